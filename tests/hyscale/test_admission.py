"""CPU trainers are decided on before processes start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch

from lightning_gnn import NeighborDataModule
from lightning_gnn.hyscale import admission
from lightning_gnn.hyscale.admission import admit_cpu_trainers, cpu_share_bound
from lightning_gnn.hyscale.analytic import BatchSizes, Platform, Processor, Workload
from lightning_gnn.hyscale.options import TrainerSet
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.hyscale.training import Plain, copy_state, fit, make_graph

CPU = torch.device("cpu")
TRAINERS = TrainerSet.of(1, [CPU])


def describe_machine(factor):
    """Return a machine whose accelerator is some times as fast as its CPU."""
    return Platform(Processor(1e7, 1e12), 8, Processor(factor * 1e7, factor * 1e12), 1, 1e12, 1e9)


@pytest.mark.parametrize(("factor", "number"), [(0.5, 1), (2, 1), (15, 0), (30, 0)])
def test_the_predicted_gain_decides(factor, number, monkeypatch):
    monkeypatch.setattr(admission, "cached_platform", lambda *given: describe_machine(factor))
    graph = make_graph(20_000)
    loader = NeighborDataModule(graph, num_neighbors=[2], batch_size=200).train_dataloader()
    found = admit_cpu_trainers(TRAINERS, loader, Plain(), HyScaleStrategy().options)
    assert found.cpu_trainers == number
    figures = "an iteration takes" if factor < 19 else "of this machine's arithmetic or bandwidth"
    assert figures in str(found)
    assert f"cpu_trainers={1 - number} decides otherwise" in str(found)


def test_the_rates_alone_decide_on_loaders_of_unknown_work(monkeypatch):
    for factor, number in ((2, 1), (30, 0)):
        monkeypatch.setattr(admission, "cached_platform", lambda *given, factor=factor: describe_machine(factor))
        assert cpu_share_bound(describe_machine(factor)) == pytest.approx(1 / (1 + factor))
        found = admit_cpu_trainers(TRAINERS, ["not PyG's"], Plain(), HyScaleStrategy().options)
        assert found.cpu_trainers == number


def test_sizes_between_measured_ones_follow_a_power_of_the_seeds():
    measured = tuple(BatchSizes(n, (64.0 * n**0.5, float(n)), (8.0 * n,)) for n in (16, 64, 256))
    work = Workload(10**6, 10**7, 1000, 256, (5,), (4, 4), measured=measured)
    for seeds in (4, 16, 20, 64, 100, 256, 400):
        sizes = work.sizes(seeds)
        assert sizes.vertices == pytest.approx((64.0 * seeds**0.5, seeds))
        assert sizes.edges == pytest.approx((8.0 * seeds,))


SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from lightning_gnn import NeighborDataModule
from lightning_gnn.hyscale import admission
from lightning_gnn.hyscale.analytic import Platform, Processor
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.hyscale.training import Plain, copy_state, make_data, SILENT
import pytorch_lightning as pl

out, factor, options, more = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
slow, fast = Processor(1e7, 1e12), Processor(factor * 1e7, factor * 1e12)
machine = Platform(slow, 8, fast, len(options["devices"]), 1e12, 1e9)
admission.cached_platform = lambda *given: machine
path = more.pop("ckpt_path", None)
strategy, module = HyScaleStrategy(**options), Plain()
trainer = pl.Trainer(strategy=strategy, **{**SILENT, "max_epochs": 2, "limit_val_batches": 0, **more})
trainer.fit(module, make_data(), ckpt_path=path)
trainer.save_checkpoint(out / "end.ckpt")
if trainer.global_rank == 0:
    found = {"world": trainer.world_size, "cpu": strategy.trainers.num_cpu}
    (out / "found.json").write_text(json.dumps(found))
    torch.save(copy_state(module), out / "state.pt")
"""


