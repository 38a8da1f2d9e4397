"""Hop-by-hop sampling in one cooperative launch: the phases of a hop and the kernel that runs them.

Level 0 consists of the seeds, level l >= 1 of the edges of hop l. Edge positions are final from the start: positions
``[0, B)`` are the seeds, position B + x is edge x of the output. Each level runs two phases, each followed by a grid
barrier: *expand* (the rows of the previous level pick in-edges, and every edge bids for its source) and *settle* (find
the edges that won their source; assign local ids and edge offsets in the order of these edges). ``queue.py`` runs the
same phases after its own discovery. Settling is one pass, a scan with decoupled look-back (Merrill and Garland, 2016):
programs take tiles of edges in order; each publishes its own counts first, and the prefix sum once it is known.

One 64-bit word per node both deduplicates and orders. It only decreases within a batch and is never cleared between
batches, so a relaxed atomic minimum is the entire protocol::

    word = (stamp << 44) | (code << 32) | low       the stamp counts down, so a word of an older batch is larger
    code = 2 * level + 1: found, low = position of the lowest edge that bids for it
    code = 2 * level:     assigned, low = local id

A sample of every hop (EVERY) expands all nodes found so far in each hop, with a key per hop: *settle* gives the rows of
earlier levels new edge offsets, before those of the nodes that it finds.

A disjoint sample has one node per (tree, node), found through a hash table; its slot replaces the node id. A table of
nodes does the same where the words of all nodes exceed the L2 cache and the table fits into it (HASHED). A bulk
launch samples several mini-batches: node v of mini-batch b has the number ``b * num_nodes + v``, so each level is
sorted by mini-batch. Edge positions, local ids and nodes are int32, which halves the traffic of random accesses.
Offsets into the graph's edges are int64, as is ``program * share``, which may exceed the end of an array.
"""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import (
    Array,
    Lanes,
    Scalar,
    bounded,
    layer_key,
    node_key,
    pick_one,
    pick_row,
    tree_key,
    width,
)

# Indices into `control`, int64 [CONTROL_SIZE]: the scalars of a batch, and counters 128 bytes apart, so that no two
# contended counters share a cache line.
STAMP = tl.constexpr(0)
NUM_SEEDS = tl.constexpr(1)
KEY = tl.constexpr(2)
REPLACE = tl.constexpr(3)
NUM_HOPS = tl.constexpr(4)
CAPACITY = tl.constexpr(5)  # edge positions that fit into the scratch memory
FIRST_TREE = tl.constexpr(6)  # position of the first seed in the whole mini-batch
NUM_NODES = tl.constexpr(7)  # of the graph; only bulk launches read this and NUM_BATCHES
NUM_BATCHES = tl.constexpr(8)
BARRIER = tl.constexpr(16)
HEAD = tl.constexpr(32)  # next queue slot to claim
WORK = tl.constexpr(48)  # (slots reserved << HALF) | tasks outstanding
FANOUT = tl.constexpr(64)  # fanouts of up to MAX_HOPS hops
KEYS = tl.constexpr(96)  # of up to MAX_BATCHES mini-batches of a bulk
STARTS = tl.constexpr(128)  # position of the first seed of each of them
TILES = tl.constexpr(160)  # number of tiles of each level that programs have taken to settle

# Indices into `sizes`, int64 [SIZES_SIZE].
NODES = tl.constexpr(0)  # first local id of each level
EDGES = tl.constexpr(40)  # first edge position of each level
NEEDED = tl.constexpr(80)  # 0, or the capacity that a level would have needed; this and later levels are missing
PARTS = tl.constexpr(96)  # bulk: first local id of each (level, mini-batch), then first edge of each from level 1 on

MAX_HOPS = 30
MAX_BATCHES = 32
CONTROL_SIZE, SIZES_SIZE = 192, 96

# Two numbers in one 64-bit word: a single atomic changes both, and a single load reads a consistent pair.
HALF = tl.constexpr(32)
LOW = tl.constexpr(0xFFFFFFFF)
# Upper half of a node's word and of a task: the stamp of the batch above the code or the hop.
STAMP_SHIFT = tl.constexpr(44)
CODE = tl.constexpr(4095)

# Phases of a level.
EXPAND = tl.constexpr(0)
SETTLE = tl.constexpr(1)
PHASES = tl.constexpr(2)

