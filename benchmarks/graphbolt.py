"""GraphBolt (DGL) as a peer, in an environment of its own, because DGL needs an older torch than this package.

``python -m venv peer`` and ``peer/bin/pip install dgl==2.1.0 torch==2.2.1 'numpy<2' torchdata==0.7.1 pyyaml pydantic
pandas`` prepare it; the variable ``GRAPHBOLT_PYTHON=peer/bin/python`` selects it. GraphBolt reads the same arrays,
samples with the same fanouts, and runs in turns with the other contestants. This module imports torch and DGL only.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VARIABLE = "GRAPHBOLT_PYTHON"
_KEY = ("node", None, "x")


def python() -> str | None:
    """Return the interpreter that can import GraphBolt, or None."""
    return os.environ.get(VARIABLE) if version() else None


@cache
def version() -> str | None:
    """Return DGL's version, or None without the variable."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return None
    code = "import dgl.graphbolt; print(dgl.__version__)"
    done = subprocess.run([chosen, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{VARIABLE}={chosen} cannot import dgl.graphbolt: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()[-1]


def machine() -> dict[str, Any]:
    """Describe the hardware and versions, with DGL's."""
    from benchmarks import harness

    return {**harness.machine(), "dgl": version() or harness.MISSING}


def write_graph(folder: Path, **arrays: Tensor) -> str:
    """Write ``indptr``, ``indices`` and further arrays for the contestant; return the folder as text."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.numpy())
    return str(folder)


def write_typed(folder: Path, graph: Any) -> dict[str, Any]:
    """Write a ``HeteroCSCGraph`` as GraphBolt's single graph with a type per edge; return its part of the spec."""
    names, ids = list(graph.sizes), {":".join(key): number for number, key in enumerate(graph.relations)}
    offset = np.cumsum([0, *graph.sizes.values()])
    first = dict(zip(names, offset, strict=False))
    edges = [
        (
            part.indices.numpy() + first[key[0]],
            np.repeat(np.arange(len(part.indptr) - 1), part.indptr.diff()) + first[key[2]],
            ids[":".join(key)],
        )
        for key, part in graph.relations.items()
    ]
    source, target = (np.concatenate([own[side] for own in edges]) for side in (0, 1))
    kind = np.concatenate([np.full(len(own[0]), own[2], np.uint8) for own in edges])
    order = np.argsort(target, kind="stable")  # relations in the order of their numbers, as GraphBolt requires
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=offset[-1]))])
    arrays = {"indptr": indptr, "indices": source[order].astype(np.int32), "type_per_edge": kind[order]}
    folder.mkdir()
    where = write_graph(
        folder, node_type_offset=torch.from_numpy(offset), **{k: torch.from_numpy(v) for k, v in arrays.items()}
    )
    return {"folder": where, "node_types": {name: number for number, name in enumerate(names)}, "edge_types": ids}


