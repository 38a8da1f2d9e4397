"""Rows that one rank reads from another: our exchange over Arrow Flight, gloo's all-to-all, and an earlier exchange.

Two processes of this machine, one requesting thread: ids go to the other rank, which returns their rows. With
``--old``, the exchange of a checkout of an earlier release also runs. The figure is milliseconds per call.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import compare, machine, measure, parse, publish
from lightning_gnn.partitioned.exchange import RankRPC

SIZES = {"row_bytes": (512, 16), "calls": (20, 2), "most_rows": (65_536, 256)}
ROWS = (1, 256, 8_192, 65_536)
OURS, GLOO, OLD = "ours, Arrow Flight", "gloo, all_to_all_single", "earlier exchange, gloo with pickle"
Exchange = Callable[[np.ndarray], None]  # reads the rows of these ids; on the other rank, of an empty array


def connect(rank: int, folder: str, sizes: dict[str, int], old: str | None) -> tuple[dict[str, Exchange], list[Any]]:
    """Return the contestants, and the calls to end them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    table = torch.zeros(2 * sizes["most_rows"], sizes["row_bytes"], dtype=torch.uint8)

    def all_to_all(ids: np.ndarray) -> None:
        counts = torch.zeros(2, dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor([0, ids.size] if rank == 0 else [0, 0]))
        asked = torch.empty(int(counts.sum()), dtype=torch.int64)
        own, others = [0, ids.size] if rank == 0 else [0, 0], counts.tolist()
        dist.all_to_all_single(asked, torch.from_numpy(ids), others, own)
        rows = torch.empty(ids.size, sizes["row_bytes"], dtype=torch.uint8)
        dist.all_to_all_single(rows, table[asked], own, others)

    kinds, contestants = {OURS: RankRPC}, {GLOO: all_to_all}
    if old is not None:
        spec: Any = importlib.util.spec_from_file_location("old", f"{old}/lightning_gnn/partitioned/exchange.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kinds[OLD] = module.RankRPC
    exchanges = {name: kind({"rows": lambda ids: table[torch.from_numpy(ids)].numpy()}) for name, kind in kinds.items()}
    for name, exchange in exchanges.items():

        def read(ids: np.ndarray, exchange: RankRPC = exchange) -> None:
            if rank == 0:
                exchange.call("rows", {1: (ids,)})

        contestants[name] = read
    return contestants, [*(exchange.close for exchange in exchanges.values()), dist.destroy_process_group]


def answer(folder: str, sizes: dict[str, int], old: str | None) -> None:
    """Take part in each turn as rank 1, until rank 0 names no contestant."""
    contestants, ends = connect(1, folder, sizes, old)
    turn = [""]
    while dist.broadcast_object_list(turn) or turn[0]:
        for _ in range(sizes["calls"]):
            contestants[turn[0]](np.empty(0, np.int64))
    for end in ends:
        end()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("exchange", __doc__, SIZES, argv, runs=7, paths={"old": "checkout of an earlier release"})
    described, load = machine(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        process = get_context("spawn").Process(target=answer, args=(folder, args.sizes, args.old), daemon=True)
        process.start()
        contestants, ends = connect(0, folder, args.sizes, args.old)

        def milliseconds(name: str, count: int) -> float:
            ids, times = np.random.default_rng(0).integers(0, 2 * args.most_rows, count), []
            dist.broadcast_object_list([name])
            for _ in range(args.calls):
                start = time.perf_counter()
                contestants[name](ids)
                times.append(1e3 * (time.perf_counter() - start))
            return statistics.median(times)

        counts = [count for count in ROWS if count <= args.most_rows]
        rows = measure(
            {
                f"{name}, {count} rows": (lambda name=name, count=count: milliseconds(name, count))
                if name in contestants
                else None
                for count in counts
                for name in (OURS, GLOO, OLD)
                if args.only in name
            },
            args.runs,
        )
        dist.broadcast_object_list([""])
        for end in ends:
            end()
        process.join()
    largest = counts[-1]
    result = {
        "benchmark": "exchange",
        "title": f"Rows of {args.row_bytes} bytes from another rank",
        "unit": "ms per call",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"{count} rows, {peer}", [f"{OURS}, {count} rows"], [f"{peer}, {count} rows"], False,
                    by_rounds=True)
            for count in counts for peer in (GLOO, OLD)
        ],
        "extra": {
            "load of the machine at the start and end": [round(load, 1), round(os.getloadavg()[0], 1)],
            f"MB/s with {largest} rows": {
                row["name"]: round(largest * args.row_bytes / row["median"] / 1e3)
                for row in rows if row["name"].endswith(f", {largest} rows") and "median" in row
            },
        },
    }  # fmt: skip
    return publish(result, args.out)


if __name__ == "__main__":
    main()
