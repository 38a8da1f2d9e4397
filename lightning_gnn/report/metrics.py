"""The figures of a run as one dictionary, and metrics.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

from lightning_gnn.runtime.documents import write_whole


class MeasuredEpoch(Protocol):
    """An epoch as :class:`~lightning_gnn.callbacks.Throughput` measures it, which this package does not depend on."""

    @property
    def epoch_time_s(self) -> float: ...  # noqa: D102
    @property
    def sampled_edges_per_s(self) -> float | None: ...  # noqa: D102
    @property
    def mteps(self) -> float: ...  # noqa: D102


def collect_metrics(
    scores: dict[str, float], throughput: MeasuredEpoch | None, num_epochs: int, **more: Any
) -> dict[str, Any]:
    """Put together what metrics.json holds.

    Args:
        scores: Figures such as ``test_acc`` and ``val_acc``.
        throughput: The typical epoch; None if none was measured.
        num_epochs: How many epochs were trained.
        **more: Further entries, as they are.

    Returns:
        ``scores``, ``epochs``, ``epoch_time_s``, ``sampled_edges_per_s``, ``mteps``, ``time_split`` (seconds per
        epoch: ``sampling_s`` and ``features_s`` of the preparing threads, ``model_s``, ``wait_s`` and ``other_s`` of
        the training thread) and ``more``; None for what was not measured.
    """
    measured = throughput is not None
    return {
        **scores,
        "epochs": num_epochs,
        "epoch_time_s": throughput.epoch_time_s if throughput else None,
        "sampled_edges_per_s": throughput.sampled_edges_per_s if throughput else None,
        "mteps": throughput.mteps if throughput else None,
        "time_split": {
            name: getattr(throughput, name) if measured else None
            for name in ("sampling_s", "features_s", "model_s", "wait_s", "other_s")
        },
        **more,
    }


def write_metrics(metrics: dict[str, Any], directory: str | Path) -> Path:
    """Write ``metrics.json``; figures that are no finite number become null, which JSON has no other word for."""
    text = json.dumps(_plain(metrics), indent=2, allow_nan=False) + "\n"
    Path(directory).mkdir(parents=True, exist_ok=True)
    return write_whole(Path(directory) / "metrics.json", text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