# A tile publishes two consecutive words, its number of nodes and its number of edges. The upper bits of both identify
# the counts: stamp, level, and whether they include all previous tiles.
LEVEL_BITS = tl.constexpr(6)
EDGE_BITS = tl.constexpr(36)
MOST_EDGES = tl.constexpr((1 << 36) - 1)  # larger counts are clamped; they exceed every capacity anyway
WINDOW = tl.constexpr(32)  # tiles that look_back reads together


@triton.jit
def word(stamp: Scalar, code: Lanes, low: Lanes) -> Lanes:
    """Pack the 64-bit word of a node."""
    return (stamp << STAMP_SHIFT) | (code.to(tl.int64) << HALF) | low.to(tl.int64)


@triton.jit
def grid_barrier(bar: Array, target: Scalar) -> None:
    """Wait until the counter reaches the arrivals of all programs so far; all must be resident at once."""
    tl.debug_barrier()  # all threads' stores must precede the release by one thread; Triton adds no barrier here
    # Release: this program's writes are visible to every program that acquires the sum.
    tl.atomic_add(bar, 1, sem="release", scope="gpu")
    # Relaxed: an acquire empties the L1 cache, which other programs of this multiprocessor still use. An atomic: the
    # compiler would remove a loop of plain loads.
    while tl.atomic_add(bar, 0, sem="relaxed", scope="gpu") < target:
        pass
    # Acquire: plain loads after the barrier see released data, not stale data in the L1 cache. It succeeds at once; the
    # compiler would remove it if its result were unused.
    while tl.atomic_add(bar, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()  # one thread has waited; the others continue only now


@triton.jit
def level_rows(
    sizes: Array, level: Scalar, pid: Scalar, programs: Scalar, R: tl.constexpr, EVERY: tl.constexpr = False
) -> tuple[Scalar, Scalar, Scalar]:
    """Return this program's first row of those that expand into a level, the rows per tile, and the end of the rows."""
    low = tl.load(sizes + NODES + level - 1)
    high = tl.load(sizes + NODES + level)
    if EVERY:  # all rows so far, unless an earlier level did not fit
        low = low * 0
        high = tl.where(tl.load(sizes + NEEDED) == 0, high, 0)
    # Programs take tiles in turn: at any time, all of them work on the same few mini-batches of a bulk.
    share = tl.minimum(tl.cdiv(high - low, programs), R)
    return low + pid * share, share, high


@triton.jit
def find_slot(table: Array, slots: Scalar, high: Lanes, node: Lanes, on: Lanes, STAMPED: tl.constexpr = False) -> Lanes:
    """Find or insert (high, node) in the open-addressing table int64 ``[slots]``; return its slot.

    A slot is empty if it contains -1 or, if STAMPED, an entry with another upper half: that of an older batch.
    """
    entry = (high.to(tl.int64) << HALF) | node.to(tl.int64)
    at = bounded(entry.to(tl.uint64), slots)
    todo = on
    # Linear probing; the table has at least twice as many slots as entries, so probing always reaches an empty one.
    while tl.sum(todo.to(tl.int32), 0) > 0:
        # Volatile, as other programs insert concurrently; an entry is one word and therefore never seen in part.
        old = tl.load(table + at, mask=todo, other=0, volatile=True)
        empty = todo & ((old >> HALF) != high if STAMPED else old == -1)
        todo = todo & (old != entry)
        at = tl.where(todo & (empty == 0), tl.where(at + 1 < slots, at + 1, 0), at)
        if tl.sum((todo & (empty == 0)).to(tl.int32), 0) == 0:
            # All lanes have found their entry or an empty slot. Triton's compare-and-swap has no mask: finished lanes
            # compare with a value that the table never contains.
            now = tl.atomic_cas(table + at, tl.where(empty, old, -2), entry, sem="relaxed")
            todo = todo & (now != old) & (now != entry)
    return at


@triton.jit
def own_node(control: Array, u: Lanes) -> tuple[Lanes, Lanes]:
    """Split node numbers of a bulk launch into the mini-batch and the node of the graph, int32 ``[R]`` each."""
    num_nodes = tl.load(control + NUM_NODES).to(tl.int32)
    batch = u // num_nodes
    return batch, u - batch * num_nodes


@triton.jit
def place_seeds(
    seeds: Array, control: Array, state: Array, src: Array, sizes: Array, table: Array, stamp: Scalar,
    num_seeds: Scalar, slots: Scalar, pid: Scalar, programs: Scalar, DISJOINT: tl.constexpr, BULK: tl.constexpr,
    T: tl.constexpr, HASHED: tl.constexpr,
) -> None:  # fmt: skip
    """Set up level 0: a seed's local id is its position; a duplicate gets the id of its first occurrence."""
    t = pid.to(tl.int64) * T
    while t < num_seeds:
        i = (t + tl.arange(0, T)).to(tl.int32)
        on = i < num_seeds
        u = tl.load(seeds + i, mask=on, other=0).to(tl.int32)
        if BULK:
            num_nodes = tl.load(control + NUM_NODES).to(tl.int32)
            batch = 1
            while batch < tl.load(control + NUM_BATCHES):
                u += tl.where(i >= tl.load(control + STARTS + batch), num_nodes, 0)
                batch += 1
        if DISJOINT or HASHED:
            u = find_slot(table, slots, stamp if HASHED else i, u, on, HASHED)
        tl.store(src + i, u, mask=on)
        # Code 0 means assigned at level 0: no later bid is lower. Of a duplicated seed, the lower position remains.
        tl.atomic_min(state + u, word(stamp, i * 0, i), mask=on, sem="relaxed")
        t += programs * T
    if pid == 0:
        tl.store(sizes + NODES, 0)
        tl.store(sizes + EDGES, 0)
        tl.store(sizes + EDGES + 1, num_seeds)
        tl.store(sizes + NEEDED, 0)


@triton.jit
def bid(
    u: Lanes, tree: Lanes, pos: Lanes, on: Lanes, state: Array, src: Array, table: Array, stamp: Scalar, level: Scalar,
    slots: Scalar, DISJOINT: tl.constexpr, HASHED: tl.constexpr = False,
) -> None:  # fmt: skip
    """Record the sources of edges and bid for them; the lowest position wins."""
    if DISJOINT or HASHED:
        u = find_slot(table, slots, stamp if HASHED else tree, u, on, HASHED)
    tl.store(src + pos, u, mask=on)
    # The previous value is not used, so no thread waits for a result.
    tl.atomic_min(state + u, word(stamp, pos * 0 + 2 * level + 1, pos), mask=on, sem="relaxed")


@triton.jit
def place_of(row: Lanes, SHARDS: tl.constexpr, SHIFT: tl.constexpr) -> tuple[Lanes, Lanes]:
    """Return the shard of each row and the index in it; blocks of ``2^SHIFT`` rows are distributed round-robin."""
    block = row >> SHIFT
    return block % SHARDS, ((block // SHARDS) << SHIFT) | (row & ((1 << SHIFT) - 1))


@triton.jit
def neighbor(
    indices: Array, hot: Array, at: Lanes, begin: Lanes, e: Lanes, on: Lanes, CACHED: tl.constexpr,
    SHARDS: tl.constexpr = 1, SHIFT: tl.constexpr = 0,
) -> Lanes:  # fmt: skip
    """Read the source of in-edge e, from ``indices``, its shard, or the cached copy of its list at ``hot + at``."""
    if SHARDS > 1:
        shard, place = place_of(e, SHARDS, SHIFT)
        u = tl.load(tl.load(hot + shard, mask=on, other=0).to(indices.dtype) + place, mask=on, other=0).to(tl.int32)
    elif CACHED:
        # Two loads with opposite masks: a lane whose list is cached reads nothing over the bus.
        is_hot = on & (at >= 0)
        cold = tl.load(indices + e, mask=on & (at < 0), other=0).to(tl.int32)
        u = tl.where(is_hot, tl.load(hot + at + (e - begin), mask=is_hot, other=0).to(tl.int32), cold)
    else:
        u = tl.load(indices + e, mask=on, other=0).to(tl.int32)
    return u


@triton.jit
def expand_rows(
    indptr: Array, indices: Array, offset: Array, hot: Array, control: Array, state: Array, nodes: Array,
    trees: Array, rowptr: Array, src: Array, eid: Array, col: Array, table: Array, sizes: Array, stamp: Scalar,
    key: Scalar, first_tree: Scalar, fanout: Scalar, replace: Scalar, slots: Scalar, level: Scalar, pid: Scalar,
    programs: Scalar, DISJOINT: tl.constexpr, BULK: tl.constexpr, CACHED: tl.constexpr, SHARDS: tl.constexpr,
    SHIFT: tl.constexpr, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, EVERY: tl.constexpr, HASHED: tl.constexpr,
) -> None:  # fmt: skip
    """Expand by a fanout up to K: one thread picks for each row, then one thread per edge gathers and bids."""
    t, share, high = level_rows(sizes, level, pid, programs, R, EVERY)
    while t < high:
        # First the picks, one row per thread: R rows at a time hide one another's loads of `indptr`.
        stop = tl.minimum(t + share, high)
        i = (t + tl.arange(0, R)).to(tl.int32)
        on = i < stop
        v = tl.load(nodes + i, mask=on, other=0)
        own_key = key
        if BULK:
            batch, v = own_node(control, v)
            own_key = tl.load(control + KEYS + batch)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        at = tl.load(rowptr + i, mask=on, other=0)
        taken = tl.where(on, width(degree, fanout, replace), 0)
        if DISJOINT:
            own_key = tree_key(key, first_tree + tl.load(trees + i, mask=on, other=0))
        picks = pick_row(node_key(own_key, v), degree, fanout, replace, K)
        for j in tl.static_range(K):
            tl.store(eid + at + j, begin + picks[j], mask=j < taken)
            tl.store(col + at + j, i, mask=j < taken)
        tl.debug_barrier()  # one thread writes an edge id and another reads it
        # Then the random accesses, one edge per thread: rows shorter than the fanout leave no thread idle, and the
        # gathers of T edges are in flight together. Adjacent rows have adjacent edges, so this is one flat range.
        first = tl.load(rowptr + t)
        end = tl.load(rowptr + stop)
        while first < end:
            pos = first + tl.arange(0, T)
            on = pos < end
            e = tl.load(eid + pos, mask=on, other=0)
            start = e
            copied = e
            v = pos
            before = pos * 0
            if BULK or CACHED:  # cache hits: this program has just read these rows and written these edges
                v = tl.load(nodes + tl.load(col + pos, mask=on, other=0), mask=on, other=0)
            if BULK:
                before = v
                batch, v = own_node(control, v)
                before -= v
            if CACHED:
                start = tl.load(indptr + v, mask=on, other=0)
                copied = tl.load(offset + v, mask=on, other=-1)
            u = neighbor(indices, hot, copied, start, e, on, CACHED, SHARDS, SHIFT) + before
            tree = pos
            if DISJOINT:
                tree = tl.load(trees + tl.load(col + pos, mask=on, other=0), mask=on, other=0)
            bid(u, tree, pos, on, state, src, table, stamp, level, slots, DISJOINT, HASHED)
            first += T
        t += programs * share


@triton.jit
def replay_rows(
    indptr: Array, state: Array, nodes: Array, rowptr: Array, src: Array, eid: Array, col: Array, stage: Array,
    ticket_of: Array, sizes: Array, stamp: Scalar, fanout: Scalar, replace: Scalar, level: Scalar, pid: Scalar,
    programs: Scalar, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Expand from the queue's samples, int32 ``[tickets, 2, K]``: offsets and sources."""
    t, share, high = level_rows(sizes, level, pid, programs, R)
    while t < high:
        stop = tl.minimum(t + share, high)
        i = (t + tl.arange(0, R)).to(tl.int32)
        on = i < stop
        v = tl.load(nodes + i, mask=on, other=0)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        at = tl.load(rowptr + i, mask=on, other=0)
        taken = tl.where(on, width(degree, fanout, replace), 0)
        # int64: tickets * 2 * K may exceed 2^31.
        row = stage + tl.load(ticket_of + v, mask=on, other=0).to(tl.int64) * (2 * K)
        most = tl.max(taken, 0)
        j = 0
        while j < most:
            for c in tl.static_range(5):  # loads in flight
                picked = j + c < taken
                tl.store(eid + at + j + c, begin + tl.load(row + j + c, mask=picked, other=0), mask=picked)
                tl.store(src + at + j + c, tl.load(row + K + j + c, mask=picked, other=0), mask=picked)
                tl.store(col + at + j + c, i, mask=picked)
            j += 5
        tl.debug_barrier()  # one thread writes a source and another reads it
        first = tl.load(rowptr + t)
        end = tl.load(rowptr + stop)
        while first < end:
            pos = first + tl.arange(0, T)
            on = pos < end
            bid(tl.load(src + pos, mask=on, other=0), pos, pos, on, state, src, src, stamp, level, 1, False)
            first += T
        t += programs * share


@triton.jit
def row_of(rowptr: Array, pos: Lanes, first: Scalar, last: Scalar, on: Lanes) -> Lanes:
    """Return the row of ``[first, last)`` that contains each edge position: the last one starting at or before it."""
    # Rows without edges are skipped. A binary search over `rowptr`, with the same number of steps for every lane;
    # neighboring edges take the same path, so its loads hit caches.
    low = pos * 0 + first
    high = pos * 0 + last
    span = last - first
    while span > 1:
        middle = low + (high - low) // 2
        right = tl.load(rowptr + middle, mask=on, other=0) <= pos
        right = right & (middle > low)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, tl.maximum(middle, low + 1))
        span = (span + 1) // 2
    return low


@triton.jit
def expand_flat(
    indptr: Array, indices: Array, offset: Array, hot: Array, control: Array, state: Array, nodes: Array,
    trees: Array, rowptr: Array, src: Array, eid: Array, col: Array, table: Array, sizes: Array, stamp: Scalar,
    key: Scalar, first_tree: Scalar, fanout: Scalar, replace: Scalar, slots: Scalar, level: Scalar, pid: Scalar,
    programs: Scalar, DISJOINT: tl.constexpr, BULK: tl.constexpr, CACHED: tl.constexpr, SHARDS: tl.constexpr,
    SHIFT: tl.constexpr, T: tl.constexpr, EVERY: tl.constexpr, HASHED: tl.constexpr,
) -> None:  # fmt: skip
    """Expand to all neighbors or by a fanout above K: one thread per edge, so several programs share a hub."""
    t = tl.load(sizes + EDGES + level) + pid * T
    end = tl.load(sizes + EDGES + 1 + level)
    first = tl.load(sizes + NODES + level - 1).to(tl.int32)
    if EVERY:
        first = first * 0
    last = tl.load(sizes + NODES + level).to(tl.int32)
    while t < end:
        pos = (t + tl.arange(0, T)).to(tl.int32)
        on = pos < end
        low = row_of(rowptr, pos, first, last, on)
        v = tl.load(nodes + low, mask=on, other=0)
        before = pos * 0
        own_key = key
        if BULK:
            before = v
            batch, v = own_node(control, v)
            before -= v
            own_key = tl.load(control + KEYS + batch)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        j = pos - tl.load(rowptr + low, mask=on, other=0)
        tree = pos
        if DISJOINT:
            tree = tl.load(trees + low, mask=on, other=0)
            own_key = tree_key(key, first_tree + tree)
        e = begin + pick_one(node_key(own_key, v), j, degree, fanout, replace, on)
        tl.store(eid + pos, e, mask=on)
        tl.store(col + pos, low, mask=on)
        copied = e
        if CACHED:
            copied = tl.load(offset + v, mask=on, other=-1)
        u = neighbor(indices, hot, copied, begin, e, on, CACHED, SHARDS, SHIFT) + before
        bid(u, tree, pos, on, state, src, table, stamp, level, slots, DISJOINT, HASHED)
        t += programs * T


@triton.jit
def say(totals: Array, tile: Scalar, whose: Scalar, nodes: Scalar, edges: Scalar) -> None:
    """Publish the two words of a tile. Relaxed suffices, as each word identifies its tile's level and is never torn."""
    tl.atomic_xchg(totals + 2 * tile, (whose << HALF) | nodes, sem="relaxed")
    tl.atomic_xchg(totals + 2 * tile + 1, (whose << EDGE_BITS) | tl.minimum(edges, MOST_EDGES), sem="relaxed")


@triton.jit
def look_back(totals: Array, tile: Scalar, key: Scalar) -> tuple[Scalar, Scalar]:
    """Return the number of nodes and edges of all previous tiles; waits until they have published their counts."""
    nodes = key * 0
    edges = key * 0
    at = tile - 1
    while at >= 0:
        before = at - tl.arange(0, WINDOW)
        there = before >= 0
        # Volatile, as other programs write concurrently.
        node_word = tl.load(totals + 2 * before, mask=there, other=0, volatile=True)
        edge_word = tl.load(totals + 2 * before + 1, mask=there, other=0, volatile=True)
        whose = node_word >> HALF
        # Ignore a tile if only one of its two words has been written.
        said = there & ((whose >> 1) == key) & (whose == (edge_word >> EDGE_BITS))
        # Stop at the first tile, or at the nearest tile whose words are prefix sums: they cover everything before it.
        last = tl.min(tl.where((said & ((whose & 1) == 1)) | (before < 0), tl.arange(0, WINDOW), WINDOW), 0)
        missing = (tl.arange(0, WINDOW) <= last) & there & (said == 0)
        if tl.sum(missing.to(tl.int32), 0) == 0:
            own = there & (tl.arange(0, WINDOW) <= last)
            nodes += tl.sum(tl.where(own, node_word & LOW, 0), 0)
            edges += tl.sum(tl.where(own, edge_word & MOST_EDGES, 0), 0)
            at = tl.where(last < WINDOW, -1, at - WINDOW)
    return nodes, edges


@triton.jit
def settle(
    indptr: Array, control: Array, state: Array, nodes: Array, trees: Array, rowptr: Array, src: Array, table: Array,
    sizes: Array, totals: Array, stamp: Scalar, capacity: Scalar, next_fanout: Scalar, replace: Scalar, level: Scalar,
    num_hops: Scalar, DISJOINT: tl.constexpr, BULK: tl.constexpr, T: tl.constexpr, EVERY: tl.constexpr,
    HASHED: tl.constexpr,
) -> None:  # fmt: skip
    """Find the edges that won their source; assign local ids and edge offsets to the sources, in the order of edges."""
    low = tl.load(sizes + EDGES + level).to(tl.int32)
    high = tl.load(sizes + EDGES + 1 + level).to(tl.int32)
    node_end = tl.load(sizes + NODES + level)
    edge_end = tl.load(sizes + EDGES + 1 + level)
    tiles = tl.cdiv(high - low, T)
    if EVERY:  # the rows that expand again come first, then the edges
        old = tl.where((level < num_hops) & (tl.load(sizes + NEEDED) == 0), node_end, 0).to(tl.int32)
        tiles = tl.cdiv(old + high - low, T)
    key = (stamp << LEVEL_BITS) | level
    tile = tl.atomic_add(control + TILES + level, 1, sem="relaxed").to(tl.int32)
    if (tiles == 0) & (tile == 0):
        tl.store(rowptr + node_end, edge_end.to(tl.int32))
        tl.store(sizes + NODES + 1 + level, node_end)
        tl.store(sizes + EDGES + 2 + level, edge_end)
    while tile < tiles:
        pos = low + tile * T + tl.arange(0, T)
        on = pos < high
        if EVERY:
            item = pos - low
            pos -= old
            on = (pos < high) & (item >= old)
        found = tl.load(src + pos, mask=on, other=0)
        # A grid barrier separates this from the bids, so a plain load sees the lowest bid: the edge whose position is
        # in the word is the first one to its source. If the word already contains the local id, it equals no bid.
        # Every seed is a row, including duplicates.
        lowest = tl.load(state + found, mask=on, other=0)
        won = on & ((level == 0) | (lowest == word(stamp, pos * 0 + 2 * level + 1, pos)))
        expands = won & (level < num_hops)  # nodes of the last hop are not expanded: their degrees are not read
        u = found
        if DISJOINT or HASHED:
            entry = tl.load(table + found, mask=on, other=0)
            u = entry.to(tl.int32)  # the lower half is the node
        if EVERY:
            u = tl.where(item < old, tl.load(nodes + item, mask=item < old, other=0), u)
            expands = expands | (item < old)
        v = u
        if BULK:
            v = u % tl.load(control + NUM_NODES).to(tl.int32)
        begin = tl.load(indptr + v, mask=expands, other=0)
        degree = (tl.load(indptr + v + 1, mask=expands, other=0) - begin).to(tl.int32)
        edges = tl.where(expands, width(degree, next_fanout, replace), 0).to(tl.int64)
        own_nodes = tl.sum(won.to(tl.int32), 0).to(tl.int64)
        own_edges = tl.sum(edges, 0)
        say(totals, tile, 2 * key, own_nodes, own_edges)
        nodes_before, edges_before = look_back(totals, tile, key)
        node_next = nodes_before + own_nodes
        edge_next = edges_before + own_edges
        say(totals, tile, 2 * key + 1, node_next, edge_next)
        i = (node_end + nodes_before).to(tl.int32) + tl.cumsum(won.to(tl.int32), 0) - won.to(tl.int32)
        first = edge_end + edges_before + tl.cumsum(edges, 0) - edges
        # A seed's word already contains its local id. A plain store, as a source has only one winner.
        tl.store(state + found, word(stamp, i * 0 + 2 * level, i), mask=won & (level > 0))
        if DISJOINT:
            tl.store(trees + i, (entry >> HALF).to(tl.int32), mask=won)
        tl.store(nodes + i, u, mask=won)
        tl.store(rowptr + i, first.to(tl.int32), mask=won)
        if EVERY:
            tl.store(rowptr + item, first.to(tl.int32), mask=item < old)
        if tile == tiles - 1:  # writes the sizes for the next level; no program reads them in this phase
            node_next += node_end
            edge_next += edge_end
            if edge_next <= capacity:
                tl.store(rowptr + node_next, edge_next.to(tl.int32))
                tl.store(sizes + NODES + 1 + level, node_next)
                tl.store(sizes + EDGES + 2 + level, edge_next)
            else:  # stop here: without rows, all further levels are empty
                tl.store(sizes + NODES + 1 + level, node_end)
                tl.store(sizes + EDGES + 2 + level, edge_end)
                tl.store(sizes + NEEDED, edge_next)
        tile = tl.atomic_add(control + TILES + level, 1, sem="relaxed").to(tl.int32)


@triton.jit
def level_phase(
    indptr: Array,  # int64 [num_nodes + 1], on the device or in pinned host memory
    indices: Array,  # int32 or int64 [num_edges], on the device or in pinned host memory
    offset: Array,  # int64 [num_nodes], start of each node's list in hot, or -1; read if CACHED
    hot: Array,  # the type of indices [hot edges], copies of hot adjacency lists; read if CACHED. If SHARDS > 1: int64
    # [SHARDS], addresses of the shards
    seeds: Array,  # int32 or int64 [num_seeds]
    control: Array,  # int64 [CONTROL_SIZE], layout above
    state: Array,  # int64 [num_nodes], or [slots] if DISJOINT or HASHED: word of each node
    nodes: Array,  # int32 [num_sampled], node of each local id
    trees: Array,  # int32 [num_sampled], seed of each local id; used if DISJOINT
    rowptr: Array,  # int32 [num_sampled + 1], first edge position of each local id
    src: Array,  # int32 [capacity], source of each edge position: a node, or a slot of the table
    eid: Array,  # int32 or int64 [capacity], position in CSC order of each edge position
    col: Array,  # int32 [capacity], local id of the target of each edge position
    table: Array,  # int64 [slots], (tree << HALF) | node or -1; if HASHED (stamp << HALF) | node
    slots: Scalar,  # int32
    stage: Array,  # int32 [queue_slots, 2, K], offsets and sources that each task sampled; read if STAGED
    ticket_of: Array,  # int32 [num_nodes], queue slot of the final task of each node; read if STAGED
    sizes: Array,  # int64 [SIZES_SIZE], layout above
    totals: Array,  # int64 [tiles of capacity, 2], the two words of each tile of the level, as above
    level: Scalar,  # int32, 0 to num_hops
    pid: Scalar,  # int32, this program
    programs: Scalar,  # int32, number of programs
    PHASE: tl.constexpr,  # EXPAND or SETTLE
    DISJOINT: tl.constexpr,  # one tree per seed
    BULK: tl.constexpr,  # several mini-batches, not disjoint
    CACHED: tl.constexpr,  # hot lists are cached on the device
    STAGED: tl.constexpr,  # the queue has already sampled
    K: tl.constexpr,  # largest fanout that is picked in registers
    R: tl.constexpr,  # rows per tile: one per thread
    T: tl.constexpr,  # edges per tile
    SHARDS: tl.constexpr = 1,  # number of shards of indices
    SHIFT: tl.constexpr = 0,  # log2 of the entries per round-robin block, if SHARDS > 1
    EVERY: tl.constexpr = False,  # every node found so far expands in each hop; not DISJOINT, BULK or STAGED
    HASHED: tl.constexpr = False,  # the table has one entry per node, and slots replace nodes; not DISJOINT or STAGED
) -> None:
    """Run one phase of one level. It reads what the previous phase wrote, so a grid barrier must separate them."""
    stamp = tl.load(control + STAMP)
    replace = tl.load(control + REPLACE).to(tl.int32)
    if PHASE == EXPAND:
        key = tl.load(control + KEY)
        if EVERY:
            key = tl.where(level > 1, layer_key(key, level - 1), key.to(tl.uint64))
        first_tree = tl.load(control + FIRST_TREE)
        if level == 0:
            num_seeds = tl.load(control + NUM_SEEDS)
            place_seeds(seeds, control, state, src, sizes, table, stamp, num_seeds, slots, pid, programs,
                        DISJOINT, BULK, T, HASHED)  # fmt: skip
        else:
            fanout = tl.load(control + FANOUT + level - 1).to(tl.int32)
            if (fanout >= 0) & (fanout <= K):
                if STAGED:
                    replay_rows(indptr, state, nodes, rowptr, src, eid, col, stage, ticket_of, sizes, stamp, fanout,
                                replace, level, pid, programs, K, R, T)  # fmt: skip
                else:
                    expand_rows(indptr, indices, offset, hot, control, state, nodes, trees, rowptr, src, eid, col,
                                table, sizes, stamp, key, first_tree, fanout, replace, slots, level, pid, programs,
                                DISJOINT, BULK, CACHED, SHARDS, SHIFT, K, R, T, EVERY, HASHED)  # fmt: skip
            else:
                expand_flat(indptr, indices, offset, hot, control, state, nodes, trees, rowptr, src, eid, col,
                            table, sizes, stamp, key, first_tree, fanout, replace, slots, level, pid, programs,
                            DISJOINT, BULK, CACHED, SHARDS, SHIFT, T, EVERY, HASHED)  # fmt: skip
    else:
        num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
        fanout = tl.load(control + FANOUT + level).to(tl.int32)
        capacity = tl.load(control + CAPACITY)
        settle(indptr, control, state, nodes, trees, rowptr, src, table, sizes, totals, stamp, capacity, fanout,
               replace, level, num_hops, DISJOINT, BULK, T, EVERY, HASHED)  # fmt: skip


@triton.jit
def split(nodes: Array, rowptr: Array, control: Array, sizes: Array, T: tl.constexpr) -> None:
    """Record where each mini-batch of a bulk launch starts in each level; runs in one program."""
    batches = tl.load(control + NUM_BATCHES).to(tl.int32)
    num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
    num_nodes = tl.load(control + NUM_NODES).to(tl.int32)
    parts = (num_hops + 1) * batches
    t = 0
    while t < parts:
        part = t + tl.arange(0, T)
        on = part < parts
        level = part // batches
        # A level is sorted by mini-batch: binary searches for the first node of each run in parallel.
        first = (part - level * batches) * num_nodes
        at = tl.load(sizes + NODES + level, mask=on, other=0).to(tl.int32)
        left = tl.load(sizes + NODES + 1 + level, mask=on, other=0).to(tl.int32) - at
        while tl.max(left, 0) > 0:
            half = left >> 1
            below = (tl.load(nodes + at + half, mask=left > 0, other=0) < first) & (left > 0)
            at = tl.where(below, at + half + 1, at)
            left = tl.where(below, left - half - 1, half)
        tl.store(sizes + PARTS + part, at.to(tl.int64), mask=on)
        edge = tl.load(rowptr + at, mask=on & (level < num_hops), other=0)  # valid for the first node past a level too
        tl.store(sizes + PARTS + parts + part, edge.to(tl.int64), mask=on & (level < num_hops))
        t += T


# Arguments that change from batch to batch are not specialized: otherwise the first batch with seeds at an address not
# divisible by 16, or a range that starts at 1, would recompile the kernel.
@triton.jit(do_not_specialize=["seeds", "slots", "begin", "end"])
def hop_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, nodes: Array,
    trees: Array, rowptr: Array, src: Array, eid: Array, col: Array, table: Array, slots: Scalar,
    sizes: Array, totals: Array, begin: Scalar, end: Scalar,
    DISJOINT: tl.constexpr, BULK: tl.constexpr, CACHED: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, SHARDS: tl.constexpr = 1, SHIFT: tl.constexpr = 0, EVERY: tl.constexpr = False,
    HASHED: tl.constexpr = False,
) -> None:  # fmt: skip
    """Run phases ``[begin, end)`` of ``2 * level + EXPAND`` or ``SETTLE``; a bulk launch ends with :func:`split`."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    phase = begin
    # One loop over phases, not over levels, so that the code contains a single barrier; the two conditions are uniform
    # over all threads. Under the interpreter, which runs programs sequentially, a launch has a single phase.
    while phase < end:
        level = phase // PHASES
        at_end = False
        if BULK:
            at_end = level > tl.load(control + NUM_HOPS)
            if at_end & (pid == 0):
                split(nodes, rowptr, control, sizes, R)
        for what in tl.static_range(2):
            if (phase % PHASES == what) & (at_end == 0):
                level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, trees, rowptr, src, eid, col,
                            table, slots, src, src, sizes, totals, level, pid, programs, what,
                            DISJOINT, BULK, CACHED, False, K, R, T, SHARDS, SHIFT, EVERY, HASHED)  # fmt: skip
        phase += 1
        if phase < end:
            grid_barrier(control + BARRIER, (phase - begin).to(tl.int64) * programs)
