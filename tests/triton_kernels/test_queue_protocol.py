"""Model of the queue protocol: programs pause before every access to shared memory, under any schedule.

It follows ``triton_kernels/queue.py`` access by access; hypothesis searches for an interleaving that breaks it.
"""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.campaigns import drawn

UNSEEN = 10**6


class ProtocolError(Exception):
    """A program reached a state that the protocol rules out."""


class Shared:
    """State that programs share: counters, slots, and a code per node (0: seed, 2 * hop + 1: found at that hop)."""

    def __init__(self, neighbors, seeds, fanouts):
        self.neighbors, self.seeds, self.fanouts = neighbors, seeds, fanouts
        rows, slots = len(seeds), len(seeds)
        for fanout in fanouts[:-1]:
            rows = min(rows * fanout, len(neighbors))
            slots += rows
        self.queue = [None] * slots
        self.head, self.tail, self.outstanding = 0, len(seeds), len(seeds)
        self.history = [[UNSEEN] for _ in neighbors]
        self.done = [0] * slots
        self.stage = [None] * slots

    def lower(self, v, code):
        old = self.history[v][-1]
        if code < old:
            self.history[v].append(code)
        return old


def run_program(shared, fetch_size, chunk, bug, rng):
    """Run ``discover``; other programs may run at each ``yield``."""
    num_seeds, num_hops = len(shared.seeds), len(shared.fanouts)
    yield
    todo, shared.head = list(range(shared.head, shared.head + fetch_size)), shared.head + fetch_size
    while True:
        if bug == "the paper's end":
            yield
            if todo[0] >= shared.tail:
                return
            todo = [slot for slot in todo if slot < shared.tail]
        ready = []
        for slot in todo:
            if slot < num_seeds:
                ready.append((slot, shared.seeds[slot], 0))
                continue
            yield
            if bug == "unpublished slots" and slot < shared.tail and shared.queue[slot] is None:
                raise ProtocolError("read a slot before its task")
            if slot < len(shared.queue) and shared.queue[slot] is not None:
                ready.append((slot, *shared.queue[slot]))
        if not ready:
            yield
            if shared.outstanding == 0:
                return
            continue
        if bug == "retired first":
            yield
            shared.outstanding -= len(ready)
        taken = {}
        for slot, v, hop in ready:
            shared.done[slot] += 1
            if slot < num_seeds:
                yield
                shared.lower(v, 0)
            yield
            now = rng.choice(shared.history[v][-2:])  # a read may be stale
            live = slot < num_seeds or now >= 2 * hop + 1
            taken[slot] = shared.neighbors[v][: shared.fanouts[hop]] if live else []
            if live:
                shared.stage[slot] = taken[slot]
        most = max(1, *(len(picks) for picks in taken.values()))
        for k in range(0, most, chunk):
            new = []
            for slot, _, hop in ready:
                for u in taken[slot][k : k + chunk]:
                    yield
                    if shared.lower(u, 2 * hop + 3) > 2 * hop + 3 and hop + 1 < num_hops:
                        new.append((u, hop + 1))
            yield
            base = shared.tail
            shared.tail += len(new)
            retired = len(ready) if k + chunk >= most and bug != "retired first" else 0
            shared.outstanding += len(new) - retired
            if shared.outstanding < 0 or shared.tail > len(shared.queue):
                raise ProtocolError("counters out of range")
            for at, task in enumerate(new, start=base):
                yield
                shared.queue[at] = task
        done = {slot for slot, _, _ in ready}
        todo = [slot for slot in todo if slot not in done]
        if not todo:
            yield
            todo, shared.head = list(range(shared.head, shared.head + fetch_size)), shared.head + fetch_size


def run_hop_by_hop(neighbors, seeds, fanouts):
    """Return the code of every node as computed with barriers between hops."""
    code = [UNSEEN] * len(neighbors)
    for v in seeds:
        code[v] = 0
    frontier = list(dict.fromkeys(seeds))
    for hop, fanout in enumerate(fanouts):
        found = dict.fromkeys(u for v in frontier for u in neighbors[v][:fanout] if code[u] == UNSEEN)
        for u in found:
            code[u] = 2 * hop + 3
        frontier = list(found)
    return code


