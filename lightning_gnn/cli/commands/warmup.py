"""``lgnn warmup``: compile the kernels of typical runs in advance, so that their first mini-batches do not wait."""

import argparse
import io
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout

from hydra import compose
from hydra.errors import HydraException
from rich.console import Console

from lightning_gnn.cli.command_line import UserError, raise_user_errors
from lightning_gnn.cli.commands.train import run
from lightning_gnn.cli.search_path import initialize
from lightning_gnn.ops.library import triton_obstacle
from lightning_gnn.report.console import say
from lightning_gnn.runtime.kernels import kernel_folder, num_compiled

_SHORT = ["trainer.max_epochs=1", "trainer.enable_progress_bar=false", "logger=none", "callbacks=none"]
_TWO_BATCHES = [f"+trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
_GRAPH = ["data.num_nodes=20000", "data.num_edges=200000"]
_LARGE = [*_GRAPH, *_TWO_BATCHES]
# Small mini-batches take another code path through the layers.
_SMALL = [
    "data.num_nodes=600", "data.num_edges=4000", "data.split=[0.5,0.1,0.2]", "datamodule.batch_size=64", *_TWO_BATCHES
]  # fmt: skip
_MODELS = ("sage", "gcn", "gin", "gat")
USUAL = {
    "mini-batches": [[f"model={model}", *size] for model in _MODELS for size in (_LARGE, _SMALL)],
    "full graphs": [[f"model={model}", "datamodule=full", *_LARGE] for model in _MODELS],
    "exact inference": [["inference=full", *_LARGE]],
    "links": [["task=link", "task.split.num_train=2048", "task.split.num_val=256", "task.split.num_test=256", *_GRAPH]],
}
"""Overrides of short runs that compile the kernels of the default configurations, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels; return 2 for wrong overrides."""
    parser = argparse.ArgumentParser(
        "lgnn warmup",
        description="Compile the kernels of typical runs on a CPU in advance, once per machine and release. On a "
        "machine with a GPU, compile those of GPU sampling with: lgnn warmup datamodule=persistent trainer=gpu",
    )
    parser.add_argument("overrides", nargs="*", help="compile for the run with these overrides of lgnn instead")
    parser.add_argument(
        "--arch",
        type=int,
        choices=(70, 75, 80, 86, 87, 89, 90, 100, 103, 120),
        help="only compile the sampling kernels for a GPU that need not be present, by its compute capability without "
        "the point: 80 for an A100, 90 for an H100. The kernels are stored in Triton's cache",
    )
    chosen = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    runs_by_name = {" ".join(chosen.overrides): [[*chosen.overrides, *_TWO_BATCHES]]} if chosen.overrides else USUAL
    begin = time.perf_counter()
    if chosen.arch is not None:
        return _compile_for(chosen.arch, chosen.overrides)
    for name, runs in runs_by_name.items():
        before, start = num_compiled(), time.perf_counter()
        try:
            with console.status(f"compiling for {name}" if name in USUAL else "compiling"):  # only on a terminal
                for overrides in runs:
                    _run_silently(overrides)
        except (HydraException, UserError) as error:
            say(f"error: {error}", "red")
            return 2
        console.print(f"{name}: {num_compiled() - before} kernels compiled in {time.perf_counter() - start:.1f} s")
    seconds = time.perf_counter() - begin
    console.print(f"{num_compiled()} compiled in {seconds:.0f} s, stored in {kernel_folder()}")
    return 0


def _run_silently(overrides: Sequence[str]) -> None:
    """Run in a temporary folder without output."""
    with tempfile.TemporaryDirectory() as folder, initialize():
        cfg = compose("train", overrides=[*_SHORT, *overrides, f"output_dir={folder}"])
        with redirect_stdout(io.StringIO()):
            run(cfg)


def _compile_for(capability: int, overrides: Sequence[str]) -> int:
    """Compile the sampling kernels of a run for a GPU that need not be present; return 2 if that is not possible."""
    start = time.perf_counter()
    try:
        with raise_user_errors():
            if (obstacle := triton_obstacle()) is not None:
                raise ValueError(f"--arch needs Triton, but {obstacle}")
            with initialize():
                options = compose("train", overrides=["datamodule=persistent", *overrides]).datamodule
            if "num_neighbors" not in options:
                raise ValueError("no fanouts: --arch is for the DataModules persistent and persistent_link")
            import triton

            from lightning_gnn.ops.sample.compile_ahead import compile_for

            evaluated = (options.get("eval_loader_kwargs") or {}).get("num_neighbors", options.num_neighbors)
            shapes = [
                (list(fanouts), bool(options.get("disjoint")), options.get("bulk", 1))
                for fanouts in (options.num_neighbors, evaluated)
            ]
            names = ("mode", "fetch_size", "num_warps")
            every_hop = options.semantics == "every_hop"
            compile_for(capability, shapes, every_hop=every_hop, **{name: options[name] for name in names})
    except UserError as error:
        say(f"error: {error}", "red")
        return 2
    print(
        f"{num_compiled()} kernels compiled in {time.perf_counter() - start:.0f} s, stored in {triton.knobs.cache.dir}"
    )
    return 0
