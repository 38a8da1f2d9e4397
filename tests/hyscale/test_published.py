"""Algorithm 1 as published: each case moves what the paper says, and the totals never change."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.hyscale.costs import IterationTimes, TaskMapping
from lightning_gnn.hyscale.drm import PublishedResourceManager, find_remedy

BEGIN = TaskMapping((320, 320, 320), 1, (2, 2, 2), 0.5)
WORK, NONE = 30, (0, 0, 0)
"""One 32nd of 960 seeds."""


def make_times(**stages):
    """Return stage times, by default 1 ms; ``accelerator`` is the slower of two, the other takes 10 % less."""
    seconds = {"sample_cpu": 1.0, "sample_accelerator": 1.0, "load": 1.0, "train_cpu": 1.0, "accelerator": 1.0} | stages
    slower = seconds["accelerator"]
    return IterationTimes(
        seconds["sample_cpu"],
        seconds["load"],
        (seconds["train_cpu"],),
        (0.9 * slower, slower),
        transfer=slower / 2,
        sample_accelerator=seconds["sample_accelerator"],
    )


@pytest.mark.parametrize(
    ("stages", "seeds", "threads", "sampling"),
    [
        # Lines 11 and 12, 13 and 14: whichever task is the fastest.
        ({"sample_accelerator": 9.0}, NONE, NONE, -1 / 32),
        ({"accelerator": 9.0}, (WORK, 0, -WORK), NONE, 0.0),
        # Lines 15 and 16: a thread of the fastest CPU task.
        ({"load": 9.0, "train_cpu": 0.5}, NONE, (0, 1, -1), 0.0),
        ({"load": 9.0, "sample_cpu": 0.5}, NONE, (-1, 1, 0), 0.0),
        # Lines 18 and 19, 20 and 21, 23.
        ({"sample_cpu": 9.0, "sample_accelerator": 0.5}, NONE, NONE, 1 / 32),
        ({"sample_cpu": 9.0, "accelerator": 0.4, "sample_accelerator": 0.5}, NONE, NONE, 1 / 32),
        ({"sample_cpu": 9.0, "accelerator": 0.4, "load": 0.5}, NONE, (1, -1, 0), 0.0),
        ({"sample_cpu": 9.0, "train_cpu": 0.5}, NONE, (1, 0, -1), 0.0),
        # Lines 26 and 27, 28 and 29, 31.
        ({"train_cpu": 9.0, "accelerator": 0.5}, (-WORK, WORK, 0), NONE, 0.0),
        ({"train_cpu": 9.0, "sample_accelerator": 0.4, "accelerator": 0.5}, (-WORK, WORK, 0), NONE, 0.0),
        ({"train_cpu": 9.0, "sample_accelerator": 0.4, "load": 0.5}, NONE, (0, -1, 1), 0.0),
        ({"train_cpu": 9.0, "sample_cpu": 0.5}, NONE, (-1, 0, 1), 0.0),
    ],
)
def test_each_case_moves_what_it_says(stages, seeds, threads, sampling):
    manager = PublishedResourceManager(BEGIN)
    decision = manager.observe(make_times(**stages))
    action = "balance_work" if threads == NONE else "balance_thread"
    assert (decision.action, decision.changed, decision.observation) == (action, True, 1)
    assert decision.mapping == manager.mapping == manager.log[-1].mapping
    assert tuple(new - old for new, old in zip(manager.mapping.seeds, BEGIN.seeds, strict=True)) == seeds
    assert tuple(new - old for new, old in zip(manager.mapping.threads, BEGIN.threads, strict=True)) == threads
    assert manager.mapping.accelerator_sampling - BEGIN.accelerator_sampling == pytest.approx(sampling)


def test_it_works_its_way_to_the_balance_of_two():
    """Without other stages, only lines 14 and 27 apply: the split stays around 307 of 1024 seeds."""
    manager = PublishedResourceManager(TaskMapping((900, 124), 1))
    found = []
    for _ in range(80):
        cpu, there = manager.mapping.seeds
        manager.observe(IterationTimes(None, None, (cpu / 300,), (there / 700,)))
        found.append(manager.mapping.seeds[0])
    assert all(abs(seeds - 307) <= 32 for seeds in found[30:])
    assert len(manager.log) == 81  # it never holds


def test_work_comes_back_from_the_cpu_only_if_an_accelerator_is_the_fastest_of_all():
    """Work that noise moved to the CPU stays there while Feature Loading is faster: lines 26 to 31, then 16."""
    manager = PublishedResourceManager(TaskMapping((640, 384), 1, (2, 2, 2)))
    for _ in range(80):
        cpu, there = manager.mapping.seeds
        threads = manager.mapping.threads
        manager.observe(IterationTimes(0.8, 0.2 / threads[1], (2 * cpu / 300 / threads[2],), (there / 700,)))
    assert manager.mapping.cpu_seeds == 640


counts = st.integers(0, 600)
seconds = st.none() | st.floats(0, 10)


@st.composite
def runs(draw):
    cpus, accelerators = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    seeds = draw(st.lists(counts, min_size=cpus + accelerators or 1, max_size=cpus + accelerators or 1))
    seeds[0] += 1
    cpus = min(cpus, len(seeds))
    threads = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), cpus + draw(st.integers(0, 5)))
    begin = TaskMapping(tuple(seeds), cpus, threads, draw(st.sampled_from([0.0, 0.01, 0.3, 0.99])))
    measured = [
        IterationTimes(
            draw(seconds),
            draw(seconds),
            tuple(draw(seconds) for _ in range(cpus)),
            tuple(draw(seconds) for _ in range(len(seeds) - cpus)),
            draw(seconds),
            draw(seconds),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]
    return begin, measured


@given(runs())
def test_no_seed_and_no_thread_is_ever_lost_and_equal_times_decide_the_same(drawn):
    begin, measured = drawn
    manager, other = PublishedResourceManager(begin), PublishedResourceManager(begin)
    for number, seen in enumerate(measured, start=1):
        before = manager.mapping
        decision = manager.observe(seen)
        now = manager.mapping
        assert (now.total, sum(now.threads), now.cpu_trainers) == (begin.total, sum(begin.threads), begin.cpu_trainers)
        assert min(now.seeds) >= 0
        assert now.threads[2] >= min(begin.cpu_trainers, before.threads[2])
        assert (now.accelerator_sampling > 0) == (begin.accelerator_sampling > 0)
        assert all(new >= 1 for old, new in zip(before.seeds, now.seeds, strict=True) if old)
        assert (decision.changed, decision.mapping) == (now != before, now)
        if decision.changed:
            assert decision.action == find_remedy(seen.stages()).kind
        assert other.observe(seen) == decision
        if number == len(measured) // 2:
            state = json.loads(json.dumps(other.state_dict()))
            other = PublishedResourceManager(begin)
            other.load_state_dict(state)
    assert other.log == manager.log
    assert other.state_dict() == manager.state_dict()
