"""Draws the pictures of the documentation: ``python docs/charts.py`` writes docs/images/*.svg.

SVG files need no network, and look the same on the site and in a repository's viewer. Colors are legible on a light and
on a dark page. ``python -m benchmarks.report`` draws results.svg with :func:`ratios` and scaling.svg
with :func:`growth`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
FILL = {"ours": "#3949ab", "other": "#607d8b", "question": "#00796b", "warm": "#bf5b17", "train": "#2e7d32"}
"""Colors by what a box stands for: a part of this package, what the user has, a question, a copy, training."""
MARKS = ("#5c7cfa", "#d9822b", "#2ba39a")
"""Colors of thin marks, one for each column of :func:`ratios`."""
LINES = (*MARKS, "#b04a9d", "#8a8d2b", "#d1495b")
"""Colors of the lines of :func:`growth`."""
_GREY = "#808080"
_LINE = 16


def box(x: float, y: float, width: float, height: float, text: str, kind: str = "other") -> str:
    """Return a filled box with centred lines of text; the first of several is bold, but in questions."""
    lines = text.split("\n")
    top = y + height / 2 - (len(lines) - 1) * _LINE / 2 + 4.5
    rounded = height / 2 if kind == "question" else 5
    drawn = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{rounded}" fill="{FILL[kind]}"/>']
    for number, line in enumerate(lines):
        bold = ' font-weight="bold"' if kind != "question" and len(lines) > 1 and not number else ""
        place = f'x="{x + width / 2}" y="{top + number * _LINE}"'
        drawn.append(f'<text {place} fill="#fff" text-anchor="middle"{bold}>{escape(line)}</text>')
    return "\n".join(drawn)


def label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """Return a line of text beside the boxes."""
    return f'<text x="{x}" y="{y}" fill="{_GREY}" text-anchor="{anchor}">{escape(text)}</text>'


def arrow(*points: tuple[float, float], text: str = "", both: bool = False) -> str:
    """Return a line through points with a head at its end; the text stands beside its first part."""
    path = " ".join(f"{x},{y}" for x, y in points)
    start = ' marker-start="url(#head)"' if both else ""
    drawn = (
        f'<polyline points="{path}" fill="none" stroke="{_GREY}" stroke-width="1.5" marker-end="url(#head)"{start}/>'
    )
    (x, y), (to_x, to_y) = points[:2]
    if not text:
        return drawn
    if x == to_x:
        return f"{drawn}\n{label(x + 6, (y + to_y) / 2 + 4, text, 'start')}"
    return f"{drawn}\n{label((x + to_x) / 2, y - 6, text)}"


def lanes(x: float, y: float, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]) -> list[str]:
    """Return a timeline: rows of bars (start, width, text, kind), each behind the name of its row."""
    drawn = []
    for number, (name, bars) in enumerate(rows):
        top = y + number * 32
        drawn.append(label(x - 8, top + 17, name, "end"))
        drawn += [box(x + start, top, width, 26, text, kind) for start, width, text, kind in bars]
    return drawn


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return the SVG file."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{_GREY}"/></marker>'
    )
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12.5" role="img">'
    )
    return "\n".join([opened, f"<title>{escape(title)}</title>", f"<defs>{head}</defs>", *parts, "</svg>", ""])


def ratios(title: str, rows: Mapping[str, Mapping[str, Sequence[tuple[float, ...]]]]) -> str:
    """Return ratios with their intervals on logarithmic axes: a band for each topic, a panel for each kind.

    Args:
        rows: For each topic, for each kind, triples of a ratio and the ends of its interval.
    """
    kinds = [*next(iter(rows.values()))]
    left, top, width, gap, step = 215.0, 62.0, 180.0, 24.0, 7.0
    # Each panel has the range of its own values.
    panels = []
    for number, kind in enumerate(kinds):
        ends = [end for cells in rows.values() for triple in cells[kind] for end in triple] or [1.0]
        low, high = math.log(min(*ends, 0.9)), math.log(max(*ends, 1.1))
        panels.append((left + number * (width + gap), low, width / (high - low)))
    heights = [step * max(2, *map(len, cells.values())) + 16 for cells in rows.values()]
    bottom = top + sum(heights)
    parts = []
    for kind, color, (x, low, scale) in zip(kinds, MARKS, panels, strict=True):
        parts.append(f'<text x="{x + width / 2:.1f}" y="24" fill="{color}" text-anchor="middle">{escape(kind)}</text>')
        last = -math.inf
        for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 2, 5, 10, 20, 50):
            at = x + (math.log(tick) - low) * scale
            if x - 1 <= at <= x + width + 1 and at - last > 24:
                last = at
                line = f'x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" stroke="{_GREY}"'
                parts.append(f'<line {line} stroke-width="{1.5 if tick == 1 else 0.3}"/>')
                parts += [label(round(at, 1), top - 8, f"{tick:g}"), label(round(at, 1), bottom + 18, f"{tick:g}")]
    for (topic, cells), height in zip(rows.items(), heights, strict=True):
        parts.append(label(left - 14, top + height / 2 + 4, topic, "end"))
        parts.append(f'<line x1="8" y1="{top}" x2="{left + 3 * width + 2 * gap}" y2="{top}" stroke="{_GREY}" '
                     'stroke-width="0.5"/>')  # fmt: skip
        for kind, color, (x, low, scale) in zip(kinds, MARKS, panels, strict=True):
            for number, triple in enumerate(sorted(cells[kind], reverse=True)):
                at, begin, end = (x + (math.log(value) - low) * scale for value in triple)
                y = top + 11 + number * step
                parts.append(f'<line x1="{begin:.1f}" y1="{y}" x2="{end:.1f}" y2="{y}" stroke="{color}" '
                             'stroke-width="2" stroke-opacity="0.6"/>')  # fmt: skip
                parts.append(f'<circle cx="{at:.1f}" cy="{y}" r="2.8" fill="{color}"/>')
        top += height
    parts.append(
        label(left + 1.5 * width + gap, bottom + 38, "ratio, and its 95 % confidence interval; above 1, ours is faster")
    )
    return picture(int(left + 3 * width + 2 * gap + 16), int(bottom + 50), title, parts)


def growth(title: str, fits: Mapping[str, Mapping[str, Any]]) -> str:
    """Return costs over the number of edges on logarithmic axes: times, and peaks of memory in a second panel.

    Args:
        fits: For each cost, ``measured`` values and the fitted ``line``, by number of edges.
    """
    peaks = {name.removeprefix("peak of "): fit for name, fit in fits.items() if name.startswith("peak of ")}
    times = {name: fit for name, fit in fits.items() if not name.startswith("peak of ")}
    colors = [next(color for color, time in zip(LINES, times, strict=False) if time.startswith(peak)) for peak in peaks]
    parts = _growth_panel(58, "time, ns per edge or row", times, LINES)
    parts += _growth_panel(458, "peak memory, GB", peaks, colors)
    parts.append(label(58, 402, "dots: measured; lines: fitted, dashed where predicted", "start"))
    return picture(820, 414, title, parts)


def _growth_panel(
    left: float, heading: str, costs: Mapping[str, Mapping[str, Any]], colors: Sequence[str]
) -> list[str]:
    top, width, height = 34.0, 330.0, 250.0
    every = [pair for fit in costs.values() for key in ("measured", "line") for pair in fit[key].items()]
    low, high = (math.log10(end(int(edges) for edges, _ in every)) for end in (min, max))
    least = math.floor(math.log10(min(value for _, value in every)))
    most = math.ceil(math.log10(max(value for _, value in every)))

    def place(edges: str, value: float) -> tuple[float, float]:
        x = left + (math.log10(int(edges)) - low) / (high - low) * width
        return round(x, 1), round(top + (most - math.log10(value)) / (most - least) * height, 1)

    parts = [label(left + width / 2, 18, heading), label(left + width / 2, top + height + 36, "edges")]
    for power in range(math.ceil(low), math.floor(high + 1e-9) + 1):
        x, _ = place(str(10**power), 1.0)
        parts.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{top + height}" stroke="{_GREY}" stroke-width="0.3"/>')
        parts.append(label(x, top + height + 18, f"{10 ** (power % 3)} {'_KMB'[power // 3]}"))
    for power in range(least, most + 1):
        _, y = place("1", 10.0**power)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="{_GREY}" stroke-width="0.3"/>')
        parts.append(label(left - 8, y + 4, f"{10.0**power:,g}" if -4 < power < 6 else f"1e{power}", "end"))
    for row, (color, (name, fit)) in enumerate(zip(colors, costs.items(), strict=False)):
        last = max(map(int, fit["measured"]))
        inside = [place(*pair) for pair in fit["line"].items() if int(pair[0]) <= last]
        beyond = [place(*pair) for pair in fit["line"].items() if int(pair[0]) > last]
        for points, dashes in ((inside, ""), ([*inside[-1:], *beyond], ' stroke-dasharray="5 4"')):
            path = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dashes}/>')
        for x, y in (place(*pair) for pair in fit["measured"].items()):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.2" fill="{color}"/>')
        x, y = left + row % 2 * width / 2, top + height + 58 + row // 2 * 18
        parts.append(f'<circle cx="{x + 5}" cy="{y - 4}" r="4" fill="{color}"/>')
        parts.append(label(x + 15, y, name, "start"))
    return parts


def gains(title: str, below: str, lines: Mapping[str, Mapping[float, float]]) -> str:
    """Return ratios over a logarithmic axis, a line for each name, with 1 emphasized.

    Args:
        below: Name of the axis.
        lines: For each line, ratios by position.
    """
    left, top, width, height = 58.0, 20.0, 420.0, 190.0
    places = sorted({place for line in lines.values() for place in line})
    values = [value for line in lines.values() for value in line.values()]
    low, high = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10

    def at(place: float, value: float) -> tuple[float, float]:
        x = left + math.log(place / places[0]) / math.log(places[-1] / places[0]) * width
        return round(x, 1), round(top + (high - value) / (high - low) * height, 1)

    parts = [label(left + width / 2, top + height + 38, below)]
    parts += [label(at(place, low)[0], top + height + 18, f"{place:g}x") for place in places]
    for step in range(round(10 * low), round(10 * high) + 1):
        y = at(places[0], step / 10)[1]
        end, wide = f'x1="{left}" y1="{y}" x2="{left + width}" y2="{y}"', 1.5 if step == 10 else 0.3
        parts += [
            f'<line {end} stroke="{_GREY}" stroke-width="{wide}"/>',
            label(left - 8, y + 4, f"{step / 10:g}", "end"),
        ]
    for row, (color, (name, line)) in enumerate(zip(LINES, lines.items(), strict=False)):
        points = [at(*pair) for pair in sorted(line.items())]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.2" fill="{color}"/>' for x, y in points]
        y = top + height + 62 + row * 18
        parts += [f'<circle cx="{left + 5}" cy="{y - 4}" r="4" fill="{color}"/>', label(left + 15, y, name, "start")]
    return picture(500, int(top + height + 62 + 18 * len(lines)), title, parts)


def suite() -> str:
    """Return what changes in a user's script, and what stays."""
    modules = ("NeighborDataModule\nCPU threads", "PersistentSamplerDataModule\nthe GPU samples",
               "CollectiveDataModule\nCPU and GPU, by plan", "FullGraphDataModule\nno sampling")  # fmt: skip
    strategies = (
        "auto, ddp\nLightning's own",
        "hyscale\nCPU and accelerators train",
        "ascend_hybrid\nfull graph, shared",
    )
    parts = [box(10, 92, 120, 52, "your graph\nPyG Data")]
    for number, text in enumerate(modules):
        parts += [box(165, 30 + number * 54, 230, 44, text, "ours"), arrow((130, 118), (165, 52 + number * 54))]
    parts += [box(435, 92, 130, 52, "pl.Trainer\nLightning"), box(435, 190, 130, 52, "your model\nLightningModule")]
    parts += [arrow((395, 52 + number * 54), (435, 118)) for number in range(4)]
    parts.append(arrow((500, 190), (500, 144)))
    for number, text in enumerate(strategies):
        kind = "ours" if number else "other"
        parts += [box(615, 38 + number * 58, 195, 46, text, kind), arrow((565, 118), (615, 61 + number * 58))]
    parts += [label(280, 18, "datamodule: one of these"), label(712, 18, "strategy=: one of these")]
    return picture(820, 250, "The parts of lightning-gnn around a Lightning Trainer", parts)


