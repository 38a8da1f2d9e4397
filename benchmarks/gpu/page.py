"""What the files of the GPU benchmarks say: the results page, and the part of docs/results.md."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.model import GPUS, Batch, expected, hop_by_hop
from benchmarks.harness import TABLE_HEAD, as_row

HEADS = {
    "layers": ("Layers", "Forward and backward of a model with one layer per hop, 256 channels; ms per mini-batch."),
    "profile": ("Profile", "A training step of GraphSAGE, and its time in which the device has work; ms per step, and "
                "the number of launches."),
    "samples": ("Samples", "From seeds to a sample on the device, without features; us per mini-batch."),
    "phases": ("Phases", "The sampling kernel's phases, each with the barrier before it; us per launch."),
    "launches": ("Launches", "The kernels of one fused sample, by the shape of the launch; us."),
    "loaders": ("Mini-batches", "With features and labels on the device, nothing trained on them; ms per mini-batch."),
    "steps": ("Training steps", "GraphSAGE, 256 hidden channels, through Lightning's Trainer; ms per step."),
    "places": ("Host memory", "Edges and features where they may lie; us per mini-batch."),
    "shards": ("Several GPUs", "A process for each, all at the same time; what is dealt out is read where it lies, or "
               "sent; ms per mini-batch of the slowest."),
}  # fmt: skip
QUOTED = (  # what, part, unit, ours, peer
    ("a sample on the GPU", "samples", "us", "bulk of 8", "hop by hop, with the host"),
    ("a sample on the GPU", "samples", "us", "bulk of 8", "CPU and transfer"),
    ("a mini-batch with features", "loaders", "ms", "persistent, bulk=8", "NeighborDataModule with PrefetchLoader"),
    ("the same with features in host memory", "loaders", "ms", "persistent, features pinned",
     "NeighborDataModule with PrefetchLoader"),
    ("a training step of GraphSAGE, 256 channels", "steps", "ms", "persistent, bulk=8", "NeighborDataModule"),
    ("reading feature rows in host memory", "places", "us", "features in pinned memory", "features read by the CPU"),
)  # fmt: skip
ENOUGH = 1.03
"""Maximum relative slowdown of the recommended bulk, the smallest one within it."""
OURS = ("persistent", "NeighborDataModule")


def medians(figures: dict[str, Any]) -> dict[str, float]:
    """Return the medians of the contestants that ran."""
    return {name: seen["median"] for name, seen in figures.items() if "median" in seen}


def verdicts(parts: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Return the conclusions from the figures, one or two sentences each."""
    found = [f"**{wrong}**: no figure below counts." for wrong in parts.get("check", {}).get("wrong", ())]
    samples, launches, places, shards = (
        medians(parts.get(part, {})) for part in ("samples", "launches", "places", "shards")
    )
    queues = {name: us for name, us in samples.items() if name.startswith("queue")}
    if "fused" in samples and queues:
        best = min(queues, key=queues.__getitem__)
        ratio = queues[best] / samples["fused"]
        word = "fused" if ratio >= 1 else "the queue"
        found.append(f'Fused or queue: **{word}**; "{best}" takes {ratio:.2f} times as long as fused.')
    bulks = {1: samples["fused"]} if "fused" in samples else {}
    bulks |= {int(name.split()[-1]): us for name, us in samples.items() if name.startswith("bulk")}
    if len(bulks) > 1:
        chosen = min(bulk for bulk, us in bulks.items() if us <= ENOUGH * min(bulks.values()))
        found.append(f"Bulk size: **{chosen}**; the smallest within {ENOUGH - 1:.0%} of the fastest.")
    if "hop by hop, with the host" in samples and bulks:
        ratio = samples["hop by hop, with the host"] / min(bulks.values())
        found.append(f"Against hop by hop with a wait per hop: **{ratio:.2f} times** as fast.")
    if launches:
        best, most = min(launches, key=launches.__getitem__), max(launches.values())
        found.append(f"Launch: **{best}**; the slowest takes {most / launches[best]:.2f} times as long.")
    for what, pinned in (("edges", "edges in pinned memory, bulk of 8"), ("features", "features in pinned memory")):
        cpu = f"{what} read by the CPU"
        if pinned in places and cpu in places:
            ratio = places[cpu] / places[pinned]
            word = "the GPU" if ratio >= 1 else "the CPU"
            found.append(f"Host memory, {what}: better read by **{word}** (the CPU takes {ratio:.2f} times as long).")
    if "both dealt out" in shards and len(shards) > 1:
        ratios = {name: ms / shards["both dealt out"] for name, ms in shards.items() if name != "both dealt out"}
        said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        found.append(f"Several GPUs, time of a mini-batch over that with **both dealt out**: {said}.")
    layers = medians(parts.get("layers", {}))
    if ratios := {
        name.removesuffix(", PyG"): ms / layers[f"{name.removesuffix(', PyG')}, ours"]
        for name, ms in layers.items()
        if name.endswith(", PyG") and f"{name.removesuffix(', PyG')}, ours" in layers
    }:
        said = "; ".join(f"{name} **{ratio:.2f}**" for name, ratio in ratios.items())
        found.append(f"Layers, PyG's time over ours: {said}.")
    for part, what in (("loaders", "Mini-batches"), ("steps", "Training steps")):
        both = medians(parts.get(part, {}))
        ours = {name: ms for name, ms in both.items() if name.startswith(OURS)}
        theirs = {name: ms for name, ms in both.items() if name not in ours}
        if ours and theirs:
            mine, peer = min(ours, key=ours.__getitem__), min(theirs, key=theirs.__getitem__)
            ratio = theirs[peer] / ours[mine]
            found.append(f'{what}: "{mine}" is **{ratio:.2f} times** as fast as the best peer, "{peer}".')
    cells = [cell["kernel_us"] for cell in others.get("persistent", {}).get("cells", ())]
    if both := [cell for cell in cells if {"fused", "persistent"} <= cell.keys()]:
        shares = [cell["fused"]["share_of_ceiling"] for cell in both]
        ratios = [cell["persistent"]["median"] / cell["fused"]["median"] for cell in both]
        found.append(f"Kernels of fused: {min(shares):.0%} to {max(shares):.0%} of this GPU's rate of random reads. ")
        found[-1] += f"The queue's take {min(ratios):.2f} to {max(ratios):.2f} times as long in {len(both)} settings."
    blocks = others.get("aggregate_blocks", {}).get("cells", ())
    if sums := [cell["torch_sparse"] / cell["us"][cell["chosen"]] for cell in blocks if "torch_sparse" in cell]:
        slower = max(cell["us"][cell["chosen"]] / min(cell["us"].values()) for cell in blocks)
        found.append(f"A weighted sum: {min(sums):.1f} to {max(sums):.1f} times as fast as torch's sparse product in ")
        found[-1] += f"{len(sums)} settings of float32. The best block would gain at most {slower:.2f}x."
    step = medians(parts.get("profile", {}))
    if {"a step", "the device is busy"} <= step.keys():
        idle = 1 - step["the device is busy"] / step["a step"]
        found.append(f"A training step: the device is idle for **{idle:.0%}** of {step['a step']:.3g} ms.")
    if sums := others.get("full_graph", {}).get("sums", ()):
        told = [f"{one['graph']}, {one['sum']}, {one['columns']} columns **{one['ratio']:.2f}**" for one in sums]
        found.append(f"Sums over a full graph, time of torch's sparse product over ours: {', '.join(told)}.")
    for cell in others.get("collective", {}).get("cells", ()):
        rates = cell.get("mini-batches per s", {})
        told = [f"{way} {one['measured']:.3g} ({one['predicted']:.3g})" for way, one in rates.items()]
        found.append(f"Mini-batches per second with {cell['cores']} cores, and predicted: {', '.join(told)}.")
    hybrid = others.get("hyscale", {})
    if "variants" in hybrid:
        ran = {row["name"]: row["median"] for row in hybrid["rows"] if "median" in row}
        known = {name: one["predicted_ms"] for name, one in hybrid["variants"].items() if "predicted_ms" in one}
        told = [f"{name} {ran[name]:.3g} ({known[name]:.3g})" for name in ran if name in known]
        found.append(f"Hybrid training, the rule: {(hybrid['rule'].get('says') or '').removeprefix('hyscale: ')}.")
        found.append(f"Hybrid training, ms per iteration, and predicted: {', '.join(told)}.")
    return found


