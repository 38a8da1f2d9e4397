"""Unsupported configurations of hybrid training are refused before it begins, with advice."""

import os
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.utils.data import DataLoader, IterableDataset

from lightning_gnn import FullGraphDataModule
from lightning_gnn.hyscale.checks import check_precision
from lightning_gnn.hyscale.costs import TaskMapping
from lightning_gnn.hyscale.drm import Decision
from lightning_gnn.hyscale.options import TrainerSet
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import NodeClassifier
from lightning_gnn.runtime.devices import num_cores
from tests.full_graph.launch import run
from tests.hyscale.training import SILENT, Plain, copy_state, fit, make_data, make_graph, make_hybrid
from tests.patience import NEVER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_share": 0.0}, r"in \(0, 1\], but is 0.0"),
        ({"cpu_share": 1.2}, r"in \(0, 1\], but is 1.2"),
        ({"cpu_share": "half"}, "'half'"),
        ({"cpu_share": None}, "but is None"),
        ({"shares": [0.5, 0.6]}, "sum to 1"),
        ({"shares": [-0.5, 1.5]}, "sum to 1"),
        ({"shares": "auto"}, "one number per trainer"),
        ({"cpu_trainers": -1}, "must not be negative"),
        ({"cpu_trainers": 1.5}, "whole number, but is 1.5"),
        ({"cpu_trainers": "numa"}, "cpu_trainers must be a whole number, but is 'numa'"),
        ({"agree_every": 0}, "agree_every"),
        ({"agree_every": 2.5}, "whole number, but is 2.5"),
        ({"drm": None}, "drm must be True, False, 'paper' or the path"),
        ({"drm": 1}, "drm must be True, False, 'paper' or the path"),
        ({"prefetch": 3}, "prefetch"),
        ({"stall_timeout": 0}, "stall_timeout"),
        ({"stall_timeout": float("nan")}, "stall_timeout"),
        ({"stall_timeout": "5"}, "stall_timeout"),
        ({"transfer_dtype": "int4"}, "transfer_dtype"),
        ({"accelerator_sampling": 1.5}, r"in \[0, 1\], but is 1.5"),
        ({"accelerator_sampling": "all"}, "'all'"),
        ({"threads": 3}, "at least 1, but are 3"),
        ({"threads": [1.5, 1, 1]}, "at least 1"),
        ({"threads": [1, 0, 1]}, "at least 1"),
        ({"threads": [1, 1]}, "at least 1"),
        ({"threads": [1, 1, num_cores() + 5]}, f"may use {num_cores()} cores"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        HyScaleStrategy(**options)


@pytest.mark.parametrize(("typo", "meant"), [("drn", "drm"), ("cpu_trainer", "cpu_trainers")])
def test_an_option_that_nobody_knows(typo, meant):
    with pytest.raises(TypeError, match=f"unknown option {typo}; did you mean {meant}"):
        HyScaleStrategy(**{typo: False})


def test_logs_of_decisions_that_are_no_files(tmp_path):
    with pytest.raises(ValueError, match=r"drm='.*none' is not a file; give a log written by decision_log="):
        HyScaleStrategy(drm=tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe.* is not a (regular )?file"):
        HyScaleStrategy(drm=tmp_path / "pipe")


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"cpu_trainers": 0}, 1, "cpu_trainers=0 without an accelerator"),
        ({"cpu_trainers": 0}, 2, "devices=2.* and cpu_trainers=0: set one of them"),
        ({"cpu_trainers": 3}, 2, "devices=2.* and cpu_trainers=3: set one of them, or both to the number"),
        ({"cpu_trainers": 2, "shares": [0.2, 0.3, 0.5]}, 1, "3 entries, but there are 2 trainers"),
        ({"shares": [0.2, 0.8], "devices": ["cpu", "cpu"]}, 1, "2 entries, but there are 3 trainers"),
    ],
    ids=str,
)
def test_trainers_that_do_not_fit_the_trainers_devices(options, devices, message, monkeypatch):
    # Other ranks would fail too, and Lightning would kill this process, which runs the tests.
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", lambda self, function, *args, **_: function(*args))
    with pytest.raises(ValueError, match=message):
        pl.Trainer(**SILENT, devices=devices, strategy=HyScaleStrategy(**options)).fit(Plain(), make_data())


@pytest.mark.parametrize(("options", "devices"), [({}, 2), ({"cpu_trainers": 2}, 2), ({"cpu_trainers": 2}, 1)], ids=str)
def test_devices_that_fit(options, devices):
    trainer = pl.Trainer(**SILENT, devices=devices, strategy=HyScaleStrategy(**options))
    assert trainer.strategy.trainers.num_cpu == trainer.strategy.num_processes == 2


@pytest.mark.parametrize(
    ("precision", "device", "message"),
    [
        (HalfPrecision("16-true"), "cuda", r"0 \(CPU\) does not support precision='16-true': CPUs do not train"),
        (MixedPrecision("16-mixed", "cpu"), "cuda", r"trainer 0 \(CPU\) does not .*: .*; use 'bf16-mixed'"),
        (DoublePrecision(), "mps", r"trainer 1 \(mps\) does not .*: MPS does not support"),
        (MixedPrecision("bf16-mixed", "cpu"), "cuda", r"trainer 1 \(cuda\) does not .*: this GPU does not support"),
        (type("Own", (Precision,), {})(), "cuda", "its modules cannot be copied to another device"),
    ],
    ids=["half", "mixed", "double", "bfloat16", "own"],
)
def test_a_precision_that_one_device_does_not_have(precision, device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match=message):
        check_precision(precision, TrainerSet.of(1, [torch.device(device)]))
    check_precision(Precision(), TrainerSet.of(1, [torch.device(device)]))


