"""The page of several runs beside one another: report.html of a sweep, comparison.html of others."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning_gnn.report.html import Html, page, table, tag
from lightning_gnn.report.metrics import BOUNDED, LOWER_IS_BETTER
from lightning_gnn.report.runs import Run, find_runs, read_curves, shown_score, shown_seconds
from lightning_gnn.report.svg import line_chart, parallel_coordinates
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole

_ONCE = ("hydra.mode=", "hydra.run.dir=", "hydra.sweep.dir=")
"""What is not typed again: a sweep repeated in its old folder would write over it."""


def write_sweep_page(folder: str | Path, rows: Sequence[dict[str, Any]], told: Sequence[str]) -> Path:
    """Make ``report.html`` in the folder of a sweep.

    Args:
        told: The columns of what the runs were told differently.
    """
    runs = {run.job: run for run in find_runs([folder]) if run.job is not None}
    return write_comparison_page(Path(folder) / "report.html", rows, told, runs, "Sweep")


def write_comparison_page(
    path: Path,
    rows: Sequence[dict[str, Any]],
    told: Sequence[str],
    runs: Mapping[int, Run] | Mapping[str, Run],
    what: str = "Comparison",
) -> Path:
    """Make the page of several runs.

    Args:
        told: The columns of what the runs were told differently.
        runs: By their names in the rows.
    """
    found: dict[Any, Run] = dict(runs)
    rows = [{**row, **found[row["job"]].scores} if row["job"] in found else row for row in rows]
    return write_whole(path, _page(path.parent, rows, told, found, what))


def _page(folder: Path, rows: Sequence[dict[str, Any]], told: Sequence[str], runs: dict[Any, Run], what: str) -> str:
    first = min((run.started for run in runs.values()), default=None)
    title = f"{what} over {', '.join(told)}" if told else what
    ok = [row for row in rows if row["status"] == "ok"]
    score = next((name for name in _scores(ok)), None)
    began = f"{first:%Y-%m-%d %H:%M} · " if first else ""
    failed = len(rows) - len(ok)
    counted = f"{len(rows)} runs" + (f", {failed} failed" if failed else "")
    return page(
        title,
        tag("h1", title),
        tag("p", f"{began}{counted} · {folder.absolute()}", class_="dim"),
        tag("h2", "Comparison"),
        _comparison(folder, rows, told, runs),
        *_groups(ok, told, score),
        *_pictures(ok, told, score, runs),
        *_command(folder),
    )


def _scores(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the scores that the rows have, in their order, those of the test first."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(("test_", "val_")))
    found = [name for name in names if not name.endswith(("_mean", "_std", "_loss"))]
    return sorted(found, key=lambda name: not name.startswith("test_"))


def _lower_is_better(score: str) -> bool:
    return score.partition("_")[2] in LOWER_IS_BETTER


def _comparison(folder: Path, rows: Sequence[dict[str, Any]], told: Sequence[str], runs: dict[Any, Run]) -> Html:
    scores = _scores(rows)
    cells = []
    for row in rows:
        run = runs.get(row["job"])
        page_of = None if run is None else run.folder / "report.html"
        name = tag("span", row["job"], class_="name")
        if page_of is not None and page_of.is_file():
            name = tag("a", name, href=quote(Path(os.path.relpath(page_of, folder)).as_posix()))
        took = shown_seconds(run.seconds) if run is not None else ""
        values = [shown_score(key, row[key]) if isinstance(row.get(key), (int, float)) else "" for key in scores]
        values.append(shown_seconds(row.get("epoch_time_s")))
        note = tag("span", row.get("error", ""), class_="bad")
        cells.append([name, *(_shown(row.get(key, "")) for key in told), *values, took, note])
    head = ["job", *told, *scores, "an epoch", "in all", ""]
    return table(cells, head, numbers=range(1 + len(told), len(head) - 1))


def _groups(rows: Sequence[dict[str, Any]], told: Sequence[str], score: str | None) -> list[Html]:
    """Return mean and standard deviation over the seeds, the best first, where there are several."""
    keys = [key for key in told if key != "seed"]
    groups = {tuple(row.get(key, "") for key in keys): row for row in rows if row.get("runs", 1) > 1}
    if score is None or not groups or not all(f"{score}_mean" in row for row in groups.values()):
        return []
    sign = 1 if _lower_is_better(score) else -1
    best = sorted(groups.items(), key=lambda item: sign * item[1][f"{score}_mean"])
    cells = [
        [
            *map(_shown, key),
            shown_score(score, row[f"{score}_mean"]),
            shown_score(score, row[f"{score}_std"]),
            row["runs"],
        ]
        for key, row in best
    ]
    head = [*keys, f"{score}, mean", "standard deviation", "runs"]
    return [tag("h2", "Over the seeds"), table(cells, head, numbers=range(len(keys), len(head)))]


def _pictures(
    rows: Sequence[dict[str, Any]], told: Sequence[str], score: str | None, runs: dict[Any, Run]
) -> list[Html]:
    found: list[Html] = []
    if score is None:
        return found
    names = [
        f"{_called(row['job'])}: {', '.join(f'{key}={_shown(row[key])}' for key in told if row.get(key))}"
        for row in rows
    ]
    columns = {key: [row.get(key) for row in rows] for key in [*told, score]}
    across = parallel_coordinates(columns, names, lowest=_lower_is_better(score))
    if across is not None:
        note = "One line per run, the stronger the better its score; point at a line for its settings."
        found += [tag("h2", "Settings and scores"), across, tag("p", note, class_="dim")]
    kind = f"val_{score.partition('_')[2]}"
    curves = {}
    for row, name in zip(rows, names, strict=True):
        if (run := runs.get(row["job"])) is not None:
            curves[name] = [(line["epoch"] + 1, line[kind]) for line in read_curves(run.folder) if kind in line]
    whole = (0.0, 1.0) if kind.removeprefix("val_") in BOUNDED else None
    chart = line_chart(kind, curves, bounds=whole, percent=kind.endswith("_acc"), width=1080.0)
    return found if chart is None else [*found, tag("h2", "Validation"), chart]


def _shown(setting: Any) -> str:
    """Return a setting, of a number that was drawn four digits; comparison.csv has all of them."""
    text = str(setting)
    return f"{float(text):.4g}" if re.fullmatch(r"-?\d*\.\d{6,}(e-?\d+)?", text) else text


def _called(name: int | str) -> str:
    return f"job {name}" if isinstance(name, int) else name


def _command(folder: Path) -> list[Html]:
    """Return the command that Hydra has noted."""
    try:
        hydra = read_yaml(read_text(folder / "multirun.yaml"))["hydra"]
        typed = [str(item) for part in ("hydra", "task") for item in hydra["overrides"][part]]
        cwd = str(hydra["runtime"]["cwd"])
    except (OSError, ValueError, LookupError, TypeError):
        return []
    typed = [item for item in typed if not item.startswith(_ONCE)]
    return [tag("h2", "Repeat it"), tag("pre", f"cd {shlex.quote(cwd)}\n{shlex.join(['lgnn', '-m', *typed])}")]
