"""Roofline estimate of the sampling kernels without a GPU: bytes, atomics, launches, barriers, time.

``python -m benchmarks.gpu.model`` prints it for mini-batches like those of ``benchmarks.gpu.persistent``, sampled one
by one and in bulks. ``--write`` also compiles the kernels for sm_80 and sm_90 (minutes), and writes their resource
usage with the roofline to benchmarks/results/gpu_model.json and into the guide. Counted: accesses per array (a test
compares them with Triton's interpreter and the compiled kernels), sectors per access, barriers. Assumed: ``GPUS`` to
``SYNC_US``, one pass of all bytes through the memory, 4 programs per multiprocessor.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, replaced

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pgsampler.md"
FILE = RESULTS / "gpu_model.json"
SECTOR = 32
"""Bytes transferred for one random access, or for several of a warp to the same sector."""
COUNTED = json.loads((RESULTS / "gpu_counts.json").read_text())
"""Barriers, accesses and sectors of the compiled kernels, by ``python -m tests.ptx.counts``."""
GPUS = {  # GB/s of memory, published; multiprocessors
    "A100 80 GB": (2039, 108),
    "H100 SXM": (3350, 132),
    "H200": (4800, 132),
}
PCIE = {"PCIe 4 x16": 25.0, "PCIe 5 x16": 50.0}
"""GB/s of reads from pinned memory, about four fifths of the published bandwidth."""
BARRIER_US = 2.0
"""A grid barrier; 1.3 to 2.5 us in "A Study of Single and Multi-device Synchronization Methods in Nvidia GPUs"."""
LAUNCH_US = 4.0
"""Time from one kernel's end to the next one's start if the host is not ahead."""
SYNC_US = 20.0
"""Time in which the host waits for the sizes, reads them, creates tensors and launches the copy of the mini-batch."""
BYTES = {
    "seeds": 8, "indptr": 8, "indices": 4, "state": 8, "nodes": 4, "rowptr": 4, "src": 4, "eid": 4, "col": 4,
    "totals": 8, "node_out": 8, "edge_index_out": 8, "edge_out": 8, "table": 8, "queue": 8, "stage": 4, "ticket_of": 4,
}  # fmt: skip
RANDOM = ("indptr", "indices", "state", "ticket_of")
"""Arrays with random accesses; accesses to the others are contiguous."""


@dataclass(frozen=True)
class Batch:
    """The size of one mini-batch, or of several together."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    parts: int = 1

    def times(self, parts: int) -> Batch:
        """Return a bulk of this many mini-batches."""
        return Batch(tuple(parts * n for n in self.nodes), tuple(parts * n for n in self.edges), parts)


TILE, WINDOW = 256, 32
"""Edges that a program settles at once, and preceding tiles that it reads at once."""

Counts = Counter[tuple[str, str]]
"""Number of accesses of one value each, by (load, store or atomic; array)."""