def which_module() -> str:
    """Return the decision chart: questions below one another, and where an answer leads to the right."""
    rows = (
        ("Train on mini-batches,\nor on the whole graph?", "whole graph", "mini-batches",
         "FullGraphDataModule\nseveral devices: ascend_hybrid"),
        ("Do you predict\nedges?", "yes", "nodes", "LinkDataModule\non a GPU: PersistentLinkDataModule"),
        ("A CUDA GPU\nin the machine?", "no", "yes", "NeighborDataModule\nthen: lgnn plan"),
        ("Does the training step wait\nfor mini-batches?", "no", "yes", "NeighborDataModule\nnothing to gain"),
        ("Are CPU cores\nfree to help?", "no", "yes", "PersistentSamplerDataModule\nthe GPU prepares all"),
    )  # fmt: skip
    parts = []
    for number, (question, aside, below, answer) in enumerate(rows):
        y = 16 + number * 84
        parts += [box(20, y, 250, 44, question, "question"), box(400, y, 250, 44, answer, "ours")]
        parts += [arrow((270, y + 22), (400, y + 22), text=aside), arrow((145, y + 44), (145, y + 84), text=below)]
    parts.append(
        box(20, 16 + len(rows) * 84, 250, 44, "CollectiveDataModule\nboth prepare, by a measured plan", "ours")
    )
    return picture(650, 76 + len(rows) * 84, "Which DataModule to use", parts)


