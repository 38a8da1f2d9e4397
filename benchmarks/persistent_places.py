"""What goes with ``benchmarks.persistent``: topology and features in pinned memory, caches, gathering, the figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_clock import failure, rounds

SECTOR = 32
FEATURES = 100  # ogbn-products
BUDGETS = (0.0, 0.02, 0.1, 0.3)
"""Shares of the bytes of topology and features."""


def rounded(value: Any) -> Any:
    """Round floats for a file."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def medians(contestants: dict[str, Callable[[int], float]], runs: int) -> dict[str, Any]:
    """Return the median of each contestant, or what went wrong."""
    seen = rounds(contestants, runs + 1, dict.fromkeys(contestants, 4))
    return {name: us if isinstance(us, str) else statistics.median(us[1:]) for name, us in seen.items()}


def random_reads(bench: Any) -> dict[str, float]:
    """Measure how fast 32-byte sectors come from random places of memory as large as the graph's arrays."""
    from lightning_gnn.ops import gather_rows

    bytes_ = 8 * bench.host.num_nodes + bench.host.num_bytes
    table = torch.zeros(bytes_ // SECTOR + 1, SECTOR // 4, device=bench.device)
    reads = 1 << (8 if bench.args.interpret else 24)
    index = torch.randint(table.size(0), (reads,), dtype=torch.int32, device=bench.device)
    one, out = table.view(-1), torch.empty(reads, SECTOR // 4, device=bench.device)
    spread = index * (SECTOR // 4) if one.numel() < 2**31 else index.long() * (SECTOR // 4)
    column = torch.empty(reads, device=bench.device)
    calls: dict[str, Callable[[], Any]] = {
        "gather_rows": lambda: gather_rows(table, index, out),
        "index_select of rows": lambda: torch.index_select(table, 0, index, out=out),
        "index_select of single values": lambda: torch.index_select(one, 0, spread, out=column),
    }
    us = medians({name: partial(_device, bench, call) for name, call in calls.items()}, bench.args.runs)
    rates = {name: SECTOR * reads / time / 1e3 for name, time in us.items() if not isinstance(time, str)}
    return {"bytes": bytes_, "reads": reads, "gb_per_s": max(rates.values()), **rates}


def _device(bench: Any, call: Callable[[], Any], turn: int) -> float:
    return bench.clock.device(call)


def run(bench: Any, cell: tuple[int, int, int]) -> dict[str, Any]:
    """Measure the topology in pinned memory, the caches in front, and gathering; what fails does not stop the rest."""
    from lightning_gnn.graph.features import FeatureTable

    result: dict[str, Any] = {"graph": bench.name, "hops": cell[0], "fanout": cell[1], "batch_size": cell[2]}
    try:
        columns = FEATURES if not bench.args.interpret else 5
        values = torch.rand(bench.host.num_nodes, columns, device=bench.device)
        table = FeatureTable(_pinned(values, bench.device))
        node = bench.sample(next(iter(bench.samplers)), cell, 0)[0]
        host = bench.host.pin_memory() if bench.device.type == "cuda" else bench.host
    except Exception as error:
        return {**result, "failed": failure(error)}
    for part, measured in (
        ("gather", partial(_gathering, bench, table, values, node)),
        ("topology", partial(_topology, bench, host, cell)),
        ("caches", partial(_caches, bench, host, table, cell, node)),
    ):
        try:
            result[part] = measured()
        except Exception as error:
            result[part] = {"failed": failure(error)}
        print(f"{part}: {rounded(result[part])}", flush=True)
    return result


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    host = tensor.cpu()
    return host.pin_memory() if device.type == "cuda" else host


def _gathering(bench: Any, table: Any, values: Tensor, node: Tensor) -> dict[str, Any]:
    """Gather the rows of one mini-batch from the device, from pinned memory, and through a cache of hot rows."""
    from lightning_gnn.graph.cache import hottest
    from lightning_gnn.graph.features import FeatureTable

    there = FeatureTable(values)
    quarter = table.cached(hottest(bench.host.out_degrees, table.num_nodes // 4), bench.device)
    on_cpu, out = node.cpu(), torch.empty(node.numel(), table.num_features, device=bench.device)
    staged = _pinned(out, bench.device)

    def by_the_cpu(turn: int) -> float:
        return bench.clock.wall(
            lambda: out.copy_(torch.index_select(table.values, 0, on_cpu, out=staged), non_blocking=True)
        )

    us = medians(
        {
            "ours, device": partial(_device, bench, lambda: there.gather(node, out)),
            "torch.index_select, device": partial(_device, bench, lambda: torch.index_select(values, 0, node, out=out)),
            "ours, pinned": partial(_device, bench, lambda: table.gather(node, out)),
            "ours, pinned, a quarter of the rows cached": partial(_device, bench, lambda: quarter.gather(node, out)),
            "torch.index_select on the CPU and copy": by_the_cpu,
        },
        bench.args.runs,
    )
    useful = node.numel() * table.row_bytes
    return {
        "rows": node.numel(), "row_bytes": table.row_bytes, "us": us,
        "gb_per_s": {name: useful / time / 1e3 for name, time in us.items() if not isinstance(time, str)},
    }  # fmt: skip


def _pinned_sampler(bench: Any, host: Any, mode: str, **options: Any) -> Any:
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    # As PersistentNeighborSampler places it: the offsets on the device, the edges in pinned memory.
    indptr = host.indptr.to(bench.device)
    return TritonNeighborSampler(indptr, host.indices, device=bench.device, mode=mode, **bench.small, **options)


def _topology(bench: Any, host: Any, cell: tuple[int, int, int]) -> dict[str, Any]:
    """Sample with the topology on the device and in pinned memory."""
    contestants: dict[str, Callable[[int], float]] = {}
    for mode in bench.samplers:
        if mode in ("fused", "persistent"):
            pinned = _pinned_sampler(bench, host, mode)
            contestants[f"{mode}, device"] = partial(bench.whole, mode, cell)
            contestants[f"{mode}, pinned"] = partial(_whole, bench, pinned, cell)
    return medians(contestants, bench.args.runs)


def _whole(bench: Any, sampler: Any, cell: tuple[int, int, int], turn: int) -> float:
    seeds = bench.seeds_there[turn % len(bench.seeds)][: cell[2]]
    return bench.clock.wall(lambda: sampler.sample(seeds, [cell[1]] * cell[0], turn))


def _caches(bench: Any, host: Any, table: Any, cell: tuple[int, int, int], node: Tensor) -> list[dict[str, Any]]:
    """Sweep ``cache_bytes``: hot lists in front of a pinned topology, hot rows in front of pinned features."""
    from lightning_gnn.graph.cache import plan_dual_cache
    from lightning_gnn.persistent import count_accesses

    hops, fanout, batch = cell
    everyone = torch.arange(host.num_nodes)
    counts = count_accesses(host, everyone, [fanout] * hops, batch, 8, backend="numba")
    total = host.num_bytes + table.num_nodes * table.row_bytes
    sweep = []
    for share in BUDGETS if not bench.args.interpret else BUDGETS[::3]:
        plan = plan_dual_cache(
            counts.features, counts.adjacency, host.in_degrees, table.row_bytes, host.indices.element_size(),
            int(share * total),
        )  # fmt: skip
        rows = table.cached(plan.feature_nodes, bench.device) if plan.feature_nodes.numel() else table
        lists = plan.adjacency_nodes
        cached = {"cached": host.cache_adjacency(lists, bench.device)} if lists.numel() else {}
        out = torch.empty(node.numel(), table.num_features, device=bench.device)
        try:
            sampler = _pinned_sampler(bench, host, "fused", **cached)
        except TypeError as error:
            sweep.append({"cache_bytes": int(share * total), "failed": failure(error)})
            continue
        us = medians(
            {
                "sample": partial(_whole, bench, sampler, cell),
                "gather": partial(_device, bench, partial(rows.gather, node, out)),
            },
            bench.args.runs,
        )
        sweep.append({
            "cache_bytes": int(share * total), "share": share, "us": us, "feature_hit_rate": plan.feature_hit_rate,
            "adjacency_hit_rate": plan.adjacency_hit_rate, "used_bytes": plan.nbytes,
        })  # fmt: skip
    return sweep


def draw(result: dict[str, Any], file: Path) -> str:
    """Draw the speed-ups over hop by hop, whole samples above kernels, if matplotlib is there; say what was done."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no figure: matplotlib is not installed"
    graphs = [name for name in result["graphs"] if any(cell["graph"] == name for cell in result["cells"])]
    if not graphs:
        return "no figure: no cell was measured"
    figure, axes = pyplot.subplots(2, len(graphs), figsize=(3.6 * len(graphs), 6.4), squeeze=False, sharey="row")
    for column, name in enumerate(graphs):
        order = ("hops", "fanout", "batch_size")
        cells = sorted((c for c in result["cells"] if c["graph"] == name), key=lambda c: [c[key] for key in order])
        for row, kind in enumerate(("whole_us", "kernel_us")):
            axis = axes[row][column]
            for mode in ("persistent", "fused", "no_queue", "launches", "hop_by_hop"):
                known = [cell[kind] for cell in cells]
                speedups = [
                    seen["hop_by_hop"]["median"] / seen[mode]["median"]
                    if mode in seen and "hop_by_hop" in seen
                    else float("nan")
                    for seen in known
                ]
                axis.plot(range(len(cells)), speedups, marker=".", label=mode)
            axis.set_xticks(range(len(cells)))
            axis.set_xticklabels(["/".join(str(cell[key]) for key in order) for cell in cells], rotation=90, size=6)
            axis.grid(alpha=0.3)
            axis.set_title(f"{name}: {'whole samples' if row == 0 else 'kernels'}", size=9)
    axes[0][0].set_ylabel("times as fast as hop by hop")
    axes[1][0].set_ylabel("times as fast as hop by hop")
    axes[0][0].legend(fontsize=7)
    device = result["machine"].get("gpu", "interpreted: the times mean nothing")
    figure.suptitle(f"Sampling on {device}; hops/fanout/batch size", size=10)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return f"figure: {file.name}"
