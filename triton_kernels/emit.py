"""Output of finished mini-batches: relabels their edges and copies them out of the scratch memory."""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import Array, Lanes, Scalar
from lightning_gnn.triton_kernels.hops import CODE, EDGES, HALF, LOW, NODES, NUM_BATCHES, NUM_HOPS, NUM_NODES

THREADS = 256  # per program of the kernels below: one element each

# Layout of the row that describes one mini-batch in the table of a bulk launch.
ROW = tl.constexpr(8)  # words per row
NODE_OUT = tl.constexpr(0)  # addresses of the outputs
EDGE_INDEX_OUT = tl.constexpr(1)
EDGE_OUT = tl.constexpr(2)
OWN_EDGES = tl.constexpr(3)  # number of edges


@triton.jit(do_not_specialize=["num_seeds", "num_nodes", "num_edges"])
def emit_kernel(
    state: Array,  # int64 [num_nodes of the graph] or [slots]
    nodes: Array,  # int32 [num_sampled]
    trees: Array,  # int32 [num_sampled]; read if DISJOINT
    src: Array,  # int32 [capacity]
    eid: Array,  # int32 or int64 [capacity]
    col: Array,  # int32 [capacity]
    node_out: Array,  # int64 [num_nodes]
    batch_out: Array,  # int64 [num_nodes]; written if DISJOINT
    edge_index_out: Array,  # int64 [2, num_edges]
    edge_out: Array,  # int64 [num_edges]
    num_seeds: Scalar,
    num_nodes: Scalar,
    num_edges: Scalar,
    DISJOINT: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """Relabel the edges of a finished batch and copy it out of the scratch memory."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    on = i < num_nodes
    tl.store(node_out + i, tl.load(nodes + i, mask=on, other=0).to(tl.int64), mask=on)
    if DISJOINT:
        tl.store(batch_out + i, tl.load(trees + i, mask=on, other=0).to(tl.int64), mask=on)
    on = i < num_edges
    pos = num_seeds + i
    u = tl.load(src + pos, mask=on, other=0)
    # Every source has been assigned: the lower half of its word is the local id. This is the only random access here.
    tl.store(edge_index_out + i, tl.load(state + u, mask=on, other=0) & LOW, mask=on)
    # int64: the second row of edge_index begins at num_edges, and twice that may pass 2^31.
    tl.store(edge_index_out + num_edges.to(tl.int64) + i, tl.load(col + pos, mask=on, other=0).to(tl.int64), mask=on)
    tl.store(edge_out + i, tl.load(eid + pos, mask=on, other=0).to(tl.int64), mask=on)


@triton.jit
def level_of(sizes: Array, first: Scalar, control: Array, at: Lanes) -> Lanes:
    """Return the level of each position, int32 ``[T]``; the first positions of levels start at ``sizes + first``."""
    level = at * 0
    last = tl.load(control + NUM_HOPS)
    own = 1
    while own <= last:
        level += (at >= tl.load(sizes + first + own)).to(tl.int32)
        own += 1
    return level


@triton.jit(do_not_specialize=["num_seeds", "num_nodes", "num_edges"])
def emit_bulk_kernel(
    control: Array,  # int64 [CONTROL_SIZE]
    sizes: Array,  # int64
    state: Array,  # int64 [num_batches * num_nodes of the graph] or [slots]
    nodes: Array,  # int32 [num_sampled]
    src: Array,  # int32 [capacity]
    eid: Array,  # int32 or int64 [capacity]
    col: Array,  # int32 [capacity]
    table: Array,  # int64: rows of the mini-batches; for each (level, mini-batch) the offset from local ids in the bulk
    # to those in the mini-batch; then the same from edge positions to positions in its output
    num_seeds: Scalar,  # total over all mini-batches, as the next two
    num_nodes: Scalar,
    num_edges: Scalar,
    HASHED: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """Relabel the edges of the mini-batches of a bulk launch, and copy each mini-batch to its own tensors."""
    batches = tl.load(control + NUM_BATCHES).to(tl.int32)
    num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
    size = tl.load(control + NUM_NODES).to(tl.int32)
    of_nodes = table + batches * ROW
    of_edges = of_nodes + (num_hops + 1) * batches
    i = tl.program_id(0) * T + tl.arange(0, T)
    on = i < num_nodes
    u = tl.load(nodes + i, mask=on, other=0)
    batch = u // size
    level = level_of(sizes, NODES, control, i)
    out = tl.load(table + batch * ROW + NODE_OUT, mask=on, other=0).to(tl.pointer_type(tl.int64))
    at = i + tl.load(of_nodes + level * batches + batch, mask=on, other=0)
    tl.store(out + at, (u - batch * size).to(tl.int64), mask=on)

    on = i < num_edges
    pos = num_seeds + i
    u = tl.load(src + pos, mask=on, other=0)
    target = tl.load(col + pos, mask=on, other=0)
    batch = (tl.load(nodes + target, mask=on, other=0) if HASHED else u) // size
    level = level_of(sizes, EDGES, control, pos)
    own = table + batch * ROW
    at = pos + tl.load(of_edges + level * batches + batch, mask=on, other=0)
    # Every source has been assigned: the code of its word contains the level, the lower half the local id.
    word = tl.load(state + u, mask=on, other=0)
    found = (((word >> HALF) & CODE) >> 1).to(tl.int32)
    row = (word & LOW) + tl.load(of_nodes + found * batches + batch, mask=on, other=0)
    col_out = target + tl.load(of_nodes + (level - 1) * batches + batch, mask=on, other=0)
    out = tl.load(own + EDGE_INDEX_OUT, mask=on, other=0).to(tl.pointer_type(tl.int64))
    tl.store(out + at, row, mask=on)
    tl.store(out + tl.load(own + OWN_EDGES, mask=on, other=0) + at, col_out, mask=on)
    out = tl.load(own + EDGE_OUT, mask=on, other=0).to(tl.pointer_type(tl.int64))
    tl.store(out + at, tl.load(eid + pos, mask=on, other=0).to(tl.int64), mask=on)
