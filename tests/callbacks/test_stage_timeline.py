"""Timelines of real epochs: what is recorded, beside what was predicted, and the files."""

import json
import time
from itertools import pairwise

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.callbacks import StageTimeline, Throughput
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import simulate_dual_buffer
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.hyscale.decisions import Decision
from lightning_gnn.hyscale.mapping import TaskMapping
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.report.figure import save_timeline
from lightning_gnn.report.timeline import Counter, Mark, save_trace
from lightning_gnn.runtime.timeline import Interval, Timeline
from lightning_gnn.sampling.node_datamodule import NeighborDataModule
from tests.full_graph.launch import run

DATA = planted_power_law(300, 2000, 3, 8, split=(0.5, 0.2, 0.2))
TIMES = StageTimes(Duration(4e-3), Duration(1e-3), Duration(1e-3), Duration(1e-3), Duration(1e-3), cpu_workers=1)


def trained(datamodule, *callbacks, epochs=2, **kwargs):
    torch.manual_seed(0)
    module = NodeClassifier(GraphSAGE(8, 8, 2, 3), 3)
    trainer = pl.Trainer(
        callbacks=list(callbacks), max_epochs=epochs, logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_checkpointing=False, enable_model_summary=False, **kwargs,
    )  # fmt: skip
    trainer.fit(module, datamodule)
    return trainer, module


def neighbours(**kwargs):
    return NeighborDataModule(DATA, num_neighbors=[4, 4], batch_size=30, seed=1, **kwargs)


def trace(path):
    return json.loads(path.with_suffix(".json").read_text())["traceEvents"]


def numbers(timeline, stage):
    return [item.batch for item in timeline.intervals if item.stage == stage]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_own_profile_names_the_stages(num_workers):
    everything = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    options = {"experimental_config": everything} if num_workers else {}  # else the calling thread's, as torch does
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        trained(neighbours(num_workers=num_workers), epochs=1)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["lightning_gnn::sampling"] == counts["lightning_gnn::feature_loading"] >= 5


