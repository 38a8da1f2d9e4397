"""Heterogeneous, temporal, weighted and LABOR sampling, hop by hop, in one cooperative launch.

A hop runs three phases for all edge types together, each followed by a grid barrier: *measure* (which in-edges of a row
are eligible, and the positions of those it picks), *pick* (pick the in-edges, and bid for their sources) and *settle*
(number the sources, in the order of the edges that won). A phase is made of tiles: T rows or edges of one edge type,
at least one each. Edge types are rows of a table, so neither the barriers nor the code depend on their number.

Edge types are sorted by source type, then by number. Bids only compare edges with the same source type, so the lowest
position is the first edge in the order of the definition. Measuring and settling sum the counts of earlier tiles by
decoupled look-back, as in ``hops.py``; settling starts a new sum at the first tile of each source type. Node ids of all
types are numbered consecutively, with one word for each; local ids are per type.
"""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import Array, Lanes, Scalar, node_key, pick_one, tree_key, width
from lightning_gnn.triton_kernels.hops import (
    BARRIER,
    CAPACITY,
    FIRST_TREE,
    HALF,
    LEVEL_BITS,
    LOW,
    REPLACE,
    STAMP,
    bid,
    find_slot,
    grid_barrier,
    look_back,
    row_of,
    say,
    word,
)
from lightning_gnn.triton_kernels.relation_picks import count_at_most, pick_by_variate, pick_by_weight

# Further indices into `control` (see hops.py), int64: scalars, counters, sizes, tables, seeds and times.
NUM_TYPES = tl.constexpr(1)
NUM_RELATIONS = tl.constexpr(2)
OFTEN = tl.constexpr(7)  # LABOR: number of mini-batches per renewal of a variate
BATCH = tl.constexpr(8)  # LABOR: number of the mini-batch
UNTIL = tl.constexpr(9)  # index of the latest eligible time of each tree
AFTER = tl.constexpr(10)  # index of the exclusive lower bound of times of each tree; 0 without a window
NEWEST = tl.constexpr(11)  # 1 if only the newest eligible edges are taken
EDGES = tl.constexpr(12)  # index of the first edge position of each stage, and the end of the last one
STAGES = tl.constexpr(13)  # index of the rows of stages, a stage being one edge type in one hop
TYPES = tl.constexpr(14)  # index of the rows of node types, which the seeds of each type follow
TILES = tl.constexpr(32)  # number of tiles that programs have taken to measure and to settle each hop
NEEDED = tl.constexpr(96)  # 0, or the capacity that would have been needed; from here to the stages: sizes for the host
NODES = tl.constexpr(97)  # number of nodes of each type: 0, before each hop, and after the last one

# Layout of the row of a stage.
STAGE_SIZE = tl.constexpr(17)
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
TARGET = tl.constexpr(12)  # target node type; the nodes that the previous hop added are the rows
TARGET_AT = tl.constexpr(13)  # start of its sampled nodes
OPENS = tl.constexpr(14)  # 1 if this edge type is the first one with its source type
CLOSES = tl.constexpr(15)  # 1 if it is the last one
ROWS_AT = tl.constexpr(16)  # place of the first row in the arrays of rows; written by the kernel

# Layout of the row of a node type.
TYPE_SIZE = tl.constexpr(4)
TYPE_AT = tl.constexpr(0)  # start of the sampled nodes of this type
TYPE_FIRST = tl.constexpr(1)  # number of its node 0
SEEDS = tl.constexpr(2)  # number of seeds
START = tl.constexpr(3)  # tree of the first seed

PHASES = tl.constexpr(3)
MOST_TILES = tl.constexpr(2**31 - 1)


@triton.jit
def rows_of(control: Array, own: Array, hop: Scalar) -> tuple[Lanes, Lanes]:
    """Return the ranges of local ids that stages expand: the nodes that the previous hop added."""
    num_types = tl.load(control + NUM_TYPES)
    at = control + NODES + hop * num_types + tl.load(own + TARGET)
    return tl.load(at).to(tl.int32), tl.load(at + num_types).to(tl.int32)


@triton.jit
def edges_of(control: Array, stage: Lanes) -> tuple[Lanes, Lanes]:
    """Return the ranges of edge positions of stages."""
    at = control + tl.load(control + EDGES) + stage
    return tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)


