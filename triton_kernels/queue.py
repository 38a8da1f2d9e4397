"""The persistent sampler: a queue of (node, hop) tasks in device memory (PGSampler, algorithms 1 and 2).

Resident programs claim tasks, sample them, deduplicate what they found and push it as new tasks, until none is left;
there is no barrier between hops. Where the paper's termination test can lose tasks, this one is exact for every fetch
size:

- *One word for the counters*, ``(slots reserved << 32) | outstanding``: a single atomic addition reserves slots for the
  new tasks, counts them, and retires the finished ones. Outstanding is zero only when every task has been done.
- *Published slots*: a slot holds ``(stamp << 38) | (hop << 32) | node``. The stamp of the batch is the publication, and
  travels in the same word as the task, so no fence is needed and nothing is cleared.
- *A claimed slot is waited for*, and given up only when nothing is outstanding.
- *Lowest hop*: a node may first be met at a later hop than its lowest. The atomic minimum on its word lowers the hop,
  and a node whose hop fell is pushed again. With fanouts that never grow, the picks of the later hop are among those of
  the earlier one, so the fixpoint is that of hop-by-hop sampling, whatever the schedule.

What races write is keyed by slot, so that expansions of one node never mix. The order of the output comes from the
phases of ``phases.py`` afterwards, which take the sampled edges from the slot of each node's final hop.
"""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import node_key, pick_row, width
from lightning_gnn.triton_kernels.phases import (
    BARRIER,
    FANOUT,
    HEAD,
    KEY,
    NUM_HOPS,
    NUM_SEEDS,
    REPLACE,
    STAMP,
    WORK,
    grid_barrier,
    level_phase,
    neighbor,
    word,
)

# Phases before those of level 0.
DISCOVER = tl.constexpr(0)
FIND_TICKETS = tl.constexpr(1)
FIRST_LEVEL = tl.constexpr(2)
QUEUE_PHASES = 2


@triton.jit
def publish(queue, at, capacity, stamp, hop, node, new):
    """Fill reserved slots, so that whoever claimed them sees the tasks."""
    task = word(stamp, hop, node.to(tl.int64))
    tl.atomic_xchg(queue + at, task, mask=new & (at < capacity), sem="relaxed")


