"""Test accuracy of the model zoo: best checkpoints with five seeds, trained by the command line.

Each contestant is a row of docs/zoo.md. The citation graphs with their public split are read from ``--planetoid``;
without it, a synthetic graph is used instead. ``--tuned`` adds the wide settings of arXiv:2406.08993, whose epochs take
twenty times as long.
"""

from __future__ import annotations

import io
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from benchmarks.harness import RESULTS, Rows, machine, measure, parse, publish
from lightning_gnn.cli.commands.train import run

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
START, END = "<!-- zoo:start -->", "<!-- zoo:end -->"
SIZES = {"epochs": (0, 1), "torch_threads": (2, 1)}
DATA = ("Cora", "CiteSeer")
MODELS = {
    "GCN": "model=gcn",
    "GraphSAGE": "model=sage",
    "GAT": "model=gat",
    "GATv2": "experiment=planetoid_gatv2",
    "GAT, residual": "experiment=planetoid_gat_residual",
    "GIN": "experiment=planetoid_gin",
    "GCN, jumping knowledge": "experiment=planetoid_jk",
    "GraphSAGE, normalised": "experiment=planetoid_sage_norm",
}
TUNED = {f"{model}, tuned": model for model in ("GCN", "GraphSAGE", "GAT")}
PUBLISHED = {"GCN": (81.5, 70.3), "GAT": (83.0, 72.5)}
"""Means reported by the papers on the public splits of Cora and CiteSeer."""
MACHINE = ("cpu", "cores", "python", "torch", "torch_threads", "torch_geometric", "pytorch_lightning", "date")
"""Fields of the machine recorded in each row, since retained rows may be from other days and machines."""
_FILES = {"GCN": "gcn", "GraphSAGE": "sage", "GAT": "gat"}
_TINY = ["data=synthetic", "data.num_nodes=300", "data.num_edges=2000", "data.num_classes=4", "data.num_features=8"]
_QUIET = ["logger=none", "~callbacks.last", "trainer.enable_progress_bar=false"]


def overrides_of(name: str, data: str) -> list[str]:
    """Return the ``lgnn`` arguments for a model on one of the graphs."""
    if name in TUNED:
        return [f"experiment={data.lower()}_{_FILES[TUNED[name]]}_tuned"]
    chosen = MODELS[name]
    return [chosen, f"data.name={data}", *(["data=planetoid", "datamodule=full"] if chosen.startswith("model") else [])]


class Contestant:
    """Trains with the next seed at each call, and returns the test accuracy in percent."""

    def __init__(self, overrides: Sequence[str], epochs: int, threads: int) -> None:
        self.overrides, self.seed = [*overrides, *_QUIET, f"torch_threads={threads}"], 0
        if epochs:
            self.overrides.append(f"trainer.max_epochs={epochs}")

    def __call__(self) -> float:
        """Train and test once."""
        self.seed += 1
        with (
            tempfile.TemporaryDirectory() as folder,
            initialize_config_module("lightning_gnn.conf", version_base="1.3"),
            redirect_stdout(io.StringIO()),
        ):
            cfg = compose("train", overrides=[*self.overrides, f"seed={self.seed}", f"output_dir={folder}"])
            return 100 * float(run(cfg)["test_acc"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    paths = {
        "planetoid": "folder of PyG's Planetoid files",
        "tuned": "yes: with the wide models, too",
        "add": "a JSON file of this script, whose other rows are kept",
    }
    args = parse("zoo", __doc__, SIZES, argv, runs=5, paths=paths)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    described = machine() | {"torch_threads": args.torch_threads}
    graphs = DATA if args.planetoid else ("synthetic",)
    rows: Rows = []
    kept = json.loads(Path(args.add).read_text())["rows"] if args.add else []
    for name in (*MODELS, *(TUNED if args.tuned else ())):
        for data in graphs:
            if args.only not in f"{name} on {data}":
                continue
            given = overrides_of(name, data)
            if args.planetoid:
                given.append(f"data.root={Path(args.planetoid).resolve()}")
            else:
                given = [item for item in given if item.partition("=")[0] not in ("data", "data.name")] + _TINY
            contestant = Contestant(given, args.epochs, args.torch_threads)
            rows += measure({f"{name} on {data}": contestant}, args.runs, warmup=0)
            values = rows[-1]["values"]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            found = {"mean": round(statistics.fmean(values), 2), "std": round(spread, 2)}
            rows[-1] |= {**found, "machine": {key: described[key] for key in MACHINE}}
            if args.out is not None:  # save partial results
                args.out.with_suffix(".part").write_text(json.dumps(rows))
    measured = {row["name"] for row in rows}
    result = {
        "benchmark": "zoo",
        "title": "Test accuracy of the best checkpoint",
        "unit": "%",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": [*rows, *(row for row in kept if row["name"] not in measured)],
        "comparisons": [],
    }
    if args.out is not None:
        args.out.with_suffix(".part").unlink(missing_ok=True)
    if args.out == RESULTS / "zoo.json":
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    return publish(result, args.out)


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table of a result: mean and standard deviation over the seeds."""
    rows = {row["name"]: row for row in result["rows"]}
    lines = [f"| model | {' | '.join(DATA)} | papers | what to type |", f"|---|{'---|' * len(DATA)}---|---|"]
    for name in (*MODELS, *TUNED):
        found = [rows.get(f"{name} on {data}") for data in DATA]
        cells = ["" if row is None else f"{row['mean']:.1f} ± {row['std']:.1f}" for row in found]
        papers = ", ".join(f"{value:.1f}" for value in PUBLISHED.get(name, ()))
        typed = overrides_of(name, "Cora" if name in TUNED else "NAME")
        lines.append(f"| {name} | {' | '.join(cells)} | {papers} | `lgnn {' '.join(typed)}` |")
    return "\n".join(lines)


def written(page: str, result: dict[str, Any]) -> str:
    """Return the page with the table of a result between its markers."""
    before, after = page.split(START)[0], page.split(END)[1]
    return f"{before}{START}\n{table(result)}\n{END}{after}"


if __name__ == "__main__":
    main()
