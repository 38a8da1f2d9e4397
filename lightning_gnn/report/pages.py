"""The pages of runs, of sweeps and of plans, whose templates are in the folder beside this file."""

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from lightning_gnn.report import metrics as figures
from lightning_gnn.report.metrics import number
from lightning_gnn.report.runs import Run, is_run, read_curves, read_run
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole

_LARGEST_TEXT = 1 << 20
_ONLY_PLANS = ("plan.", "plan=", "hydra.")  # what is told to the plan alone
_ONCE = ("hydra.mode=", "hydra.run.dir=", "hydra.sweep.dir=")
"""What is not typed again: a sweep repeated in its old folder would write over it."""


def write_run_page(folder: str | Path) -> Path:
    """Make ``report.html`` of what lies in the folder of a run; whatever is missing there is left out."""
    run = read_run(folder)
    epochs, curves = read_curves(run.folder), []
    if epochs:
        from lightning_gnn.report import charts

        kinds = [name.removeprefix("val_") for row in epochs[-1:] for name in row if name.startswith("val_")]
        for kind in dict.fromkeys(["loss", *kinds]):
            lines, levels = charts.curves_of(run.metrics, epochs, kind)
            curves.append(charts.line_chart(charts.name_of(kind), lines, levels, kind))
    default = " ".join(["lgnn", *["plan"] * (run.state == "plan"), *run.overrides])
    return _write(
        run.folder / "report.html", "run", run.metrics.get("title") or default, run=run, curves=[*filter(None, curves)],
        scores=figures.score_rows(run.metrics), speeds=figures.speed_rows(run.metrics),
        split=figures.split_rows(run.metrics).items(),
    )  # fmt: skip


def write_plan_page(folder: str | Path, title: str = "", said: Sequence[str] = ()) -> Path:
    """Make ``plan.html`` of what a plan has left in its folder: ``plan.yaml``.

    Args:
        title: Heads the page; by default the command.
    """
    folder = Path(folder)
    run = read_run(folder) if is_run(folder) else None
    try:
        plan = _pairs(read_yaml(read_text(folder / "plan.yaml")))
    except (OSError, ValueError):
        plan = []
    told, state = ["lgnn"], dict(plan)
    if run is not None:
        told += [item for item in run.overrides if not item.startswith(_ONLY_PLANS)]
        told += [f"datamodule.plan={folder.absolute() / 'plan.yaml'}"] if "gpu_buffer_size" in state else []
    more = {"run": run, "plan": state, "told": shlex.join(told), "said": said}
    title = title or (run.command if run is not None else "lgnn plan")
    return _write(folder / "plan.html", "plan", title, folder=folder, **more)


def write_runs_page(
    path: Path, rows: Sequence[dict[str, Any]], runs: Mapping[Any, Run], told: list[str], scores: list[str], what: str
) -> Path:
    """Make the page of several runs.

    Args:
        scores: The columns of the scores; by the first the runs are ordered.
        what: They are, as in ``"Sweep"``.
    """
    ok, score = [row for row in rows if row["status"] == "ok"], next(iter(scores), "")
    kind, keys = score.partition("_")[2], [key for key in told if key != "seed"]
    lowest, slices, curves = kind in figures.LOWER_IS_BETTER, None, None
    if ok and score:
        from lightning_gnn.report import charts

        lines: dict[str, Any] = {}
        for row in ok:
            given = ", ".join(f"{key}={_setting(row[key])}" for key in told if row.get(key))
            epochs = read_curves(runs[row["job"]].folder) if row["job"] in runs else []
            lines[f"{run_name(row['job'])}: {given}"] = charts.curves_of({}, epochs, kind)[0].get("validation", [])
        if told and len(ok) > 1:
            settings = {key: [row.get(key) for row in ok] for key in told}
            slices = charts.slice_chart(score, settings, [row.get(score) for row in ok], [*lines])
        curves = charts.line_chart(f"val_{kind}", lines, kind=kind, width=1080)
    repeated = [row for row in ok if row.get("runs", 1) > 1 and f"{score}_mean" in row]
    groups = {tuple(row.get(key) for key in keys): row for row in repeated}.values()
    pages = {name: run.folder / "report.html" for name, run in runs.items()}
    there = {name: Path(os.path.relpath(page, path.parent)) for name, page in pages.items() if page.is_file()}
    return _write(
        path, "sweep", f"{what} over {', '.join(told)}" if told else what, folder=path.parent, rows=rows, runs=runs,
        told=told, scores=scores, score=score, slices=slices, curves=curves, command=_sweep_command(path.parent),
        groups=sorted(groups, key=lambda row: row[f"{score}_mean"], reverse=not lowest), keys=keys,
        links={name: quote(page.as_posix()) for name, page in there.items()},
        first=min((run.started for run in runs.values()), default=None),
    )  # fmt: skip


def run_name(name: int | str) -> str:
    """Return what to call a run of a sweep, or another."""
    return f"job {name}" if isinstance(name, int) else name


def _sweep_command(folder: Path) -> str:
    """Return the command that Hydra has noted; empty where it has not."""
    try:
        hydra = read_yaml(read_text(folder / "multirun.yaml"))["hydra"]
        typed = [str(item) for part in ("hydra", "task") for item in hydra["overrides"][part]]
        cwd = str(hydra["runtime"]["cwd"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    typed = [item for item in typed if not item.startswith(_ONCE)]
    return f"cd {shlex.quote(cwd)}\n{shlex.join(['lgnn', '-m', *typed])}"


def _write(path: Path, template: str, title: Any, **content: Any) -> Path:
    """Write a page as a whole file."""
    return write_whole(path, _templates().get_template(f"{template}.html.j2").render(title=title, **content))


@cache
def _templates() -> Environment:
    """Return the templates, which escape all text, and leave empty what is not there."""
    folder = FileSystemLoader(Path(__file__).parent / "templates")
    found = Environment(
        loader=folder, autoescape=True, undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {
        "by_time": lambda options: sorted(
            (each for each in _listed(options) if isinstance(each, dict)),
            key=lambda each: math.inf if (seconds := number(each.get("epoch_s"))) is None else seconds,
        ),
        "listed": _listed,
        "minute": lambda time: f"{time:%Y-%m-%d %H:%M}",
        "ms": lambda value: _shown(value, "%.4g ms", 1e3),
        "number": number,
        "of": _of,
        "pairs": _pairs,
        "quote": shlex.quote,
        "score": lambda key, row, name=None: figures.shown(name or key, row.get(key)),
        "seconds": figures.shown_seconds,
        "setting": _setting,
        "shown": _shown,
        "text": _text,
    }
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return [*value.items()] if isinstance(value, dict) else []


def _of(key: str, value: Any) -> Any:
    return value.get(key, "") if isinstance(value, dict) else ""


def _shown(value: Any, form: str, factor: float = 1) -> str:
    return "" if number(value) is None else form % (factor * value)


def _setting(value: Any) -> str:
    """Return a setting, of a number that was drawn four digits; comparison.csv has all of them."""
    text = str(value)
    return f"{float(text):.4g}" if re.fullmatch(r"-?\d*\.\d{6,}(e-?\d+)?", text) else text


def _text(path: Path) -> str | None:
    """Return a text file; None if there is none, or it is too large."""
    try:
        return read_text(path, _LARGEST_TEXT)
    except (OSError, ValueError):
        return None