@triton.jit
def discover(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
             ONCE: tl.constexpr, CACHED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
             R: tl.constexpr):  # fmt: skip
    """Do tasks until none is outstanding, or if ONCE those of a single claim.

    R is the number of threads: one slot per thread, so that each racing read of a slot has one reader.
    """
    stamp = tl.load(control + STAMP)
    num_seeds = tl.load(control + NUM_SEEDS).to(tl.int32)
    num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
    key = tl.load(control + KEY)
    replace = tl.load(control + REPLACE).to(tl.int32)
    head = control + HEAD
    work = control + WORK
    lane = tl.arange(0, R)
    first = tl.atomic_add(head, fetch_size, sem="relaxed").to(tl.int32)
    last = first + fetch_size
    todo = lane < fetch_size
    running = 1
    while running > 0:
        slot = first + lane
        is_seed = todo & (slot < num_seeds)
        waits = todo & (slot >= num_seeds) & (slot < queue_slots)
        task = tl.load(queue + slot, mask=waits, other=0, volatile=True)
        ready = is_seed | (waits & ((task >> 38) == stamp))
        num_ready = tl.sum(ready.to(tl.int32), 0)
        if num_ready == 0:
            # An atomic, not a load: the compiler deletes loops of loads.
            if (tl.atomic_add(work, 0, sem="relaxed") & 0xFFFFFFFF) == 0:
                running = 0
        else:
            seed = tl.load(seeds + slot, mask=is_seed, other=0).to(tl.int64)
            v = tl.where(is_seed, seed, task & 0xFFFFFFFF).to(tl.int32)
            v = tl.where(ready, v, 0)
            hop = tl.where(is_seed | (ready == 0), 0, (task >> 32) & 63).to(tl.int32)
            tl.atomic_min(state + v, word(stamp, hop * 0, slot), mask=is_seed, sem="relaxed")
            now = tl.load(state + v, mask=ready, other=0, volatile=True)
            live = ready & (is_seed | (now >= word(stamp, 2 * hop + 1, hop * 0)))  # else a lower hop has the node
            fanout = tl.load(control + FANOUT + hop, mask=live, other=0).to(tl.int32)
            begin = tl.load(indptr + v, mask=live, other=0)
            degree = (tl.load(indptr + v + 1, mask=live, other=0) - begin).to(tl.int32)
            taken = tl.where(live, width(degree, fanout, replace), 0)
            copied = begin
            if CACHED:
                copied = tl.load(offset + v, mask=live, other=-1)
            deeper = hop + 1 < num_hops  # nodes of the last hop are not expanded
            found = word(stamp, 2 * hop + 3, hop.to(tl.int64) * 0 + 0xFFFFFFFF)

            picks = pick_row(node_key(key, v), degree, fanout, replace, K)
            row = stage + slot.to(tl.int64) * (2 * K)
            for k in tl.static_range(K):
                tl.store(row + k, picks[k], mask=(fanout >= 0) & (k < taken))
            tl.debug_barrier()
            k = 0
            most = tl.maximum(tl.max(taken, 0), 1)
            while k < most:  # CHUNK gathers in flight, then as many bids, then one reservation for all children
                sources = ()
                for c in tl.static_range(CHUNK):
                    on = k + c < taken
                    picked = on & (fanout >= 0)
                    p = tl.where(fanout < 0, k + c, tl.load(row + k + c, mask=picked, other=0))
                    u = neighbor(indices, hot, copied, begin, begin + p, on, CACHED)
                    tl.store(row + K + k + c, u, mask=picked)
                    sources = sources + (u,)  # noqa: RUF005 (Triton has no unpacking)
                news = ()
                mine = tl.zeros([R], tl.int32)
                for c in tl.static_range(CHUNK):
                    on = k + c < taken
                    old = tl.atomic_min(state + sources[c], found, mask=on, sem="relaxed")
                    new = on & deeper & (old > found)
                    news = news + (new,)  # noqa: RUF005
                    mine += new.to(tl.int32)
                at = tl.cumsum(mine, 0) - mine
                total = tl.sum(mine, 0).to(tl.int64)
                # The parents are retired with their last children, never before.
                retired = tl.where(k + CHUNK >= most, num_ready, 0)
                at += (tl.atomic_add(work, (total << 32) + total - retired, sem="relaxed") >> 32).to(tl.int32)
                for c in tl.static_range(CHUNK):
                    publish(queue, at, queue_slots, stamp, hop + 1, sources[c], news[c])
                    at += news[c].to(tl.int32)
                k += CHUNK

            todo = todo & (ready == 0)
            if tl.sum(todo.to(tl.int32), 0) == 0:
                first += R
                if first >= last:
                    if ONCE:
                        running = 0
                    else:
                        first = tl.atomic_add(head, fetch_size, sem="relaxed").to(tl.int32)
                        last = first + fetch_size
                todo = first + lane < last


@triton.jit
def find_tickets(seeds, control, state, queue, ticket_of, pid, programs, T: tl.constexpr):
    """Note the slot that holds the sample of each expanded node at its final hop."""
    num_seeds = tl.load(control + NUM_SEEDS).to(tl.int32)
    tasks = tl.load(control + WORK) >> 32
    t = pid.to(tl.int64) * T
    while t < tasks:
        i = (t + tl.arange(0, T)).to(tl.int32)
        on = i < tasks
        is_seed = on & (i < num_seeds)
        task = tl.load(queue + i, mask=on & (i >= num_seeds), other=0)
        seed = tl.load(seeds + i, mask=is_seed, other=0).to(tl.int64)
        v = tl.where(is_seed, seed, task & 0xFFFFFFFF).to(tl.int32)
        now = tl.load(state + v, mask=on, other=0)
        final = ((now >> 32) & 63) == 2 * ((task >> 32) & 63) + 1
        # A seed given twice has two slots with the same sample; either will do.
        tl.store(ticket_of + v, i, mask=is_seed | (on & final))
        t += programs * T


