"""Find runs, and read the results in their folders."""

import csv
import io
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from lightning_gnn.report.metrics import Metrics, number
from lightning_gnn.runtime.files import LARGEST_JSON, read_json, read_text, read_yaml, write_whole

State = Literal["done", "failed", "unfinished", "plan"]
_CURVES_FILE = "curves.csv"


@dataclass
class Run:
    """A run, as read from its folder."""

    folder: Path
    state: State  # "unfinished" without a metrics.json, because it was interrupted or still runs
    started: datetime  # start, or time of configuration
    overrides: list[str] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    job: int | None = None  # its number in a sweep, or None
    cwd: str = ""  # the directory it was started in; empty if unknown
    subdir: str = ""  # hydra.sweep.subdir of its worker, not resolved; empty if unknown

    @property
    def seconds(self) -> float | None:
        """Duration in seconds; None if the run did not end."""
        return number(self.metrics.get("total_time_s"))

    @property
    def scores(self) -> dict[str, float]:
        """Validation and test metrics without losses."""
        found = {name: value for name, value in self.metrics.items() if name.startswith(("test_", "val_"))}
        return {name: value for name, value in found.items() if name[-5:] != "_loss" and number(value) is not None}

    def settings(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the effective settings of keys or groups, as typed on the command line; empty if unset."""
        typed = dict(item.lstrip("+").partition("=")[::2] for item in self.overrides)
        typed |= {item: "yes" for item in typed if item.startswith("~")}
        config, hydra = (_yaml(self.folder / ".hydra" / name) for name in ("config.yaml", "hydra.yaml"))
        chosen = _lookup(hydra, "hydra.runtime.choices") or {}
        return {key: typed[key] if key in typed else _unparse(chosen.get(key, _lookup(config, key))) for key in keys}

    @property
    def command(self) -> str:
        """Shell command that repeats the run."""
        return shlex.join(["lgnn", *["plan"] * (self.state == "plan"), *self.overrides])


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Return the runs in and below folders, the latest first; unreadable fields are empty."""
    found = {}
    for folder in folders:
        for parent, subfolders, files in os.walk(folder):
            if ".hydra" in subfolders or "metrics.json" in files:
                subfolders[:] = [name for name in subfolders if name not in (".hydra", "checkpoints", "logs")]
                if (path := Path(parent)).resolve() not in found and is_run(path):
                    found[path.resolve()] = read_run(path)
    return sorted(found.values(), key=lambda run: (run.started, run.job or 0), reverse=True)


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of one run or plan."""
    return any((folder / name).is_file() for name in (".hydra/overrides.yaml", "metrics.json"))


def read_run(folder: str | Path) -> Run:
    """Read the run of a folder; raise a FileNotFoundError if it holds none."""
    folder = Path(folder)
    if not is_run(folder):
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has neither metrics.json nor .hydra")
    metrics, settings = _metrics(folder / "metrics.json"), _yaml(folder / ".hydra/hydra.yaml")
    overrides, job = _yaml(folder / ".hydra/overrides.yaml"), _lookup(settings, "hydra.job.num")
    planned = str(_lookup(settings, "hydra.job.config_name")).startswith("plan")
    state: State = "plan" if planned else "unfinished"
    return Run(
        folder,
        ("failed" if metrics.get("error") else "done") if metrics else state,
        _started(folder, metrics),
        [str(item) for item in overrides] if isinstance(overrides, list) else [],
        metrics,
        job if isinstance(job, int) else None,
        str(_lookup(settings, "hydra.runtime.cwd") or ""),
        str(_lookup(settings, "hydra.sweep.subdir") or ""),
    )


def write_csv(rows: Sequence[Metrics], path: Path, columns: Sequence[str] = ()) -> Path:
    """Write rows to a CSV file, by default with all their columns; return its path."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns or [*dict.fromkeys(name for row in rows for name in row)], restval="")
    writer.writeheader()
    writer.writerows(rows)
    return write_whole(path, text.getvalue())


def write_curves(epochs: Sequence[dict[str, float]], folder: str | Path) -> Path:
    """Write ``curves.csv``: one row per epoch, one column per metric."""
    return write_csv(epochs, Path(folder) / _CURVES_FILE)


def read_curves(folder: str | Path) -> list[dict[str, float]]:
    """Read ``curves.csv``; empty if it is missing or damaged."""
    try:
        rows = [*csv.DictReader(io.StringIO(read_text(Path(folder) / _CURVES_FILE, LARGEST_JSON)))]
        return [{name: float(value) for name, value in row.items() if name and value} for row in rows]
    except (OSError, ValueError, csv.Error):
        return []


def _metrics(path: Path) -> Metrics:
    try:
        content = read_json(read_text(path, LARGEST_JSON))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        return {"error": f"{path} cannot be read: {error}"}
    return dict(content) if isinstance(content, dict) else {"error": f"{path} is not a JSON object of metrics"}


def _yaml(path: Path) -> Any:
    try:
        return read_yaml(read_text(path))
    except (OSError, ValueError):
        return None


def _lookup(value: object, key: str) -> Any:
    """Return the value of a dotted key in nested mappings, or None."""
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _unparse(value: object) -> str:
    """Format a setting as typed on the command line; empty for null or a whole section."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_unparse, value))}]"
    return "" if value is None or isinstance(value, dict) else str(value)


def _started(folder: Path, metrics: Metrics) -> datetime:
    try:
        return datetime.fromisoformat(str(metrics.get("started"))).astimezone()
    except ValueError:
        files = (folder / ".hydra/overrides.yaml", folder / "metrics.json")
        return datetime.fromtimestamp(next(path for path in files if path.is_file()).stat().st_mtime).astimezone()
