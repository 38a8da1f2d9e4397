"""Run the command, in this process or a new one, on a small graph."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.cli import main as cli
from lightning_gnn.cli.saved_run import KEY
from lightning_gnn.nn import NodeClassifier
from tests.full_graph.launch import run_script

ROOT = Path(__file__).parents[2]
TINY = [
    "data.num_nodes=600", "data.num_edges=4000", "data.num_classes=3", "data.num_features=8",
    "data.split=[0.5,0.1,0.2]", "model.hidden_channels=16", "datamodule.num_workers=0", "torch_threads=1",
    "trainer.enable_progress_bar=false",
]  # fmt: skip
NODE = [
    *TINY, "model.num_layers=2", "datamodule.num_neighbors=[4,4]", "datamodule.batch_size=64", "trainer.max_epochs=2",
]  # fmt: skip
"""Five optimizer steps per epoch."""


def lgnn(directory, *overrides, base=NODE, command=()):
    """Run in this process; return the exit code."""
    flags = [item for item in overrides if item.startswith("-")]
    overrides = [item for item in overrides if item not in flags]
    overrides += _drop_signals(overrides)
    folders = f"hydra.run.dir={directory}", f"hydra.sweep.dir={directory}"
    return run_exactly(*command, *flags, *base, *folders, *overrides)[0]


def run_exactly(*arguments):
    """Run in this process with these arguments only; return the exit code, and the arguments that a new rank gets."""
    argv, sys.argv = sys.argv, ["lgnn", *arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, code = torch.get_num_threads(), 0
    try:
        cli.main()
    except SystemExit as error:
        code = error.code
    finally:
        (_, *left), sys.argv = sys.argv, argv
        torch.set_num_threads(threads)
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    return code, left


def _drop_signals(overrides):
    """Remove :class:`SignalAt` from the configuration of a checkpoint, so that a resumed run is not interrupted."""
    paths = [item.removeprefix("ckpt_path=").strip("'") for item in overrides if item.startswith("ckpt_path=")]
    for path in filter(zipfile.is_zipfile, paths):
        saved = torch.load(path, weights_only=True, mmap=True).get(KEY, {}).get("config", {})
        if "kill" in saved.get("callbacks", {}) and not any("callbacks.kill" in item for item in overrides):
            return ["~callbacks.kill"]
    return []


def fork(*arguments):
    """Run in a new process that has imported the packages already."""
    return run_script(ROOT / "lightning_gnn" / "__main__.py", *arguments)


def spawn(*arguments, cwd=ROOT, **environment):
    """Run in a new Python interpreter, as a user's shell does."""
    return subprocess.run(
        [sys.executable, "-m", "lightning_gnn", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def metrics_of(directory):
    return json.loads((Path(directory) / "metrics.json").read_text())


def assert_two_devices_as_one(folder, overrides, metrics):
    """Check that the command gives the same metrics on two devices, of which it starts one, as on one."""
    assert lgnn(folder / "1", "trainer.devices=1", base=overrides) == 0
    done = spawn(*overrides, "trainer.devices=2", f"hydra.run.dir={folder / '2'}", cwd=folder)
    assert done.returncode == 0, done.stderr
    one, two = metrics_of(folder / "1"), metrics_of(folder / "2")
    assert [two[name] for name in metrics] == pytest.approx([one[name] for name in metrics], rel=1e-4)


def load_weights(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state_dict"]


class SignalAt(pl.Callback):
    """Sends this process a signal, as a user or a batch system would."""

    def __init__(self, step, number, hook="on_train_batch_start", times=1):
        self.step, self.number, self.hook, self.times = step, number, hook, times

    def on_train_batch_start(self, trainer, *args):
        self._send(trainer, "on_train_batch_start")

    def on_validation_start(self, trainer, *args):
        self._send(trainer, "on_validation_start")

    def on_test_start(self, trainer, *args):
        self._send(trainer, "on_test_start")

    def _send(self, trainer, hook):
        if hook == self.hook and trainer.fit_loop.epoch_loop.total_batch_idx + 1 >= self.step:
            for _ in range(self.times):
                signal.raise_signal(self.number)  # os.kill might deliver it to another thread, much later
            self.step = sys.maxsize


class OneCycle(NodeClassifier):
    """A classifier whose schedule has the length of the run, so Lightning inspects the loader early."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def signal_at(step, number, **more):
    return [
        "+callbacks.kill._target_=tests.cli.command.SignalAt",
        *(f"+callbacks.kill.{key}={value}" for key, value in {"step": step, "number": int(number), **more}.items()),
    ]
