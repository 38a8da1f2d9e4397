"""MorphGL's own planner and schedule, and how far a plan is from any schedule."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks.papers import morphgl
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.collective.plan import CollectivePlan, initial_ratio, relaxed_time
from lightning_gnn.collective.published import PublishedDispatcher, cpu_buffer_size
from lightning_gnn.collective.simulate import simulate_dual_buffer
from tests.collective.test_batch_schedule import cases, drive
from tests.collective.test_datamodule import COLLECTIVE, fit_model, make_datamodule
from tests.collective.test_dispatcher import make_stage_times

PAPER = replace(COLLECTIVE, schedule="paper")

# -- schedule


def test_three_phases_by_hand():
    """A GPU buffer of two, a CPU buffer of one, whose worker takes no time."""
    schedule, steps = DualBuffer(range(6), 2, 1), []
    while (step := schedule.next()).kind != "end":
        steps.append(f"{schedule.phase[:5]} {step.kind} {step.number}")
        while (number := schedule.claim()) is not None:
            schedule.ready(number)
    assert ", ".join(steps) == (
        "filli batch 0, block batch 2, flush transfer 1, flush train 0, flush train 2, flush train 1, "
        "block batch 4, block batch 5, flush transfer 3, flush train 4, flush train 5, flush train 3"
    )


@settings(max_examples=200)
@given(cases(), cases(), st.randoms(use_true_random=False), st.booleans())
def test_every_mini_batch_once_within_the_buffers(case, other, source, resized):
    sizes = [(max(1, each[1]), *each[2:4]) for each in (case, other)] if resized else [case[1:4]]
    schedule = DualBuffer(range(case[0]), *sizes[0])

    def between():
        if resized and source.random() < 0.1:
            schedule.resize(*source.choice(sizes))

    trained = []
    for step in drive(schedule, case[3], source, between):
        trained += [step.number] * (step.kind == "train")
        if not resized:
            assert len(schedule.gpu_buffer) <= max(case[1] + 1, 2)
            assert len(schedule.cpu_buffer) + len(schedule._in_progress) <= max(0, case[2] + case[3] - 1)
    assert sorted(trained) == list(range(case[0]))


def test_while_the_cpu_lags_the_gpu_trains_and_refills():
    schedule = DualBuffer(range(20), 2, 1)
    assert schedule.claim() == 0
    assert [schedule.next()[:2] for _ in range(6)] == [
        ("batch", 1), ("batch", 2), ("train", 1), ("batch", 3), ("train", 2), ("batch", 4)
    ]  # fmt: skip
    schedule.ready(0)
    assert [schedule.next()[:2] for _ in range(3)] == [("transfer", 0), ("train", 3), ("train", 4)]


# -- planner


def test_the_extremes_are_plans_for_one_processor():
    for times, mode in ((make_stage_times(1, 0.5, 2, 3), "cpu"), (make_stage_times(500, 0.5, 1, 1), "gpu")):
        assert PublishedDispatcher(times, num_batches=60).plan().mode == mode


def test_feedback_moves_the_buffer_until_both_wait_equally():
    balanced = morphgl.solve(("GraphSAGE", "TW", "B"))
    plan = PublishedDispatcher(balanced, num_batches=408, schedule="paper").plan()
    assert (plan.rounds, plan.cpu_buffer_size) == (1, cpu_buffer_size(10, plan.ratio))
    late = morphgl.solve(("GraphSAGE", "UK", "A"))  # the paper goes from 52 to 30, too
    plan = PublishedDispatcher(late, num_batches=759, schedule="paper").plan()
    assert plan.cpu_buffer_size == cpu_buffer_size(10, plan.ratio) - plan.rounds + 1 < 45
    assert plan.epoch_s["collective"] == pytest.approx(
        759 / 400 * simulate_dual_buffer(late, plan, 400, seed=1).makespan, rel=0.02
    )


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.sampled_from(["in_order", "paper"]), st.integers(1, 60))
def test_no_plan_is_below_equation_6(source, schedule, number):
    times = make_stage_times(*(10 ** source.uniform(-2, 1) for _ in range(4)), source.choice((1, 2, 4)))
    bound = number * relaxed_time(initial_ratio(times), times)
    for planner in (Dispatcher, PublishedDispatcher):
        plan = planner(times, 5, num_batches=number, schedule=schedule).plan()
        made = plan.create_schedule(number, times.cpu_workers)
        assert isinstance(made, DualBuffer) == (schedule == "paper")
        assert plan.epoch_s["collective"] == simulate_dual_buffer(times, plan, number).makespan
        assert plan.optimality_gap == pytest.approx(plan.epoch_s["collective"] / bound - 1)
        assert f"at most {plan.optimality_gap:.1%} above any schedule" in str(plan)
        assert CollectivePlan.from_yaml(plan.to_yaml()) == plan
    assert CollectivePlan("gpu", 1, 0, 5, epoch_s={"collective": 1.0}).optimality_gap is None


def test_the_cache_is_sized_for_the_chosen_buffer():
    options = {"num_neighbors": [3], "batch_size": 40, "gpu_route": "auto", "bulk": 1, "cache_bytes": "auto",
               "device_memory": 330_000, "topology": "pinned", "features": "pinned", "gpu_buffer_size": 10}  # fmt: skip
    limit = make_datamodule("auto", **options)
    chosen = make_datamodule(CollectivePlan("collective", 1, 2), **options)
    limit._placement, placement = limit.plan_placement(), chosen.plan_placement()
    assert placement.buffers < limit._placement.buffers
    assert placement.hit_rate > limit._placement.hit_rate
    measured = CollectivePlan("collective", 10, 2, 40, times=make_stage_times(4, 0.1, 2, 1, 2))
    plan = limit.plan_with_cache(measured)
    assert plan.gpu_buffer_size < 10
    assert plan.times.uva.mean < measured.times.uva.mean
    assert chosen.plan_with_cache(measured) is measured


# -- training


def seeds_of(model, part=slice(None)):
    return sorted(tuple(step[1]) for step in model.history[part])


@pytest.mark.medium
@pytest.mark.parametrize("plan", ["paper", PAPER, COLLECTIVE])
def test_an_epoch_has_the_same_mini_batches_in_another_order(plan):
    data = make_datamodule(plan, schedule="paper")
    found, expected = fit_model(data), fit_model(make_datamodule())
    assert data.plan.schedule == "paper"
    half = len(expected.history) // 2
    for epoch in (slice(half), slice(half, None)):
        assert seeds_of(found, epoch) == seeds_of(expected, epoch)
    if plan == "paper":
        assert data.plan.times is not None
    else:
        assert [step[1] for step in found.history] != [step[1] for step in expected.history]


@pytest.mark.medium
def test_a_resumed_epoch_trains_what_is_left(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole = fit_model(make_datamodule(PAPER, schedule="paper"), callbacks=[saver], max_epochs=1)
    checkpoint = tmp_path / "step=3.ckpt"
    resumed = fit_model(make_datamodule(PAPER, schedule="paper"), ckpt_path=checkpoint, max_epochs=1)
    assert sorted(seeds_of(whole, slice(3)) + seeds_of(resumed)) == seeds_of(whole)
    with pytest.raises(ValueError, match=r"3 mini-batches were trained in another order \(schedule='paper'\): resume"):
        fit_model(make_datamodule(), ckpt_path=checkpoint)


def test_what_needs_the_order_of_the_epoch_is_refused():
    data = make_datamodule(PAPER, schedule="paper")
    with pytest.raises(ValueError, match="which deterministic=True excludes; leave it out"):
        fit_model(data, deterministic=True)
    torch.use_deterministic_algorithms(False)
    data.trainer = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="in another order in each of 2 processes; use one"):
        data._check_any_order()
    with pytest.warns(UserWarning, match="what the plan predicts is for schedule='paper', not 'in_order'"):
        assert not make_datamodule(replace(PAPER, epoch_s={"collective": 1.0}))._given_plan.epoch_s
    with pytest.raises(ValueError, match="schedule='dual' is unknown; use one of in_order, paper"):
        make_datamodule(schedule="dual")


@pytest.mark.slow
def test_the_page_of_the_paper_is_made(tmp_path):
    page = morphgl.main(["--quick", "--out", str(tmp_path / "page.json")])
    assert [table.title.split(":")[0].split(" (")[0] for table in page.tables][:2] == ["Figure 5", "Table 4"]
    assert (tmp_path / "page.md").read_text() == page.markdown()
