"""``lgnn plan``: its output and files agree with the planners; its errors."""

import re
import signal
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from lightning_gnn.cli.commands.plan import _Profiling
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.hyscale import analytic
from lightning_gnn.hyscale.analytic import PerformanceModel, Platform, Processor, Workload
from lightning_gnn.hyscale.costs import TaskMapping
from lightning_gnn.planning.hyscale import stages
from tests.cli.command import NODE, lgnn
from tests.threads import list_threads

SERVER = Platform(Processor(1e12, 1e11), 16, Processor(1e13, 1e12), 4, 1e10, 2e7, core_bandwidth=1e10)
pytestmark = pytest.mark.usefixtures("cache")
HYBRID = "strategy=hyscale"
COLLECTIVE = [
    "datamodule=collective",
    "datamodule.gpu_route=cpu",
    "datamodule.num_workers=1",
    "data.split=[0.8,0.1,0.1]",
]


def plan(directory, *overrides, base=NODE):
    before = list_threads("lightning-gnn")
    code = lgnn(directory, *overrides, base=base, command=["plan"])
    names = set(list_threads("lightning-gnn")) - set(before)
    assert not [name for name in names if not name.startswith("lightning-gnn-worker")]  # compiled loops keep theirs
    return code


def load_yaml(path):
    return OmegaConf.to_container(OmegaConf.load(path))


# -- a GPU's memory


def test_a_gpu_that_is_not_there_is_planned_for(tmp_path, capfd):
    memory = ["datamodule=persistent", "datamodule.device_memory=80GB", "datamodule.cache_bytes=auto"]
    assert plan(tmp_path, *memory) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"of 80 GB on the device: topology .*; data.x .*; mini-batches", out)
    made = load_yaml(tmp_path / "plan.yaml")
    assert {part["place"] for part in made["placement"].values()} == {"device"}
    assert made["nbytes"] <= made["memory"] == 80 * 10**9
    assert plan(tmp_path / "small", *memory, "datamodule.device_memory=1kB") == 2
    assert ", but has 1 kB free" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_is_planned_and_said_so_once(tmp_path, capfd):
    assert plan(tmp_path, "datamodule=persistent", "datamodule.num_workers=1") == 0
    out, err = capfd.readouterr()
    assert "No GPU for" not in out + err
    assert out.count("This plan is for a CPU") == 1
    assert "Bottleneck:" in out


# -- one CPU


@pytest.mark.slow
def test_a_run_on_the_cpu_is_predicted(tmp_path, capfd):
    assert plan(tmp_path, "datamodule.num_workers=1") == 0
    out, err = capfd.readouterr()
    assert err == ""
    for text in ("A mini-batch", "sampling", "features", "products", "aggregation", "ns an edge", "Predicted:",
                 "5 mini-batches", "Bottleneck:", "Other settings", "datamodule.num_neighbors=[2,2]"):  # fmt: skip
        assert text in out, text
    state = load_yaml(tmp_path / "plan.yaml")
    assert state["batches"] == 5
    assert state["threads"] == 1
    assert state["bottleneck"] in state["parts_s"]
    assert state["epoch_s"] == pytest.approx(
        5 * state["batch_s"]["seconds"] + state["preparation"]["sampling_s"] + state["preparation"]["features_s"]
    )
    tried = {option["change"] for option in state["options"]}
    assert "datamodule.num_neighbors=[2,2]" in tried
    assert not list(tmp_path.glob("**/*.ckpt"))


# -- hyscale


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path, capfd):
    assert plan(tmp_path, HYBRID, "+trainer.strategy.devices=[cpu]") == 0
    out, err = capfd.readouterr()
    for text in ("cpu.flops", "Best mapping: seeds cpu", "bound by", "Feature Loading", "MTEPS", "64 seeds"):
        assert text in out
    assert err == ""
    state = load_yaml(tmp_path / "plan.yaml")
    assert state["platform"]["accelerator.flops"] > 0
    assert sum(state["best"]["seeds"]) == 64


