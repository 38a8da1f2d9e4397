"""The phases of one hop, from which the kernels in ``hops.py`` and ``queue.py`` are made.

Level 0 is the seeds; level l >= 1 the edges of hop l. Edge positions are final from the start: positions ``[0, B)`` are
the seeds, position B + x is edge x of the output. Each level runs three phases: *expand* (the rows of the level before
pick in-edges, and every edge bids for its source), *count* (which edges won their source, and how many edges those
nodes will have), *assign* (local ids and edge offsets in the order of the winning edges).

One 64-bit word per node both deduplicates and orders. It is only ever lowered within a batch and never cleared between
batches::

    word = (stamp << 38) | (code << 32) | low       the stamp counts down, so a word of an older batch is larger
    code = 2 * level + 1: found, low = position of the lowest edge that bids for it
    code = 2 * level:     assigned, low = local id

so a relaxed atomic minimum is the whole protocol. A disjoint sample has one node per (tree, node), found through a hash
table; its slot takes the place of the node id.
"""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import mix, node_key, pick_one, pick_row, tree_key, width

# Places in `control`, int64 [128]: the scalars of a batch, and counters 128 bytes apart.
STAMP = tl.constexpr(0)
NUM_SEEDS = tl.constexpr(1)
KEY = tl.constexpr(2)
REPLACE = tl.constexpr(3)
NUM_HOPS = tl.constexpr(4)
CAPACITY = tl.constexpr(5)  # edge positions there is room for
FIRST_TREE = tl.constexpr(6)  # position of the first seed in the whole mini-batch
BARRIER = tl.constexpr(16)
HEAD = tl.constexpr(32)  # next queue slot to claim
WORK = tl.constexpr(48)  # (slots reserved << 32) | tasks outstanding
FANOUT = tl.constexpr(64)  # fanouts of up to MAX_HOPS hops

# Places in `sizes`, int64 [96].
NODES = tl.constexpr(0)  # first local id of each level
EDGES = tl.constexpr(40)  # first edge position of each level
NEEDED = tl.constexpr(80)  # 0, or the capacity that a level would have needed: the levels from there on are missing

MAX_HOPS = 30
CONTROL_SIZE, SIZES_SIZE = 128, 96
STAMP_BITS = 25


