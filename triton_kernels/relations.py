"""Heterogeneous, temporal, weighted and LABOR sampling, edge type by edge type, in one cooperative launch.

A *stage* is one edge type in one hop, in the order of (hop, edge type); stages replace the levels of ``hops.py``. Node
ids of all types are numbered consecutively, with one word for each; local ids are per type. Each stage runs six phases,
each followed by a grid barrier: *measure* (which in-edges of a row are eligible, and how many it picks), *place* (edge
positions of each row), *pick*, *bid*, *count* (edges that won their source), *assign* (local ids in the order of the
winning edges). The kernel reads the parameters of each stage from ``control``.
"""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import Array, Lanes, Scalar, node_key, pick_one, tree_key, width
from lightning_gnn.triton_kernels.hops import (
    BARRIER,
    CAPACITY,
    FIRST_TREE,
    HALF,
    LOW,
    REPLACE,
    STAMP,
    bid,
    find_slot,
    grid_barrier,
    row_of,
    word,
)
from lightning_gnn.triton_kernels.relation_picks import count_at_most, pick_by_variate, pick_by_weight

# Further indices into `control` (see hops.py).
NUM_TYPES = tl.constexpr(1)
NUM_STAGES = tl.constexpr(2)
OFTEN = tl.constexpr(7)  # LABOR: number of mini-batches per renewal of a variate
BATCH = tl.constexpr(8)  # LABOR: number of the mini-batch
UNTIL = tl.constexpr(9)  # address of each tree's latest eligible time
AFTER = tl.constexpr(10)  # address of each tree's exclusive lower bound of times; 0 without a window
NEWEST = tl.constexpr(11)  # 1 if only the newest eligible edges are taken
TABLES = tl.constexpr(32)  # a row for each stage, then a row for each node type

# Layout of the row of a stage.
STAGE_SIZE = tl.constexpr(16)
OWN_KEY = tl.constexpr(0)
FANOUT = tl.constexpr(1)
INDPTR = tl.constexpr(2)  # address, as of all arrays below; 0 if absent
INDICES = tl.constexpr(3)
STRIDE = tl.constexpr(4)  # int32 words per source id; the first one contains the id
TIME = tl.constexpr(5)
WEIGHT = tl.constexpr(6)
PREFIX = tl.constexpr(7)
PARALLEL = tl.constexpr(8)
SOURCE = tl.constexpr(9)  # source node type
SOURCE_FIRST = tl.constexpr(10)  # number of its node 0
SOURCE_AT = tl.constexpr(11)  # start of its sampled nodes
TARGET_AT = tl.constexpr(12)  # start of the sampled nodes of the target type
ROWS_FROM = tl.constexpr(13)  # index in `sizes` of the target type's node count before the previous hop, or -1 for 0
ROWS_TO = tl.constexpr(14)  # index of its node count before this hop; the nodes between both are the rows
EDGES = tl.constexpr(15)  # index in `sizes` of the edge count before this stage

# Layout of the row of a node type.
TYPE_SIZE = tl.constexpr(4)
TYPE_AT = tl.constexpr(0)  # start of the sampled nodes of this type
TYPE_FIRST = tl.constexpr(1)  # number of its node 0
SEEDS = tl.constexpr(2)  # number of seeds

# `sizes` is int64 [1 + (num_stages + 1) * (1 + num_types)]: 0, or the capacity that would have been needed; then the
# number of edges, and of nodes of each type, before each stage and after the last one.
NEEDED = tl.constexpr(0)

PHASES = tl.constexpr(6)


@triton.jit
def rows_of(own: Array, sizes: Array) -> tuple[Scalar, Scalar]:
    """Return the range of local ids that a stage expands: the nodes that the previous hop added."""
    at = tl.load(own + ROWS_FROM)
    low = tl.load(sizes + at, mask=at >= 0, other=0).to(tl.int32)
    return low, tl.load(sizes + tl.load(own + ROWS_TO)).to(tl.int32)


