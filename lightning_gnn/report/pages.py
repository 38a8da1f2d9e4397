"""HTML pages of runs and sweeps, from the templates in the folder ``templates``."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from lightning_gnn.report import metrics as figures
from lightning_gnn.report.metrics import Metrics, number
from lightning_gnn.report.runs import Run, read_curves, read_run
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole

_MAX_TEXT_BYTES = 1 << 20
_NOT_REPEATED = ("hydra.mode=", "hydra.run.dir=", "hydra.sweep.dir=")
"""Overrides omitted from the command that repeats a sweep, which would otherwise overwrite its folder."""
Name = TypeVar("Name", int, str)


def write_run_page(folder: str | Path) -> Path:
    """Write ``report.html`` in the folder of a run, without the sections whose files are missing; return its path."""
    run = read_run(folder)
    epochs, curves = read_curves(run.folder), ""
    if epochs:
        from lightning_gnn.report import charts

        kinds = [name.removeprefix("val_") for name in epochs[-1] if name.startswith("val_")]
        panels = [charts.panel_of(run.metrics, epochs, kind) for kind in dict.fromkeys(["loss", *kinds])]
        curves = charts.inline_svg(panels, "loss and scores over the epochs")
    return _write(
        run.folder / "report.html", "run", run.metrics.get("title") or run.command, run=run, curves=curves,
        scores=figures.score_rows(run.metrics), speeds=figures.speed_rows(run.metrics),
        split=figures.split_rows(run.metrics).items(),
    )  # fmt: skip


def write_runs_page(
    path: Path, rows: Sequence[Metrics], runs: Mapping[Name, Run], settings: list[str], scores: list[str], what: str
) -> Path:
    """Write the page of several runs, ordered by the first score; ``what`` is the title, such as ``"Sweep"``."""
    ok, score = [row for row in rows if row["status"] == "ok"], next(iter(scores), "")
    kind, keys = score.partition("_")[2], [key for key in settings if key != "seed"]
    lower_is_better, curves = kind in figures.LOWER_IS_BETTER, ""
    if ok and score:
        from lightning_gnn.report import charts

        lines = {}
        for row in ok:
            overrides = ", ".join(f"{key}={_format_setting(row[key])}" for key in settings if row.get(key))
            epochs = read_curves(runs[row["job"]].folder) if row["job"] in runs else []
            lines[f"{run_name(row['job'])}: {overrides}"] = charts.panel_of({}, epochs, kind).lines["validation"]
        curves = charts.inline_svg([charts.Panel(kind, lines, {})], f"{score} of the runs over the epochs")
    repeated = [row for row in ok if row.get("runs", 1) > 1 and f"{score}_mean" in row]
    groups = {tuple(row.get(key) for key in keys): row for row in repeated}.values()
    pages = {name: run.folder / "report.html" for name, run in runs.items()}
    existing = {name: Path(os.path.relpath(page, path.parent)) for name, page in pages.items() if page.is_file()}
    title = f"{what} over {', '.join(settings)}" if settings else what
    return _write(
        path, "sweep", title, folder=path.parent, rows=rows, runs=runs, settings=settings,
        scores=scores, score=score, curves=curves, command=_sweep_command(path.parent),
        groups=sorted(groups, key=lambda row: row[f"{score}_mean"], reverse=not lower_is_better), keys=keys,
        links={name: quote(page.as_posix()) for name, page in existing.items()},
        first=min((run.started for run in runs.values()), default=None),
    )  # fmt: skip


def run_name(name: int | str) -> str:
    """Return the display name of a run: ``"job N"`` in a sweep, else its folder."""
    return f"job {name}" if isinstance(name, int) else name


def _sweep_command(folder: Path) -> str:
    """Return the command that Hydra saved for a sweep; empty if it is missing or damaged."""
    try:
        hydra = read_yaml(read_text(folder / "multirun.yaml"))["hydra"]
        typed = [str(item) for part in ("hydra", "task") for item in hydra["overrides"][part]]
        cwd = str(hydra["runtime"]["cwd"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    typed = [item for item in typed if not item.startswith(_NOT_REPEATED)]
    return f"cd {shlex.quote(cwd)}\n{shlex.join(['lgnn', '-m', *typed])}"


def _write(path: Path, template: str, title: str, **content: object) -> Path:
    """Render a template and write the page atomically."""
    return write_whole(path, _templates().get_template(f"{template}.html.j2").render(title=title, **content))


@cache
def _templates() -> Environment:
    """Return the environment of the templates; it escapes all text and renders undefined values as empty."""
    folder = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=folder, autoescape=True, undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "minute": lambda time: f"{time:%Y-%m-%d %H:%M}",
        "number": number,
        "of": lambda key, row: row.get(key, ""),
        "pairs": lambda value: [*value.items()] if isinstance(value, dict) else [],
        "quote": shlex.quote,
        "score": lambda key, row, name=None: figures.shown(name or key, row.get(key)),
        "seconds": figures.format_seconds,
        "setting": _format_setting,
        "text": _read_text_or_none,
    }
    return environment


def _format_setting(value: object) -> str:
    """Format a setting, with four digits if it was sampled; comparison.csv has all digits."""
    text = str(value)
    return f"{float(text):.4g}" if re.fullmatch(r"-?\d*\.\d{6,}(e-?\d+)?", text) else text


def _read_text_or_none(path: Path) -> str | None:
    """Return the content of a text file; None if it is missing, unreadable or too large."""
    try:
        return read_text(path, _MAX_TEXT_BYTES)
    except (OSError, ValueError):
        return None