@triton.jit
def row_of_stage(control: Array, hop: Scalar, relation: Lanes) -> tuple[Lanes, Lanes]:
    """Return the number of a stage, and the pointer to its row."""
    stage = hop * tl.load(control + NUM_RELATIONS).to(tl.int32) + relation
    return stage, control + tl.load(control + STAGES) + stage * STAGE_SIZE


@triton.jit
def relation_of(
    control: Array, hop: Scalar, tile: Scalar, ROWS: tl.constexpr, T: tl.constexpr
) -> tuple[Scalar, Scalar, Scalar]:
    """Return the edge type of a tile of rows or of edges, its first tile, and the end of its tiles.

    After the last tile, this is at least the number of edge types, and the number of tiles.
    """
    num_relations = tl.load(control + NUM_RELATIONS).to(tl.int32)
    relation = tile * 0
    first = tile * 0
    stop = tile * 0 + MOST_TILES
    before = tile * 0
    number = 0
    while number < num_relations:
        own = number + tl.arange(0, T)
        stage, row = row_of_stage(control, hop, tl.minimum(own, num_relations - 1))
        if ROWS:
            low, high = rows_of(control, row, hop)
        else:
            low, high = edges_of(control, stage)
        tiles = tl.where(own < num_relations, tl.maximum(tl.cdiv(high - low, T), 1), 0)
        ends = before + tl.cumsum(tiles, 0)
        relation += tl.sum((ends <= tile).to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(ends <= tile, ends, 0), 0))
        stop = tl.minimum(stop, tl.min(tl.where(ends > tile, ends, MOST_TILES), 0))
        before += tl.sum(tiles, 0)
        number += T
    return relation, first, stop


@triton.jit
def take_tile(control: Array, hop: Scalar, SETTLE: tl.constexpr) -> Scalar:
    """Take the next tile to measure or to settle; a program waits for earlier tiles only, which others have taken."""
    return tl.atomic_add(control + TILES + 2 * hop + SETTLE, 1, sem="relaxed").to(tl.int32)


@triton.jit
def sum_before(totals: Array, tile: Scalar, key: Scalar, count: Scalar, start: Scalar, opens: Scalar) -> Scalar:
    """Return ``start`` plus the counts of the tiles from the last one that opens a sum to the previous one."""
    before = start
    if opens == 0:
        say(totals, tile, 2 * key, key * 0, count)
        _, before = look_back(totals, tile, key)
    # A tile that opens a sum publishes no count of its own: no program looks past it.
    say(totals, tile, 2 * key + 1, key * 0, before + count)
    return before