def sampling() -> str:
    """Return threads that prepare mini-batches beside the training thread."""
    stages = [(0, 60, "sample 1", "ours"), (62, 50, "load 1", "ours"), (114, 60, "sample 3", "ours"),
              (176, 50, "load 3", "ours"), (228, 60, "sample 5", "ours"), (290, 50, "load 5", "ours")]  # fmt: skip
    second = [(30 + start, width, f"{text[:-1]}{int(text[-1]) + 1}", kind) for start, width, text, kind in stages]
    steps = [(114 + 58 * number, 54, f"train {number + 1}", "train") for number in range(5)]
    rows = lanes(130, 20, [("worker thread 1", stages), ("worker thread 2", second), ("training thread", steps)])
    return picture(530, 130, "Two worker threads prepare mini-batches while the model trains", rows)


def pgsampler() -> str:
    """Return hop by hop with synchronizations against one launch."""
    apart = []
    for number in range(3):
        apart += [(number * 124, 24, "go", "other"), (number * 124 + 26, 50, f"hop {number + 1}", "ours"),
                  (number * 124 + 78, 42, "wait", "warm")]  # fmt: skip
    once = [(0, 24, "go", "other"), (26, 50, "hop 1", "ours"), (76, 50, "hop 2", "ours"), (126, 50, "hop 3", "ours"),
            (178, 42, "sizes", "warm")]  # fmt: skip
    rows = lanes(150, 20, [("a launch per hop", apart), ("one launch for all hops", once)])
    return picture(540, 100, "A launch and a wait per hop, against one launch with one wait for the sizes", rows)