def run(case, schedule, rng, bug=None):
    """Run all programs under a schedule, then round-robin; raise if a task is lost, repeated or never ends."""
    neighbors, seeds, fanouts, programs, fetch_size, chunk = case
    shared = Shared(neighbors, seeds, fanouts)
    running = [run_program(shared, fetch_size, chunk, bug, rng) for _ in range(programs)]
    turns = itertools.chain(schedule, itertools.cycle(range(programs)))
    limit = 2000 + 400 * len(shared.queue) * (1 + programs * fetch_size)
    for turn in itertools.islice(turns, limit):
        if not running:
            break
        current = running[turn % len(running)]
        try:
            next(current)
        except StopIteration:
            running.remove(current)
    if running:
        raise ProtocolError("it does not end")
    if shared.outstanding or any(done != 1 for done in shared.done[: shared.tail]):
        raise ProtocolError("a task was lost or done twice")
    if any(shared.done[shared.tail :]):
        raise ProtocolError("a task came from nowhere")
    code = [history[-1] for history in shared.history]
    if code != run_hop_by_hop(neighbors, seeds, fanouts):
        raise ProtocolError("a node has the wrong hop")
    tickets = {}
    for slot in range(shared.tail):
        v, hop = (shared.seeds[slot], 0) if slot < len(seeds) else shared.queue[slot]
        if slot < len(seeds) or code[v] == 2 * hop + 1:
            if v in tickets and slot >= len(seeds):
                raise ProtocolError("two tasks of a node are final")
            tickets[v] = slot
            if shared.stage[slot] != neighbors[v][: fanouts[hop]]:
                raise ProtocolError("the sample of a final task is not that of its hop")
    expanded = {v for v in range(len(neighbors)) if code[v] < 2 * len(fanouts)}
    if set(tickets) != expanded:
        raise ProtocolError("a node that is expanded has no task")


@st.composite
def cases(draw):
    """Draw (neighbors of each node, seeds, fanouts, programs, fetch size, chunk)."""
    num_nodes = draw(st.integers(1, 6))
    nodes = st.integers(0, num_nodes - 1)
    neighbors = draw(st.lists(st.lists(nodes, max_size=4), min_size=num_nodes, max_size=num_nodes))
    seeds = draw(st.lists(nodes, min_size=1, max_size=4))
    fanouts = sorted(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)), reverse=True)
    return neighbors, seeds, fanouts, draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 4))


def schedules(prefix, programs, seed):
    """Yield the drawn schedule and extreme ones: random, and one program far ahead of or behind the others."""
    rng = random.Random(seed)
    yield prefix
    yield [rng.randrange(programs) for _ in range(300)]
    yield [rng.randrange(programs)] * 200 + prefix
    behind = rng.randrange(programs)
    yield [turn for turn in (rng.randrange(programs) for _ in range(400)) if turn != behind]


@pytest.mark.medium
@drawn(2500)
@given(cases(), st.lists(st.integers(0, 3), max_size=120), st.integers(0, 2**31))
def test_no_task_is_lost_under_any_schedule(case, prefix, seed):
    for schedule in schedules(prefix, case[3], seed):
        run(case, schedule, random.Random(seed))


@pytest.mark.medium
@pytest.mark.parametrize("bug", ["the paper's end", "unpublished slots", "retired first"])
def test_the_model_finds_planted_bugs(bug):
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        neighbors = [[rng.randrange(6) for _ in range(3)] for _ in range(6)]
        case = (neighbors, [rng.randrange(6)], [2, 2, 1], 3, rng.choice([1, 2, 4]), 2)
        try:
            run(case, [rng.randrange(3) for _ in range(200)], rng, bug)
        except ProtocolError:
            found += 1
    assert found > 0


def test_growing_fanouts_would_be_wrong():
    """For this reason, the sampler runs them hop by hop."""
    wrong = 0
    for seed in range(300):
        rng = random.Random(seed)
        neighbors = [[rng.randrange(12) for _ in range(4)] for _ in range(12)]
        try:
            run((neighbors, [0, 1], [2, 2, 4], 3, 1, 1), [rng.randrange(3) for _ in range(300)], rng)
        except ProtocolError as broken:
            wrong += "hop" in str(broken)
    assert wrong > 0