def hop_counts(batch: Batch, programs: int, tile: int = TILE) -> Counts:
    """Count the accesses of ``hop_kernel``: graph on the device, fanouts that are picked in registers, not disjoint.

    Reads for locating a bulk's parts and the launch's scalars are not counted.
    """
    seeds, hops, bulk = batch.nodes[0], len(batch.edges), batch.parts > 1
    expanding, edges = sum(batch.nodes[:-1]), sum(batch.edges)
    positions = seeds + edges
    found: Counts = Counter({
        ("load", "seeds"): seeds, ("store", "src"): seeds, ("atomic", "state"): seeds,
        # expand: one row per thread, then one edge per thread
        ("load", "nodes"): expanding, ("load", "indptr"): 2 * expanding, ("load", "rowptr"): expanding,
        ("store", "eid"): edges, ("store", "col"): edges,
        ("load", "eid"): edges, ("load", "indices"): edges,
    })  # fmt: skip
    found.update({("store", "src"): edges, ("atomic", "state"): edges})
    if bulk:  # the mini-batch of an edge, by its row
        found.update({("load", "col"): edges, ("load", "nodes"): edges})
    # settle: winners, the numbers of edges of these nodes, and prefix sums over all preceding tiles
    found.update({("load", "src"): positions, ("load", "state"): positions, ("load", "indptr"): 2 * expanding})
    new = sum(batch.nodes[1:])
    tiles = [-(-count // tile) for count in (seeds, *batch.edges)]
    looked = sum(min(number, WINDOW) for count in tiles for number in range(count))
    found.update({("atomic", "totals"): 4 * sum(tiles), ("load", "totals"): 2 * looked})
    found.update({("load", "rowptr"): 2 * programs * hops, ("store", "rowptr"): hops + 1})  # bounds of shares
    found.update({("store", "state"): new, ("store", "nodes"): seeds + new, ("store", "rowptr"): seeds + new})
    return found


def emit_counts(batch: Batch) -> Counts:
    """Count the accesses of ``emit_kernel``, or of ``emit_bulk_kernel`` except its small tables."""
    nodes, edges = sum(batch.nodes), sum(batch.edges)
    return Counter({
        ("load", "nodes"): nodes, ("store", "node_out"): nodes,
        ("load", "src"): edges, ("load", "state"): edges, ("store", "edge_index_out"): 2 * edges,
        ("load", "col"): edges, ("load", "eid"): edges, ("store", "edge_out"): edges,
    })  # fmt: skip


def queue_counts(batch: Batch, programs: int, tile: int = TILE) -> Counts:
    """Count the accesses of ``queue_kernel`` if no node is found late, so that each is a task once.

    Polls of empty slots are not counted: they read the L2 cache, and their number depends on the schedule.
    """
    seeds, expanding, edges = batch.nodes[0], sum(batch.nodes[:-1]), sum(batch.edges)
    pushed = expanding - seeds
    found = hop_counts(batch, programs, tile)
    found.subtract({("load", "indices"): edges, ("load", "eid"): edges})  # the expansion reads the queue's samples
    found.update({
        # discover: a task per thread; its picks and their sources go through `stage`
        ("load", "seeds"): seeds, ("load", "queue"): pushed, ("atomic", "queue"): pushed,
        ("atomic", "state"): seeds + edges, ("load", "state"): expanding, ("load", "indptr"): 2 * expanding,
        ("store", "stage"): 2 * edges, ("load", "stage"): edges, ("load", "indices"): edges,
    })  # fmt: skip
    found.update({  # find_tickets: the slot of each node's final hop
        ("load", "seeds"): seeds, ("load", "queue"): pushed, ("load", "state"): expanding,
        ("store", "ticket_of"): expanding,
    })  # fmt: skip
    found.update({  # replay_rows, then the bids
        ("load", "ticket_of"): expanding, ("load", "stage"): 2 * edges, ("load", "src"): edges,
        ("store", "src"): edges,
    })  # fmt: skip
    return +found


def barriers(batch: Batch, queued: bool = False) -> int:
    """Return the grid barriers of a launch: two phases per level; the split of a bulk, or two phases of the queue."""
    return 2 * queued + 2 * (len(batch.edges) + 1) - 1 + (batch.parts > 1)


def counted(mode: str = "fused") -> dict[tuple[str, str], tuple[int, int]]:
    """Return the accesses of compiled kernels in one case, and their sectors, by (load, store or atomic; array)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for kernel in COUNTED[mode]["kernels"].values():
        for name, (accesses, _, sectors) in kernel["accesses"].items():
            key = tuple(name.split()[1:])
            found[key] = accesses + found.get(key, (0, 0))[0], sectors + found.get(key, (0, 0))[1]
    return found


def moved(counts: Counts) -> tuple[float, int]:
    """Return the bytes of random accesses, by counted sectors, and those of contiguous accesses."""
    seen = counted()
    each = {key: sectors / accesses for key, (accesses, sectors) in seen.items() if accesses}
    random = sum(SECTOR * each.get(key, 1) * n for key, n in counts.items() if key[1] in RANDOM)
    side_by_side = sum(BYTES[array] * n for (_, array), n in counts.items() if array not in RANDOM)
    return random, side_by_side


def expected(batch: Batch, gb_per_s: float, programs: int, queued: bool = False) -> dict[str, float]:
    """Return the lower bound of a mini-batch's cost in us and bytes; for a bulk, the cost per mini-batch.

    All bytes are assumed to come from memory, although contiguous data is read shortly after it is written and partly
    still in the L2 cache. Only the accesses themselves overlap.
    """
    both = (queue_counts if queued else hop_counts)(batch, programs) + emit_counts(batch)
    random, side_by_side = moved(both)
    memory = (random + side_by_side) / gb_per_s / 1e3
    fixed = barriers(batch, queued) * BARRIER_US + 2 * LAUNCH_US + SYNC_US
    atomics = sum(n for (kind, array), n in both.items() if (kind, array) == ("atomic", "state"))
    return {
        "random_mb": random / batch.parts / 1e6, "side_by_side_mb": side_by_side / batch.parts / 1e6,
        "atomics": atomics / batch.parts, "launches": 2 / batch.parts,
        "barriers": barriers(batch, queued) / batch.parts,
        "memory_us": memory / batch.parts, "fixed_us": fixed / batch.parts, "us": (memory + fixed) / batch.parts,
    }  # fmt: skip


def hop_by_hop(batch: Batch, gb_per_s: float, programs: int) -> float:
    """Return the us of the same kernels with a launch per phase and a host synchronization per hop."""
    random, side_by_side = moved(hop_counts(batch, programs) + emit_counts(batch))
    levels = len(batch.edges) + 1
    return (random + side_by_side) / gb_per_s / 1e3 + (2 * levels + 1) * LAUNCH_US + levels * SYNC_US


def judged(batch: Batch, gb_per_s: float, programs: int) -> dict[str, float]:
    """Return the us per mini-batch that alternative designs would save; negative if they cost more.

    - The one-pass scan, compared with the three passes it replaced (count, sum, assign): each position is written and
      read once more and its source twice, one barrier per level, and every program reads the totals of all programs.
    - Copying out within the launch: saves a launch, costs a barrier, as every source needs its local id first.
    - int32 outputs, which PyG cannot index with: halves the writes, but requires a conversion to int64.
    - A test before each atomic: saves no memory traffic, as the sector is the same; saves the atomics of losing bids,
      but costs a load per bid, which reads as many sectors of the L2 cache.
    """
    levels, edges = len(batch.edges) + 1, sum(batch.edges)
    positions, new = edges + batch.nodes[0], sum(batch.nodes[1:])
    outputs = 3 * edges + sum(batch.nodes)
    totals = sum(n * BYTES[array] for (_, array), n in hop_counts(batch, programs).items() if array == "totals")
    us = {
        "one pass": (12 * positions + 16 * programs * programs * levels - totals) / gb_per_s / 1e3
        + levels * BARRIER_US,
        "copying out inside": LAUNCH_US - BARRIER_US,
        "int32 outputs": (4 - 12) * outputs / gb_per_s / 1e3,
        "test before atomics": SECTOR * (edges - new - edges) / gb_per_s / 1e3,
    }
    return {what: saved / batch.parts for what, saved in us.items()}


def pinned_us(batch: Batch, gb_per_s: float) -> float:
    """Return the us for reading edges over the bus if the topology is in pinned memory."""
    return SECTOR * sum(batch.edges) / gb_per_s / 1e3


CASES = {  # sampled from similar graphs of benchmarks.gpu.persistent's generator
    "ogbn-products, 15-10-5, 1,024 seeds": ("ogbn-products", (15, 10, 5), 1024),
    "ogbn-products, 10-10-10, 1,024 seeds": ("ogbn-products", (10, 10, 10), 1024),
    "ogbn-arxiv, 10-10-10, 1,024 seeds": ("ogbn-arxiv", (10, 10, 10), 1024),
}


def sampled(name: str, fanouts: Sequence[int], seeds: int) -> Batch:
    """Sample one mini-batch on the CPU to determine its size."""
    import torch

    from benchmarks.gpu.persistent import GRAPHS
    from lightning_gnn.datasets.synthetic import power_law_graph
    from lightning_gnn.graph.csc import CSCGraph
    from lightning_gnn.ops import sample_neighbors

    nodes, edges, exponent = GRAPHS[name]
    indptr, indices = power_law_graph(nodes, edges, exponent=exponent, seed=0)
    some = torch.randperm(nodes, generator=torch.Generator().manual_seed(1))[:seeds]
    out = sample_neighbors(CSCGraph.from_csc(indptr, indices.int()), some, fanouts, 1, backend="numba")
    return Batch(tuple(out.num_sampled_nodes), tuple(out.num_sampled_edges))


def roofline(batches: dict[str, Batch], bulks: Sequence[int] = (1, 8)) -> list[dict[str, Any]]:
    """Return a row for each mini-batch, bulk and GPU."""
    rows = []
    for what, batch in batches.items():
        for gpu, (gb_per_s, sms) in GPUS.items():
            for bulk in bulks:
                figures = expected(batch.times(bulk), gb_per_s, 4 * sms)
                peer = hop_by_hop(batch, gb_per_s, 4 * sms)
                rows.append({
                    "what": what, "gpu": gpu, "bulk": bulk, "nodes": sum(batch.nodes), "edges": sum(batch.edges),
                    **figures, "hop_by_hop_us": peer, "ratio": peer / figures["us"],
                    "saves_us": judged(batch.times(bulk), gb_per_s, 4 * sms),
                })  # fmt: skip
    return rows


def queue_roofline(batches: dict[str, Batch]) -> list[dict[str, Any]]:
    """Return a row for each mini-batch and GPU: the queue against the fused mode, one mini-batch a launch."""
    rows = []
    for what, batch in batches.items():
        for gpu, (gb_per_s, sms) in GPUS.items():
            figures = expected(batch, gb_per_s, 4 * sms, queued=True)
            fused = expected(batch, gb_per_s, 4 * sms)["us"]
            rows.append({"what": what, "gpu": gpu, **figures, "fused_us": fused, "ratio": figures["us"] / fused})
    return rows


def queue_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the estimates of the queue as Markdown."""
    heads = ("mini-batch", "GPU", "MB at random", "MB side by side", "atomics", "barriers", "us", "fused mode, us")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['gpu']} | {row['random_mb']:.1f} | {row['side_by_side_mb']:.1f} | "
            f"{row['atomics']:,.0f} | {row['barriers']:.3g} | {row['us']:.0f} | {row['fused_us']:.0f} |"
        )
    return "\n".join(lines)