def contestants(folder: Path, specs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Start one process per contestant; the figure of a missing environment is None."""
    from benchmarks.scripts import Script

    if python() is None:
        return dict.fromkeys(specs)
    started: dict[str, Any] = {}
    for number, (name, spec) in enumerate(specs.items()):
        started[name] = Script("benchmarks.graphbolt", spec, folder, f"graphbolt-{number}", python())
    return started


def facts(folder: Path, number: int = 0) -> dict[str, float]:
    """Return the mean numbers of edges and of nodes in a mini-batch of a contestant of :func:`contestants`."""
    found: dict[str, float] = json.loads((folder / f"graphbolt-{number}.facts").read_text())
    return found


def _graph(spec: dict[str, Any]) -> Any:
    import dgl.graphbolt as gb

    arrays = {path.stem: torch.from_numpy(np.load(path)) for path in Path(spec["folder"]).glob("*.npy")}
    types: dict[str, Any] = {"edge_attributes": {"weight": arrays["weight"]}} if "weight" in arrays else {}
    if "node_types" in spec:
        types = {"node_type_offset": arrays["node_type_offset"], "type_per_edge": arrays["type_per_edge"]}
        types |= {"node_type_to_id": spec["node_types"], "edge_type_to_id": spec["edge_types"]}
    return gb.fused_csc_sampling_graph(arrays["indptr"], arrays["indices"], **types)


def _seeds(spec: dict[str, Any], dtype: torch.dtype) -> Tensor:
    count = spec["batches"] * spec["batch_size"]
    if spec.get("independent"):  # each mini-batch is a draw without replacement, as in benchmarks.sampling
        generator = torch.Generator().manual_seed(1)
        drawn = [
            torch.randperm(spec["nodes"], generator=generator)[: spec["batch_size"]] for _ in range(spec["batches"])
        ]
        return torch.cat(drawn[spec.get("part", 0) :: spec.get("parts", 1)]).to(dtype)
    return torch.randperm(spec["nodes"], generator=torch.Generator().manual_seed(1))[:count].to(dtype)


def _pipe(spec: dict[str, Any], graph: Any, seeds: Any, features: Any = None, shuffle: bool = False) -> Any:
    """Return GraphBolt's loader: samples, and rows of features if there are any."""
    import dgl.graphbolt as gb

    if "seed_type" in spec:
        items = gb.ItemSetDict({spec["seed_type"]: gb.ItemSet(seeds, names="seed_nodes")})
    else:
        items = gb.ItemSet(seeds, names=("seed_nodes", "labels") if isinstance(seeds, tuple) else "seed_nodes")
    pipe = gb.ItemSampler(items, batch_size=spec["batch_size"], shuffle=shuffle)
    # GraphBolt's layers start at the seeds with the last fanout.
    kinds = len(spec.get("edge_types", [None]))  # each edge type has its own fanout
    fanouts = [torch.tensor([fanout] * kinds) for fanout in reversed(spec["fanouts"])]
    pipe = pipe.sample_neighbor(graph, fanouts, prob_name=spec.get("weights"))
    if features is not None:
        pipe = pipe.fetch_feature(features, node_feature_keys=["x"])
    return gb.DataLoader(pipe, num_workers=spec.get("num_workers", 0))


def _store(x: Tensor) -> Any:
    import dgl.graphbolt as gb

    return gb.BasicFeatureStore({_KEY: gb.TorchBasedFeature(x)})


def _edges(batch: Any) -> int:
    def count(csc: Any) -> int:
        return sum(map(count, csc.values())) if isinstance(csc, dict) else int(csc.indices.numel())

    return sum(count(layer.sampled_csc) for layer in batch.sampled_subgraphs)


def _nodes(batch: Any) -> int:
    ids = batch.input_nodes
    return sum(part.numel() for part in ids.values()) if isinstance(ids, dict) else int(ids.numel())


def sampling(spec: dict[str, Any]) -> Iterator[Callable[[], float]]:
    """Yield a turn that returns millions of sampled edges per second."""
    graph = _graph(spec)
    loader = _pipe(spec, graph, _seeds(spec, graph.indices.dtype))

    def turn() -> float:
        start = time.perf_counter()
        edges = sum(map(_edges, loader))
        return edges / (time.perf_counter() - start) / 1e6

    _note(spec, loader)
    yield turn


def minibatch(spec: dict[str, Any]) -> Iterator[Callable[[], float]]:
    """Yield a turn that returns milliseconds per mini-batch with features, in the steady state."""
    graph, margin = _graph(spec), spec["margin"]
    seeds = _seeds({**spec, "batches": spec["batches"] + 2 * margin}, graph.indices.dtype)
    loader = _pipe(spec, graph, seeds, _store(torch.rand(spec["nodes"], spec["features"])), shuffle=True)

    def turn() -> float:
        batches = iter(loader)
        _take(batches, margin)
        start = time.perf_counter()
        _take(batches, spec["batches"])
        milliseconds = (time.perf_counter() - start) * 1e3
        _take(batches, margin)
        return milliseconds / spec["batches"]

    _note(spec, islice(loader, 4))
    yield turn


def epoch(spec: dict[str, Any]) -> Iterator[Callable[[], float]]:
    """Yield a turn that trains GraphSAGE with DGL's layers, and returns seconds of an epoch, or ms of a ``step``."""
    import dgl.nn
    import torch.nn.functional as F

    class Sage(torch.nn.Module):
        def __init__(self, sizes: Sequence[int]) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(map(dgl.nn.SAGEConv, sizes, sizes[1:], ["mean"] * (len(sizes) - 1)))

        def forward(self, blocks: Any, x: Tensor) -> Tensor:
            for number, (layer, block) in enumerate(zip(self.layers, blocks)):  # noqa: B905 (Python 3.9 of old peers)
                x = layer(block, x)
                if number < len(self.layers) - 1:
                    x = F.dropout(F.relu(x), 0.5, self.training)
            return x

    graph = _graph(spec)
    seeds = _seeds({**spec, "batches": 1, "batch_size": spec["train_nodes"]}, graph.indices.dtype)
    if "map" in spec:
        rows = np.load(spec["map"], mmap_mode="r+")
        rows._mmap.madvise(mmap.MADV_RANDOM)  # else each row reads 128 kB ahead, and an epoch takes minutes
        x = torch.from_numpy(rows)
    else:
        x = torch.rand(spec["nodes"], spec["features"])
    is_narrow = spec.get("precision") == "bf16-mixed"
    x = x.bfloat16() if is_narrow else x
    labels = torch.randint(spec["classes"], (seeds.numel(),), generator=torch.Generator().manual_seed(0))
    loader = _pipe(spec, graph, (seeds, labels), _store(x), shuffle=True)
    layers = len(spec["fanouts"])
    model = Sage([x.size(1), *[spec["hidden"]] * (layers - 1), spec["classes"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train(batches: Iterable[Any]) -> float:
        start = time.perf_counter()
        for batch in batches:
            rows = batch.node_features["x"]
            with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
                out = model(batch.blocks, rows if is_narrow else rows.float())
            optimizer.zero_grad()
            F.cross_entropy(out.float(), batch.labels).backward()
            optimizer.step()
        return time.perf_counter() - start

    def turn() -> float:
        if "step" not in spec:
            return train(loader)
        same = [next(iter(loader))]
        train(same)
        return train(same * spec["step"]) / spec["step"] * 1e3

    if "map" not in spec:  # whose pages must not be in memory before the limit holds
        _note(spec, islice(loader, 4))
    yield turn


def _take(batches: Iterator[Any], count: int) -> None:
    if sum(1 for _ in islice(batches, count)) < count:
        raise RuntimeError("the epoch ended early")


def _note(spec: dict[str, Any], batches: Iterable[Any]) -> None:
    """Write the mean size of some mini-batches to the contestant's file."""
    sizes = [(_edges(batch), _nodes(batch)) for batch in batches]
    edges, nodes = (sum(column) / len(sizes) for column in zip(*sizes))  # noqa: B905
    Path(spec["facts"]).write_text(json.dumps({"edges": edges, "nodes": nodes}))


KINDS = {"sampling": sampling, "minibatch": minibatch, "epoch": epoch}


def main(arguments: Sequence[str]) -> None:
    """Serve one contestant: the specification's file, and the handle of its pipe."""
    spec = json.loads(Path(arguments[0]).read_text())
    spec["facts"] = str(Path(arguments[0]).with_suffix(".facts"))
    torch.set_num_threads(spec.get("torch_threads", 1))
    torch.manual_seed(0)
    pipe = Connection(int(arguments[1]))
    turn = next(KINDS[spec["kind"]](spec))
    try:
        while True:
            pipe.send("ready")
            pipe.recv()
            pipe.send(turn())
    except (EOFError, ConnectionError):
        pass  # the benchmark has ended


if __name__ == "__main__":
    main(sys.argv[1:])