SEVERAL = """
import os, sys
from pathlib import Path
import torch
from lightning_gnn import NeighborDataModule
from lightning_gnn.hyscale import admission
from lightning_gnn.hyscale.admission import Admission
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.hyscale.training import Plain, make_data, make_graph, SILENT
import pytorch_lightning as pl

out, place = Path(sys.argv[1]), sys.argv[2]
decisions = iter([1, 0, 0] if place != "another trainer" else [0])
admission.admit_cpu_trainers = lambda *given: Admission(next(decisions), "the test says so")


class Late(NeighborDataModule):
    def __init__(self):
        super().__init__(make_graph(), num_neighbors=[-1], batch_size=60, seed=0)

    def setup(self, stage):
        super().setup(stage)
        self.is_ready = self.trainer is not None

    def train_dataloader(self):
        assert self.is_ready
        return super().train_dataloader()


class Kept(pl.Callback):
    def state_dict(self):
        return {"path": Path("an object that weights_only refuses")}


class Valid(Plain):
    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), batch_size=batch.batch_size)


def make_trainer(**options):
    return pl.Trainer(strategy=HyScaleStrategy(devices=["cpu"]), **{**SILENT, "max_epochs": 1, **options})


trainer, module, data = make_trainer(callbacks=[Kept()]), Valid(), Late()
worlds = []
if place == "validation first":
    trainer.validate(module, data)
trainer.fit(module, data)
worlds.append(trainer.world_size)
if place == "two fits":
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    worlds.append(trainer.world_size)
if place == "a checkpoint with an object":
    trainer.save_checkpoint(out / "end.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, ckpt_path=out / "end.ckpt", weights_only=False)
    worlds.append(trainer.world_size)
if place == "another trainer":
    trainer = pl.Trainer(strategy=HyScaleStrategy(), **{**SILENT, "max_epochs": 1})
    trainer.fit(Valid(), make_data())
    worlds.append(trainer.world_size)
if trainer.global_rank == 0:
    print("worlds", worlds, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "worlds"),
    [
        ("two fits", [2, 2]),
        ("validation first", [2]),
        ("a checkpoint with an object", [2, 2]),
        ("another trainer", [1, 1]),
    ],
)
def test_what_a_script_does_besides_one_fit(place, worlds, tmp_path):
    script, root = tmp_path / "script.py", Path(__file__).parents[2]
    script.write_text(SEVERAL)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), place], stdout=PIPE, stderr=STDOUT, text=True, cwd=root,
        check=False, env={**environment(), "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert f"worlds {worlds}" in done.stdout, done.stdout


def run_script(folder, factor, options, **more):
    """Train in a script; return the number of ranks and of CPU trainers, the weights, and what was printed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(folder), str(factor), json.dumps({"devices": ["cpu"], **options}), json.dumps(more)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], stdout=PIPE, stderr=STDOUT, text=True, cwd=root, check=False,
        env={**environment(), "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads((folder / "found.json").read_text())
    return found["world"], found["cpu"], torch.load(folder / "state.pt"), done.stdout


def environment():
    return {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "options", "more", "expected"),
    [
        (30, {}, {}, (1, 0)),
        (1, {}, {}, (2, 1)),
        (30, {"devices": ["cpu", "cpu"]}, {}, (2, 0)),
        # What the user sets is never overruled.
        (30, {"cpu_trainers": 1}, {}, (2, 1)),
        (30, {"cpu_share": 0.3}, {}, (2, 1)),
        (30, {"shares": [0.3, 0.7]}, {}, (2, 1)),
        (30, {}, {"deterministic": True}, (2, 1)),
        (1, {"cpu_trainers": 0}, {}, (1, 0)),
    ],
)
def test_processes_start_only_where_they_pay(factor, options, more, expected, tmp_path):
    world, cpu, weights, printed = run_script(tmp_path, factor, options, **more)
    assert (world, cpu) == expected
    assert ("decides otherwise" in printed) == (not options.keys() - {"devices"} and not more)
    plain = Plain()
    fit(plain, epochs=2)
    for name, value in copy_state(plain).items():
        assert torch.allclose(weights[name], value, atol=1e-9), name


@pytest.mark.slow
def test_a_resumed_run_has_the_trainers_of_its_checkpoint(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert run_script(tmp_path / "first", 1, {"drm": False})[:2] == (2, 1)
    path = str(tmp_path / "first" / "end.ckpt")
    assert run_script(tmp_path / "second", 30, {"drm": False}, ckpt_path=path, max_epochs=4)[:2] == (2, 1)