def test_the_plan_is_that_of_the_performance_model(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(analytic, "measure_platform", lambda *given: SERVER)
    options = ["trainer.strategy.threads=[1,1,1]", "+trainer.strategy.devices=[cpu,cpu,cpu,cpu]"]
    assert plan(tmp_path / "one", HYBRID, *options) == 0
    out = capfd.readouterr().out
    state = load_yaml(tmp_path / "one/plan.yaml")
    assert len(state["best"]["seeds"]) == 5
    assert state["begin"] == state["best"]
    assert "The run starts with this mapping" in out
    assert "ms with the CPU" in out
    assert "decides otherwise" in out
    assert state["platform"]["pcie_bandwidth"] == 1e10
    monkeypatch.setattr(analytic, "measure_platform", lambda *given: replace(SERVER, accelerator_sampling=1e8))
    assert plan(tmp_path / "two", HYBRID, *options, "trainer.strategy.shares=[0.5,0.5,0,0,0]") == 0
    out = capfd.readouterr().out
    assert "The run starts with seeds cpu 32 + accelerator 32/0/0/0, threads 1/1/1, 95% sampled on accelerators" in out
    assert "100 M edges/s each" in out
    assert "decides otherwise" not in out  # shares are set


@pytest.mark.parametrize(
    ("changes", "stage", "bound"),
    [
        ({"sampling": 1e3}, "Sampling, CPU", "2 threads, 2e+03 edges/s"),
        ({"core_bandwidth": 1e4}, "Feature Loading", "1 thread, 1e+04 B/s"),
        ({"cpu": Processor(1e12, 1e4), "core_bandwidth": 1e9}, "Feature Loading", "CPU memory, 1e+04 B/s"),
        ({"pcie_bandwidth": 1e4}, "Data Transfer", "PCIe, 1e+04 B/s"),
        ({"accelerator": Processor(1e6, 1e15)}, "Propagation, accelerators", "update (100%), 1 MFLOP/s"),
        ({"accelerator": Processor(1e18, 1e6)}, "Propagation, accelerators", "aggregation (100%), memory at 1 MB/s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_binds_a_stage(changes, stage, bound):
    work = Workload(10_000, 100_000, 1000, 100, (5, 5), (64, 32, 8))
    model = PerformanceModel(replace(SERVER, num_accelerators=1, **changes), work)
    mapping = TaskMapping((0, 100), 1, (2, 1, 1))
    rows = {name: (seconds, text) for name, seconds, text in stages(model, mapping)}
    assert rows[stage][1] == bound
    assert max(rows, key=lambda name: rows[name][0]) == stage
    times = model.stage_times(mapping)
    assert rows["Sampling, CPU"][0] == times.sample_cpu
    assert rows["Data Transfer"][0] == times.transfer
    assert rows["Propagation, accelerators"][0] == times.train_accelerator[0]
    assert "Propagation, CPU" not in rows


# -- collective


@pytest.mark.slow
def test_the_collective_plan_is_measured_printed_and_saved(tmp_path, capfd):
    assert plan(tmp_path, *COLLECTIVE) == 0
    out = capfd.readouterr().out
    made = CollectivePlan.load(tmp_path / "plan.yaml")
    assert made.num_batches == 8
    assert made.times.cpu_workers == 1
    for text in ("cpu_batching", "gpu_buffer_size", "CPU only", "GPU only", "Run with this plan"):
        assert text in out
    assert not list(tmp_path.glob("**/*.ckpt"))

    # A run and another plan use it without measuring again.
    options = [*COLLECTIVE, f"datamodule.plan={tmp_path}/plan.yaml"]
    assert plan(tmp_path / "again", *options) == 0
    assert CollectivePlan.load(tmp_path / "again/plan.yaml") == made
    assert lgnn(tmp_path / "run", *options) == 0


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_the_profile(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(_Profiling, "on_train_batch_end", lambda *args: signal.raise_signal(signal.SIGINT))
    assert plan(tmp_path, *COLLECTIVE) == 130
    assert "Interrupted before the plan was complete." in capfd.readouterr().err
    assert not (tmp_path / "plan.yaml").exists()


# -- what is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=ddp", "trainer.devices=2"], "predicts one process, but there are 2"),
        (["trainer.limit_train_batches=0"], "leaves nothing to train"),
        ([HYBRID, "mode=test"], "plans training"),
        ([HYBRID, "-m"], "leave out -m"),
        ([HYBRID, "trainer.strategy.cpu_trainers=0"], "leaves no trainer"),
        ([HYBRID, "model.num_layers=3"], "one fanout per layer"),
        (["datamodule=collective"], "trainer=gpu, or .*gpu_route=cpu"),
        ([*COLLECTIVE, "datamodule.num_workers=0"], "at least one worker"),
        ([*COLLECTIVE, "plan.max_batches=2"], "no plan after 2 mini-batches"),
        ([*COLLECTIVE, "trainer.devices=2", "strategy=ddp"], "profiles one process"),
        ([*COLLECTIVE, "datamodule.plan=nowhere.yaml"], "nowhere.yaml"),
        ([*COLLECTIVE, "trainer.limit_train_batches=0"], "training ended before the plan was made"),
        ([*COLLECTIVE, "datamodule.profile_batches=x"], "profile_batches must be a whole number, but is 'x'"),
        ([*COLLECTIVE, "+trainer.no_such_argument=1"], "no_such_argument"),
    ],
    ids=lambda value: "-".join(value)[-40:] if isinstance(value, list) else "",
)
def test_one_line_and_exit_code_2(tmp_path, capfd, overrides, message):
    assert plan(tmp_path, *overrides) == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, line), line
    assert line.startswith("error: ")