@triton.jit
def word(stamp, code, low):
    """Pack the 64-bit word of a node."""
    return (stamp << 38) | (code.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def grid_barrier(bar, target):
    """Wait until the counter reaches the target, the number of arrivals of all programs so far."""
    tl.debug_barrier()  # every thread's stores come before the release of one; Triton puts no barrier there
    tl.atomic_add(bar, 1, sem="release", scope="gpu")
    while tl.atomic_add(bar, 0, sem="acquire", scope="gpu") < target:  # a plain load in a loop would be deleted
        pass
    tl.debug_barrier()


@triton.jit
def level_edges(sizes, level, pid, programs, T: tl.constexpr):
    """Return this program's contiguous share of the edge positions of a level."""
    low = tl.load(sizes + EDGES + level).to(tl.int32)
    high = tl.load(sizes + EDGES + 1 + level).to(tl.int32)
    share = tl.cdiv(tl.cdiv(high - low, programs), T) * T
    # In 64 bits: the last programs may start past the end of an int32.
    begin = tl.minimum(low.to(tl.int64) + pid.to(tl.int64) * share, high).to(tl.int32)
    return begin, tl.minimum(begin.to(tl.int64) + share, high).to(tl.int32)


@triton.jit
def level_rows(sizes, level, pid, programs):
    """Return this program's contiguous share of the rows that expand into a level."""
    low = tl.load(sizes + NODES + level - 1).to(tl.int32)
    high = tl.load(sizes + NODES + level).to(tl.int32)
    share = tl.cdiv(high - low, programs)
    begin = tl.minimum(low.to(tl.int64) + pid.to(tl.int64) * share, high).to(tl.int32)
    return begin, tl.minimum(begin.to(tl.int64) + share, high).to(tl.int32)


@triton.jit
def find_slot(table, slots, tree, node, on):
    """Find or insert (tree, node) in the open-addressing table int64 ``[slots]``, -1 where empty; return its slot."""
    entry = (tree.to(tl.int64) << 32) | node.to(tl.int64)
    at = (mix(entry.to(tl.uint64)) & (slots - 1).to(tl.uint64)).to(tl.int32)
    todo = on
    while tl.sum(todo.to(tl.int32), 0) > 0:
        # Triton's compare-and-swap has no mask: lanes that are done compare with a value that is never there.
        old = tl.atomic_cas(table + at, tl.where(todo, -1, -2).to(tl.int64), entry, sem="relaxed")
        todo = todo & (old != -1) & (old != entry)
        at = tl.where(todo, (at + 1) & (slots - 1), at)
    return at


@triton.jit
def place_seeds(seeds, state, src, sizes, table, stamp, num_seeds, slots, pid, programs,
                DISJOINT: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Level 0: a seed's local id is its position, or the first one if it is given twice."""
    t = pid.to(tl.int64) * T
    while t < num_seeds:
        i = (t + tl.arange(0, T)).to(tl.int32)
        on = i < num_seeds
        u = tl.load(seeds + i, mask=on, other=0).to(tl.int32)
        if DISJOINT:
            u = find_slot(table, slots, i, u, on)
        tl.store(src + i, u, mask=on)
        tl.atomic_min(state + u, word(stamp, i * 0, i), mask=on, sem="relaxed")
        t += programs * T
    if pid == 0:
        tl.store(sizes + NODES, 0)
        tl.store(sizes + EDGES, 0)
        tl.store(sizes + EDGES + 1, num_seeds)
        tl.store(sizes + NEEDED, 0)


@triton.jit
def bid(u, tree, pos, on, state, src, table, stamp, level, slots, DISJOINT: tl.constexpr):
    """Note the sources of edges and bid for them; the lowest position wins."""
    if DISJOINT:
        u = find_slot(table, slots, tree, u, on)
    tl.store(src + pos, u, mask=on)
    tl.atomic_min(state + u, word(stamp, pos * 0 + 2 * level + 1, pos), mask=on, sem="relaxed")


@triton.jit
def neighbor(indices, hot, at, begin, e, on, CACHED: tl.constexpr):
    """Read the source of in-edge e of a node whose first is begin; if CACHED, a list that has a copy at ``hot + at``
    (-1 if not) is read there.
    """
    if CACHED:
        is_hot = on & (at >= 0)
        cold = tl.load(indices + e, mask=on & (at < 0), other=0).to(tl.int32)
        u = tl.where(is_hot, tl.load(hot + at + (e - begin), mask=is_hot, other=0).to(tl.int32), cold)
    else:
        u = tl.load(indices + e, mask=on, other=0).to(tl.int32)
    return u


@triton.jit
def expand_rows(indptr, indices, offset, hot, state, nodes, trees, rowptr, src, eid, col, table, sizes,
                stamp, key, first_tree, fanout, replace, slots, level, pid, programs,
                DISJOINT: tl.constexpr, CACHED: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                T: tl.constexpr):  # fmt: skip
    """Fanouts up to K: one thread picks for a row, in registers; then the program's edges gather and bid, flat."""
    low, high = level_rows(sizes, level, pid, programs)
    t = low
    while t < high:
        i = t + tl.arange(0, R)
        on = i < high
        v = tl.load(nodes + i, mask=on, other=0)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        at = tl.load(rowptr + i, mask=on, other=0)
        taken = tl.where(on, width(degree, fanout, replace), 0)
        own_key = key
        if DISJOINT:
            own_key = tree_key(key, first_tree + tl.load(trees + i, mask=on, other=0))
        picks = pick_row(node_key(own_key, v), degree, fanout, replace, K)
        for j in tl.static_range(K):
            tl.store(eid + at + j, begin + picks[j], mask=j < taken)
            tl.store(col + at + j, i, mask=j < taken)
        t += R
    tl.debug_barrier()  # an edge id is written by one thread and read by another
    t = tl.load(rowptr + low)
    end = tl.load(rowptr + high)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        e = tl.load(eid + pos, mask=on, other=0)
        begin = e
        copied = e
        if CACHED:
            v = tl.load(nodes + tl.load(col + pos, mask=on, other=0), mask=on, other=0)
            begin = tl.load(indptr + v, mask=on, other=0)
            copied = tl.load(offset + v, mask=on, other=-1)
        u = neighbor(indices, hot, copied, begin, e, on, CACHED)
        tree = pos
        if DISJOINT:
            tree = tl.load(trees + tl.load(col + pos, mask=on, other=0), mask=on, other=0)
        bid(u, tree, pos, on, state, src, table, stamp, level, slots, DISJOINT)
        t += T


@triton.jit
def replay_rows(indptr, state, nodes, rowptr, src, eid, col, stage, ticket_of, sizes, stamp, fanout, replace, level,
                pid, programs, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Expand from what the queue sampled, int32 ``[tickets, 2, K]``: offsets and sources."""
    low, high = level_rows(sizes, level, pid, programs)
    t = low
    while t < high:
        i = t + tl.arange(0, R)
        on = i < high
        v = tl.load(nodes + i, mask=on, other=0)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        at = tl.load(rowptr + i, mask=on, other=0)
        taken = tl.where(on, width(degree, fanout, replace), 0)
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
        t += R
    tl.debug_barrier()  # a source is written by one thread and read by another
    t = tl.load(rowptr + low)
    end = tl.load(rowptr + high)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        bid(tl.load(src + pos, mask=on, other=0), pos, pos, on, state, src, src, stamp, level, 1, False)
        t += T


@triton.jit
def expand_flat(indptr, indices, offset, hot, state, nodes, trees, rowptr, src, eid, col, table, sizes,
                stamp, key, first_tree, fanout, replace, slots, level, pid, programs,
                DISJOINT: tl.constexpr, CACHED: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """All neighbours, or fanouts above K: one thread per edge, so that hubs are shared among programs."""
    t, end = level_edges(sizes, level, pid, programs, T)
    first = tl.load(sizes + NODES + level - 1).to(tl.int32)
    last = tl.load(sizes + NODES + level).to(tl.int32)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        # The last row that starts at or before the edge; rows without edges are passed over.
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
        v = tl.load(nodes + low, mask=on, other=0)
        begin = tl.load(indptr + v, mask=on, other=0)
        degree = (tl.load(indptr + v + 1, mask=on, other=0) - begin).to(tl.int32)
        j = pos - tl.load(rowptr + low, mask=on, other=0)
        tree = pos
        own_key = key
        if DISJOINT:
            tree = tl.load(trees + low, mask=on, other=0)
            own_key = tree_key(key, first_tree + tree)
        e = begin + pick_one(node_key(own_key, v), j, degree, fanout, replace, on)
        tl.store(eid + pos, e, mask=on)
        tl.store(col + pos, low, mask=on)
        copied = e
        if CACHED:
            copied = tl.load(offset + v, mask=on, other=-1)
        u = neighbor(indices, hot, copied, begin, e, on, CACHED)
        bid(u, tree, pos, on, state, src, table, stamp, level, slots, DISJOINT)
        t += T


@triton.jit
def count(indptr, state, src, mark, table, sizes, counts, stamp, next_fanout, replace, level, num_hops, pid, programs,
          DISJOINT: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Mark the edges that won their source (1 + the edges it will have); total both for this program."""
    t, end = level_edges(sizes, level, pid, programs, T)
    new_nodes = tl.zeros([T], tl.int32)
    new_edges = tl.zeros([T], tl.int64)
    while t < end:
        pos = t + tl.arange(0, T)
        on = pos < end
        u = tl.load(src + pos, mask=on, other=0)
        # Every seed is a row, also one that is given twice.
        won = on & ((level == 0) | (tl.load(state + u, mask=on, other=0) == word(stamp, pos * 0 + 2 * level + 1, pos)))
        expands = won & (level < num_hops)
        if DISJOINT:
            u = tl.load(table + u, mask=on, other=0).to(tl.int32)  # the lower half is the node
        begin = tl.load(indptr + u, mask=expands, other=0)
        degree = (tl.load(indptr + u + 1, mask=expands, other=0) - begin).to(tl.int32)
        edges = tl.where(expands, width(degree, next_fanout, replace), 0)
        tl.store(mark + pos, tl.where(won, edges + 1, 0), mask=on)
        new_nodes += won.to(tl.int32)
        new_edges += edges
        t += T
    tl.store(counts + 2 * pid, tl.sum(new_nodes, 0).to(tl.int64))
    tl.store(counts + 2 * pid + 1, tl.sum(new_edges, 0))


@triton.jit
def assign(state, nodes, trees, rowptr, src, mark, table, sizes, counts, stamp, capacity, level, pid, programs,
           DISJOINT: tl.constexpr, T: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Give the winners local ids, and their edges positions, in the order of the winning edges."""
    t, end = level_edges(sizes, level, pid, programs, T)
    program = tl.arange(0, P)
    program_nodes = tl.load(counts + 2 * program, mask=program < programs, other=0)
    program_edges = tl.load(counts + 2 * program + 1, mask=program < programs, other=0)
    node_end = tl.load(sizes + NODES + level)
    edge_end = tl.load(sizes + EDGES + 1 + level)
    node_next = node_end + tl.sum(program_nodes, 0)
    edge_next = edge_end + tl.sum(program_edges, 0)
    fits = edge_next <= capacity
    if fits:
        i0 = (node_end + tl.sum(tl.where(program < pid, program_nodes, 0), 0)).to(tl.int32)
        e0 = (edge_end + tl.sum(tl.where(program < pid, program_edges, 0), 0)).to(tl.int32)
        while t < end:
            pos = t + tl.arange(0, T)
            on = pos < end
            u = tl.load(src + pos, mask=on, other=0)
            marked = tl.load(mark + pos, mask=on, other=0)
            won = on & (marked > 0)
            both = (won.to(tl.int64) << 32) + tl.where(won, marked - 1, 0)
            before = tl.cumsum(both, 0) - both
            total = tl.sum(both, 0)
            i = i0 + (before >> 32).to(tl.int32)
            # A seed's word names its first place already.
            tl.store(state + u, word(stamp, i * 0 + 2 * level, i), mask=won & (level > 0))
            if DISJOINT:
                entry = tl.load(table + u, mask=won, other=0)
                tl.store(trees + i, (entry >> 32).to(tl.int32), mask=won)
                u = entry.to(tl.int32)
            tl.store(nodes + i, u, mask=won)
            tl.store(rowptr + i, e0 + (before & 0xFFFFFFFF).to(tl.int32), mask=won)
            i0 += (total >> 32).to(tl.int32)
            e0 += (total & 0xFFFFFFFF).to(tl.int32)
            t += T
    if pid == 0:
        if fits:
            tl.store(rowptr + node_next, edge_next.to(tl.int32))
            tl.store(sizes + NODES + 1 + level, node_next)
            tl.store(sizes + EDGES + 2 + level, edge_next)
        else:  # stop here: no rows, so no edges from the next level on
            tl.store(sizes + NODES + 1 + level, node_end)
            tl.store(sizes + EDGES + 2 + level, edge_end)
            tl.store(sizes + NEEDED, edge_next)


@triton.jit
def level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, trees, rowptr, src, eid, col, mark, table,
                slots, stage, ticket_of, sizes, counts, level, pid, programs, WHAT: tl.constexpr,
                DISJOINT: tl.constexpr, CACHED: tl.constexpr, STAGED: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                T: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Run phase WHAT of one level: 0 expand, 1 count, 2 assign."""
    stamp = tl.load(control + STAMP)
    replace = tl.load(control + REPLACE).to(tl.int32)
    if WHAT == 0:
        key = tl.load(control + KEY)
        first_tree = tl.load(control + FIRST_TREE)
        if level == 0:
            num_seeds = tl.load(control + NUM_SEEDS)
            place_seeds(seeds, state, src, sizes, table, stamp, num_seeds, slots, pid, programs, DISJOINT, T)
        else:
            fanout = tl.load(control + FANOUT + level - 1).to(tl.int32)
            if (fanout >= 0) & (fanout <= K):
                if STAGED:
                    replay_rows(indptr, state, nodes, rowptr, src, eid, col, stage, ticket_of, sizes, stamp, fanout,
                                replace, level, pid, programs, K, R, T)  # fmt: skip
                else:
                    expand_rows(indptr, indices, offset, hot, state, nodes, trees, rowptr, src, eid, col, table, sizes,
                                stamp, key, first_tree, fanout, replace, slots, level, pid, programs,
                                DISJOINT, CACHED, K, R, T)  # fmt: skip
            else:
                expand_flat(indptr, indices, offset, hot, state, nodes, trees, rowptr, src, eid, col, table, sizes,
                            stamp, key, first_tree, fanout, replace, slots, level, pid, programs,
                            DISJOINT, CACHED, T)  # fmt: skip
    elif WHAT == 1:
        num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
        fanout = tl.load(control + FANOUT + level).to(tl.int32)
        count(indptr, state, src, mark, table, sizes, counts, stamp, fanout, replace, level, num_hops, pid, programs,
              DISJOINT, T)  # fmt: skip
    else:
        capacity = tl.load(control + CAPACITY)
        assign(state, nodes, trees, rowptr, src, mark, table, sizes, counts, stamp, capacity, level, pid, programs,
               DISJOINT, T, P)  # fmt: skip
