"""Print a forecast: tables of the parts of a mini-batch and of other settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_gnn.planning.forecast import MIN_GAIN, WORKER_PARTS, CPUForecast
from lightning_gnn.planning.limits import MachineLimits
from lightning_gnn.runtime.files import write_whole

if TYPE_CHECKING:  # rich is a dependency of the command only
    from rich.console import Console


@dataclass(frozen=True)
class Option:
    """An alternative setting and its predicted epoch time."""

    change: str  # overrides of the command line
    epoch_s: float | None  # predicted seconds of an epoch; None if the setting cannot be used
    note: str = ""  # its other effects, or why it cannot be used

    def helps(self, found: CPUForecast) -> bool:
        """Return whether it shortens an epoch by more than noise."""
        return self.epoch_s is not None and self.epoch_s < (1 - MIN_GAIN) * found.epoch_s


def rows(found: CPUForecast, limits: MachineLimits, bf16: bool) -> list[tuple[str, str, str, str, str, float]]:
    """Return name, thread, work, rate, machine limit and milliseconds per mini-batch of each part."""
    prepared, step, workers = found.preparation, found.step, found.preparation.workers
    described = []
    for name, seconds in found.parts.items():
        by = f"{workers} worker{'s' * (workers > 1)}" if workers and name in WORKER_PARTS else "training"
        # Relate the time of each part to its amount of work, if known.
        work = rate = limit = ""
        if name in ("sampling", "aggregation", "preparing") and prepared.edges:
            work, rate = f"{prepared.edges:,.0f} edges", f"{1e9 * seconds / prepared.edges:.3g} ns an edge"
            limit = f"{1e9 * limits.random_read_s:.3g} ns a random read" if name == "sampling" else ""
        elif name == "features" and prepared.feature_bytes and seconds:
            work = f"{prepared.nodes:,.0f} rows, {prepared.feature_bytes / 1e6:.3g} MB"
            rate = f"{prepared.feature_bytes / seconds / 1e9:.3g} GB/s"
            limit = f"{limits.gather_bandwidth / 1e9:.3g} GB/s"
        elif name == "products" and step.flops and seconds:
            work, rate = f"{step.flops / 1e9:.3g} GFLOP", f"{step.flops / seconds / 1e9:.3g} GFLOP/s"
            limit = f"{(limits.flops_bf16 if bf16 else limits.flops) / 1e9:.3g} GFLOP/s"
        described.append((name, by, work, rate, limit, 1e3 * seconds))
    return described


def sentences(found: CPUForecast) -> list[str]:
    """Describe the time per mini-batch, the epoch time and the bottleneck in sentences."""
    predicted, name = found.rhythm, found.bottleneck
    milliseconds = 1e3 * found.parts[name]
    reason = {
        "training": "training takes longer than preparing",
        "preparing": "training waits for mini-batches",
        "cores": f"training and preparing together fill {found.cores} core{'s' * (found.cores > 1)}",
    }[predicted.bound]
    slower = f"; in parallel {found.slowdown:.2f}x as long" if found.slowdown > 1 + MIN_GAIN else ""
    return [
        f"Predicted: {1e3 * predicted.seconds:.4g} ms per mini-batch (training {1e3 * predicted.training:.4g} with "
        f"{found.threads} thread{'s' * (found.threads > 1)}, preparing {1e3 * predicted.preparing:.4g} with "
        f"{found.preparation.workers} workers{slower}), {found.epoch_s:.3g} s per epoch of "
        f"{found.batches:,} mini-batches.",
        f"Bottleneck: {name}, {milliseconds:.3g} ms of each mini-batch; {reason}.",
        *found.unknown,
        *(["Other processes kept this machine busy: do not trust these numbers."] if found.busy else []),
    ]


def print_forecast(
    found: CPUForecast, options: list[Option], limits: MachineLimits, bf16: bool, console: Console
) -> None:
    """Print the parts of a mini-batch, the bottleneck, and the options, the fastest first."""
    from lightning_gnn.report.tables import make_table

    table = make_table("A mini-batch", "part", "by", "work", "rate", "limit", "ms", left=["by"])
    for *texts, milliseconds in rows(found, limits, bf16):
        style = "bold" if texts[0] == found.bottleneck else None
        table.add_row(*texts, f"{milliseconds:.3g}", style=style)
    console.print(table)
    for sentence in sentences(found):
        console.print(sentence, highlight=False, soft_wrap=True)
    if not options:
        return
    table = make_table("Other settings", "setting", "epoch", "speedup", "", left=[""])
    for option in sorted(options, key=lambda each: each.epoch_s or float("inf")):
        if option.epoch_s is None:
            table.add_row(option.change, "", "", option.note, style="dim")
            continue
        speedup = f"{found.epoch_s / option.epoch_s:.2f}x"
        style = "bold" if option.helps(found) else None
        table.add_row(option.change, f"{option.epoch_s:.3g} s", speedup, option.note, style=style)
    console.print(table)
    if not any(option.helps(found) for option in options):
        console.print("No setting is expected to shorten an epoch.", highlight=False)


def save_forecast(found: CPUForecast, options: list[Option], limits: MachineLimits, path: Path) -> None:
    """Write the forecast, its options and limits as YAML."""
    state: dict[str, Any] = {
        "epoch_s": found.epoch_s,
        "batches": found.batches,
        "batch_s": asdict(found.rhythm),
        "bound_by": found.rhythm.bound,
        "slowdown": found.slowdown,
        "bottleneck": found.bottleneck,
        "parts_s": found.parts,
        "preparation": asdict(found.preparation),
        "steps": {threads: asdict(step) for threads, step in found.steps.items()},
        "threads": found.threads,
        "cores": found.cores,
        "limits": asdict(limits),
        "options": [{**asdict(option), "helps": option.helps(found)} for option in options],
        "unknown": list(found.unknown),
        "busy": found.busy,
    }
    write_whole(path, yaml.safe_dump(state, sort_keys=False, allow_unicode=True))
