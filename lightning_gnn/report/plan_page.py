"""plan.html of ``lgnn plan``: what a run is expected to take, what holds it up, and what would shorten it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_gnn.report.html import Html, file_of, page, section, table, tag
from lightning_gnn.report.runs import Run, is_run, read_run, shown_seconds
from lightning_gnn.report.svg import bars
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole

_AHEAD = ("sampling", "features", "preparing")
"""Parts of a mini-batch that workers do."""
_PART_COLORS = {"sampling": 2, "features": 1, "preparing": 2}
_PART_COLORS |= {"products": 0, "aggregation": 4, "elementwise": 1, "optimizer": 2, "Python": 3}
_ROUTES = {"collective": "this plan", "cpu": "the CPU alone", "gpu": "the GPU alone"}
_STAGES = {
    "cpu_batching": "a CPU worker prepares it",
    "dma": "its transfer",
    "gpu_batching": "the GPU samples it",
    "uva": "the GPU gathers its features",
    "model": "forward, backward and optimizer",
}
_ONCE = ("plan.", "plan=", "hydra.")
"""What is told to the plan alone."""


def write_plan_page(folder: str | Path, title: str = "", said: Sequence[str] = ()) -> Path:
    """Make ``plan.html`` of what a plan has left in its folder: ``plan.yaml`` and ``platform.yaml``.

    Args:
        title: Heads the page; by default the command.
    """
    folder = Path(folder)
    return write_whole(folder / "plan.html", plan_page(folder, title, said))


def plan_page(folder: Path, title: str = "", said: Sequence[str] = ()) -> str:
    """Return the page of a plan; see :func:`write_plan_page`."""
    run = read_run(folder) if is_run(folder) else None
    plan = _plan(folder / "plan.yaml")
    heading = title or (run.command if run is not None else "lgnn plan")
    when = f"{run.started:%Y-%m-%d %H:%M} · " if run is not None else ""
    describe = _hybrid if "best" in plan else _collective if "gpu_buffer_size" in plan else _cpu
    describe = _placement if "placement" in plan else describe
    return page(
        heading,
        tag("h1", heading),
        tag("p", f"{when}plan · {folder.absolute()}", class_="dim"),
        *describe(plan, [tag("p", sentence) for sentence in said]),
        *_commands(run, "gpu_buffer_size" in plan),
        section("All figures", file_of(folder / "plan.yaml"), file_of(folder / "platform.yaml")),
        section("Configuration", file_of(folder / ".hydra/config.yaml")),
    )


def _plan(path: Path) -> dict[str, Any]:
    try:
        plan = read_yaml(read_text(path))
    except (OSError, ValueError):
        return {}
    return dict(plan) if isinstance(plan, dict) else {}


# -- a run on the CPU


def _cpu(plan: dict[str, Any], said: list[Html]) -> list[Html | None]:
    parts, epoch = _numbers(plan.get("parts_s")), _number(plan.get("epoch_s"))
    rhythm = _numbers(plan.get("batch_s"))
    workers = _inside(plan, "preparation").get("workers")
    rows: list[tuple[object, ...]] = []
    if epoch is not None:
        rows.append(("an epoch", shown_seconds(epoch), f"of {plan.get('batches')} mini-batches, validation left out"))
    for name, key in (("a mini-batch", "seconds"), ("training it", "training"), ("preparing it", "preparing")):
        if key in rhythm:
            many = f"by {workers} worker{'s' * (workers != 1)}" if workers else ""
            note = {"seconds": "from one to the next", "preparing": many}
            rows.append((name, _milliseconds(rhythm[key]), note.get(key, "")))
    name = str(plan.get("bottleneck"))
    if name in parts:
        rows.append(("the bottleneck", name, f"{_milliseconds(parts[name])} of each mini-batch"))
    drawn: dict[str, dict[str, float]] = {"training": {}, "preparation": {}}
    for name, seconds in parts.items():
        drawn["preparation" if workers and name in _AHEAD else "training"][name] = seconds
    lines = {
        who: [(name, 1e3 * seconds, _PART_COLORS.get(name, 5)) for name, seconds in inside.items()]
        for who, inside in drawn.items()
        if inside
    }
    return [
        section("Prediction", *said, table(rows, numbers=[1]) if rows else None),
        section("Where a mini-batch's time goes", bars("A mini-batch", lines, "ms") if lines else None),
        section("Other settings", *_options(plan.get("options"), epoch)),
    ]


def _options(options: Any, epoch: float | None) -> list[Html | None]:
    """Return the settings that were tried, the best first, with what each is expected to gain."""
    found = [option for option in options if isinstance(option, dict)] if isinstance(options, list) else []
    if not found:
        return []
    rows, lengths = [], {"as it is": [("as it is", epoch, 5)]} if epoch else {}
    for option in sorted(found, key=lambda each: _number(each.get("epoch_s")) or math.inf):
        change, seconds, note = str(option.get("change")), _number(option.get("epoch_s")), option.get("note") or ""
        if seconds is None or not epoch:
            rows.append((change, "", "", note))
            continue
        rows.append((change, shown_seconds(seconds), f"{epoch / seconds:.2f}x" if seconds else "", note))
        name = f"setting {len(rows)}"
        lengths[name] = [(name, seconds, 2 if option.get("helps") else 5)]
    helps = any(option.get("helps") for option in found)
    drawn = bars("Predicted epochs", lengths) if len(lengths) > 1 else None
    none = None if helps else tag("p", "None of them is expected to help by more than the noise of a measurement.")
    head = ["setting", "an epoch", "expected gain", ""]
    return [table([(f"{i}: {row[0]}", *row[1:]) for i, row in enumerate(rows, 1)], head, numbers=[1, 2]), drawn, none]


# -- a GPU's memory


def _placement(plan: dict[str, Any], said: list[Html]) -> list[Html | None]:
    parts = plan.get("placement")
    rows: list[tuple[object, ...]] = []
    for name, part in parts.items() if isinstance(parts, dict) else ():
        if isinstance(part, dict):
            size = _number(part.get("device_bytes")) or 0.0
            where = "the device" if part.get("place") == "device" else "host memory"
            rows.append((name, where, f"{size / 1e6:,.1f}", f"{part.get('cached') or 0:,}"))
    for name, key in (("mini-batches", "buffers"), ("other attributes", "fixed"), ("all", "nbytes")):
        rows.append((name, "the device", f"{(_number(plan.get(key)) or 0.0) / 1e6:,.1f}", ""))
    head = ["", "lies in", "MB on the device", "rows or lists cached there"]
    return [section("What lies where", *said, table(rows, head, numbers=[2, 3]))]


# -- collective batching


def _collective(plan: dict[str, Any], said: list[Html]) -> list[Html | None]:
    epochs = _numbers(plan.get("epoch_s"))
    own = epochs.get("collective")
    rows: list[tuple[object, ...]] = [
        (name, shown_seconds(epochs[key]), f"{epochs[key] / own:.2f}x" if own else "")
        for key, name in _ROUTES.items()
        if key in epochs
    ]
    colors = {"collective": 2, "cpu": 1, "gpu": 0}
    lines = {name: [(name, epochs[key], colors[key])] for key, name in _ROUTES.items() if key in epochs}
    on_gpu, on_cpu = plan.get("gpu_buffer_size"), plan.get("cpu_buffer_size")
    who = {
        "collective": f"Of every {_sum(on_gpu, on_cpu)} mini-batches the GPU prepares {on_gpu} and the CPU {on_cpu}.",
        "cpu": "The CPU prepares all mini-batches.",
        "gpu": "The GPU prepares all mini-batches.",
    }.get(str(plan.get("mode")))
    times = _inside(plan, "times")
    stages = []
    for name, note in _STAGES.items():
        duration = _numbers(times.get(name))
        if "mean" in duration:
            spread = _milliseconds(duration.get("spread", 0.0))
            stages.append((name, _milliseconds(duration["mean"]), spread, note))
    head = ["", "an epoch", "against this plan"]
    return [
        section(
            "Prediction",
            *said,
            tag("p", who) if who else None,
            table(rows, head, numbers=[1, 2]) if rows else None,
            bars("Predicted epochs", lines) if len(lines) > 1 else None,
        ),
        section("Stages of a mini-batch", table(stages, ["stage", "mean", "spread", ""], [1, 2]) if stages else None),
    ]


# -- hybrid training


def _hybrid(plan: dict[str, Any], said: list[Html]) -> list[Html | None]:
    mappings = []
    for name, key in (("best mapping", "best"), ("the run begins with", "begin")):
        state = _inside(plan, key)
        times = _numbers(state)
        if "epoch_s" in times and "iteration_s" in times:
            seeds, threads = (" / ".join(map(str, _list(state.get(each)))) for each in ("seeds", "threads"))
            took = _milliseconds(times["iteration_s"]), shown_seconds(times["epoch_s"]), f"{times.get('mteps', 0):.4g}"
            mappings.append((name, seeds, threads, *took))
    stages = []
    for name, state in _inside(plan, "stages_of_best").items():
        if isinstance(state, dict) and (seconds := _number(state.get("seconds"))) is not None:
            stages.append((name, _milliseconds(seconds), state.get("bound_by", "")))
    scaling = []
    for point in _list(plan.get("scaling")):
        figures = _numbers(point)
        if {"iteration_s", "mteps", "speedup"} <= figures.keys():
            speed = _milliseconds(figures["iteration_s"]), f"{figures['mteps']:.4g}", f"{figures['speedup']:.2f}x"
            scaling.append((point.get("nodes"), point.get("accelerators"), *speed, point.get("limit", "")))
    head = ["", "seeds of the trainers", "threads", "an iteration", "an epoch", "MTEPS"]
    across = ["nodes", "accelerators", "an iteration", "MTEPS", "speedup", "limit"]
    return [
        section("Prediction", *said, table(mappings, head, numbers=[3, 4, 5]) if mappings else None),
        section("Stages of an iteration", table(stages, ["stage", "takes", "bound by"], [1]) if stages else None),
        section("Scaling", table(scaling, across, numbers=range(5)) if scaling else None),
    ]


# -- what to type


def _commands(run: Run | None, has_plan: bool) -> list[Html | None]:
    """Return the command that repeats the plan, and the one of the run itself."""
    if run is None:
        return []
    told = [item for item in run.overrides if not item.startswith(_ONCE)]
    if has_plan:
        told.append(f"datamodule.plan={run.folder.absolute() / 'plan.yaml'}")
    there = f"cd {shlex.quote(run.cwd)}\n" if run.cwd else ""
    return [
        section("Run it", tag("pre", there + shlex.join(["lgnn", *told]))),
        section("Plan it again", tag("pre", there + run.command)),
    ]


# -- figures, whatever is in the file


def _inside(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return {str(name): each for name, each in found.items()} if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if number else None


def _numbers(value: Any) -> dict[str, float]:
    found = value.items() if isinstance(value, dict) else ()
    return {str(name): number for name, each in found if (number := _number(each)) is not None}


def _sum(*values: Any) -> int | str:
    numbers = [value for value in values if isinstance(value, int)]
    return sum(numbers) if len(numbers) == len(values) else "so many"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