def test_a_users_own_profile_names_the_transfers(tmp_path):
    plan = CollectivePlan("collective", 2, 1, times=TIMES)
    datamodule = CollectiveDataModule(
        DATA, num_neighbors=[4, 4], batch_size=30, num_workers=1, gpu_route="cpu", plan=plan, cache_plan=False
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(datamodule, epochs=1)
    counts = {event.key: event.count for event in profile.key_averages()}
    # Those of 5 mini-batches that the CPU prepares, it prepares in another thread.
    assert 1 <= counts["lightning_gnn::transfer"] <= 2
    assert counts["lightning_gnn::sampling"] >= 5 - counts["lightning_gnn::transfer"]


def test_waiting_and_training_of_any_loader(tmp_path):
    recorded = StageTimeline(tmp_path / "deep/timeline")
    _, with_it = trained(neighbours(num_workers=1), recorded, epochs=3)
    timeline = recorded.timelines["measured"]
    assert list(recorded.timelines) == ["measured"]
    assert numbers(timeline, "wait") == numbers(timeline, "model") == [0, 1, 2, 3, 4]
    in_order = sorted(timeline.intervals, key=lambda item: item.start)
    assert [item.stage for item in in_order] == ["wait", "model"] * 5
    assert all(item.resource == "CPU" for item in in_order)
    assert all(a.end <= b.start for a, b in pairwise(in_order))
    assert (tmp_path / "deep/timeline.png").read_bytes().startswith(b"\x89PNG")
    assert sum(event["ph"] == "X" for event in trace(tmp_path / "deep/timeline")) == 10
    _, without = trained(neighbours(num_workers=1), epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_waiting_in_a_timeline_is_that_of_the_figures(tmp_path, num_workers):
    recorded, figures = StageTimeline(tmp_path / "timeline"), Throughput()
    trained(neighbours(num_workers=num_workers), recorded, figures, SlowToBegin())
    waits = [item.end - item.start for item in recorded.timelines["measured"].intervals if item.stage == "wait"]
    assert sum(waits) == pytest.approx(figures.epochs[1].wait_s, abs=1e-9)


class SlowToBegin(pl.Callback):
    """Takes time between a mini-batch's arrival and its step, for which nobody waits."""

    def on_train_batch_start(self, *args):
        time.sleep(0.002)

    def on_before_zero_grad(self, *args):
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("options", "epochs", "epoch", "batches"),
    [
        ({"epoch": 0, "max_batches": 2}, 1, 0, 2),
        ({"epoch": 7}, 2, 1, 5),
        ({"epoch": 1, "max_batches": None}, 1, 0, 5),
        ({}, -1, 1, 5),
    ],
    ids=["some mini-batches", "the last epoch", "the only epoch", "without an end"],
)
def test_which_epoch_and_how_much_of_it(tmp_path, options, epochs, epoch, batches):
    recorded = StageTimeline(tmp_path / "timeline", **options)
    trained(neighbours(), recorded, epochs=epochs, max_steps=12)
    assert f"epoch {epoch}" in recorded._title
    assert len(numbers(recorded.timelines["measured"], "model")) == batches


@pytest.mark.parametrize(
    ("steps", "accumulated", "epoch", "batches"), [(3, 1, 0, 3), (5, 1, 0, 5), (6, 1, 1, 1), (3, 2, 0, 5), (4, 2, 1, 2)]
)
def test_a_run_that_ends_by_steps_records_its_last_epoch_at_the_latest(tmp_path, steps, accumulated, epoch, batches):
    recorded = StageTimeline(tmp_path / "timeline")
    trained(neighbours(), recorded, epochs=-1, max_steps=steps, accumulate_grad_batches=accumulated)
    assert f"epoch {epoch}" in recorded._title
    assert len(numbers(recorded.timelines["measured"], "model")) == batches
    assert (tmp_path / "timeline.png").exists()


def test_prediction_and_measurement_of_the_collective_loader_lie_side_by_side(tmp_path):
    plan = CollectivePlan("collective", 2, 1, times=TIMES)
    datamodule = CollectiveDataModule(
        DATA, num_neighbors=[4, 4], batch_size=30, num_workers=1, gpu_route="cpu", plan=plan, cache_plan=False
    )
    recorded = StageTimeline(tmp_path / "timeline")
    trainer, _ = trained(datamodule, recorded)
    predicted, measured = recorded.timelines["predicted"], recorded.timelines["measured"]
    expected = simulate_dual_buffer(TIMES, plan, 5).timeline
    assert predicted.intervals == expected.intervals
    assert predicted.phases == expected.phases
    for timeline in (predicted, measured):  # who prepares which is a matter of who is fast
        by = {stage: set(numbers(timeline, stage)) for stage in ("cpu_batching", "dma", "gpu_batching", "uva")}
        assert by["cpu_batching"] == by["dma"]
        assert by["gpu_batching"] == by["uva"]
        assert not by["cpu_batching"] & by["gpu_batching"]
        assert by["cpu_batching"] | by["gpu_batching"] == set(numbers(timeline, "model")) == set(range(5))
    occupied = {(i.stage, i.resource) for i in predicted.intervals}
    assert {(i.stage, i.resource) for i in measured.intervals} <= occupied
    assert {name for name, _, _ in measured.phases} <= {"filling", "blocking", "flushing"}
    assert trainer.train_dataloader.timeline is None
    events = trace(tmp_path / "timeline")
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {1: "predicted", 2: "measured"}
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"phases", "CPU", "CPU as PCIe", "CPU as GPU"}
    assert min(event["ts"] for event in events if "ts" in event) == 0


