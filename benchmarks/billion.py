"""A graph of a billion edges from tables to predictions, on one machine and within a limit of memory.

The graph has degrees with a power law of exponent 3, 10 edges per node, 64 features of float16 and 16 classes, which
features and edges reveal in part. Each step is a process of its own, in a cgroup if the system permits it. ``peak`` is
the peak of the process itself, ``with page cache`` that of the cgroup.

- ``draw`` writes Parquet files, and is not limited.
- ``convert`` is ``lgnn convert``; ``partition`` is ``lgnn partition method=ldg`` into 8 parts.
- ``sample`` samples mini-batches with fanouts 15, 10 and 5 on one core, and measures reads at random positions.
- ``gather`` gathers rows at random from memory (the page cache, if it has room) and from disk without lookahead.
- ``aggregate`` sums 8 columns of float32 over all edges.
- ``train`` is two epochs of a two-layer GraphSAGE with fanouts 10 and 5, on 2 % of the nodes, with features on disk.
- ``bound`` counts the blocks that Belady's rule would read in these epochs.
- ``evaluate`` tests the model on 0.2 % of the nodes.
- ``infer`` is exact inference for a tenth of the nodes, layer by layer for all nodes, with the outputs on disk.

Finished steps are kept in ``--folder``, so that an interrupted benchmark goes on. It requires 75 GB of disk.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.data.disk import forget_group, limited, optimum
from benchmarks.harness import machine, parse, publish, shortened
from lightning_gnn import NeighborDataModule
from lightning_gnn.cli.commands import convert, partition
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.features import DiskFeatures
from lightning_gnn.features.feature_file import FeatureFile
from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn import FullInference, GraphSAGE, NodeClassifier, inference
from lightning_gnn.ops import aggregate, gather_rows, sample_neighbors

SIZES = {"edges": (1_000_000_000, 200_000)}
STEPS = ("draw", "convert", "sample", "gather", "aggregate", "train", "bound", "evaluate", "infer", "partition")
DEGREE, FEATURES, CLASSES = 10, 64, 16
LIMIT = 16 << 30
"""Bytes of memory of each step, including its page cache."""
CONVERT_MEMORY, FEATURE_MEMORY = "10GB", "6GB"
INFERENCE_BYTES = 60
"""Memory of inference, per node."""
EDGES_PER_FILE, NODES_PER_FILE = 50_000_000, 5_000_000
SAMPLED_FANOUTS, FANOUTS, BATCH_SIZE = [15, 10, 5], [10, 5], 1024
INFERENCE_SHARE = 10


@numba.njit(nogil=True, cache=True)
def _draw_edges(source: np.ndarray, target: np.ndarray, first: int, num_nodes: int) -> None:
    """Draw edges between nodes of squared uniform rank; every second edge connects nodes of one class."""
    state = np.uint64(first)
    for e in range(source.size):
        for end in (source, target):
            # SplitMix64 (Steele, Lea and Flood 2014).
            state += np.uint64(0x9E3779B97F4A7C15)
            z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            drawn = np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
            # A factor that spreads nodes of similar rank.
            end[e] = np.int64(drawn * drawn * num_nodes) * 2654435761 % num_nodes
        if e % 2:
            source[e] = min(source[e] - source[e] % CLASSES + target[e] % CLASSES, num_nodes - 1)


def draw(folder: Path, num_edges: int) -> dict[str, Any]:
    """Write the tables."""
    import pyarrow as pa
    from pyarrow import parquet

    num_nodes = num_edges // DEGREE
    for number, first in enumerate(range(0, num_edges, EDGES_PER_FILE)):
        ends = np.empty((2, min(EDGES_PER_FILE, num_edges - first)), np.int32)
        _draw_edges(*ends, first, num_nodes)
        table = pa.table({"source": ends[0], "target": ends[1]})
        parquet.write_table(table, folder / f"edges-{number:03}.parquet", compression="none", use_dictionary=False)
    splits = np.array(["train"] * 20 + ["val"] + ["test"] * 2 + [None] * 977, object)
    for number, first in enumerate(range(0, num_nodes, NODES_PER_FILE)):
        random = np.random.default_rng(number)
        label = (np.arange(first, min(first + NODES_PER_FILE, num_nodes)) % CLASSES).astype(np.int8)
        columns: dict[str, Any] = {"label": label, "split": pa.array(splits[random.integers(1000, size=label.size)])}
        for column in range(FEATURES):
            noise = random.integers(-8, 8, label.size, np.int8)
            columns[f"f{column}"] = noise + (label == column % CLASSES)
        parquet.write_table(pa.table(columns), folder / f"nodes-{number:03}.parquet", compression="none")
    tables = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    return {"tables, GB": tables / 1e9}


def convert_graph(folder: Path, num_edges: int) -> dict[str, Any]:
    """Run ``lgnn convert``."""
    tables = [f"source={folder}/edges-*.parquet", f"nodes={folder}/nodes-*.parquet"]
    code = convert.main([*tables, f"out={folder}/graph", f"memory={CONVERT_MEMORY}", "feature_dtype=float16"])
    if code:
        raise RuntimeError(f"lgnn convert ended with {code}")
    return {"graph, GB": sum(path.stat().st_size for path in Path(folder, "graph").iterdir()) / 1e9}


def partition_graph(folder: Path, num_edges: int) -> dict[str, Any]:
    """Run ``lgnn partition``."""
    graph = ["data=custom", f"data.root={folder}/graph"]
    if code := partition.main([*graph, "parts=8", "method=ldg", f"out={folder}/parts"]):
        raise RuntimeError(f"lgnn partition ended with {code}")
    return {}


@numba.njit(nogil=True, cache=True)
def _read_scattered(array: np.ndarray, count: int) -> int:
    """Return the sum of elements at positions that no prefetcher predicts."""
    state, total = np.uint64(1), np.int64(0)
    for _ in range(count):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        total += array[(state >> np.uint64(32)) * np.uint64(array.size) >> np.uint64(32)]
    return total


def sample(folder: Path, num_edges: int) -> dict[str, Any]:
    """Sample on one core, and read elements of the largest array and of an array of one number per node."""
    graph = load_folder(folder / "graph").graph
    nodes, sources = graph.indptr.numel() - 1, np.array(graph.indices)  # copies, so that no read is a page fault
    graph = CSCGraph(graph.indptr.clone(), torch.from_numpy(sources))
    random = torch.Generator().manual_seed(1)
    batches = [torch.randint(nodes, (BATCH_SIZE,), generator=random).unique() for _ in range(60)]
    edges, seconds = [], []
    for number, seeds in enumerate(batches):
        start = time.perf_counter()
        edges.append(sample_neighbors(graph, seeds, SAMPLED_FANOUTS, number).edge.numel())
        seconds.append(time.perf_counter() - start)
    found: dict[str, Any] = {"ns per edge": 1e9 * sum(seconds[20:]) / sum(edges[20:]), "edges": sum(edges[20:])}
    found["edges per second"] = 1e9 / found["ns per edge"]
    for name, array in (("sources", sources), ("nodes", np.ones(nodes, np.int32))):
        for _ in range(2):
            start = time.perf_counter()
            _read_scattered(array, 20_000_000)
            found[f"ns per read of {name}"] = (time.perf_counter() - start) * 1e9 / 20_000_000
    return found


def gather(folder: Path, num_edges: int) -> dict[str, Any]:
    """Gather rows from memory and from disk."""
    x = load_folder(folder / "graph").x
    found = {}
    rows = torch.randint(x.size(0), (20, min(200_000, x.size(0))), generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # the second time from the page cache, as far as it reaches
        start = time.perf_counter()
        for ids in rows:
            gather_rows(x, ids)
        found["ns per row from memory"] = (time.perf_counter() - start) * 1e9 / rows.numel()
    table = DiskFeatures(folder / "graph" / "x.npy", DiskFeatures.least_bytes(FeatureFile.open(folder / "graph/x.npy")))
    start = time.perf_counter()
    for ids in rows[:5]:
        table.gather(ids)
    found["ns per row from disk"] = (time.perf_counter() - start) * 1e9 / rows[:5].numel()
    return found


def aggregate_all(folder: Path, num_edges: int) -> dict[str, Any]:
    """Aggregate over all edges, once before the clock starts."""
    data = load_folder(folder / "graph")
    graph = CompressedGraph.from_graph(data.graph)
    x, found = torch.ones(data.num_nodes, 8), {}
    for _ in range(2):
        start = time.perf_counter()
        aggregate(graph, x)
        found["ns per edge"] = (time.perf_counter() - start) * 1e9 / num_edges
    return found


def _module(folder: Path, **options: Any) -> NeighborDataModule:
    data = load_folder(folder / "graph")
    options = {"num_neighbors": FANOUTS, "batch_size": BATCH_SIZE, "memory": FEATURE_MEMORY, **options}
    return NeighborDataModule(data, num_workers=1, seed=0, **options)


def _classifier() -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(GraphSAGE(FEATURES, 64, 2, CLASSES), CLASSES)


def _trainer(folder: Path, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet, **options)


class _Epochs(pl.Callback):
    """Records the seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def train(folder: Path, num_edges: int) -> dict[str, Any]:
    """Train two epochs."""
    module, model, epochs = _module(folder), _classifier(), _Epochs()
    trainer = _trainer(folder, max_epochs=2, limit_val_batches=0, callbacks=[epochs])
    trainer.fit(model, datamodule=module)
    trainer.save_checkpoint(folder / "model.ckpt")
    (table,) = trainer.train_dataloader.pipeline.tables.values()
    counts = table.counts
    return {
        "epochs, s": epochs.seconds,
        "mini-batches": trainer.global_step,
        "rows": counts.rows,
        "from the cache": counts.hits / counts.rows,
        "blocks": counts.blocks,
        "GB read": counts.blocks * 4096 / 1e9,
        "cached rows": table.cache_rows,
    }


