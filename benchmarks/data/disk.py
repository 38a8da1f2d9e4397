"""Training epochs with features on disk, against features in memory and against a plain memory map.

A graph with power-law degrees, GraphSAGE with 2 layers, fanouts 15 and 10. ``memory=`` is a half, a quarter and an
eighth of the features' size. If the system permits it, each contestant runs in a cgroup with this memory limit (plus an
allowance for the model and the topology, which stays in memory); the page cache of a memory map counts towards it.
GraphBolt reads features from a memory map in its own environment, see ``benchmarks.graphbolt``. The
figure is seconds per epoch, after a warm-up epoch. Reads are counted in blocks of 4096 bytes over the first epoch, from
an empty cache, and compared with Belady's rule over the whole epoch, computed afterwards from the recorded trace. "By
threads" does not use the system's read queue.

``--large`` is the setting with 20 million nodes and 16 GB of features; the in-memory contestant then uses a graph with
an eighth of the nodes and the same number of seeds. It requires 35 GB of disk. The memory map then waits for millions
of page faults one at a time, for an hour; ``--only="ours, disk, 1/4 of memory"`` excludes it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import graphbolt
from benchmarks.harness import Gate, compare, measure_isolated, parse, publish
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.features import DiskFeatures, disk_reads
from lightning_gnn.features.arrays import advise, save_arrays, write_blocks
from lightning_gnn.features.feature_file import FeatureFile
from lightning_gnn.nn import GraphSAGE

SIZES = {
    "nodes": (1_000_000, 4_000),
    "features": (200, 100),
    "degree": (15, 5),
    "hidden": (64, 8),
    "batch_size": (128, 32),
    "train_nodes": (5_120, 320),
}
LARGE = {**SIZES, "nodes": (20_000_000, 4_000), "batch_size": (1024, 32), "train_nodes": (102_400, 320)}
SHARES = {"1/2": 2, "1/4": 4, "1/8": 8}
FANOUTS = [15, 10]
CLASSES = 32
GRAPHBOLT = "GraphBolt, memory map, 1/4 of memory"
LEAST = 12_000_000
"""Minimum memory budget in bytes, which applies to quick runs."""
ALLOWANCE, LARGE_ALLOWANCE = 256_000_000, 1_850_000_000
"""Bytes for topology, labels, the model and the interpreter in the cgroup."""
PUBLISHED = {
    "GraphBolt, disk, times as long as memory": 3.4,
    "GraphBolt, disk with dependent mini-batches, times as long as memory": 2.0,
}
_BLOCK = 100_000


def write_graph(folder: Path, nodes: int, degree: int, features: int, train: int) -> None:
    """Write a graph with randomly placed hubs, block by block."""
    random = np.random.default_rng(0)
    counts = np.minimum(random.zipf(1.8, nodes), 1000).astype(np.int64)
    counts = np.maximum(degree // 2, counts * degree * nodes // (2 * counts.sum()))
    indptr = np.concatenate([[0], np.cumsum(counts)])

    def sources() -> Iterator[np.ndarray]:
        for first in range(0, int(indptr[-1]), 1 << 22):
            drawn = random.random(min(1 << 22, int(indptr[-1]) - first)) ** 2.5
            yield ((drawn * nodes).astype(np.int64) * 7919 % nodes).astype(np.int32)

    def rows() -> Iterator[np.ndarray]:
        some = random.standard_normal((_BLOCK, features), np.float32)
        for first in range(0, nodes, _BLOCK):
            yield some[: nodes - first] + np.float32(first / nodes)

    write_blocks(folder / "indices.npy", np.int32, (int(indptr[-1]),), sources())
    train_idx = np.sort(random.choice(nodes, train, replace=False))
    save_arrays(folder, {"indptr": indptr, "y": random.integers(0, CLASSES, nodes), "train_idx": train_idx})
    write_blocks(folder / "x.npy", np.float32, (nodes, features), rows())


def forget_pages(folder: Path) -> None:
    """Drop all files below a folder from the page cache, except mapped pages."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def limited(memory: int, pid: int | None = None) -> bool:
    """Limit a process to an additional amount of memory and page cache; return whether the system permits it."""
    pid = pid or os.getpid()
    for root, limit in (("memory", "memory.limit_in_bytes"), ("unified", "memory.max"), (".", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"benchmark-disk-{pid}")
        try:
            group.mkdir()
            (group / limit).write_text(str(memory))
            (group / "cgroup.procs").write_text(str(pid))
            return True
        except OSError:
            if group.is_dir():
                group.rmdir()
    return False


def forget_group(pid: int) -> None:
    """Remove the cgroup of a process that has ended."""
    for group in Path("/sys/fs/cgroup").glob(f"*/benchmark-disk-{pid}"):
        group.rmdir()


def datamodule(
    spec: dict[str, Any], kind: type[NeighborDataModule] = NeighborDataModule, **options: Any
) -> NeighborDataModule:
    data = load_folder(spec["folder"], mmap=True, check=False)
    if spec.get("in_memory"):
        data.x = torch.from_numpy(np.array(data.x.numpy()))
        forget_pages(Path(spec["folder"]))  # else the memory map would benefit from the page cache of this contestant
    return kind(
        data,
        num_neighbors=FANOUTS,
        batch_size=spec["batch_size"],
        num_workers=1,
        seed=0,
        check_features=False,
        **options,
    )


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Train epochs, and record the reads of the first one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out = Path(spec["folder"], f"{spec['name'].replace('/', '-')}.json")
    options = {}
    if not spec.get("queued", True):
        disk_reads._create_queues = list
    if spec["kind"] == "disk":
        options = {"memory": spec["memory"], "store": spec["store"]}
    module = datamodule(spec, **options)
    if spec["kind"] == "map":
        advise(module.data.x, "MADV_RANDOM")  # else each page fault reads 128 kB
    model = GraphSAGE(module.data.x.size(1), spec["hidden"], 2, CLASSES)
    optimizer = torch.optim.Adam(model.parameters())
    bounded = False if spec.get("in_memory") else limited(spec["memory"] + spec["allowance"])
    loader = module.train_dataloader()
    noted: dict[str, Any] = {"pid": os.getpid(), "limited": bounded}
    for number in range(gate.rounds):
        gate.wait()
        start = time.perf_counter()
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(
                model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            ).backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        table = loader.pipeline.tables.get("x")
        if isinstance(table, DiskFeatures) and number == 0:
            noted.update(vars(table.counts), cache_rows=table.cache_rows, direct=table.direct)
        out.write_text(json.dumps(noted))
        gate.report(seconds)


def _graphbolt(folder: Path, args: Any, allowance: int, memory: int) -> dict[str, Any]:
    """Start GraphBolt, with features in a memory map and the same limit of memory."""
    # A file of its own, since two maps of one file share their page cache.
    if args.only not in GRAPHBOLT or graphbolt.python() is None:
        return {GRAPHBOLT: None} if args.only in GRAPHBOLT else {}
    own = folder / "graphbolt"
    own.mkdir()
    shutil.copyfile(folder / "x.npy", own / "x.npy")
    arrays = {name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("indptr", "indices")}
    spec = {**args.sizes, "kind": "epoch", "folder": graphbolt.write_graph(own, **arrays), "fanouts": FANOUTS}
    spec |= {"map": str(own / "x.npy"), "classes": CLASSES, "num_workers": 1}
    forget_pages(own)
    started = graphbolt.contestants(folder, {GRAPHBOLT: spec})
    limited(memory + allowance, started[GRAPHBOLT].pid)
    return started


def optimum(trace: Sequence[np.ndarray], file: FeatureFile, slots: int) -> int:
    """Return the number of blocks that an optimal reader with this number of slots must read, given the whole trace.

    Of the cached rows and those in the blocks just read, it retains the ones that are needed soonest.
    """
    trace = [np.unique(rows) for rows in trace]
    starts = np.cumsum([0, *map(len, trace)])
    rows = np.concatenate([np.empty(0, np.int32), *trace], dtype=np.int32, casting="same_kind")
    return int(_count_optimal_reads(rows, starts, file.num_rows, file.offset, file.row_bytes, slots))


@numba.njit(nogil=True, cache=True)
def _count_optimal_reads(
    rows: np.ndarray, starts: np.ndarray, num_rows: int, offset: int, row_bytes: int, slots: int
) -> int:
    # `coming` is the next mini-batch that needs a row, `after` the one after each read.
    num_batches = never = starts.size - 1
    coming, after = np.full(num_rows, never, np.int32), np.empty(rows.size, np.int32)
    for batch in range(num_batches - 1, -1, -1):
        for i in range(starts[batch], starts[batch + 1]):
            after[i] = coming[rows[i]]
            coming[rows[i]] = batch
    # A row is cached if it was stored after the cached rows for its next mini-batch were evicted.
    stored_in, evicted_in = np.full(num_rows, -1, np.int32), np.full(num_batches + 1, -1, np.int32)
    num_cached = 0
    needed_in = np.zeros(num_batches + 1, np.int64)  # number of cached rows by the mini-batch that needs them next
    read_in = np.full((offset + num_rows * row_bytes) // 4096 + 2, -1, np.int32)  # last mini-batch that read a block
    num_blocks = 0
    for batch in range(num_batches):
        blocks = []
        for i in range(starts[batch], starts[batch + 1]):
            row = np.int64(rows[i])
            begin = offset + row * row_bytes
            if stored_in[row] > evicted_in[batch]:
                num_cached -= 1
                needed_in[batch] -= 1
            else:
                for block in range(begin // 4096, (begin + row_bytes - 1) // 4096 + 1):
                    if read_in[block] != batch:
                        read_in[block] = batch
                        blocks.append(block)
            coming[row], stored_in[row] = after[i], -1
            if after[i] < never:
                stored_in[row] = batch
                num_cached += 1
                needed_in[after[i]] += 1
        num_blocks += len(blocks)
        # Rows in these blocks are at hand too if the blocks contain them completely.
        for block in blocks:
            low = max((block * 4096 - offset) // row_bytes, 0)
            for row in range(low, min((block * 4096 + 4095 - offset) // row_bytes + 1, num_rows)):
                begin = offset + row * row_bytes
                if coming[row] == never or stored_in[row] > evicted_in[coming[row]]:
                    continue
                whole = True
                for touched in range(begin // 4096, (begin + row_bytes - 1) // 4096 + 1):
                    whole = whole and read_in[touched] == batch
                if whole:
                    stored_in[row] = batch
                    num_cached += 1
                    needed_in[coming[row]] += 1
        # Evict the rows that are needed last: those of whole mini-batches while too many remain, then single ones.
        for latest in range(num_batches - 1, batch, -1):
            excess = num_cached - slots
            if excess < needed_in[latest]:
                for i in range(starts[latest], starts[latest + 1] if excess > 0 else starts[latest]):
                    row = np.int64(rows[i])
                    if num_cached > slots and coming[row] == latest and stored_in[row] > evicted_in[latest]:
                        stored_in[row] = -1
                        num_cached -= 1
                        needed_in[latest] -= 1
                break
            num_cached -= needed_in[latest]
            needed_in[latest], evicted_in[latest] = 0, batch
    return num_blocks


def trace_of(spec: dict[str, Any]) -> list[np.ndarray]:
    """Return the nodes of each mini-batch of the first epoch."""
    loader = datamodule(spec).train_dataloader()
    return [loader.pipeline.sample(task).nodes(None).numpy() for task in loader.tasks(loader.begin_epoch())]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    argv = [*(sys.argv[1:] if argv is None else argv)]
    large = "--large" in argv
    argv = [argument for argument in argv if argument != "--large"]
    args = parse(
        "disk", __doc__, LARGE if large else SIZES, argv, runs=3, paths={"folder": "where the graph lies meanwhile"}
    )
    described = graphbolt.machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_graph(folder, args.nodes, args.degree, args.features, args.train_nodes)
        size = args.nodes * args.features * 4
        common = {"folder": name, "hidden": args.hidden, "batch_size": args.batch_size}
        common["allowance"] = LARGE_ALLOWANCE if large else ALLOWANCE
        specs: dict[str, Any] = {"ours, in memory": {**common, "kind": "memory", "in_memory": True}}
        if large and args.only in "ours, in memory":
            twin = Path(name, "twin")
            twin.mkdir()
            write_graph(twin, args.nodes // 8, args.degree, args.features, args.train_nodes)
            specs["ours, in memory"]["folder"] = str(twin)
        for share, part in SHARES.items():
            memory = max(size // part, LEAST)
            specs[f"ours, disk, {share} of memory"] = {
                **common,
                "kind": "disk",
                "memory": memory,
                "store": str(folder / "x.npy"),
            }
        quarter = max(size // 4, LEAST)
        quarter_of = specs["ours, disk, 1/4 of memory"]
        specs["ours, disk, 1/4 of memory, by threads"] = {**quarter_of, "queued": False}
        specs["memory map, 1/4 of memory"] = {**common, "kind": "map", "memory": quarter}
        specs = {key: {**spec, "name": key} for key, spec in specs.items() if args.only in key}
        forget_pages(folder)
        bolt = _graphbolt(folder, args, common["allowance"], quarter := max(size // 4, LEAST))
        rows = measure_isolated(contestant, specs, args.runs, bolt)
        for process in filter(None, bolt.values()):
            forget_group(process.pid)
        noted = {
            key: json.loads(Path(spec["folder"], f"{key.replace('/', '-')}.json").read_text())
            for key, spec in specs.items()
        }
        for each in noted.values():
            forget_group(each["pid"])
        trace = trace_of(specs[next(iter(specs))] | {"folder": name, "in_memory": False})
        extra: dict[str, Any] = {"features, GB": size / 1e9, "published": PUBLISHED}
        extra["limited by a control group"] = all(
            each["limited"] for key, each in noted.items() if key != "ours, in memory"
        )
        for key, each in noted.items():
            if "blocks" in each and specs[key].get("queued", True):  # otherwise it reads the same blocks
                best = optimum(trace, FeatureFile.open(specs[key]["store"]), each["cache_rows"])
                extra[key] = {
                    "direct": each["direct"],
                    "rows asked for": each["rows"],
                    "in memory": round(each["hits"] / each["rows"], 3),
                    "MB read": round(each["blocks"] * 4096 / 1e6, 1),
                    "against the optimum": round(each["blocks"] / max(best, 1), 3),
                    "blocks in a read": round(each["blocks"] / max(each["reads"], 1), 2),
                }
    ours = "ours, disk, 1/4 of memory"
    in_memory = "ours, in memory"
    pairs = [(f"{share} in memory, against memory", f"ours, disk, {share} of memory", in_memory) for share in SHARES]
    pairs += [
        ("1/4 in memory, against GraphBolt", ours, GRAPHBOLT),
        ("1/4 in memory, against a memory map", ours, "memory map, 1/4 of memory"),
        ("a queue of reads against threads", ours, f"{ours}, by threads"),
    ]
    comparisons = [compare(rows, f"Features on disk, {what}", [mine], [peer], False) for what, mine, peer in pairs]
    comparisons[1]["target"], comparisons[4]["target"] = round(1 / 1.5, 3), 1.0
    result = {
        "benchmark": "disk",
        "title": f"An epoch, {args.nodes:,} nodes with {args.features} features",
        "unit": "s per epoch",
        "machine": described,
        "settings": {**args.sizes, "runs": args.runs, "fanouts": FANOUTS},
        "rows": rows,
        "comparisons": comparisons,
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