def morphgl() -> str:
    """Return a schedule of the dual buffer: three mini-batches by the GPU for one by the CPU, twice."""
    cpu = [(152 * number, 150, f"CPU batch {4 * number + 4}", "ours") for number in range(3)]
    gpu, pcie = [], []
    for begin, first in ((0, 1), (252, 5)):
        gpu += [(begin + 36 * number, 34, f"G{first + number}", "ours") for number in range(3)]
        gpu += [(begin + 108 + 36 * number, 34, f"T{first + number}", "train") for number in range(4)]
        pcie += [(begin + 36 * number, 34, "UVA", "other") for number in range(3)]
        pcie.append((begin + 156, 48, "copy", "warm"))  # beside training, before T4, and never beside UVA
    rows = lanes(80, 20, [("CPU", cpu), ("PCIe", pcie), ("GPU", gpu)])
    rows.append(
        label(80, 140, "G: the GPU prepares a mini-batch, reading host memory (UVA).  T: it trains on one.", "start")
    )
    return picture(620, 152, "A plan of three mini-batches by the GPU for each one by the CPU", rows)


def hyscale() -> str:
    """Return how an iteration is shared out."""
    parts = [box(10, 74, 110, 48, "seeds of an\niteration")]
    for number, (name, share) in enumerate((("rank 0: accelerator", "70 %"), ("rank 1: CPU trainer", "30 %"))):
        y = 30 + number * 92
        parts += [arrow((120, 98), (165, y + 22)), label(142, y + 22 + (-14 if not number else 24), share)]
        stages = (
            ("Sampling", "ours"),
            ("Feature\nLoading", "ours"),
            ("Data\nTransfer", "warm"),
            ("Propagation", "train"),
        )
        for place, (stage, kind) in enumerate(stages):
            if number and place == 2:
                parts.append(label(165 + place * 92 + 42, y + 26, "none"))
            else:
                parts.append(box(165 + place * 92, y, 84, 44, stage, kind))
        parts += [label(165, y - 8, name, "start"), arrow((525, y + 22), (570, 98))]
    parts.append(box(570, 70, 130, 56, "sum of gradients\none step", "train"))
    return picture(710, 185, "Accelerators and CPU trainers share out the seeds and add their gradients", parts)


