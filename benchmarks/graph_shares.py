"""Memory of each of 1, 2, 4 and 8 ranks that train on one graph, beside what was expected of it beforehand.

Under ``ascend_hybrid`` a rank brings its range of the compressed graph to memory, and no other edges. The graph lies in
a folder and is mapped; the model is a GCN of two layers, and ``num_groups=1``, so that the ranks share out the edges,
not the columns. The figure is what a rank takes of memory of its own (``RssAnon``; what it maps from files is not
counted), that of the rank with the most, less what the same run takes for a graph of 1,000 nodes: Python, libraries,
buffers of the process group. What is expected (:func:`expected_bytes`) is an Nth of the edges' bytes, and a constant,
some bytes for each vertex.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch_geometric.data import Data

from benchmarks.harness import parse, publish
from benchmarks.machine import machine
from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.folder import load_folder, save_folder
from lightning_gnn.graph.synthetic import power_law_graph
from lightning_gnn.nn import GCN, NodeClassifier
from lightning_gnn.ops.aggregate.numba_rows import PACK_DEGREE

SIZES = {"nodes": (150_000, 3_000), "edges": (9_000_000, 30_000), "features": (24, 4), "most_ranks": (8, 2)}
CHUNKS, CLASSES, STEPS = 8, 4, 3
LEAST = {"nodes": 1_000, "edges": 5_000}
_PATIENCE = 600  # seconds


def expected_bytes(
    nodes: int, edges: int, features: int, ranks: int, columns: int, sources: int
) -> tuple[float, float]:
    """Return what a rank should take: its share, which falls with the number of ranks, and a constant, in bytes.

    Args:
        nodes: V.
        edges: E; with its self-loops, a GCN's graph has at most E + V.
        features: Columns.
        ranks: N.
        columns: Columns that the chunks of both directions hold, each of 4 bytes.
        sources: Vertices that a rank's edges start from, at most V.
    """
    # In either direction a column in its chunk, the column that compiled loops read, and a weight; and the place of the
    # edge in the other direction. One process alone keeps the user's edge and the edge that gives a weight, too.
    share = (4 * 7 + (8 if ranks == 1 else 0)) * (edges + nodes) + 4.0 * columns
    # A row of a direction and its offset, and what compiled loops read of it: where its result goes, its degree and
    # that of its vertex; the order of the columns; features packed in that order, where they are read often.
    of_row, of_column = 4 + 8 + 3 * 8, 8
    packed = 4 * features if edges / ranks >= PACK_DEGREE * sources else 0
    if ranks == 1:  # all features stay mapped; what they come to is kept
        return share, nodes * (2.0 * (of_row + of_column) + packed + 4 * features)
    # Of its own rows: ids, features and what they come to, labels and masks, position, and whom they are sent to.
    share += nodes * (of_row + of_column + 8 + 2 * 4 * features + 9 + 4 + 8)
    # Of each vertex: its owner's order, its place there, and how many self-loops it has. Of each source: a row of the
    # transpose, its position and whom it is sent to.
    return share / ranks, nodes * 20.0 + sources * (of_row + of_column + 4 + 8 + packed)


class Memory(pl.Callback):
    """Measures this rank after the last step."""

    megabytes = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Look at the memory."""
        if trainer.global_step == STEPS:
            trainer.strategy.barrier()
            lines = Path("/proc/self/status").read_text().splitlines()
            self.megabytes = next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))
            trainer.strategy.barrier()


def rank_main(rank: int, ranks: int, port: int, folder: str, cache: str, features: int, out: Any) -> None:
    """Train as one of several ranks, as torchrun would start it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    datamodule = FullGraphDataModule(load_folder(folder), CHUNKS, "natural", cache_dir=cache)
    memory = Memory()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=AscendHybridParallelStrategy(num_groups=1, memory_limit=None),
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(NodeClassifier(GCN(features, 8, 2, CLASSES), CLASSES), datamodule=datamodule)
    out.put((rank, memory.megabytes))


def write(folder: Path, nodes: int, edges: int, features: int) -> Path:
    """Write a graph into a folder."""
    indptr, indices = power_law_graph(nodes, edges, seed=0)
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(nodes) % 2 == 0
    data = Data(
        x=torch.rand(nodes, features, generator=generator),
        y=torch.randint(CLASSES, (nodes,), generator=generator),
        graph=CSCGraph(indptr, indices, None),
        train_mask=mask,
        num_nodes=nodes,
    )
    return save_folder(data, folder)


def train(ranks: int, folder: Path, cache: Path, features: int) -> list[float]:
    """Let the ranks train; return the megabytes of each."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    out: Any = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, str(folder), str(cache), features, out))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return [megabytes for _, megabytes in sorted(out.get(timeout=_PATIENCE) for _ in processes)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def columns_of(graph: CSCGraph) -> int:
    """Return how many columns the chunks of both directions hold, by counting."""
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr.numpy()))
    chunk = graph.num_nodes / CHUNKS
    pairs = (targets // chunk, graph.indices.numpy()), (graph.indices.numpy() // chunk, targets)
    return sum(np.unique(first.astype(np.int64) * graph.num_nodes + second).size for first, second in pairs)


def sources_of(graph: CSCGraph, ranks: int) -> int:
    """Return how many vertices the edges of the first of ``ranks`` even ranges start from."""
    return np.unique(graph.indices.numpy()[: graph.num_edges // ranks]).size


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("graph_shares", __doc__, SIZES, argv, runs=1)
    described = machine()
    # Every large array then has pages of its own, which go back to the system when it is freed.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["lightning_gnn", "lightning_gnn.nn"])
    rows, extra = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        least = write(root / "least", **LEAST, features=args.features)
        folder = write(root / "graph", args.nodes, args.edges, args.features)
        graph = load_folder(folder).graph
        columns = columns_of(graph)
        train(1, least, root / "cache", args.features)  # what is compiled then takes no memory of the others
        for ranks in (ranks for ranks in (1, 2, 4, 8) if ranks <= args.most_ranks):
            sources = sources_of(graph, ranks)
            share, constant = expected_bytes(args.nodes, args.edges, args.features, ranks, columns, sources)
            found = []
            for _ in range(args.runs):
                empty = max(train(ranks, least, root / "cache", args.features))
                found.append(max(train(ranks, folder, root / "cache", args.features)) - empty)
            name = f"ours, {ranks} rank{'s'[: ranks > 1]}"
            median = statistics.median(found)
            rows.append({"name": name, "values": found, "median": median, "min": min(found), "max": max(found)})
            wanted = (share + constant) / 1e6
            extra[name] = {
                "expected MB": round(wanted, 1),
                "of these the constant": round(constant / 1e6, 1),
                "measured over expected": round(median / wanted, 3),
                "MB of Python, libraries and buffers": round(empty, 1),
            }
    result = {
        "benchmark": "graph_shares",
        "title": f"Memory of a rank, {args.nodes:,} nodes, {args.edges:,} edges, {args.features} features",
        "unit": "MB",
        "settings": {**args.sizes, "runs": args.runs, "num_chunks": CHUNKS, "num_groups": 1},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