@triton.jit
def edges_of(own: Array, control: Array, sizes: Array) -> tuple[Scalar, Scalar]:
    """Return the range of edge positions of a stage."""
    at = sizes + tl.load(own + EDGES)
    return tl.load(at).to(tl.int32), tl.load(at + 1 + tl.load(control + NUM_TYPES)).to(tl.int32)


@triton.jit
def share(low: Scalar, high: Scalar, pid: Scalar, programs: Scalar, T: tl.constexpr) -> tuple[Scalar, Scalar]:
    """Return this program's contiguous part of an int32 range: whole tiles of T, except the last one."""
    size = tl.cdiv(tl.cdiv(high - low, programs), T) * T
    # In 64 bits: the start of the last programs may exceed an int32.
    begin = tl.minimum(low.to(tl.int64) + pid.to(tl.int64) * size, high).to(tl.int32)
    return begin, tl.minimum(begin.to(tl.int64) + size, high).to(tl.int32)


@triton.jit
def place_seeds(
    control: Array, state: Array, nodes: Array, trees: Array, table: Array, slots: Scalar, sizes: Array, pid: Scalar,
    programs: Scalar, DISJOINT: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Register the seeds, which ``nodes`` already contains; the first occurrence of a duplicate wins."""
    stamp = tl.load(control + STAMP)
    num_types = tl.load(control + NUM_TYPES).to(tl.int32)
    own = control + TABLES + tl.load(control + NUM_STAGES) * STAGE_SIZE
    number = 0
    while number < num_types:
        first = tl.load(own + TYPE_FIRST).to(tl.int32)
        at = tl.load(own + TYPE_AT)
        num_seeds = tl.load(own + SEEDS)
        t = pid.to(tl.int64) * T
        while t < num_seeds:
            i = (t + tl.arange(0, T)).to(tl.int32)
            on = i < num_seeds
            u = first + tl.load(nodes + at + i, mask=on, other=0)
            if DISJOINT:
                u = find_slot(table, slots, tl.load(trees + at + i, mask=on, other=0), u, on)
            # Code 0 means assigned before all stages: no later bid is lower.
            tl.atomic_min(state + u, word(stamp, i * 0, i), mask=on, sem="relaxed")
            t += programs * T
        if pid == 0:
            tl.store(sizes + 2 + number, num_seeds)
        own += TYPE_SIZE
        number += 1
    if pid == 0:
        tl.store(sizes + NEEDED, 0)
        tl.store(sizes + 1, 0)


@triton.jit
def measure(
    control: Array, nodes: Array, trees: Array, begins: Array, degrees: Array, sizes: Array, counts: Array,
    stage: Scalar, pid: Scalar, programs: Scalar, TEMPORAL: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    """Record the eligible in-edges of each row; count the edges that the rows of this program will pick."""
    replace = tl.load(control + REPLACE).to(tl.int32)
    own = control + TABLES + stage * STAGE_SIZE
    fanout = tl.load(own + FANOUT).to(tl.int32)
    indptr = tl.load(own + INDPTR).to(tl.pointer_type(tl.int64))
    at = tl.load(own + TARGET_AT)
    low, high = rows_of(own, sizes)
    t, end = share(low, high, pid, programs, R)
    total = tl.zeros([R], tl.int64)
    while t < end:
        i = t + tl.arange(0, R)
        on = i < end
        v = tl.load(nodes + at + i, mask=on, other=0)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        if TEMPORAL:  # noqa: SIM102 (a compile-time condition, the next is evaluated at run time)
            if tl.load(own + TIME) != 0:
                time = tl.load(own + TIME).to(tl.pointer_type(tl.int64))
                tree = tl.load(trees + at + i, mask=on, other=0)
                limits = tl.load(control + UNTIL).to(tl.pointer_type(tl.int64))
                last = count_at_most(time, begin, degree, tl.load(limits + tree, mask=on, other=0))
                first = degree * 0
                if tl.load(control + AFTER) != 0:
                    limits = tl.load(control + AFTER).to(tl.pointer_type(tl.int64))
                    first = tl.minimum(
                        count_at_most(time, begin, degree, tl.load(limits + tree, mask=on, other=0)), last
                    )
                if (tl.load(control + NEWEST) != 0) & (fanout >= 0):
                    first = tl.maximum(first, last - fanout)
                begin += first
                degree = last - first
        tl.store(begins + i - low, begin, mask=on)
        tl.store(degrees + i - low, degree, mask=on)
        total += tl.where(on, width(degree, fanout, replace), 0)
        t += R
    tl.store(counts + pid, tl.sum(total, 0))


@triton.jit
def place(
    control: Array, rowptr: Array, degrees: Array, sizes: Array, counts: Array, stage: Scalar, pid: Scalar,
    programs: Scalar, R: tl.constexpr, P: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the edge positions of each row, if the edges of all rows fit into the scratch memory."""
    replace = tl.load(control + REPLACE).to(tl.int32)
    own = control + TABLES + stage * STAGE_SIZE
    fanout = tl.load(own + FANOUT).to(tl.int32)
    low, high = rows_of(own, sizes)
    t, end = share(low, high, pid, programs, R)
    program = tl.arange(0, P)
    totals = tl.load(counts + program, mask=program < programs, other=0)
    before = sizes + tl.load(own + EDGES)
    edge_begin = tl.load(before)
    edge_end = edge_begin + tl.sum(totals, 0)
    fits = edge_end <= tl.load(control + CAPACITY)  # the same in all programs
    if fits:
        e = (edge_begin + tl.sum(tl.where(program < pid, totals, 0), 0)).to(tl.int32)
        while t < end:
            i = t + tl.arange(0, R)
            on = i < end
            edges = tl.where(on, width(tl.load(degrees + i - low, mask=on, other=0), fanout, replace), 0)
            tl.store(rowptr + i - low, e + tl.cumsum(edges, 0) - edges, mask=on)
            e += tl.sum(edges, 0)
            t += R
    if pid == 0:  # writes the sizes for the next phases; no program reads them in this phase
        after = before + 1 + tl.load(control + NUM_TYPES)
        if fits:
            tl.store(rowptr + high - low, edge_end.to(tl.int32))
            tl.store(after, edge_end)
        else:  # no edges in this stage: the host repeats the sample with more scratch memory
            tl.store(after, edge_begin)
            tl.store(sizes + NEEDED, tl.maximum(tl.load(sizes + NEEDED), edge_end))


@triton.jit
def pick(
    control: Array, nodes: Array, trees: Array, rowptr: Array, begins: Array, degrees: Array, eid: Array, col: Array,
    sizes: Array, stage: Scalar, pid: Scalar, programs: Scalar,
    DISJOINT: tl.constexpr, WEIGHTED: tl.constexpr, LABOR: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Pick the edges: one per thread (uniform), one row per thread (by weight), or one row per program (by variate)."""
    replace = tl.load(control + REPLACE).to(tl.int32)
    first_tree = tl.load(control + FIRST_TREE)
    own = control + TABLES + stage * STAGE_SIZE
    key = tl.load(own + OWN_KEY)
    fanout = tl.load(own + FANOUT).to(tl.int32)
    at = tl.load(own + TARGET_AT)
    weighted = tl.load(own + WEIGHT) != 0
    low, high = rows_of(own, sizes)
    edge_begin, edge_end = edges_of(own, control, sizes)
    t, end = share(edge_begin, edge_end, pid, programs, T)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        row = row_of(rowptr, pos, high * 0, high - low, on)
        begin = tl.load(begins + row, mask=on, other=0)
        degree = tl.load(degrees + row, mask=on, other=0)
        j = pos - tl.load(rowptr + row, mask=on, other=0)
        later = on & (fanout >= 0) & ((degree > fanout) | (replace != 0))  # picked below
        if LABOR:
            tl.store(eid + pos, begin + j, mask=on & (later == 0))
        else:
            if weighted:
                tl.store(eid + pos, begin + j, mask=on & (later == 0))
            else:
                v = tl.load(nodes + at + low + row, mask=on, other=0)
                own_key = key
                if DISJOINT:
                    own_key = tree_key(key, first_tree + tl.load(trees + at + low + row, mask=on, other=0))
                e = begin + pick_one(node_key(own_key, v), j, degree, fanout, replace, on)
                tl.store(eid + pos, e, mask=on)
        tl.store(col + pos, low + row, mask=on)
        t += T
    if (edge_end > edge_begin) & (fanout > 0):
        if WEIGHTED:  # noqa: SIM102
            if weighted:
                pick_rows_by_weight(
                    own, nodes, trees, rowptr, begins, degrees, eid, at, low, high, key, first_tree, fanout,
                    replace, pid, programs, DISJOINT, R,
                )  # fmt: skip
        if LABOR:
            pick_rows_by_variate(
                control, own, trees, rowptr, begins, degrees, eid, at, low, high, key, first_tree, fanout, pid,
                programs, DISJOINT, T,
            )  # fmt: skip


@triton.jit
def pick_rows_by_weight(
    own: Array, nodes: Array, trees: Array, rowptr: Array, begins: Array, degrees: Array, eid: Array,
    at: Scalar, low: Scalar, high: Scalar, key: Scalar, first_tree: Scalar, fanout: Scalar, replace: Scalar,
    pid: Scalar, programs: Scalar, DISJOINT: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    """Pick by weight for the rows that need random draws, one row per thread."""
    weight = tl.load(own + WEIGHT).to(tl.pointer_type(tl.float64))
    prefix = tl.load(own + PREFIX).to(tl.pointer_type(tl.float64))
    rows = high - low
    t = pid.to(tl.int64) * R
    while t < rows:
        row = (t + tl.arange(0, R)).to(tl.int32)
        on = row < rows
        begin = tl.load(begins + row, mask=on, other=0)
        degree = tl.load(degrees + row, mask=on, other=0)
        draws = on & (degree > 0) & ((degree > fanout) | (replace != 0))
        own_key = key
        if DISJOINT:
            own_key = tree_key(key, first_tree + tl.load(trees + at + low + row, mask=on, other=0))
        stream = node_key(own_key, tl.load(nodes + at + low + row, mask=on, other=0))
        place = tl.load(rowptr + row, mask=on, other=0)
        pick_by_weight(weight, prefix, eid, begin, degree, place, stream, fanout, replace, draws)
        t += programs * R


@triton.jit
def pick_rows_by_variate(
    control: Array, own: Array, trees: Array, rowptr: Array, begins: Array, degrees: Array, eid: Array, at: Scalar,
    low: Scalar, high: Scalar, key: Scalar, first_tree: Scalar, fanout: Scalar, pid: Scalar, programs: Scalar,
    DISJOINT: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Pick by variate for the rows with more edges than the fanout, one row per program at a time."""
    indices = tl.load(own + INDICES).to(tl.pointer_type(tl.int32))
    stride = tl.load(own + STRIDE).to(tl.int32)
    parallel = tl.load(own + PARALLEL).to(tl.pointer_type(tl.int32))
    has_parallel = tl.load(own + PARALLEL) != 0
    often = tl.load(control + OFTEN)
    batch = tl.load(control + BATCH)
    row = pid.to(tl.int64)
    while row < high - low:
        degree = tl.load(degrees + row)
        if degree > fanout:
            own_key = key.to(tl.uint64)
            if DISJOINT:
                own_key = tree_key(key, first_tree + tl.load(trees + at + low + row))
            pick_by_variate(
                indices, stride, parallel, has_parallel, eid, tl.load(begins + row), degree, tl.load(rowptr + row),
                fanout, own_key, often, batch, T,
            )  # fmt: skip
        row += programs


@triton.jit
def bid_all(
    control: Array, state: Array, trees: Array, src: Array, eid: Array, col: Array, table: Array, slots: Scalar,
    sizes: Array, stage: Scalar, pid: Scalar, programs: Scalar, DISJOINT: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Gather the sources of the edges and bid for them."""
    stamp = tl.load(control + STAMP)
    own = control + TABLES + stage * STAGE_SIZE
    indices = tl.load(own + INDICES).to(tl.pointer_type(tl.int32))
    stride = tl.load(own + STRIDE)
    first = tl.load(own + SOURCE_FIRST).to(tl.int32)
    at = tl.load(own + TARGET_AT)
    edge_begin, edge_end = edges_of(own, control, sizes)
    t, end = share(edge_begin, edge_end, pid, programs, T)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        u = first + tl.load(indices + tl.load(eid + pos, mask=on, other=0) * stride, mask=on, other=0)
        tree = pos
        if DISJOINT:
            tree = tl.load(trees + at + tl.load(col + pos, mask=on, other=0), mask=on, other=0)
        bid(u, tree, pos, on, state, src, table, stamp, stage + 1, slots, DISJOINT)
        t += T


@triton.jit
def won_at(state: Array, u: Lanes, stamp: Scalar, stage: Scalar, pos: Lanes, on: Lanes) -> Lanes:
    """Return which edges won their source. Assigning a local id changes the word, but never to the bid of a loser."""
    return on & (tl.load(state + u, mask=on, other=0) == word(stamp, pos * 0 + 2 * stage + 3, pos))


@triton.jit
def count(
    control: Array, state: Array, src: Array, sizes: Array, counts: Array, stage: Scalar, pid: Scalar,
    programs: Scalar, T: tl.constexpr,
) -> None:  # fmt: skip
    """Count the edges of this program that won their source."""
    stamp = tl.load(control + STAMP)
    own = control + TABLES + stage * STAGE_SIZE
    edge_begin, edge_end = edges_of(own, control, sizes)
    t, end = share(edge_begin, edge_end, pid, programs, T)
    total = tl.zeros([T], tl.int32)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        total += won_at(state, tl.load(src + pos, mask=on, other=0), stamp, stage, pos, on).to(tl.int32)
        t += T
    tl.store(counts + pid, tl.sum(total, 0).to(tl.int64))


@triton.jit
def assign(
    control: Array, state: Array, nodes: Array, trees: Array, src: Array, table: Array, sizes: Array, counts: Array,
    stage: Scalar, pid: Scalar, programs: Scalar, DISJOINT: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
) -> None:  # fmt: skip
    """Assign local ids of their type to new sources, in the order of the winning edges."""
    stamp = tl.load(control + STAMP)
    num_types = tl.load(control + NUM_TYPES).to(tl.int32)
    own = control + TABLES + stage * STAGE_SIZE
    source = tl.load(own + SOURCE)
    first = tl.load(own + SOURCE_FIRST).to(tl.int32)
    at = tl.load(own + SOURCE_AT)
    edge_begin, edge_end = edges_of(own, control, sizes)
    t, end = share(edge_begin, edge_end, pid, programs, T)
    program = tl.arange(0, P)
    totals = tl.load(counts + program, mask=program < programs, other=0)
    counted = sizes + tl.load(own + EDGES) + 1
    known = tl.load(counted + source)
    place = (known + tl.sum(tl.where(program < pid, totals, 0), 0)).to(tl.int32)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        u = tl.load(src + pos, mask=on, other=0)
        won = won_at(state, u, stamp, stage, pos, on)
        new = won.to(tl.int32)
        i = place + tl.cumsum(new, 0) - new
        # A plain store, as a source has only one winner.
        tl.store(state + u, word(stamp, i * 0 + 2 * stage + 2, i), mask=won)
        if DISJOINT:
            entry = tl.load(table + u, mask=won, other=0)
            tl.store(trees + at + i, (entry >> HALF).to(tl.int32), mask=won)
            u = entry.to(tl.int32)  # the lower half is the node
        tl.store(nodes + at + i, u - first, mask=won)
        place += tl.sum(new, 0)
        t += T
    if pid == 0:
        number = 0
        while number < num_types:
            there = tl.load(counted + number) + tl.where(source == number, tl.sum(totals, 0), 0)
            tl.store(counted + 1 + num_types + number, there)
            number += 1


# Arguments that change from batch to batch are not specialized, as in hops.py.
@triton.jit(do_not_specialize=["slots", "begin", "end"])
def relation_kernel(
    control: Array,  # int64 [TABLES + num_stages * STAGE_SIZE + num_types * TYPE_SIZE], layout above
    state: Array,  # int64 [nodes of all types], or [slots] if DISJOINT: word of each node
    nodes: Array,  # int32, sampled nodes of each type, with their ids in that type
    trees: Array,  # int32, their trees; used if DISJOINT
    rowptr: Array,  # int32 [rows + 1], first edge position of each row of a stage
    begins: Array,  # int64 [rows], first eligible in-edge of each row
    degrees: Array,  # int32 [rows], number of eligible in-edges
    src: Array,  # int32 [capacity], source of each edge position: a node, or if DISJOINT a slot of the table
    eid: Array,  # int32 or int64 [capacity], position in the CSC order of its edge type
    col: Array,  # int32 [capacity], local id of the target
    table: Array,  # int64 [slots], (tree << HALF) | node or -1; used if DISJOINT
    slots: Scalar,  # int32, a power of two
    sizes: Array,  # int64, see above
    counts: Array,  # int64 [programs], new edges or nodes of each program
    begin: Scalar,  # int32, first phase to run: 0 for the seeds, 1 + 6 * stage + i for phase i of a stage
    end: Scalar,  # int32, first phase not to run
    DISJOINT: tl.constexpr,  # one tree per seed
    TEMPORAL: tl.constexpr,  # edges of some edge type have times
    WEIGHTED: tl.constexpr,  # edges of some edge type have weights
    LABOR: tl.constexpr,  # pick by variates of the sources
    R: tl.constexpr,  # rows per tile: one per thread
    T: tl.constexpr,  # edges per tile
    P: tl.constexpr,  # a power of two, at least the number of programs
) -> None:
    """Sample stage by stage: phases ``[begin, end)`` of ``[0, 1 + 6 * num_stages)``."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    phase = begin
    while phase < end:
        if phase == 0:
            place_seeds(control, state, nodes, trees, table, slots, sizes, pid, programs, DISJOINT, T)
        else:
            stage = (phase - 1) // PHASES
            what = (phase - 1) % PHASES
            if what == 0:
                measure(control, nodes, trees, begins, degrees, sizes, counts, stage, pid, programs, TEMPORAL, R)
            elif what == 1:
                place(control, rowptr, degrees, sizes, counts, stage, pid, programs, R, P)
            elif what == 2:
                pick(control, nodes, trees, rowptr, begins, degrees, eid, col, sizes, stage, pid, programs,
                     DISJOINT, WEIGHTED, LABOR, R, T)  # fmt: skip
            elif what == 3:
                bid_all(control, state, trees, src, eid, col, table, slots, sizes, stage, pid, programs, DISJOINT, T)
            elif what == 4:
                count(control, state, src, sizes, counts, stage, pid, programs, T)
            else:
                assign(control, state, nodes, trees, src, table, sizes, counts, stage, pid, programs, DISJOINT, T, P)
        phase += 1
        if phase < end:
            grid_barrier(control + BARRIER, (phase - begin).to(tl.int64) * programs)


@triton.jit(do_not_specialize=["total"])
def emit_relations_kernel(
    state: Array,  # int64, as above
    src: Array,  # int32 [capacity]
    eid: Array,  # int32 or int64 [capacity]
    col: Array,  # int32 [capacity]
    places: Array,  # int64 [num_stages, 5]: first edge, edges, offset in the edge type; the edge type's offset, edges
    edge_index_out: Array,  # int64 [2 * total], concatenated [2, m] of each edge type
    edge_out: Array,  # int64 [total]
    T: tl.constexpr,
) -> None:
    """Relabel the edges of one stage of a finished batch, and copy them to the output of their edge type."""
    own = places + tl.program_id(1) * 5
    first = tl.load(own)
    number = tl.load(own + 1)
    to = tl.load(own + 2)
    before = tl.load(own + 3)
    edges = tl.load(own + 4)
    i = tl.program_id(0) * T + tl.arange(0, T)
    on = i < number
    u = tl.load(src + first + i, mask=on, other=0)
    row = edge_index_out + 2 * before + to + i
    tl.store(row, tl.load(state + u, mask=on, other=0) & LOW, mask=on)
    tl.store(row + edges, tl.load(col + first + i, mask=on, other=0).to(tl.int64), mask=on)
    tl.store(edge_out + before + to + i, tl.load(eid + first + i, mask=on, other=0).to(tl.int64), mask=on)