def make_full_graph():
    data = FullGraphDataModule(make_graph())
    data.setup("fit")
    return data.train_dataloader()


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Endless:
    """A batch sampler without a length."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


class Fetching(Plain):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class SeveralLosses(Plain):
    def training_step(self, batch, index):
        return self.scores(batch).sum(1)


class Lazy(Plain):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.LazyLinear(3)


class Raw(Plain):
    """Computes gradients without Lightning's backward pass."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.loss(batch).backward()
        self.optimizers().step()


class StepsLater(Raw):
    """Steps at the beginning of a mini-batch, with the gradients of the one before."""

    def training_step(self, batch, index):
        if index:
            self.optimizers().step()
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))


REFUSED = {
    "the full graph": (
        {"data": lambda: FullGraphDataModule(make_graph())},
        "2 devices, which would all train on the same graph",
    ),
    "its loader": ({"loader": make_full_graph}, "yields the full graph as a single batch; train with"),
    "no batch size": ({"loader": lambda: DataLoader(range(10), None)}, r"single samples \(batch_size=None\)"),
    "no positions": ({"loader": lambda: DataLoader(Numbers(), 2)}, "of a map-style dataset.* it got DataLoader"),
    "no loader of torch's": ({"loader": lambda: [1, 2]}, "of a map-style dataset.* it got list"),
    "no length": ({"loader": lambda: DataLoader(range(10), batch_sampler=Endless())}, "give its batch_sampler a __len"),
    "several loaders": (
        {"loader": lambda: {name: make_data().train_dataloader() for name in "ab"}},
        "one loader, but the DataModule returns several",
    ),
    "fetches by itself": ({"module": Fetching}, "must not take a dataloader_iter"),
    "lazy": ({"module": Lazy}, "head.weight, head.bias has no size yet, .*: give in_channels"),
    "several losses": ({"module": SeveralLosses}, r"but the loss of trainer \d \(CPU\) has the shape"),
    "raw backward": ({"module": Raw}, r"call self.manual_backward\(loss\) instead of loss.backward\(\)"),
    "half precision": ({"precision": "16-true"}, r"trainer \d \(CPU\) does not .*: CPUs do not train in"),
    "other trainers": ({"drm": Decision(TaskMapping((10, 10, 10), 3), "start", "start")}, "recorded with 3 trainers"),
    "too few processes": (
        {"num_ranks": 3},
        r"one rank per device, 3 per node \(cpu, cpu, cpu\), 3 in total, but 2 were started: "
        r"start as many with torchrun \(--nproc-per-node=3\)",
    ),
    "too many processes": ({"num_ranks": 1}, r"1 per node \(cpu\), 1 in total, but 2 were started"),
    "other nodes": ({"num_nodes": 2}, "2 per node .* 4 in total, but 2 were started"),
}


def test_a_lone_trainer_says_that_several_would_be_refused():
    loader = make_full_graph()
    data = type("Own", (pl.LightningDataModule,), {"train_dataloader": lambda self: loader})()
    with pytest.warns(UserWarning, match="a single trainer .* several are refused: .*yields the full graph"):
        fit(NodeClassifier(Plain().net, 3), HyScaleStrategy(), data, epochs=1, filters=False)


def attempt(folder, module=Plain, data=make_data, loader=None, drm=None, num_ranks=2, **options):
    if loader is not None:
        found = loader()
        data = lambda: type("Own", (pl.LightningDataModule,), {"train_dataloader": lambda self: found})()  # noqa: E731
    more = {}
    if drm is not None:
        more["drm"] = os.path.join(folder, "decisions.jsonl")
        with open(more["drm"], "w") as file:
            file.write(drm.to_json())
    trained = module()
    fit(trained, make_hybrid(num_ranks, stall_timeout=NEVER, **more), data(), **options)
    return copy_state(trained)


def collect_refusals(rank):
    errors = {}
    for name, (options, _) in REFUSED.items():
        try:
            attempt(os.environ["RANK_FOLDER"], **options)
        except (TypeError, ValueError, RuntimeError) as error:
            errors[name] = str(error)
    return errors, [attempt(None, module) for module in (Plain, StepsLater)]


@pytest.fixture(scope="module")
def found():
    """Return the outcomes of one start of two ranks, which try all refusals in order."""
    return run(collect_refusals, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_refused_on_every_rank(name, found):
    for errors, _ in found:
        with pytest.raises(RuntimeError, match=REFUSED[name][1]):
            raise RuntimeError(errors[name])


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kind"), enumerate([Plain, StepsLater]))
def test_what_was_refused_leaves_nothing_behind_and_what_is_like_it_works(place, kind, found):
    module = kind()
    fit(module)
    for _, weights in found:
        for name, value in copy_state(module).items():
            torch.testing.assert_close(weights[place][name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_a_program_that_cannot_be_run_again_is_refused_before_anything_starts():
    program = """
import pytorch_lightning as pl, lightning_gnn
for strategy in (lightning_gnn.HyScaleStrategy(cpu_trainers=2), "ascend_hybrid"):
    try:
        pl.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    except ValueError as error:
        print(error)
"""
    said = "2 processes cannot be started from python -c, standard input or a pipe, which they would have to run again"
    for given in (["-"], ["-c", program]):
        ended = subprocess.run([sys.executable, *given], input=program, capture_output=True, text=True, check=True)
        assert ended.stdout.count(said) == 2