def count_bound(folder: Path, num_edges: int) -> dict[str, Any]:
    """Sample the epochs of ``train`` again, and count what Belady's rule reads."""
    loader = _module(folder, memory=None).train_dataloader()
    trace = []
    for _ in range(2):
        epoch = loader.begin_epoch()
        trace += [loader.pipeline.sample(task).nodes(None).int().numpy() for task in loader.tasks(epoch)]
    trained = json.loads((folder / "train.json").read_text())
    blocks = optimum(trace, FeatureFile.open(folder / "graph" / "x.npy"), trained["cached rows"])
    return {"blocks": blocks, "read against the bound": trained["blocks"] / blocks}


def evaluate(folder: Path, num_edges: int) -> dict[str, Any]:
    """Test the model on sampled mini-batches."""
    (metrics,) = _trainer(folder).test(_classifier(), _module(folder), folder / "model.ckpt", verbose=False)
    return {"accuracy": metrics["test_acc"]}


def infer(folder: Path, num_edges: int) -> dict[str, Any]:
    """Predict for a tenth of the nodes; on smaller graphs also with the sources of each block of targets gathered."""
    nodes = torch.arange(num_edges // DEGREE // INFERENCE_SHARE)
    settings = FullInference(folder / "layers", INFERENCE_BYTES * num_edges // DEGREE)
    found: dict[str, Any] = {"nodes": nodes.numel()}
    for way in ("gathered, s", "in order, s") if num_edges < 200_000_000 else ("in order, s",):
        is_linear = inference._is_linear
        if way == "gathered, s":
            inference._is_linear = lambda conv: False
        module, start = _module(folder, memory=None, input_pred_nodes=nodes, inference=settings), time.perf_counter()
        outputs: list[Tensor] = _trainer(folder).predict(_classifier(), module, ckpt_path=folder / "model.ckpt")
        found[way], inference._is_linear = time.perf_counter() - start, is_linear
    predicted = torch.cat([output.argmax(1) for output in outputs])
    return {**found, "accuracy": float((predicted == module.data.y[nodes]).float().mean())}


RUN: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "draw": draw, "convert": convert_graph, "sample": sample, "gather": gather, "aggregate": aggregate_all,
    "train": train, "bound": count_bound, "evaluate": evaluate, "infer": infer, "partition": partition_graph,
}  # fmt: skip


def run_step(step: str, folder: Path, num_edges: int) -> None:
    """Run one step in this process, and write what it found to a file."""
    bounded = step not in ("draw", "bound") and limited(LIMIT)
    start, before = time.perf_counter(), time.process_time()
    found = RUN[step](folder, num_edges)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {"wall, s": time.perf_counter() - start, "cpu, s": time.process_time() - before, **found}
    found |= {"peak, GB": usage.ru_maxrss * 1024 / 1e9, "limited": bounded}
    peaks = ("memory.max_usage_in_bytes", "memory.peak")
    for path in (Path("/sys/fs/cgroup", root, f"benchmark-disk-{os.getpid()}") for root in ("memory", "unified", ".")):
        for peak in (path / name for name in peaks if (path / name).exists()):
            found["with page cache, GB"] = int(peak.read_text()) / 1e9
    (folder / f"{step}.json").write_text(json.dumps(found))


def measure_steps(folder: Path, num_edges: int, only: str = "", steps: Sequence[str] = STEPS) -> dict[str, Any]:
    """Run the steps that are not finished, and return what they found."""
    for step in steps:
        if only in step and not (folder / f"{step}.json").exists():
            print(f"{num_edges:,} edges: {step}", flush=True)
            command = [sys.executable, "-m", "benchmarks.billion", "--step", step, str(folder), str(num_edges)]
            process = subprocess.Popen(command)
            code = process.wait()
            forget_group(process.pid)
            if code:
                raise SystemExit(code)
    return {step: json.loads(path.read_text()) for step in STEPS if (path := folder / f"{step}.json").exists()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("billion", __doc__, SIZES, argv, runs=1, paths={"folder": "where tables and graph lie"})
    described = machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(args.folder or temporary)
        found = measure_steps(folder, args.edges, args.only)
    found.pop("draw", None)  # which prepares the others, and is not limited
    rows = [
        {"name": step, **{key: shortened(each["wall, s"]) for key in ("median", "min", "max")}}
        for step, each in found.items()
    ]
    result = {
        "benchmark": "billion",
        "title": f"{args.edges:,} edges, {args.edges // DEGREE:,} nodes with {FEATURES} features of float16",
        "unit": "s",
        "machine": described,
        "settings": {**args.sizes, "limit, GB": LIMIT / 1e9, "features' memory": FEATURE_MEMORY},
        "rows": rows,
        "comparisons": [],
        "extra": found,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        run_step(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
