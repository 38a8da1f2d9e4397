"""Hop-by-hop sampling, as one cooperative launch or as a launch for each phase, and the output of a finished batch."""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.phases import BARRIER, grid_barrier, level_phase


@triton.jit(do_not_specialize=["seeds", "slots", "begin", "end"])
def hop_kernel(
    indptr,  # *int64 [num_nodes + 1], on the device or in pinned host memory
    indices,  # *int32 or *int64 [num_edges], on the device or in pinned host memory
    offset,  # *int64 [num_nodes], where in hot the list of a node begins, or -1; read if CACHED
    hot,  # *(that of indices) [hot edges], copies of hot adjacency lists; read if CACHED
    seeds,  # *int32 or *int64 [num_seeds]
    control,  # *int64 [CONTROL_SIZE], see phases.py
    state,  # *int64 [num_nodes], or [slots] if DISJOINT: a word each
    nodes,  # *int32 [num_sampled], node of each local id
    trees,  # *int32 [num_sampled], seed of each local id; touched if DISJOINT
    rowptr,  # *int32 [num_sampled + 1], first edge position of each local id
    src,  # *int32 [capacity], source of each edge position: a node, or if DISJOINT a slot of the table
    eid,  # *int32 or *int64 [capacity], position in CSC order of each edge position
    col,  # *int32 [capacity], local id of the target of each edge position
    mark,  # *int32 [capacity], 0, or 1 + number of edges of the node that the edge position found
    table,  # *int64 [slots], (tree << 32) | node or -1; touched if DISJOINT
    slots,  # a power of two
    sizes,  # *int64 [SIZES_SIZE], see phases.py
    counts,  # *int64 [programs, 2], new nodes and new edges of each program
    begin,  # first phase to run: phase 3 * level + what
    end,  # phase to stop before
    WHAT: tl.constexpr,  # 0, 1, 2: this launch runs only phases of that kind; -1: any, with a grid barrier between
    DISJOINT: tl.constexpr,
    CACHED: tl.constexpr,
    K: tl.constexpr,  # largest fanout that is picked in registers
    R: tl.constexpr,  # rows per tile: one per thread
    T: tl.constexpr,  # edges per tile
    P: tl.constexpr,  # a power of two, at least the number of programs
):
    """Sample hop by hop: phases ``[begin, end)``; all of a batch are ``[0, 3 * (num_hops + 1))``."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    phase = begin
    while phase < end:
        level = phase // 3
        for what in tl.static_range(3):
            if WHAT == -1 or what == WHAT:  # noqa: SIM102 (the outer test is for the compiler, the inner for the run)
                if phase % 3 == what:
                    level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, trees, rowptr, src, eid,
                                col, mark, table, slots, src, src, sizes, counts, level, pid, programs, what,
                                DISJOINT, CACHED, False, K, R, T, P)  # fmt: skip
        phase += 1
        if WHAT == -1:  # noqa: SIM102
            if phase < end:
                grid_barrier(control + BARRIER, (phase - begin).to(tl.int64) * programs)


@triton.jit(do_not_specialize=["num_seeds", "num_nodes", "num_edges"])
def emit_kernel(
    state,  # *int64 [num_nodes of the graph] or [slots]
    nodes,  # *int32 [num_sampled]
    trees,  # *int32 [num_sampled]; read if DISJOINT
    src,  # *int32 [capacity]
    eid,  # *int32 or *int64 [capacity]
    col,  # *int32 [capacity]
    node_out,  # *int64 [num_nodes]
    batch_out,  # *int64 [num_nodes]; written if DISJOINT
    edge_index_out,  # *int64 [2, num_edges]
    edge_out,  # *int64 [num_edges]
    num_seeds,
    num_nodes,
    num_edges,
    DISJOINT: tl.constexpr,
    T: tl.constexpr,
):
    """Relabel the edges of a finished batch and copy it out of the scratch memory."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    on = i < num_nodes
    tl.store(node_out + i, tl.load(nodes + i, mask=on, other=0).to(tl.int64), mask=on)
    if DISJOINT:
        tl.store(batch_out + i, tl.load(trees + i, mask=on, other=0).to(tl.int64), mask=on)
    on = i < num_edges
    pos = num_seeds + i
    u = tl.load(src + pos, mask=on, other=0)
    tl.store(edge_index_out + i, tl.load(state + u, mask=on, other=0) & 0xFFFFFFFF, mask=on)
    tl.store(edge_index_out + num_edges.to(tl.int64) + i, tl.load(col + pos, mask=on, other=0).to(tl.int64), mask=on)
    tl.store(edge_out + i, tl.load(eid + pos, mask=on, other=0).to(tl.int64), mask=on)
