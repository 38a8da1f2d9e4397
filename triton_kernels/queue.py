"""Persistent sampler: a queue of (node, hop) tasks in device memory (PGSampler, algorithms 1 and 2).

Resident programs claim tasks, sample them, deduplicate the sampled nodes and push new ones as tasks, until the queue is
drained. The paper's termination test can lose tasks; this one is exact for every fetch size:

- *One word for the counters*, ``(slots reserved << 32) | outstanding``: a single atomic addition reserves slots for the
  new tasks, counts them, and retires the finished ones. Outstanding is zero only after every task has been completed.
- *Published slots*: a slot holds ``(stamp << 44) | (hop << 32) | node``. The stamp of the batch publishes the task in
  the same word, so no fence is needed. A program polls its claimed slots until nothing is outstanding.
- *Lowest hop*: the atomic minimum on a node's word lowers its hop, and a node is pushed again each time its hop drops.
  With non-increasing fanouts, the picks of the later hop are among those of the earlier one, so every schedule reaches
  the fixpoint of hop-by-hop sampling.

Racing programs write results by slot. The phases of ``hops.py`` order them afterwards, from the slot of each node's
final hop.
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

# Phases that run before those of level 0.
DISCOVER = tl.constexpr(0)
FIND_TICKETS = tl.constexpr(1)
FIRST_LEVEL = tl.constexpr(2)


@triton.jit
def publish(queue: Array, at: Lanes, capacity: Scalar, stamp: Scalar, hop: Lanes, node: Lanes, new: Lanes) -> None:
    """Fill reserved slots, so that the programs that claimed them see the tasks."""
    # An exchange, not a store: an atomic goes to the L2 cache, which waiting programs poll, and is never torn.
    task = word(stamp, hop, node.to(tl.int64))
    tl.atomic_xchg(queue + at, task, mask=new & (at < capacity), sem="relaxed")


@triton.jit
def discover(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, queue: Array,
    stage: Array, queue_slots: Scalar, fetch_size: Scalar,
    ONCE: tl.constexpr, CACHED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    SHARDS: tl.constexpr = 1, SHIFT: tl.constexpr = 0,
) -> None:  # fmt: skip
    """Process tasks, one slot per thread of R, until none is outstanding; if ONCE, only those of a single claim."""
    stamp = tl.load(control + STAMP)
    num_seeds = tl.load(control + NUM_SEEDS).to(tl.int32)
    num_hops = tl.load(control + NUM_HOPS).to(tl.int32)
    key = tl.load(control + KEY)
    replace = tl.load(control + REPLACE).to(tl.int32)
    head = control + HEAD
    work = control + WORK
    lane = tl.arange(0, R)
    # A claim is a range of slots, which may still be empty. Slots below num_seeds stand for the seeds and are never
    # written. All atomics here are relaxed, because each word contains everything that its reader needs.
    first = tl.atomic_add(head, fetch_size, sem="relaxed").to(tl.int32)
    last = first + fetch_size
    todo = lane < fetch_size
    running = 1
    while running > 0:
        slot = first + lane
        is_seed = todo & (slot < num_seeds)
        # Find the claimed slots that contain a task. Volatile, as other programs write them concurrently. A slot that
        # was not written in this batch has an older stamp and is not ready.
        waits = todo & (slot >= num_seeds) & (slot < queue_slots)
        task = tl.load(queue + slot, mask=waits, other=0, volatile=True)
        ready = is_seed | (waits & ((task >> STAMP_SHIFT) == stamp))
        num_ready = tl.sum(ready.to(tl.int32), 0)
        if num_ready == 0:
            # Nothing to do now. The program ends only when no task is outstanding anywhere, as any could push more.
            # An atomic, not a load: the compiler removes loops that only load.
            if (tl.atomic_add(work, 0, sem="relaxed") & LOW) == 0:
                running = 0
        else:
            seed = tl.load(seeds + slot, mask=is_seed, other=0).to(tl.int64)
            v = tl.where(is_seed, seed, task & LOW).to(tl.int32)
            v = tl.where(ready, v, 0)
            hop = tl.where(is_seed | (ready == 0), 0, (task >> HALF) & CODE).to(tl.int32)
            tl.atomic_min(state + v, word(stamp, hop * 0, slot), mask=is_seed, sem="relaxed")
            # A stale value is too high. Then the node is expanded once more than needed, which is harmless: its lower
            # hop reaches the same nodes.
            now = tl.load(state + v, mask=ready, other=0, volatile=True)
            live = ready & (is_seed | (now >= word(stamp, 2 * hop + 1, hop * 0)))  # else a lower hop expands the node
            fanout = tl.load(control + FANOUT + hop, mask=live, other=0).to(tl.int32)
            begin = tl.load(indptr + v, mask=live, other=0)
            degree = (tl.load(indptr + v + 1, mask=live, other=0) - begin).to(tl.int32)
            taken = tl.where(live, width(degree, fanout, replace), 0)
            copied = begin
            if CACHED:
                copied = tl.load(offset + v, mask=live, other=-1)
            deeper = hop + 1 < num_hops  # nodes of the last hop are not expanded
            # Found at level hop + 1, without a position: the phases of that level bid real positions, which are lower.
            found = word(stamp, 2 * hop + 3, hop.to(tl.int64) * 0 + LOW)

            # The picks go through memory, to this task's rows of `stage`: the loop below indexes them at run time,
            # which registers do not allow, and the ordering phases read them again.
            picks = pick_row(node_key(key, v), degree, fanout, replace, K)
            row = stage + slot.to(tl.int64) * (2 * K)
            for k in tl.static_range(K):
                tl.store(row + k, picks[k], mask=(fanout >= 0) & (k < taken))
            tl.debug_barrier()  # Triton assigns threads to accesses: one may read data that another thread wrote
            k = 0
            most = tl.maximum(tl.max(taken, 0), 1)
            while k < most:  # CHUNK gathers in flight, then CHUNK bids, then one reservation for all children
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
                    # The thread that lowered the word pushes the node: one task each time its hop drops.
                    new = on & deeper & (old > found)
                    news = news + (new,)  # type: ignore[assignment]  # noqa: RUF005
                    mine += new.to(tl.int32)
                # One atomic per program: a scan gives each thread its position in the reserved slots.
                at = tl.cumsum(mine, 0) - mine
                total = tl.sum(mine, 0).to(tl.int64)
                # Parents are retired together with their last children, never earlier.
                retired = tl.where(k + CHUNK >= most, num_ready, 0)
                at += (tl.atomic_add(work, (total << HALF) + total - retired, sem="relaxed") >> HALF).to(tl.int32)
                for c in tl.static_range(CHUNK):
                    publish(queue, at, queue_slots, stamp, hop + 1, sources[c], news[c])
                    at += news[c].to(tl.int32)
                k += CHUNK

            # Empty slots stay claimed by this program, which makes a new claim once this one is finished.
            todo = todo & (ready == 0)
            if tl.sum(todo.to(tl.int32), 0) == 0:
                first += R  # a claim may span several tiles
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
    """Record the slot that holds the sample of each expanded node at its final hop."""
    num_seeds = tl.load(control + NUM_SEEDS).to(tl.int32)
    tasks = tl.load(control + WORK) >> HALF  # reserved slots, including those of the seeds
    t = pid.to(tl.int64) * T
    while t < tasks:
        i = (t + tl.arange(0, T)).to(tl.int32)
        on = i < tasks
        is_seed = on & (i < num_seeds)
        task = tl.load(queue + i, mask=on & (i >= num_seeds), other=0)
        seed = tl.load(seeds + i, mask=is_seed, other=0).to(tl.int64)
        v = tl.where(is_seed, seed, task & LOW).to(tl.int32)
        now = tl.load(state + v, mask=on, other=0)
        # Select the task of the final hop; those of higher hops sampled fewer edges, or none.
        final = ((now >> HALF) & CODE) == 2 * ((task >> HALF) & CODE) + 1
        # A duplicated seed has two slots with the same sample; either is correct.
        tl.store(ticket_of + v, i, mask=is_seed | (on & final))
        t += programs * T


@triton.jit(do_not_specialize=["seeds", "queue_slots", "fetch_size", "begin", "end"])
def queue_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, nodes: Array,
    rowptr: Array, src: Array, eid: Array, col: Array,  # all of these as in hops.level_phase
    queue: Array,  # int64 [queue_slots], tasks; an empty slot is 0 or has the stamp of an older batch
    stage: Array,  # int32 [queue_slots, 2, K], offsets and sources that the task of each slot sampled
    ticket_of: Array,  # int32 [num_nodes], slot of the final task of each node
    queue_slots: Scalar,  # int32, maximum number of tasks
    fetch_size: Scalar,  # int32, slots per claim
    sizes: Array, totals: Array,
    begin: Scalar,  # int32, first phase to run: DISCOVER, FIND_TICKETS, or FIRST_LEVEL + a phase of hop_kernel
    end: Scalar,  # int32, first phase not to run
    CACHED: tl.constexpr,
    K: tl.constexpr,  # largest fanout
    CHUNK: tl.constexpr,  # in-edges of a task that are gathered at a time
    R: tl.constexpr,  # tasks per tile: one per thread
    T: tl.constexpr, SHARDS: tl.constexpr = 1, SHIFT: tl.constexpr = 0,
) -> None:  # fmt: skip
    """Sample with the queue, then order hop by hop: phases ``[begin, end)`` of ``[0, 2 + 2 * (num_hops + 1))``."""
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