def full_graph() -> str:
    """Return an aggregation over ranks: rows, slices, rows."""
    parts = []
    for x, title in ((20, "rows of each rank"), (260, "columns of each rank"), (500, "rows of each rank")):
        parts.append(label(x + 60, 18, title))
        for number in range(3):
            kind = ("ours", "train", "question")[number]
            place = (x + number * 40, 30, 38, 114) if x == 260 else (x, 30 + number * 39, 120, 36)
            drawn = FILL[kind]
            parts.append('<rect x="{}" y="{}" width="{}" height="{}" rx="3" fill="{}"/>'.format(*place, drawn))
    parts += [arrow((146, 87), (254, 87), text="all-to-all"), arrow((386, 87), (494, 87), text="all-to-all")]
    parts += [label(320, 168, "each rank aggregates its columns over the whole graph")]
    parts += [label(80, 168, "dense layers"), label(560, 168, "dense layers")]
    return picture(640, 180, "Rows become feature slices for the aggregation, and rows again", parts)


def packages() -> str:
    """Return the packages and who stands on whom."""
    parts = []
    for number, (name, what) in enumerate((
        ("runtime", "files, threads, clocks, messages"), ("features, graph, datasets", "what a graph is"),
        ("ops", "one operator per hot path"), ("nn, sampling", "layers, models, NeighborSampler"),
        ("loading", "pipeline, loaders, prefetchers"), ("datamodules", "nodes and links"),
        ("gpu_sampling", "PGSampler"),
    )):  # fmt: skip
        y = 330 - number * 52
        parts.append(box(190, y, 250, 40, f"{name}\n{what}", "ours"))
        if number:
            parts.append(arrow((315, y + 52), (315, y + 40)))
    parts += [box(490, 330, 130, 40, "distributed\nranks of all systems", "ours"), arrow((440, 350), (490, 350))]
    parts += [box(10, 252, 130, 40, "triton_kernels\nTriton", "other"), arrow((140, 272), (190, 250))]
    parts += [box(10, 200, 130, 40, "ascend_ops\nAscend C", "other"), arrow((140, 220), (190, 240))]
    parts += [box(490, 66, 130, 40, "collective\nMorphGL", "ours"), arrow((440, 46), (490, 80))]
    parts += [box(490, 14, 130, 40, "hyscale\nHyScale-GNN", "ours"), arrow((440, 36), (490, 34))]
    parts += [box(490, 170, 130, 40, "full_graph\nNeutronAscend", "ours"), arrow((440, 104), (490, 180))]
    parts += [box(490, 118, 130, 40, "partitioned\nseveral machines", "ours"), arrow((440, 90), (490, 134))]
    parts += [label(555, 246, "on top: pyg, planning,"), label(555, 262, "callbacks, report, cli")]
    return picture(640, 385, "The packages; each imports those below it", parts)


PICTURES = {
    "suite": suite, "which-module": which_module, "sampling": sampling, "pgsampler": pgsampler, "morphgl": morphgl,
    "hyscale": hyscale, "full-graph": full_graph, "packages": packages,
}  # fmt: skip


def main() -> None:
    """Write all pictures."""
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