def test_a_picture_names_what_the_cpu_plays(tmp_path, monkeypatch):
    shown = {}

    def look(figure, path):
        axes = figure.axes[0]
        shown["lanes"] = [label.get_text() for label in axes.get_yticklabels()]
        shown["legend"] = {text.get_text() for text in figure.legends[0].get_texts()}

    monkeypatch.setattr("lightning_gnn.report.figure.save", look)
    stages = [("PCIe", "dma"), ("PCIe", "uva"), ("GPU", "gpu_batching"), ("GPU", "model")]
    intervals = [Interval(resource, stage, 0, i, i + 1.0) for i, (resource, stage) in enumerate(stages)]
    datamodule = CollectiveDataModule(DATA, num_neighbors=[4, 4], batch_size=30, num_workers=1, gpu_route="cpu")
    played = datamodule.train_dataloader().names
    for names, gpu, pcie in (({}, "GPU", "PCIe"), (played, "CPU as GPU", "CPU as PCIe")):
        save_timeline({"measured": Timeline(intervals, names=names)}, "title", tmp_path / "picture.png")
        assert shown["lanes"] == [pcie, gpu]
        assert f"sampling, {gpu}" in shown["legend"]
        assert ("DMA transfer" in shown["legend"]) == ("gathering over PCIe (UVA)" in shown["legend"]) == (not names)


def recorded_on(rank, folder):
    trained(
        neighbours(),
        StageTimeline(folder / "timeline", epoch=0),
        strategy=HyScaleStrategy(devices=["cpu"], drm=str(folder / "log")),
    )


@pytest.mark.parametrize("observation", [3, 7], ids=["in the epoch", "after it"])
def test_every_decision_of_hybrid_training_is_in_the_trace(tmp_path, observation):
    first, second = TaskMapping((10, 20), 1, (1, 1, 1)), TaskMapping((12, 18), 1, (1, 1, 1))
    log = [Decision(first, "as told", "start", 0, True)]
    log.append(Decision(second, "the accelerator lags", "balance_work", observation, True))
    (tmp_path / "log").write_text("".join(f"{decision.to_json()}\n" for decision in log))
    run(recorded_on, 2, tmp_path)
    events = [event for event in trace(tmp_path / "timeline") if event["ph"] == "i"]
    changes = [event for event in events if event["cat"] == "decision"]
    assert [(event["name"], event["args"]["explanation"]) for event in changes if event["name"] != "start"] == [
        ("balance_work", "the accelerator lags")
    ]
    assert changes[-1]["args"]["mapping"] == str(second)
    held = [event["args"]["observation"] for event in events if event["cat"] == "note"]
    assert held == [number for number in range(1, 5) if number != observation]  # the last step's times are not sent
    seeds = [event["args"] for event in trace(tmp_path / "timeline") if event["ph"] == "C" and event["name"] == "seeds"]
    assert len(seeds) == 4
    assert seeds[0] == {"trainer 0": 10.0, "trainer 1": 20.0}


@pytest.mark.parametrize(("options", "message"), [({"max_batches": 0}, "max_batches"), ({"epoch": -1}, "epoch")])
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StageTimeline(**options)


def test_an_epoch_that_fails_is_forgotten(tmp_path):
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("on purpose")

    recorded = StageTimeline(tmp_path / "timeline", epoch=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        trained(neighbours(), recorded, Fails())
    assert not recorded.timelines
    assert not list(tmp_path.iterdir())


def test_files_of_any_timeline(tmp_path):
    one = Timeline([Interval("GPU", "model", n, n + 10.0, n + 10.5) for n in range(30)], [("flushing", 9.0, 40.0)])
    other = Timeline([Interval("CPU", "own stage", 3, 0.0, 1e-3, lane) for lane in (0, 1)])
    marks = [Mark("early", -2.0, "why"), Mark("note", 0.0, "", "note")]
    path = save_timeline({"one": one, "other": other, "empty": Timeline()}, "title", tmp_path / "a.png", marks, 7)
    assert path.read_bytes().startswith(b"\x89PNG")
    save_trace({"one": one, "other": other}, tmp_path / "a.json", marks, [Counter("c", 1.0, {"x": 2.0})])
    events = trace(tmp_path / "a")
    times = {event["name"]: event["ts"] for event in events if "ts" in event}
    assert times["early"] == 0
    assert times["flushing"] == times["own stage 3"] == times["note"] == 2e6
    assert times["c"] == times["model 0"] == 3e6
    assert all(isinstance(event["pid"], int) for event in events)
    assert [item.batch for item in one.first(7).intervals] == list(range(7))
    assert one.first(7).phases == [("flushing", 9.0, 16.5)]
    with pytest.raises(ValueError, match="no timeline"):
        save_timeline({}, "title", tmp_path / "b.png")
