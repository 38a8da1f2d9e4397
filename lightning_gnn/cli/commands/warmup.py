"""``lgnn warmup``: compile ahead what a usual run needs, which else its first mini-batches wait for."""

import argparse
import io
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from rich.console import Console

from lightning_gnn.cli.command_line import UserError
from lightning_gnn.cli.commands.train import run
from lightning_gnn.report.console import say
from lightning_gnn.runtime.kernels import kernel_folder, num_compiled

_SHORT = ["trainer.max_epochs=1", "trainer.enable_progress_bar=false", "logger=none", "callbacks=none"]
_CUT = [f"+trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
_GRAPH = ["data.num_nodes=20000", "data.num_edges=200000"]
_LARGER = [*_GRAPH, *_CUT]
# Layers with little to do take another way.
_SMALL = ["data.num_nodes=600", "data.num_edges=4000", "data.split=[0.5,0.1,0.2]", "datamodule.batch_size=64", *_CUT]
_MODELS = ("sage", "gcn", "gin", "gat")
USUAL = {
    "mini-batches": [[f"model={model}", *size] for model in _MODELS for size in (_LARGER, _SMALL)],
    "full graphs": [[f"model={model}", "datamodule=full", *_LARGER] for model in _MODELS],
    "exact inference": [["inference=full", *_LARGER]],
    "links": [["task=link", "task.split.num_train=2048", "task.split.num_val=256", "task.split.num_test=256", *_GRAPH]],
}
"""Runs of seconds that use what the defaults use, by what they stand for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile; returns 2 where a run that was asked for is none."""
    parser = argparse.ArgumentParser(
        "lgnn warmup",
        description="Compile ahead the kernels of the usual runs on a CPU, once per machine and release.",
    )
    parser.add_argument(
        "overrides", nargs="*", help="of a run, as behind lgnn: what its first mini-batches need instead"
    )
    chosen = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    given = {" ".join(chosen.overrides): [[*chosen.overrides, *_CUT]]} if chosen.overrides else USUAL
    begin = time.perf_counter()
    for name, runs in given.items():
        before, start = num_compiled(), time.perf_counter()
        try:
            with console.status(f"compiling for {name}" if name in USUAL else "compiling"):  # on a terminal alone
                for overrides in runs:
                    _try(overrides)
        except (HydraException, UserError) as error:
            say(f"error: {error}", "red")
            return 2
        console.print(f"{name}: {num_compiled() - before} kernels compiled in {time.perf_counter() - start:.1f} s")
    seconds = time.perf_counter() - begin
    console.print(f"{num_compiled()} compiled in {seconds:.0f} s, kept in {kernel_folder()}")
    return 0


def _try(overrides: Sequence[str]) -> None:
    """Run in a folder that is removed, and say nothing."""
    with tempfile.TemporaryDirectory() as folder, initialize_config_module("lightning_gnn.conf", version_base="1.3"):
        cfg = compose("train", overrides=[*_SHORT, *overrides, f"output_dir={folder}"])
        with redirect_stdout(io.StringIO()):
            run(cfg)
