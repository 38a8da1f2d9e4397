"""The results page of a GPU: roofline estimates, measurements, peers and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.model import GPUS, Batch, expected, hop_by_hop

HEADS = {
    "samples": ("Samples", "From seeds to a sample on the device, without features; us per mini-batch."),
    "places": ("Host memory", "Edges and features where they may lie; us per mini-batch."),
    "loaders": ("Mini-batches", "With features and labels on the device, nothing trained on them; ms per mini-batch."),
    "steps": ("Training steps", "GraphSAGE, 256 hidden channels, through Lightning's Trainer; ms per step."),
    "shards": (
        "Several GPUs",
        "A process for each, all at the same time; what is dealt out is read where it lies, or sent; ms per mini-batch "
        "of the slowest.",
    ),
}
ENOUGH = 1.03
"""Maximum relative slowdown of the recommended bulk, the smallest one within it."""
OURS = ("persistent", "NeighborDataModule")


def medians(figures: dict[str, Any]) -> dict[str, float]:
    """Return the medians of the contestants that ran."""
    return {name: seen["median"] for name, seen in figures.items() if "median" in seen}


def verdicts(parts: dict[str, Any]) -> list[str]:
    """Return the conclusions from the figures, one sentence each."""
    found = []
    if parts.get("wrong"):
        found.append(f"**{parts['wrong']}**: no figure below counts.")
    samples = medians(parts.get("samples", {}))
    queues = {name: us for name, us in samples.items() if name.startswith("queue")}
    if "fused" in samples and queues:
        best = min(queues, key=queues.__getitem__)
        ratio = queues[best] / samples["fused"]
        word = "fused" if ratio >= 1 else "the queue"
        found.append(f'Fused or queue: **{word}**; "{best}" takes {ratio:.2f} times as long as fused.')
    bulks = {1: samples["fused"]} if "fused" in samples else {}
    bulks |= {int(name.split()[-1]): us for name, us in samples.items() if name.startswith("bulk")}
    if len(bulks) > 1:
        least = min(bulks.values())
        chosen = min(bulk for bulk, us in bulks.items() if us <= ENOUGH * least)
        found.append(f"Bulk size: **{chosen}**; the smallest within {ENOUGH - 1:.0%} of the fastest.")
    if "hop by hop, with the host" in samples and bulks:
        ratio = samples["hop by hop, with the host"] / min(bulks.values())
        found.append(f"Against hop by hop with a wait per hop: **{ratio:.2f} times** as fast.")
    places = medians(parts.get("places", {}))
    for what, pinned in (("edges", "edges in pinned memory, bulk of 8"), ("features", "features in pinned memory")):
        cpu = f"{what} read by the CPU"
        if pinned in places and cpu in places:
            ratio = places[cpu] / places[pinned]
            word = "the GPU" if ratio >= 1 else "the CPU"
            found.append(f"Host memory, {what}: better read by **{word}** (the CPU takes {ratio:.2f} times as long).")
    shards = medians(parts.get("shards", {}))
    if "both dealt out" in shards and len(shards) > 1:
        others = {name: ms / shards["both dealt out"] for name, ms in shards.items() if name != "both dealt out"}
        said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in others.items())
        found.append(f"Several GPUs, time of a mini-batch over that with **both dealt out**: {said}.")
    for part, what in (("loaders", "Mini-batches"), ("steps", "Training steps")):
        both = medians(parts.get(part, {}))
        ours = {name: ms for name, ms in both.items() if name.startswith(OURS)}
        theirs = {name: ms for name, ms in both.items() if name not in ours}
        if ours and theirs:
            mine, peer = min(ours, key=ours.__getitem__), min(theirs, key=theirs.__getitem__)
            ratio = theirs[peer] / ours[mine]
            found.append(f'{what}: "{mine}" is **{ratio:.2f} times** as fast as the best peer, "{peer}".')
    return found


def roofline(gpu: str, batch: Batch, parts: dict[str, Any]) -> list[str]:
    """Return a table of expected and measured figures for a known GPU."""
    known = next((name for name in GPUS if name.split()[0] in gpu), None)
    if known is None:
        return [f"No bandwidth of {gpu} is known; expected for others: `python -m benchmarks.gpu.model`."]
    gb_per_s, sms = GPUS[known]
    samples = medians(parts.get("samples", {}))
    wanted = {
        "fused": expected(batch, gb_per_s, 4 * sms)["us"],
        **{f"bulk of {bulk}": expected(batch.times(bulk), gb_per_s, 4 * sms)["us"] for bulk in (2, 4, 8, 16)},
        "hop by hop, with the host": hop_by_hop(batch, gb_per_s, 4 * sms),
    }
    lines = [f"For {known}, {gb_per_s:,} GB/s; us per mini-batch.", "", "| | expected | measured | share |",
             "|---|---|---|---|"]  # fmt: skip
    for name, us in wanted.items():
        seen = samples.get(name)
        lines.append(f"| {name} | {us:.0f} | " + (f"{seen:.0f} | {us / seen:.0%} |" if seen else "not measured | |"))
    return lines


def table(figures: dict[str, Any]) -> list[str]:
    """Return the contestants as Markdown, fastest first, and those that did not run."""
    ran = medians(figures)
    lines = ["| | median | least | most |", "|---|---|---|---|"]
    for name in sorted(ran, key=ran.__getitem__):
        values = figures[name]["values"]
        lines.append(f"| {name} | {ran[name]:.4g} | {min(values):.4g} | {max(values):.4g} |")
    lines += [f"| {name} | {seen['failed']} | | |" for name, seen in figures.items() if "failed" in seen]
    return lines


def page(machine: dict[str, Any], described: str, batch: Batch, parts: dict[str, Any], peers: Sequence[str]) -> str:
    """Return the page."""
    gpu = machine.get("gpu", "no GPU: interpreted, so that the times mean nothing")
    lines = [
        "# A GPU, measured", "",
        f"{gpu}; torch {machine['torch']}, PyG {machine['torch_geometric']}; {machine['date']}. {described}", "",
        "## Verdicts", "", *(f"- {verdict}" for verdict in verdicts(parts)), "",
        "## Roofline", "", *roofline(gpu, batch, parts), "",
    ]  # fmt: skip
    for part, (head, what) in HEADS.items():
        if part in parts:
            lines += [f"## {head}", "", what, "", *table(parts[part]), ""]
    if peers:
        lines += [f"Not importable here, so not measured: {', '.join(peers)}.", ""]
    return "\n".join(lines)