@triton.jit(do_not_specialize=["seeds", "queue_slots", "fetch_size", "begin", "end"])
def queue_kernel(
    indptr,  # *int64 [num_nodes + 1], on the device or in pinned host memory
    indices,  # *int32 or *int64 [num_edges], on the device or in pinned host memory
    offset,  # *int64 [num_nodes], where in hot the list of a node begins, or -1; read if CACHED
    hot,  # *(that of indices) [hot edges], copies of hot adjacency lists; read if CACHED
    seeds,  # *int32 or *int64 [num_seeds]
    control,  # *int64 [CONTROL_SIZE], see phases.py
    state,  # *int64 [num_nodes], a word each
    nodes,  # *int32 [num_sampled], node of each local id
    rowptr,  # *int32 [num_sampled + 1], first edge position of each local id
    src,  # *int32 [capacity], source of each edge position
    eid,  # *int32 or *int64 [capacity], position in CSC order of each edge position
    col,  # *int32 [capacity], local id of the target of each edge position
    mark,  # *int32 [capacity], 0, or 1 + number of edges of the node that the edge position found
    queue,  # *int64 [queue_slots], tasks
    stage,  # *int32 [queue_slots, 2, K], offsets and sources that the task of a slot sampled
    ticket_of,  # *int32 [num_nodes], slot of the final task of a node
    queue_slots,
    fetch_size,  # slots per claim
    sizes,  # *int64 [SIZES_SIZE], see phases.py
    counts,  # *int64 [programs, 2], new nodes and new edges of each program
    begin,  # first phase to run: DISCOVER, FIND_TICKETS, or FIRST_LEVEL + 3 * level + what
    end,  # phase to stop before
    FUSED: tl.constexpr,  # several phases in one launch, with a grid barrier between
    CACHED: tl.constexpr,
    K: tl.constexpr,  # largest fanout
    CHUNK: tl.constexpr,  # in-edges of a task that are gathered at a time
    R: tl.constexpr,  # tasks per tile: one per thread
    T: tl.constexpr,  # edges per tile
    P: tl.constexpr,  # a power of two, at least the number of programs
):
    """Discover by the queue, then order hop by hop: phases ``[begin, end)`` of ``[0, 2 + 3 * (num_hops + 1))``."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    phase = begin
    while phase < end:
        if phase == DISCOVER:
            discover(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
                     False, CACHED, K, CHUNK, R)  # fmt: skip
        elif phase == FIND_TICKETS:
            find_tickets(seeds, control, state, queue, ticket_of, pid, programs, T)
        else:
            level = (phase - FIRST_LEVEL) // 3
            for what in tl.static_range(3):
                if (phase - FIRST_LEVEL) % 3 == what:
                    level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, src, rowptr, src, eid, col,
                                mark, state, 1, stage, ticket_of, sizes, counts, level, pid, programs, what,
                                False, CACHED, True, K, R, T, P)  # fmt: skip
        phase += 1
        if FUSED:  # noqa: SIM102 (the outer test is for the compiler, the inner for the run)
            if phase < end:
                grid_barrier(control + BARRIER, (phase - begin).to(tl.int64) * programs)


@triton.jit(do_not_specialize=["seeds", "queue_slots", "fetch_size"])
def discover_kernel(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
                    CACHED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Discover without the queue's balancing (the paper's figure 10): one claim per program, a program for each claim.

    Arguments as for :func:`queue_kernel`. Claims are numbered as programs start, so that a program only ever waits for
    programs that run already, in whatever order the hardware starts them.
    """
    discover(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
             True, CACHED, K, CHUNK, R)  # fmt: skip