@triton.jit
def place_seeds(
    control: Array, state: Array, nodes: Array, trees: Array, table: Array, slots: Scalar, pid: Scalar,
    programs: Scalar, DISJOINT: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Register the seeds as the first nodes of their types; the first occurrence of a duplicate wins."""
    stamp = tl.load(control + STAMP)
    num_types = tl.load(control + NUM_TYPES).to(tl.int32)
    own = control + tl.load(control + TYPES)
    seeds = own + num_types * TYPE_SIZE
    number = 0
    while number < num_types:
        first = tl.load(own + TYPE_FIRST).to(tl.int32)
        at = tl.load(own + TYPE_AT)
        num_seeds = tl.load(own + SEEDS)
        t = pid.to(tl.int64) * T
        while t < num_seeds:
            i = (t + tl.arange(0, T)).to(tl.int32)
            on = i < num_seeds
            v = tl.load(seeds + i, mask=on, other=0).to(tl.int32)
            tl.store(nodes + at + i, v, mask=on)
            u = first + v
            if DISJOINT:
                tree = tl.load(own + START).to(tl.int32) + i
                tl.store(trees + at + i, tree, mask=on)
                u = find_slot(table, slots, tree, u, on)
            # Code 0 means assigned before all hops: no later bid is lower.
            tl.atomic_min(state + u, word(stamp, i * 0, i), mask=on, sem="relaxed")
            t += programs * T
        seeds += num_seeds
        own += TYPE_SIZE
        number += 1


@triton.jit
def measure(
    control: Array, nodes: Array, trees: Array, rowptr: Array, begins: Array, degrees: Array, totals: Array,
    hop: Scalar, TEMPORAL: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Record the eligible in-edges of each row, and the positions of the edges that it picks, if they all fit."""
    stamp = tl.load(control + STAMP)
    replace = tl.load(control + REPLACE).to(tl.int32)
    capacity = tl.load(control + CAPACITY)
    num_relations = tl.load(control + NUM_RELATIONS).to(tl.int32)
    edges = control + tl.load(control + EDGES)
    relation, tiles, stop = relation_of(control, hop, hop * 0 + MOST_TILES, True, T)
    first = tiles
    stop = tiles * 0  # no tile yet
    if tiles > tl.cdiv(capacity, T) + num_relations:  # the same in all programs: more rows than the capacity
        tl.store(control + NEEDED, (tiles - num_relations).to(tl.int64) * T)
        tiles = stop
    tile = take_tile(control, hop, 0)
    while tile < tiles:
        if tile >= stop:
            relation, first, stop = relation_of(control, hop, tile, True, T)
        stage, own = row_of_stage(control, hop, relation)
        fanout = tl.load(own + FANOUT).to(tl.int32)
        indptr = tl.load(own + INDPTR).to(tl.pointer_type(tl.int64))
        at = tl.load(own + TARGET_AT)
        low, high = rows_of(control, own, hop)
        i = low + (tile - first) * T + tl.arange(0, T)
        on = i < high
        v = tl.load(nodes + at + i, mask=on, other=0)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        if TEMPORAL:  # noqa: SIM102 (a compile-time condition, the next is evaluated at run time)
            if tl.load(own + TIME) != 0:
                time = tl.load(own + TIME).to(tl.pointer_type(tl.int64))
                tree = tl.load(trees + at + i, mask=on, other=0)
                limits = control + tl.load(control + UNTIL)
                last = count_at_most(time, begin, degree, tl.load(limits + tree, mask=on, other=0))
                skipped = degree * 0
                if tl.load(control + AFTER) != 0:
                    limits = control + tl.load(control + AFTER)
                    skipped = count_at_most(time, begin, degree, tl.load(limits + tree, mask=on, other=0))
                    skipped = tl.minimum(skipped, last)
                if (tl.load(control + NEWEST) != 0) & (fanout >= 0):
                    skipped = tl.maximum(skipped, last - fanout)
                begin += skipped
                degree = last - skipped
        picked = tl.where(on, width(degree, fanout, replace), 0).to(tl.int64)
        count = tl.sum(picked, 0)
        start = tl.load(edges + hop * num_relations)
        before = sum_before(totals, tile, (stamp << LEVEL_BITS) | (2 * hop), count, start, tile == 0)
        row = tile * T + tl.arange(0, T)
        tl.store(rowptr + row, (before + tl.cumsum(picked, 0) - picked).to(tl.int32), mask=on)
        tl.store(begins + row, begin, mask=on)
        tl.store(degrees + row, degree, mask=on)
        if tile == first:
            tl.store(own + ROWS_AT, tile * T)
            tl.store(edges + stage, before)
        if tile == tiles - 1:
            if before + count <= capacity:
                tl.store(edges + stage + 1, before + count)
            else:  # the host repeats the sample with more scratch memory; later hops have no rows
                tl.store(control + NEEDED, before + count)
        tile = take_tile(control, hop, 0)


@triton.jit
def bid_for(
    control: Array, own: Array, state: Array, src: Array, table: Array, slots: Scalar, e: Lanes, pos: Lanes,
    tree: Lanes, on: Lanes, hop: Scalar, DISJOINT: tl.constexpr,
) -> None:  # fmt: skip
    """Gather the sources of picked edges and bid for them."""
    indices = tl.load(own + INDICES).to(tl.pointer_type(tl.int32))
    u = tl.load(indices + e.to(tl.int64) * tl.load(own + STRIDE), mask=on, other=0)
    u += tl.load(own + SOURCE_FIRST).to(tl.int32)
    bid(u, tree, pos, on, state, src, table, tl.load(control + STAMP), hop + 1, slots, DISJOINT)


@triton.jit
def pick(
    control: Array, state: Array, nodes: Array, trees: Array, rowptr: Array, begins: Array, degrees: Array, src: Array,
    eid: Array, col: Array, table: Array, slots: Scalar, hop: Scalar, pid: Scalar, programs: Scalar,
    DISJOINT: tl.constexpr, WEIGHTED: tl.constexpr, LABOR: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Pick edges and bid for their sources: first one per thread, except those that are picked by row."""
    replace = tl.load(control + REPLACE).to(tl.int32)
    first_tree = tl.load(control + FIRST_TREE)
    num_relations = tl.load(control + NUM_RELATIONS).to(tl.int32)
    tile = pid
    relation, first, stop = relation_of(control, hop, tile, False, T)
    while relation < num_relations:
        stage, own = row_of_stage(control, hop, relation)
        fanout = tl.load(own + FANOUT).to(tl.int32)
        at = tl.load(own + TARGET_AT)
        rows_at = tl.load(own + ROWS_AT).to(tl.int32)
        low, high = rows_of(control, own, hop)
        edge_begin, edge_end = edges_of(control, stage)
        pos = edge_begin + (tile - first) * T + tl.arange(0, T)
        on = pos < edge_end
        row = row_of(rowptr, pos, rows_at, rows_at + high - low, on)
        i = low - rows_at + row
        begin = tl.load(begins + row, mask=on, other=0)
        degree = tl.load(degrees + row, mask=on, other=0)
        j = pos - tl.load(rowptr + row, mask=on, other=0)
        tl.store(col + pos, i, mask=on)
        tree = pos
        if DISJOINT:
            tree = tl.load(trees + at + i, mask=on, other=0)
        if (tl.load(own + WEIGHT) == 0) & (not LABOR):
            own_key = tl.load(own + OWN_KEY).to(tl.uint64)
            if DISJOINT:
                own_key = tree_key(own_key, first_tree + tree)
            v = tl.load(nodes + at + i, mask=on, other=0)
            j = pick_one(node_key(own_key, v), j, degree, fanout, replace, on)
        else:
            on = on & ((fanout < 0) | ((degree <= fanout) & (replace == 0)))
        e = begin + j
        tl.store(eid + pos, e, mask=on)
        bid_for(control, own, state, src, table, slots, e, pos, tree, on, hop, DISJOINT)
        tile += programs
        if tile >= stop:
            relation, first, stop = relation_of(control, hop, tile, False, T)
    if WEIGHTED or LABOR:
        pick_rows(control, state, nodes, trees, rowptr, begins, degrees, src, eid, table, slots, hop, pid, programs,
                  DISJOINT, LABOR, T)  # fmt: skip


@triton.jit
def pick_rows(
    control: Array, state: Array, nodes: Array, trees: Array, rowptr: Array, begins: Array, degrees: Array, src: Array,
    eid: Array, table: Array, slots: Scalar, hop: Scalar, pid: Scalar, programs: Scalar,
    DISJOINT: tl.constexpr, LABOR: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Pick and bid for the rows that need random draws: one per thread by weight, or one per program by variate."""
    replace = tl.load(control + REPLACE).to(tl.int32)
    first_tree = tl.load(control + FIRST_TREE)
    num_relations = tl.load(control + NUM_RELATIONS).to(tl.int32)
    TOGETHER: tl.constexpr = 1 if LABOR else T
    t = pid.to(tl.int64) * TOGETHER
    relation, first, stop = relation_of(control, hop, (t // T).to(tl.int32), True, T)
    while relation < num_relations:
        _, own = row_of_stage(control, hop, relation)
        fanout = tl.load(own + FANOUT).to(tl.int32)
        key = tl.load(own + OWN_KEY).to(tl.uint64)
        at = tl.load(own + TARGET_AT)
        low, high = rows_of(control, own, hop)
        row = t.to(tl.int32) if LABOR else t.to(tl.int32) + tl.arange(0, T)
        i = low + row - first * T
        on = (i < high) & (fanout > 0)
        begin = tl.load(begins + row, mask=on, other=0)
        degree = tl.load(degrees + row, mask=on, other=0)
        place = tl.load(rowptr + row, mask=on, other=0)
        tree = i
        if DISJOINT:
            tree = tl.load(trees + at + i, mask=on, other=0)
            key = tree_key(key, first_tree + tree)
        if LABOR:
            if on & (degree > fanout):
                indices = tl.load(own + INDICES).to(tl.pointer_type(tl.int32))
                stride = tl.load(own + STRIDE).to(tl.int32)
                parallel = tl.load(own + PARALLEL).to(tl.pointer_type(tl.int32))
                pick_by_variate(
                    indices, stride, parallel, tl.load(own + PARALLEL) != 0, eid, begin, degree, place, fanout, key,
                    tl.load(control + OFTEN), tl.load(control + BATCH), T,
                )  # fmt: skip
                tl.debug_barrier()  # one thread writes an edge id and another reads it
                j = tl.arange(0, T)
                while tl.min(j, 0) < fanout:
                    taken = j < fanout
                    e = tl.load(eid + place + j, mask=taken, other=0)
                    bid_for(control, own, state, src, table, slots, e, place + j, tree + j * 0, taken, hop, DISJOINT)
                    j += T
        else:
            on = on & (tl.load(own + WEIGHT) != 0) & (degree > 0) & ((degree > fanout) | (replace != 0))
            weight = tl.load(own + WEIGHT).to(tl.pointer_type(tl.float64))
            prefix = tl.load(own + PREFIX).to(tl.pointer_type(tl.float64))
            stream = node_key(key, tl.load(nodes + at + i, mask=on, other=0))
            pick_by_weight(weight, prefix, eid, begin, degree, place, stream, fanout, replace, on)
            j = 0
            while j < tl.where(tl.max(on.to(tl.int32), 0) > 0, fanout, 0):
                e = tl.load(eid + place + j, mask=on, other=0)
                bid_for(control, own, state, src, table, slots, e, place + j, tree, on, hop, DISJOINT)
                j += 1
        t += programs * TOGETHER
        if (t // T).to(tl.int32) >= stop:
            relation, first, stop = relation_of(control, hop, (t // T).to(tl.int32), True, T)


@triton.jit
def settle(
    control: Array, state: Array, nodes: Array, trees: Array, src: Array, table: Array, totals: Array, hop: Scalar,
    DISJOINT: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Find the edges that won their source; assign local ids of their type to the sources, in the order of edges."""
    stamp = tl.load(control + STAMP)
    num_types = tl.load(control + NUM_TYPES)
    num_relations = tl.load(control + NUM_RELATIONS).to(tl.int32)
    tile = take_tile(control, hop, 1)
    relation, first, stop = relation_of(control, hop, tile, False, T)
    while relation < num_relations:
        stage, own = row_of_stage(control, hop, relation)
        at = tl.load(own + SOURCE_AT)
        edge_begin, edge_end = edges_of(control, stage)
        pos = edge_begin + (tile - first) * T + tl.arange(0, T)
        on = pos < edge_end
        u = tl.load(src + pos, mask=on, other=0)
        # Assigning a local id changes the word of a source, but never to the bid of a loser.
        won = on & (tl.load(state + u, mask=on, other=0) == word(stamp, pos * 0 + 2 * hop + 3, pos))
        new = won.to(tl.int64)
        count = tl.sum(new, 0)
        known = control + NODES + (hop + 1) * num_types + tl.load(own + SOURCE)
        opens = (tile == first) & (tl.load(own + OPENS) != 0)
        before = sum_before(totals, tile, (stamp << LEVEL_BITS) | (2 * hop + 1), count, tl.load(known), opens)
        i = (before + tl.cumsum(new, 0) - new).to(tl.int32)
        # A plain store, as a source has only one winner.
        tl.store(state + u, word(stamp, i * 0 + 2 * hop + 2, i), mask=won)
        if DISJOINT:
            entry = tl.load(table + u, mask=won, other=0)
            tl.store(trees + at + i, (entry >> HALF).to(tl.int32), mask=won)
            u = entry.to(tl.int32)  # the lower half is the node
        tl.store(nodes + at + i, u - tl.load(own + SOURCE_FIRST).to(tl.int32), mask=won)
        if (tile == stop - 1) & (tl.load(own + CLOSES) != 0):
            tl.store(known + num_types, before + count)
        tile = take_tile(control, hop, 1)
        if tile >= stop:
            relation, first, stop = relation_of(control, hop, tile, False, T)


# Arguments that change from batch to batch are not specialized, as in hops.py.
@triton.jit(do_not_specialize=["slots", "begin", "end"])
def relation_kernel(
    control: Array,  # int64, layout above
    state: Array,  # int64 [nodes of all types], or [slots] if DISJOINT: word of each node
    nodes: Array,  # int32, sampled nodes of each type, with their ids in that type
    trees: Array,  # int32, their trees; used if DISJOINT
    rowptr: Array,  # int32 [tiles * T], first edge position of each row of a hop; the tiles of capacity, as below
    begins: Array,  # int64 [tiles * T], first eligible in-edge of each row
    degrees: Array,  # int32 [tiles * T], number of eligible in-edges
    src: Array,  # int32 [capacity], source of each edge position: a node, or if DISJOINT a slot of the table
    eid: Array,  # int32 or int64 [capacity], position in the CSC order of its edge type
    col: Array,  # int32 [capacity], local id of the target
    table: Array,  # int64 [slots], (tree << HALF) | node or -1; used if DISJOINT
    slots: Scalar,  # int32, a power of two
    totals: Array,  # int64 [tiles, 2], the two words of each tile, as in hops.py
    begin: Scalar,  # int32, first phase to run: 0 for the seeds, 1 + 3 * hop + i for phase i of a hop
    end: Scalar,  # int32, first phase not to run
    DISJOINT: tl.constexpr,  # one tree per seed
    TEMPORAL: tl.constexpr,  # edges of some edge type have times
    WEIGHTED: tl.constexpr,  # edges of some edge type have weights; not LABOR
    LABOR: tl.constexpr,  # pick by variates of the sources
    T: tl.constexpr,  # rows or edges per tile: one per thread
) -> None:
    """Sample hop by hop: phases ``[begin, end)`` of ``[0, 1 + 3 * num_hops)``."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    phase = begin
    while phase < end:
        hop = (phase - 1) // PHASES
        what = (phase - 1) % PHASES
        if phase == 0:
            place_seeds(control, state, nodes, trees, table, slots, pid, programs, DISJOINT, T)
        elif what == 0:
            measure(control, nodes, trees, rowptr, begins, degrees, totals, hop, TEMPORAL, T)
        elif tl.load(control + NEEDED) == 0:  # only measuring writes it, so it is the same in all threads
            if what == 1:
                pick(control, state, nodes, trees, rowptr, begins, degrees, src, eid, col, table, slots, hop, pid,
                     programs, DISJOINT, WEIGHTED, LABOR, T)  # fmt: skip
            else:
                settle(control, state, nodes, trees, src, table, totals, hop, DISJOINT, T)
        phase += 1
        if phase < end:
            grid_barrier(control + BARRIER, (phase - begin).to(tl.int64) * programs)


@triton.jit(do_not_specialize=["num_stages"])
def emit_relations_kernel(
    state: Array,  # int64, as above
    nodes: Array,  # int32
    trees: Array,  # int32; read if DISJOINT
    src: Array,  # int32 [capacity]
    eid: Array,  # int32 or int64 [capacity]
    col: Array,  # int32 [capacity]
    places: Array,  # int64 [num_stages + num_types, 5]: first edge or node, their number; where sources, targets and
    # edges go, or nodes and trees
    num_stages: Scalar,
    out: Array,  # int64, all outputs
    DISJOINT: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """Copy the edges of one stage of a finished batch to the output, relabeled, or the nodes of one type."""
    own = places + tl.program_id(1) * 5
    first = tl.load(own)
    i = tl.program_id(0) * T + tl.arange(0, T)
    on = i < tl.load(own + 1)
    to = out + tl.load(own + 2) + i
    next_to = out + tl.load(own + 3) + i
    if tl.program_id(1) < num_stages:
        u = tl.load(src + first + i, mask=on, other=0)
        tl.store(to, tl.load(state + u, mask=on, other=0) & LOW, mask=on)
        tl.store(next_to, tl.load(col + first + i, mask=on, other=0).to(tl.int64), mask=on)
        tl.store(out + tl.load(own + 4) + i, tl.load(eid + first + i, mask=on, other=0).to(tl.int64), mask=on)
    else:
        tl.store(to, tl.load(nodes + first + i, mask=on, other=0).to(tl.int64), mask=on)
        if DISJOINT:
            tl.store(next_to, tl.load(trees + first + i, mask=on, other=0).to(tl.int64), mask=on)
