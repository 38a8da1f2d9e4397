"""Blocks of the GPU aggregation (entries x columns, warps) against each other, and against torch's sparse product.

Justifies ``block_shape`` of ``lightning_gnn.triton_kernels.aggregate``. Weighted sums on power-law graphs; microseconds
per call by CUDA events, the median of five rounds of eight calls. Requires CUDA.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.harness import machine, parse, publish
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.triton_kernels import aggregate
from lightning_gnn.triton_kernels.row_parts import build_parts

GRAPHS = ((122_451, 3_090_000), (233_000, 11_000_000), (29_120, 2_860_000))
COLUMNS = (32, 47, 64, 100, 128, 256)
BLOCKS = (
    (4, 32, 1), (8, 32, 1), (16, 32, 1), (2, 64, 1), (4, 64, 1), (8, 64, 1), (8, 64, 2), (2, 128, 1), (4, 128, 1),
    (8, 128, 1), (4, 128, 2), (8, 128, 2), (4, 256, 1), (4, 256, 4),
)  # fmt: skip


def measure(call: Callable[[], object], runs: int) -> float:
    """Return the microseconds per call."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(8):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 8 * 1e3)
    return round(statistics.median(found), 1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("gpu_aggregate_blocks", __doc__, {}, argv, runs=5)
    cells = []
    for dtype in (torch.float32, torch.bfloat16):
        for nodes, edges in GRAPHS:
            indptr, indices = (part.cuda() for part in power_law_graph(nodes, edges, seed=0))
            rows, weight = build_parts(indptr, indices.int()), torch.rand(edges, device="cuda", dtype=dtype)
            for columns in COLUMNS:
                x = torch.rand(nodes, 1, columns, device="cuda").to(dtype)
                out = torch.empty_like(x)
                found = {}
                for entries, width, warps in BLOCKS:
                    if width < 2 * max(columns, 32):
                        block = aggregate.Block(entries, 1, width, warps)
                        call = partial(aggregate._sum_parts, x, rows.indices, weight[:, None], rows, False, out, block)
                        found[f"{entries} x {width}, warps {warps}"] = measure(call, args.runs)
                chosen = aggregate.block_shape(nodes, 1, columns, dtype, aggregate.cache_bytes(x.device))
                cell = {"dtype": str(dtype)[6:], "nodes": nodes, "columns": columns, "us": found}
                cell["chosen"] = f"{chosen.entries} x {chosen.width}, warps {chosen.warps}"
                if dtype == torch.float32:
                    matrix = torch.sparse_csr_tensor(indptr.int(), indices.int(), weight, (nodes, nodes))
                    cell["torch_sparse"] = measure(partial(torch.matmul, matrix, x[:, 0]), args.runs)
                cells.append(cell)
    title = "Blocks of the GPU aggregation"
    result = {"benchmark": "gpu_aggregate_blocks", "title": title, "unit": "us", "machine": machine(), "rows": []}
    return publish({**result, "comparisons": [], "cells": cells}, args.out)


if __name__ == "__main__":
    main()
