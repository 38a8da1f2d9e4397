"""How well ``lgnn plan`` predicts an epoch on the CPU: predicted and measured seconds, for models, batches and widths.

Each setting has a process of its own, which first predicts, from a few mini-batches and steps, and then trains. The
figure is seconds per epoch; beside it stand what was predicted and by how much that was off.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks import epoch
from benchmarks.harness import Gate, Isolated, Rows, measure, parse, publish
from benchmarks.machine import machine
from benchmarks.minibatch import make_data
from benchmarks.timed_epochs import TimedEpochs
from lightning_gnn.planning import measure_run

SIZES = {
    "nodes": (200_000, 10_000),
    "edges": (4_000_000, 100_000),
    "features": (100, 16),
    "train_nodes": (20_000, 1_000),
}
CASES = {
    f"{model}, {batch} seeds, {hidden} wide, {workers} + {threads} threads": {
        "model": model, "batch_size": batch, "hidden": hidden, "num_workers": workers, "torch_threads": threads,
    }
    for model, batch, hidden, workers, threads in (
        ("SAGE", 1024, 256, 1, 1), ("SAGE", 1024, 256, 1, 2), ("SAGE", 1024, 256, 2, 2), ("SAGE", 1024, 256, 0, 2),
        ("SAGE", 256, 256, 1, 1), ("SAGE", 1024, 16, 1, 1), ("SAGE", 1024, 16, 2, 1), ("SAGE", 2048, 64, 1, 2),
        ("GCN", 1024, 256, 1, 2), ("GCN", 512, 64, 1, 1), ("GAT", 1024, 256, 1, 2), ("GAT", 512, 64, 2, 1),
    )
}  # fmt: skip
WITHIN = 0.2
"""Error that the plan is allowed."""


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Report the predicted seconds of an epoch, then train for as many epochs as there are rounds."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(spec["torch_threads"])
    data = make_data(spec["nodes"], spec["edges"], spec["features"], epoch.CLASSES)
    seeds = torch.randperm(spec["nodes"], generator=torch.Generator().manual_seed(0))[: spec["train_nodes"]]
    gate.wait()
    model, datamodule = epoch.make(data, seeds, spec)
    gate.report(measure_run(datamodule, model, partial(_trainer, spec)).epoch_s)
    model, datamodule = epoch.make(data, seeds, spec)
    epoch.trainer(spec, max_epochs=gate.rounds - 1, callbacks=[TimedEpochs(gate)]).fit(model, datamodule)


def _trainer(spec: dict[str, Any], **more: Any) -> pl.Trainer:
    return epoch.trainer(
        spec, **{name: value for name, value in more.items() if not name.startswith(("enable", "logger"))}
    )


def run(sizes: dict[str, int], runs: int, only: str = "") -> Rows:
    """Predict and measure the cases whose name contains ``only``, one after the other; returns their rows."""
    rows: Rows = []
    for name, case in CASES.items():
        if only not in f"ours, {name}":
            continue
        process = Isolated(contestant, {**sizes, **case, "library": "ours", "device": "cpu"}, runs + 2)
        try:
            predicted = process()
            (row,) = measure({f"ours, {name}": process}, runs)
        finally:
            process.close()
        rows.append({**row, "predicted": round(predicted, 4), "error": round(predicted / row["median"] - 1, 3)})
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("plan_cpu", __doc__, SIZES, argv)
    described = machine()
    rows = run(args.sizes, args.runs, args.only)
    errors = [abs(row["error"]) for row in rows]
    result = {
        "benchmark": "plan_cpu",
        "title": f"Predicted epochs, {args.nodes:,} nodes, {args.edges:,} edges, {args.train_nodes:,} seeds",
        "unit": "s per epoch",
        "settings": {**args.sizes, "fanouts": epoch.FANOUTS, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {
            "predicted s and error": {row["name"]: [row["predicted"], row["error"]] for row in rows},
            f"cases within {WITHIN:.0%}": f"{sum(error <= WITHIN for error in errors)} of {len(errors)}",
            "median error": round(statistics.median(errors), 3) if errors else None,
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
