"""Start-up: the seconds of whole processes, from their start to the end of their imports or of their first step.

The phases are timed from outside the library: this file replaces functions of ``lgnn`` by timed ones. A last process
runs under ``python -X importtime``, and attributes the time of the imports to packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
LIBRARIES = "import torch, pytorch_lightning, torch_geometric"
IMPORTS = {"torch, Lightning and PyG": LIBRARIES, "these and lightning_gnn": f"{LIBRARIES}, lightning_gnn"}
WARM, COLD = "lgnn, first step, kernels cached", "lgnn, first step, no kernel cached"
MIN_IMPORT_S = 0.1  # packages that take less are summed up


def _seconds(command: Sequence[str], folder: str, **variables: str) -> tuple[float, str]:
    """Run a process in a folder; return its wall time in seconds and what it wrote to stderr."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    begin = time.perf_counter()
    ended = subprocess.run(
        command, cwd=folder, env={**env, "PYTHONPATH": path, **variables}, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return time.perf_counter() - begin, ended.stderr


def time_first_step(out: str, overrides: Sequence[str]) -> None:
    """Run ``lgnn`` in this process up to the end of the first optimizer step; write the seconds of each phase."""
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + _boot_seconds_at_start()
    marks = [("", started)]

    def mark(name: str) -> None:
        marks.append((name, time.time()))

    def marked(owner: Any, name: str, begin: str = "", end: str = "") -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if begin:
                mark(begin)
            result = function(*args, **kwargs)
            if end:
                mark(end)
            return result

        setattr(owner, name, call)

    def imported() -> None:
        mark("imports")
        import pytorch_lightning as pl

        import lightning_gnn.cli.commands.train as train

        marked(train, "check_config", begin="configuration")
        marked(train, "build_data", end="dataset")
        marked(train, "build_task", end="plan and model")

        class Stop(pl.Callback):
            def on_train_start(self, *args: Any) -> None:
                mark("set-up and sanity check")

            def on_train_batch_start(self, *args: Any) -> None:
                mark("first mini-batch")

            def on_train_batch_end(self, *args: Any) -> None:
                mark("first step")
                phases = {name: end - begin for (_, begin), (name, end) in pairwise(marks)}
                Path(out).write_text(json.dumps(phases))
                sys.stdout.flush()
                os._exit(0)

        build = train.build_trainer

        def build_with_stop(*args: Any) -> pl.Trainer:
            trainer: pl.Trainer = build(*args)
            trainer.callbacks.append(Stop())  # type: ignore[attr-defined]
            mark("Trainer")
            return trainer

        train.build_trainer = build_with_stop

    sys.argv = ["lgnn", *overrides]
    from lightning_gnn import startup
    from lightning_gnn.cli.main import main as lgnn

    startup.done = imported  # which `lgnn` calls between the imports and the run
    lgnn()


def _boot_seconds_at_start() -> float:
    """Return when this process was started, in seconds since the machine's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _first_step(cache: str | None, overrides: Sequence[str], phases: list[dict[str, float]]) -> float:
    """Start ``lgnn`` in a new process; return the seconds up to its first step. No cache: a new one."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "phases.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--first-step", out, *overrides]
        _seconds(command, folder, NUMBA_CACHE_DIR=cache or folder)
        phases.append(json.loads(Path(out).read_text()))
    return sum(phases[-1].values())


def _imports_by_package(folder: str) -> dict[str, float]:
    """Return the seconds that the imports of ``lgnn`` take, by package, without those that each of them imports."""
    command = [sys.executable, "-X", "importtime", "-c", "import lightning_gnn.cli.commands.train"]
    lines = [line.removeprefix("import time:").split("|") for line in _seconds(command, folder)[1].splitlines()]
    found: Counter[str] = Counter()
    for own, _, name in (line for line in lines if len(line) == 3 and line[0].strip().isdigit()):
        found[name.strip().partition(".")[0]] += int(own) / 1e6
    large = {name: seconds for name, seconds in found.most_common() if seconds >= MIN_IMPORT_S}
    return large | {"others": sum(found.values()) - sum(large.values())}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and write the results."""
    from benchmarks.harness import compare, machine, measure, parse, publish, shortened

    args = parse("startup", str(__doc__), {"num_nodes": (100_000, 2_000)}, argv, runs=3)
    overrides = [f"data.num_nodes={args.num_nodes}", "trainer.enable_progress_bar=false"]
    described, phases = machine(), {WARM: [], COLD: []}
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            name: lambda code=code: _seconds([sys.executable, "-c", code], folder)[0] for name, code in IMPORTS.items()
        }
        contestants[WARM] = lambda: _first_step(folder, overrides, phases[WARM])
        contestants[COLD] = lambda: _first_step(None, overrides, phases[COLD])
        rows = measure({name: run for name, run in contestants.items() if args.only in name}, args.runs)
        extra: dict[str, Any] = {
            name: {phase: shortened(median(run.get(phase, 0.0) for run in runs[1:])) for phase in runs[-1]}
            for name, runs in phases.items()
            if runs
        }
        extra["imports"] = {name: shortened(seconds) for name, seconds in _imports_by_package(folder).items()}
    result = {
        "benchmark": "startup",
        "title": "Start-up",
        "unit": "s",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [compare(rows, "kernels cached", [WARM], [COLD], higher_is_better=False)],
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-step"]:
        sys.path[0] = str(ROOT)
        time_first_step(sys.argv[2], sys.argv[3:])
    else:
        main()
