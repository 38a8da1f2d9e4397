"""What runs have left in their folders: found, and read for those who compare or show them."""

from __future__ import annotations

import csv
import io
import math
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from lightning_gnn.runtime.files import LARGEST_JSON, read_json, read_text, read_yaml, write_whole

State = Literal["done", "failed", "unfinished", "plan"]
_CURVES = "curves.csv"


@dataclass
class Run:
    """What is known of a run.

    Args:
        folder: Where it has left its files.
        state: ``"unfinished"`` if it has left no ``metrics.json``, because it was interrupted or still runs.
        started: When it began, or was configured.
        job: Its number in a sweep, or None.
        cwd: Where it was started; empty if that is not known.
    """

    folder: Path
    state: State
    started: datetime
    overrides: list[str] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    job: int | None = None
    cwd: str = ""

    @property
    def seconds(self) -> float | None:
        """Duration; None if it did not end."""
        value = self.metrics.get("total_time_s")
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def scores(self) -> dict[str, float]:
        """Its figures of validation and test, but losses."""
        found = {name: value for name, value in self.metrics.items() if name.startswith(("test_", "val_"))}
        return {
            name: value for name, value in found.items() if name[-5:] != "_loss" and isinstance(value, (int, float))
        }

    def settings(self, keys: Iterable[str]) -> dict[str, str]:
        """Return what was in force under some keys or groups, typed or not, as it is typed; empty where none was."""
        typed = dict(item.lstrip("+").partition("=")[::2] for item in self.overrides)
        typed |= {item: "yes" for item in typed if item.startswith("~")}
        config, hydra = (_yaml(self.folder / ".hydra" / name) for name in ("config.yaml", "hydra.yaml"))
        chosen = _inside(_inside(_inside(hydra, "hydra"), "runtime"), "choices")
        return {key: typed[key] if key in typed else _typed(chosen.get(key, _below(config, key))) for key in keys}

    @property
    def command(self) -> str:
        """What to type to repeat it."""
        return shlex.join(["lgnn", *["plan"] * (self.state == "plan"), *self.overrides])


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Return the runs in and below folders, the latest first; what cannot be read is left empty."""
    found = {}
    for folder in folders:
        for above, inside, files in os.walk(folder):
            if ".hydra" in inside or "metrics.json" in files:
                inside[:] = [name for name in inside if name not in (".hydra", "checkpoints", "logs")]
                if (path := Path(above)).resolve() not in found and is_run(path):
                    found[path.resolve()] = read_run(path)
    return sorted(found.values(), key=lambda run: (run.started, run.job or 0), reverse=True)


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of one run or plan."""
    return any((folder / name).is_file() for name in (".hydra/overrides.yaml", "metrics.json"))


def read_run(folder: str | Path) -> Run:
    """Read what a run has left."""
    folder = Path(folder)
    if not is_run(folder):
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has neither metrics.json nor .hydra")
    metrics, settings = _metrics(folder / "metrics.json"), _yaml(folder / ".hydra/hydra.yaml")
    hydra = _inside(settings, "hydra")
    job, runtime = _inside(hydra, "job"), _inside(hydra, "runtime")
    overrides = _yaml(folder / ".hydra/overrides.yaml")
    return Run(
        folder,
        _state(folder, metrics, str(job.get("config_name"))),
        _started(folder, metrics),
        [str(item) for item in overrides] if isinstance(overrides, list) else [],
        metrics,
        job["num"] if isinstance(job.get("num"), int) else None,
        str(runtime.get("cwd", "")),
    )


def write_curves(epochs: Sequence[dict[str, float]], folder: str | Path) -> Path:
    """Write ``curves.csv``: one row per epoch, one column per figure."""
    columns = list(dict.fromkeys(name for row in epochs for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(epochs)
    return write_whole(Path(folder) / _CURVES, text.getvalue())


def read_curves(folder: str | Path) -> list[dict[str, float]]:
    """Read ``curves.csv``; empty where it is missing or damaged."""
    try:
        rows = [*csv.DictReader(io.StringIO(read_text(Path(folder) / _CURVES, LARGEST_JSON)))]
        return [{name: float(value) for name, value in row.items() if name and value} for row in rows]
    except (OSError, ValueError, csv.Error):
        return []


def shown_score(name: str, value: float) -> str:
    """Return a score as people read it: accuracy in percent."""
    return f"{value:.2%}" if name.endswith("_acc") else f"{value:.4f}"


def shown_seconds(seconds: float | None) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _metrics(path: Path) -> dict[str, Any]:
    try:
        found = read_json(read_text(path, LARGEST_JSON))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        return {"error": f"{path} cannot be read: {error}"}
    return dict(found) if isinstance(found, dict) else {"error": f"{path} holds no figures"}


def _yaml(path: Path) -> Any:
    try:
        return read_yaml(read_text(path))
    except (OSError, ValueError):
        return None


def _inside(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _below(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _typed(value: Any) -> str:
    """Return a setting as one types it; what is null or a whole section counts as left out."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return "" if value is None or isinstance(value, dict) else str(value)


def _state(folder: Path, metrics: dict[str, Any], config_name: str) -> State:
    if metrics:
        return "failed" if metrics.get("error") else "done"
    return "plan" if config_name.startswith("plan") else "unfinished"


def _started(folder: Path, metrics: dict[str, Any]) -> datetime:
    try:
        return datetime.fromisoformat(str(metrics.get("started"))).astimezone()
    except ValueError:
        files = (folder / ".hydra/overrides.yaml", folder / "metrics.json")
        return datetime.fromtimestamp(next(path for path in files if path.is_file()).stat().st_mtime).astimezone()
