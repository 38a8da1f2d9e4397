"""The persistent sampler: a queue of (node, hop) tasks in device memory (PGSampler, algorithms 1 and 2).

Resident programs claim tasks, sample them, deduplicate what they found and push it as new tasks, until none is left.
Where the paper's termination test can lose tasks, this one is exact for every fetch size:

- *One word for the counters*, ``(slots reserved << 32) | outstanding``: a single atomic addition reserves slots for the
  new tasks, counts them, and retires the finished ones. Outstanding is zero only when every task has been done.
- *Published slots*: a slot holds ``(stamp << 44) | (hop << 32) | node``; the stamp of the batch publishes the task in
  one word with it, so no fence is needed. A claimed slot is waited for, until nothing is outstanding.
- *Lowest hop*: the atomic minimum on a node's word lowers its hop, and a node whose hop fell is pushed again. With
  fanouts that never grow, the picks of the later hop are among those of the earlier one, so the fixpoint is that of
  hop-by-hop sampling, whatever the schedule.

What races write is keyed by slot. The phases of ``hops.py`` order it afterwards, from the slot of each node's final
hop.
"""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import Array, Lanes, Scalar, node_key, pick_row, width
from lightning_gnn.triton_kernels.hops import (
    BARRIER,
    CODE,
    FANOUT,
    HALF,
    HEAD,
    KEY,
    LOW,
    NUM_HOPS,
    NUM_SEEDS,
    PHASES,
    REPLACE,
    STAMP,
    STAMP_SHIFT,
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


@triton.jit
def publish(queue: Array, at: Lanes, capacity: Scalar, stamp: Scalar, hop: Lanes, node: Lanes, new: Lanes) -> None:
    """Fill reserved slots, so that whoever claimed them sees the tasks."""
    # An exchange, not a store: an atomic goes to the L2 cache, where a waiting program polls, and is never torn.
    task = word(stamp, hop, node.to(tl.int64))
    tl.atomic_xchg(queue + at, task, mask=new & (at < capacity), sem="relaxed")


@triton.jit
def discover(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, queue: Array,
    stage: Array, queue_slots: Scalar, fetch_size: Scalar,
    ONCE: tl.constexpr, CACHED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    SHARDS: tl.constexpr = 1, SHIFT: tl.constexpr = 0,
) -> None:  # fmt: skip
    """Do tasks, one slot per thread of R, until none is outstanding, or if ONCE those of a single claim."""
    stamp = tl.load(control + STAMP)
    num_seeds = tl.load(control + NUM_SEEDS).to(tl.int32)
    num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
    key = tl.load(control + KEY)
    replace = tl.load(control + REPLACE).to(tl.int32)
    head = control + HEAD
    work = control + WORK
    lane = tl.arange(0, R)
    # A claim is a range of slots, whether or not there are tasks in them yet. Slots below num_seeds hold the seeds
    # without being written. Relaxed, as all atomics here: each word carries all that its reader needs.
    first = tl.atomic_add(head, fetch_size, sem="relaxed").to(tl.int32)
    last = first + fetch_size
    todo = lane < fetch_size
    running = 1
    while running > 0:
        slot = first + lane
        is_seed = todo & (slot < num_seeds)
        # Which of the claimed slots have a task by now? Volatile, as others write them meanwhile; the stamp of an older
        # batch is another one, so a slot that was not written in this batch is not ready.
        waits = todo & (slot >= num_seeds) & (slot < queue_slots)
        task = tl.load(queue + slot, mask=waits, other=0, volatile=True)
        ready = is_seed | (waits & ((task >> STAMP_SHIFT) == stamp))
        num_ready = tl.sum(ready.to(tl.int32), 0)
        if num_ready == 0:
            # Nothing to do at the moment; over only when no task is outstanding anywhere, for any could push more.
            # An atomic, not a load: the compiler deletes loops of loads.
            if (tl.atomic_add(work, 0, sem="relaxed") & LOW) == 0:
                running = 0
        else:
            seed = tl.load(seeds + slot, mask=is_seed, other=0).to(tl.int64)
            v = tl.where(is_seed, seed, task & LOW).to(tl.int32)
            v = tl.where(ready, v, 0)
            hop = tl.where(is_seed | (ready == 0), 0, (task >> HALF) & CODE).to(tl.int32)
            tl.atomic_min(state + v, word(stamp, hop * 0, slot), mask=is_seed, sem="relaxed")
            # A late value is a higher one: then the node is expanded once too often, and all that this finds is found
            # from its lower hop too.
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
            # Found at level hop + 1, at no position yet: the phases of that level bid with real ones, which are lower.
            found = word(stamp, 2 * hop + 3, hop.to(tl.int64) * 0 + LOW)

            # The picks go through memory, into this task's own rows of `stage`: the loop below takes them by an index
            # that is known only when it runs, which registers do not allow, and the ordering reads them again.
            picks = pick_row(node_key(key, v), degree, fanout, replace, K)
            row = stage + slot.to(tl.int64) * (2 * K)
            for k in tl.static_range(K):
                tl.store(row + k, picks[k], mask=(fanout >= 0) & (k < taken))
            tl.debug_barrier()  # Triton chooses the threads of each access: one may read what another wrote
            k = 0
            most = tl.maximum(tl.max(taken, 0), 1)
            while k < most:  # CHUNK gathers in flight, then as many bids, then one reservation for all children
                sources = ()
                for c in tl.static_range(CHUNK):
                    on = k + c < taken
                    picked = on & (fanout >= 0)
                    p = tl.where(fanout < 0, k + c, tl.load(row + k + c, mask=picked, other=0))
                    u = neighbor(indices, hot, copied, begin, begin + p, on, CACHED, SHARDS, SHIFT)
                    tl.store(row + K + k + c, u, mask=picked)
                    sources = sources + (u,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
                news = ()
                mine = tl.zeros([R], tl.int32)
                for c in tl.static_range(CHUNK):
                    on = k + c < taken
                    old = tl.atomic_min(state + sources[c], found, mask=on, sem="relaxed")
                    # Whoever lowered the word pushes the node: one task for each time that its hop falls.
                    new = on & deeper & (old > found)
                    news = news + (new,)  # type: ignore[assignment]  # noqa: RUF005
                    mine += new.to(tl.int32)
                # One atomic for the program: a scan gives each thread its place among the slots that it reserves.
                at = tl.cumsum(mine, 0) - mine
                total = tl.sum(mine, 0).to(tl.int64)
                # The parents are retired with their last children, never before.
                retired = tl.where(k + CHUNK >= most, num_ready, 0)
                at += (tl.atomic_add(work, (total << HALF) + total - retired, sem="relaxed") >> HALF).to(tl.int32)
                for c in tl.static_range(CHUNK):
                    publish(queue, at, queue_slots, stamp, hop + 1, sources[c], news[c])
                    at += news[c].to(tl.int32)
                k += CHUNK

            # The slots without a task stay claimed by this program; a new claim when all of this one are done.
            todo = todo & (ready == 0)
            if tl.sum(todo.to(tl.int32), 0) == 0:
                first += R  # a claim may be longer than a tile
                if first >= last:
                    if ONCE:
                        running = 0
                    else:
                        first = tl.atomic_add(head, fetch_size, sem="relaxed").to(tl.int32)
                        last = first + fetch_size
                todo = first + lane < last


@triton.jit
def find_tickets(
    seeds: Array, control: Array, state: Array, queue: Array, ticket_of: Array, pid: Scalar, programs: Scalar,
    T: tl.constexpr,
) -> None:  # fmt: skip
    """Note the slot that holds the sample of each expanded node at its final hop."""
    num_seeds = tl.load(control + NUM_SEEDS).to(tl.int32)
    tasks = tl.load(control + WORK) >> HALF  # slots reserved, the seeds' among them
    t = pid.to(tl.int64) * T
    while t < tasks:
        i = (t + tl.arange(0, T)).to(tl.int32)
        on = i < tasks
        is_seed = on & (i < num_seeds)
        task = tl.load(queue + i, mask=on & (i >= num_seeds), other=0)
        seed = tl.load(seeds + i, mask=is_seed, other=0).to(tl.int64)
        v = tl.where(is_seed, seed, task & LOW).to(tl.int32)
        now = tl.load(state + v, mask=on, other=0)
        # The task of the hop that remained; those of higher hops sampled fewer edges, or none.
        final = ((now >> HALF) & CODE) == 2 * ((task >> HALF) & CODE) + 1
        # A seed given twice has two slots with the same sample; either will do.
        tl.store(ticket_of + v, i, mask=is_seed | (on & final))
        t += programs * T


@triton.jit(do_not_specialize=["seeds", "queue_slots", "fetch_size", "begin", "end"])
def queue_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, nodes: Array,
    rowptr: Array, src: Array, eid: Array, col: Array,  # all of these as in hops.level_phase
    queue: Array,  # int64 [queue_slots], tasks; 0 or of an older batch where there is none
    stage: Array,  # int32 [queue_slots, 2, K], offsets and sources that the task of a slot sampled
    ticket_of: Array,  # int32 [num_nodes], slot of the final task of a node
    queue_slots: Scalar,  # int32, as many as there can be tasks
    fetch_size: Scalar,  # int32, slots per claim
    sizes: Array, totals: Array,
    begin: Scalar,  # int32, first phase to run: DISCOVER, FIND_TICKETS, or FIRST_LEVEL + those of hop_kernel
    end: Scalar,  # int32, phase to stop before
    CACHED: tl.constexpr,
    K: tl.constexpr,  # largest fanout
    CHUNK: tl.constexpr,  # in-edges of a task that are gathered at a time
    R: tl.constexpr,  # tasks per tile: one per thread
    T: tl.constexpr, SHARDS: tl.constexpr = 1, SHIFT: tl.constexpr = 0,
) -> None:  # fmt: skip
    """Discover by the queue, then order hop by hop: phases ``[begin, end)`` of ``[0, 2 + 2 * (num_hops + 1))``."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    phase = begin
    while phase < end:
        if phase == DISCOVER:
            discover(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
                     False, CACHED, K, CHUNK, R, SHARDS, SHIFT)  # fmt: skip
        elif phase == FIND_TICKETS:
            find_tickets(seeds, control, state, queue, ticket_of, pid, programs, T)
        else:
            level = (phase - FIRST_LEVEL) // PHASES
            for what in tl.static_range(2):
                if (phase - FIRST_LEVEL) % PHASES == what:
                    level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, src, rowptr, src, eid, col,
                                state, 1, stage, ticket_of, sizes, totals, level, pid, programs, what,
                                False, False, CACHED, True, K, R, T, SHARDS, SHIFT)  # fmt: skip
        phase += 1
        if phase < end:
            grid_barrier(control + BARRIER, (phase - begin).to(tl.int64) * programs)