def roofline(gpu: str, check: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """Return a table of expected and measured figures for a known GPU."""
    known = next((name for name in GPUS if name.split()[0] in gpu), None)
    if known is None or "nodes" not in check:
        return [f"Unknown for {gpu}; expected for others: `python -m benchmarks.gpu.model`."]
    batch, (gb_per_s, sms), samples = Batch(tuple(check["nodes"]), tuple(check["edges"])), GPUS[known], medians(figures)
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
    return lines + [f"| {name} | {seen['failed']} | | |" for name, seen in figures.items() if "failed" in seen]


def page(index: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the page of gpu_first.json and of the files of other parts, by name."""
    parts, last = index["parts"], index["machine"]
    gpu = last.get("gpu", "no GPU, so that the times mean nothing")
    lines = [
        "# A GPU, measured", "", f"{gpu}; torch {last['torch']}, PyG {last['torch_geometric']}.", "",
        "## Verdicts", "", *(f"- {verdict}" for verdict in verdicts(parts, others)), "",
        "## Roofline", "", *roofline(gpu, parts.get("check", {}), parts.get("samples", {})), "",
    ]  # fmt: skip
    for part, (head, what) in HEADS.items():
        if part in parts:
            where = index["measured"].get(part, index)["machine"]
            when = f"{where.get('gpu', 'no GPU')}, {where['date']}"
            lines += [f"## {head}", "", f"{what} {when}.", "", *table(parts[part]), ""]
    for found in others.values():
        told = [as_row(found, compared) for compared in found.get("comparisons", ())]
        rows = found.get("rows", ())
        told = (
            [*TABLE_HEAD, *told] if told else [f"- {row['name']}: {row['median']:.4g} {found['unit']}" for row in rows]
        )
        if told:
            lines += [f"## {found['title']}", "", f"{found['machine'].get('gpu', 'no GPU')}.", "", *told, ""]
    return "\n".join(lines)


def quoted(index: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the part of docs/results.md."""
    rows, last = [], index["machine"]
    for what, part, unit, ours, peer in QUOTED:
        ran = medians(index["parts"].get(part, {}))
        if ours in ran and peer in ran:
            both = [ran[ours], ran[peer]]
            compared = {"what": what, "ours": ours, "peer": peer, "medians": both, "ratio": both[1] / both[0]}
            rows.append(as_row({"unit": unit}, compared))
    where = f"Measured on {last.get('gpu')} with {last['cores']} cores, torch {last['torch']}, {last['date']}."
    return "\n".join(
        [where, "", *TABLE_HEAD, *rows, "", *(f"- {verdict}" for verdict in verdicts(index["parts"], others))]
    )