def roofline_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the estimates per mini-batch as Markdown."""
    lines = [
        "| mini-batch | GPU | bulk | MB at random | MB side by side | atomics | launches | barriers | us | "
        "against hop by hop |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['gpu']} | {row['bulk']} | {row['random_mb']:.1f} | {row['side_by_side_mb']:.1f} | "
            f"{row['atomics']:,.0f} | {row['launches']:.3g} | {row['barriers']:.3g} | {row['us']:.0f} | "
            f"{row['ratio']:.2g}x |"
        )
    return "\n".join(lines)


def judged_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the savings of alternative designs per mini-batch as Markdown."""
    ways = list(rows[0]["saves_us"])
    lines = [f"| mini-batch | GPU | bulk | {' | '.join(ways)} |", "|---" * (len(ways) + 3) + "|"]
    for row in rows:
        saved = " | ".join(
            f"{us / (row['us'] + (us if way == 'one pass' else 0)):+.1%}" for way, us in row["saves_us"].items()
        )
        lines.append(f"| {row['what']} | {row['gpu']} | {row['bulk']} | {saved} |")
    return "\n".join(lines)


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return registers, shared memory and occupancy of the compiled kernels as Markdown."""
    lines = [
        "| kernel | variant | GPU | registers | shared memory | spilled | programs per multiprocessor | occupancy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| `{row['kernel']}` | {row['variant']} | sm_{row['sm']} | {row['registers']} | {row['shared']} B | "
            f"{row['spilled']} B | {row['programs']} | {row['occupancy']:.0%} |"
        )
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """Return the section of the guide between its markers."""
    few = [row for row in result["roofline"] if row["gpu"] != "H200"]
    return (
        "Expected, not measured: all bytes at the published bandwidth of the memory, "
        f"{BARRIER_US:g} us a barrier, {LAUNCH_US:g} us a launch, {SYNC_US:g} us a wait of the host.\n\n"
        f"{roofline_table(few)}\n\nTime saved (+) or lost (-) by four other designs, under the same assumptions. "
        '"One pass" is built; its saving is relative to\nthe design before it.\n\n'
        f"{judged_table(few)}\n\nThe queue, one mini-batch a launch, if no node is found late:\n\n"
        f"{queue_table([row for row in result['queue'] if row['gpu'] != 'H200'])}\n\n"
        f"Compiled with Triton {result['triton']}, eight warps a program:\n\n"
        f"{kernel_table(result['kernels'])}"
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.model", description=__doc__)
    parser.add_argument("--write", action="store_true", help="compile the kernels too, and write the file and the page")
    args = parser.parse_args(argv)
    batches = {what: sampled(*case) for what, case in CASES.items()}
    rows = roofline(batches)
    print(roofline_table(rows))
    print(judged_table(rows))
    queue = queue_roofline(batches)
    print(queue_table(queue))
    for what, batch in batches.items():
        by_bus = ", ".join(f"{pinned_us(batch, rate):.0f} us over {bus}" for bus, rate in PCIE.items())
        print(f"{what}: with the topology in pinned memory its edges take {by_bus}")
    result: dict[str, Any] = {"roofline": rows, "queue": queue}
    if args.write:
        import triton

        from benchmarks.gpu.kernel_usage import all_kernels

        result = {"triton": triton.__version__, "kernels": all_kernels(), **result}
        FILE.write_text(json.dumps(result, indent=1) + "\n")
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), page(result)), encoding="utf-8")
        print(kernel_table(result["kernels"]))
    return result


if __name__ == "__main__":
    main()
