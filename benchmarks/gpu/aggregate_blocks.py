"""Blocks of the GPU aggregation (entries x columns, warps) against each other, and against torch's sparse product.

Justifies ``block_shape`` of ``lightning_gnn.triton_kernels.aggregate``. Weighted sums on power-law graphs; microseconds
per call by CUDA events, the median of the rounds.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.device_clock import Clock, rounds
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.triton_kernels import aggregate
from lightning_gnn.triton_kernels.row_parts import build_parts

GRAPHS = ((122_451, 3_090_000), (233_000, 11_000_000), (29_120, 2_860_000))
COLUMNS = (32, 47, 64, 100, 128, 256)
BLOCKS = (
    (4, 32, 1), (8, 32, 1), (16, 32, 1), (2, 64, 1), (4, 64, 1), (8, 64, 1), (8, 64, 2), (2, 128, 1), (4, 128, 1),
    (8, 128, 1), (4, 128, 2), (8, 128, 2), (4, 256, 1), (4, 256, 4),
)  # fmt: skip


def run(device: torch.device, runs: int, tiny: bool = False) -> dict[str, Any]:
    """Measure all blocks for each dtype, graph and number of columns; ``tiny`` measures one of each."""
    cells, clock, few = [], Clock(device), 1 if tiny else None
    for dtype in (torch.float32, torch.bfloat16)[:few]:
        for nodes, edges in ((20, 60),) if tiny else GRAPHS:
            indptr, indices = (part.to(device) for part in power_law_graph(nodes, edges, seed=0))
            rows, weight = build_parts(indptr, indices.int()), torch.rand(edges, device=device).to(dtype)
            matrix = torch.sparse_csr_tensor(indptr.int(), indices.int(), weight, (nodes, nodes))
            for columns in COLUMNS[:few]:
                x = torch.rand(nodes, 1, columns, device=device).to(dtype)
                given = x, rows.indices, weight[:, None], rows, False, torch.empty_like(x)
                chosen = aggregate.block_shape(nodes, 1, columns, dtype, aggregate.cache_bytes(x.device))
                blocks = [block for block in BLOCKS[:few] if block[1] < 2 * max(columns, 32)]
                best = (chosen.entries, chosen.width, chosen.warps)
                calls = {
                    name(*block): partial(aggregate._sum_parts, *given, aggregate.Block(block[0], 1, *block[1:]))
                    for block in dict.fromkeys((best, *blocks))
                }
                if dtype == torch.float32:
                    calls["torch_sparse"] = partial(torch.matmul, matrix, x[:, 0])
                timed = {what: lambda turn, call=call: clock.device(call) for what, call in calls.items()}
                found = {what: seen for what, seen in rounds(timed, runs + 1).items() if not isinstance(seen, str)}
                us = {what: round(statistics.median(seen[1:]), 1) for what, seen in found.items()}
                cell = {"dtype": str(dtype)[6:], "nodes": nodes, "columns": columns, "us": us, "chosen": name(*best)}
                cells.append(cell | ({"torch_sparse": us.pop("torch_sparse")} if "torch_sparse" in us else {}))
    return {"title": "Blocks of the GPU aggregation", "unit": "us", "rows": [], "comparisons": [], "cells": cells}


def name(entries: int, width: int, warps: int) -> str:
    """Name a block."""
    return f"{entries} x {width}, warps {warps}"
