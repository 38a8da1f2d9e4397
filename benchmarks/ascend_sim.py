"""NeutronAscend's figures 4, 5, 9 to 13 and 15 in simulation, for its own chip and for the Atlas A2.

No NPU is needed, but a C++ compiler: the kernels of ``ascend_ops/csrc`` are followed instruction by instruction on a
model of the chip (``ascend_sim_engine``), which agrees with the CPU twin that runs the real ones; the numbers of the
chips and where they are from stand in ``ascend_sim_machines.py``. The figure is milliseconds of a GCN epoch,
simulated. The paper's numbers are printed beside the model's; one of them, how unevenly its ranges of vertices are
loaded, goes into an order of the vertices that stands beside the published one (``ascend_sim_order``).

The JSON also holds ``summary``, the paper's figures beside the simulated ones (``ascend_sim_summary``), and under
``extra`` the figures' data, what the gains become when an assumption is changed, the chips' tables, and how well the
model agrees with the twin.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product, repeat
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.ascend_sim_check import agreement
from benchmarks.ascend_sim_epoch import (
    SHAPES,
    STEPS,
    Epoch,
    Graph,
    Setting,
    is_real,
    make_graph,
    make_topology,
    simulate,
)
from benchmarks.ascend_sim_figures import draw
from benchmarks.ascend_sim_machines import Machine, machine
from benchmarks.ascend_sim_order import ORDERS, fitted_lean, load_ratio
from benchmarks.ascend_sim_summary import MODELLED, PAPER, ROWS, main_chip, summary
from benchmarks.harness import parse
from benchmarks.machine import machine as this_machine

SIZES = {"shrink": (1, 40)}
DATASETS = ("CiteSeer", "Cora", "PubMed", "Reddit", "Products")
ARCHS = ("unified", "split")
ROW_BY_ROW = {"rows_at_once": 1, "own_lists": True}
"""A vector kernel that waits for each row, or with double buffering for every second one, and for each vertex's list;
ours asks for 16 at once, and its lists go on over vertices (``Setting``)."""
ASSUMPTIONS: dict[str, dict[str, Any]] = {
    MODELLED: {},
    "vertices in their published order": {"lean": 0.0},
    "vertices sorted by degree": {"lean": 1.0},
    "every edge inside its class": {"homophily": 1.0},
    "L2 answers at once": {"changes": {"l2_read_latency": 0, "l2_write_latency": 0}},
    "every edge inside its class, L2 answers at once": {
        "homophily": 1.0,
        "changes": {"l2_read_latency": 0, "l2_write_latency": 0},
    },
    "4 copies in flight, not 16": {"changes": {"copies_in_flight": 4}},
    "copies start in 40 cycles, not 13": {"changes": {"mte_head": 40}},
    ROWS: ROW_BY_ROW,
    "the vector kernel asks for 16 rows at once, but lists each vertex by itself": {"own_lists": True},
    "no bank of UB waits": {"changes": {"bank_cycles": 0}},
    "a scalar access takes 4 cycles, not 1": {"changes": {"scalar_cycles": 4}},
    "L2 has 20 times the bandwidth of HBM": {"l2_over_hbm": 20},
    "before +IP, a tile ends before the next begins": {"serial": True},
}
"""What the gains are computed with, one change at a time; the graph is ``Reddit, smaller``, degree-leaning."""
GAINED = ("+HP over the baseline", "+CT over +HP", "+IP over +CT")
LARGE = ("Reddit", "Products")
"""The graphs of the figures that the paper shows for two of them."""
HIDDEN_CHANNELS = (32, 64, 128, 256)


def setting_of(chip: Machine, graph: Graph, changes: dict[str, float] | None = None, **options: Any) -> Setting:
    """Return how a chip is simulated for a graph."""
    return Setting(chip, l2_scale=graph.l2_scale, changes=tuple((changes or {}).items()), **options)


def rounded(value: Any) -> Any:
    """Round floats to four digits, in lists and dicts too."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, (float, np.floating)) else value


def describe(epoch: Epoch, chip: Machine) -> dict[str, Any]:
    """Return what an epoch took as plain data."""
    return {
        "ms": epoch.milliseconds,
        "ms with launches": epoch.milliseconds_launched,
        "aggregation's share": epoch.share("aggregate"),
        "cube busy": epoch.busy("cube", chip.cube_cores),
        "vector busy": epoch.busy("vector", chip.vector_cores),
        "utilisation": epoch.running(),
        "utilisation, the cube's tasks alone": epoch.running("cube"),
        "plans": {
            str(width): {
                "kernel": plan.kernel,
                "rows of a chunk": plan.height,
                "order": plan.order,
                "M": plan.num_groups,
            }
            for width, plan in epoch.plans.items()
        },
        "load max/mean": {str(width): float(load.max() / load.mean()) for width, load in epoch.loads.items()},
        "hbm bytes": sum(launch.bytes["hbm_read"] for _, launch in epoch.launches),
        "l2 bytes": sum(launch.bytes["l2_read"] for _, launch in epoch.launches),
    }


def loads_and_idle(epoch: Epoch, width: int) -> dict[str, Any]:
    """Return figure 4: edges of each core in the first aggregation, which share of it and of the epoch it idles."""
    launch = next(launch for what, launch in epoch.launches if what == "aggregate")
    load = epoch.loads[width] / width
    if width in epoch.plans:
        load = epoch.plans[width].work / width
    least = float(load[load > 0].min()) if (load > 0).any() else 1.0
    return {
        "load": [float(edges) for edges in load],
        "idle": [float(1 - end / launch.cycles) for end in launch.ends],
        "load, max/mean": float(load.max() / load.mean()),
        "load, max/min": float(load.max()) / least,
        "idle, at most": float(1 - launch.ends.min() / launch.cycles),
        "idle of the epoch": float(epoch.idle().max()),
        "vector tasks": epoch.share("aggregate"),
    }


def units(epoch: Epoch, chip: Machine) -> dict[str, float]:
    """Return which share of the forward pass each unit works, on average over the cores that have it."""
    forward = [launch for what, launch in epoch.launches if "gradient" not in what and "sum" not in what][:4]
    cycles = sum(launch.cycles for launch in forward)
    cores = {"vector": chip.vector_cores, "cube": chip.cube_cores, "mte1": chip.cube_cores, "fix": chip.cube_cores}
    total = chip.cube_cores if chip.unified else chip.cube_cores + chip.vector_cores
    return {
        unit: sum(launch.busy[unit] for launch in forward) / cycles / cores.get(unit, total)
        for unit in ("scalar", "vector", "cube", "mte1", "mte2", "mte3", "fix")
    }


def gains(chip: Machine, graph: Graph, **options: Any) -> dict[str, float]:
    """Return the gain of each step of figure 10 over the one before it, and of all over the baseline."""
    planned = {key: options.pop(key) for key in ("num_groups",) if key in options}
    changes = dict(options.pop("changes", {}))
    if ratio := options.pop("l2_over_hbm", None):
        changes["l2_read_bytes"] = ratio * chip["hbm_bytes"]
    times = [simulate(setting_of(chip, graph, changes, **options), graph, step, **planned).cycles for step in STEPS]
    steps = {step: before / after for step, (before, after) in zip(STEPS[1:], pairwise(times), strict=True)}
    return {**steps, "all": times[0] / times[-1]}


def fitted(name: str, args: Any) -> dict[str, float]:
    """Return the degree-leaning order of a graph, and how unevenly its ranges are loaded in that and in others."""
    degrees = make_topology(name, args.planetoid, args.shrink).in_degrees.numpy()
    lean = fitted_lean(degrees)
    leans = {"published": 0.0, "degree-leaning": lean, "sorted by degree": 1.0}
    return {"lean": lean, **{order: load_ratio(degrees, by) for order, by in leans.items()}}


def assumptions(archs: Sequence[str], args: Any, tick: Any) -> dict[str, Any]:
    """Return the gains under each changed assumption."""
    lean = fitted("Reddit, smaller", args)["lean"]
    result: dict[str, Any] = {arch: {} for arch in archs}
    with ThreadPoolExecutor(len(archs)) as pool:
        for name, change in ASSUMPTIONS.items():
            options = {"lean": lean, **change}
            graph_options = {key: options.pop(key) for key in ("lean", "homophily") if key in options}
            graph = make_graph("Reddit, smaller", shrink=args.shrink, **graph_options)
            runs = pool.map(lambda arch, graph=graph, options=options: gains(machine(arch), graph, **options), archs)
            for arch, gained in zip(archs, runs, strict=True):
                result[arch][name] = gained
                tick(f"{arch}: {name}")
    return result


def both_ends(chip: Machine, graph: Graph, cores: int | None = None) -> dict[str, float]:
    """Return the milliseconds of the baseline and with all steps, and how many times as fast the latter is."""
    times = {step: simulate(setting_of(chip, graph), graph, step, cores).milliseconds for step in ("baseline", "+IP")}
    return {**times, "speedup": times["baseline"] / times["+IP"]}


def study_rows(data: dict[str, Any], arch: str, name: str, graph: Graph, tick: Any) -> None:
    """Simulate a dataset as if the vector kernel went row by row; put the epochs to the data."""
    chip, steps = machine(arch), data["row by row"].setdefault(name, {})
    for step in STEPS:
        steps[step] = describe(simulate(setting_of(chip, graph, **ROW_BY_ROW), graph, step), chip)
    tick(f"{name}, row by row")


def study_chip(data: dict[str, Any], arch: str, name: str, order: str, graph: Graph, tick: Any) -> None:
    """Simulate a dataset in one order on one chip; put the figures to the data."""
    chip, shown = machine(arch), data["shown"]
    steps = data["epochs"][arch][order][name] = {}
    four = data["figure 4"][arch].setdefault(order, {})
    for step in STEPS:
        log = 600 if name == shown and order == ORDERS[1] and step in ("baseline", "+IP") else 0
        epoch = simulate(setting_of(chip, graph, log=log), graph, step)
        steps[step] = describe(epoch, chip)
        if name == shown and step in ("baseline", "+HP", "+IP"):
            four[step] = loads_and_idle(epoch, graph.widths[0])
        if log:
            data["figure 5"][arch][step] = {
                "busy": units(epoch, chip),
                "log": epoch.launches[0][1].log[-log:].tolist(),
            }
        tick(f"{name} on {arch}, {order}, {step}")
    if order == ORDERS[1] and (name in LARGE or name == shown):
        all_cores = {"baseline": steps["baseline"]["ms"], "+IP": steps["+IP"]["ms"]}
        all_cores["speedup"] = all_cores["baseline"] / all_cores["+IP"]
        data["figure 12"][arch][name] = {
            str(chip.cube_cores * third // 3): both_ends(chip, graph, chip.cube_cores * third // 3) for third in (1, 2)
        } | {str(chip.cube_cores): all_cores}
        tick(f"{name} on {arch}, fewer cores")
        data["figure 11"][arch][name] = {
            str(channels): all_cores if channels == graph.widths[1] else both_ends(chip, graph.with_hidden(channels))
            for channels in HIDDEN_CHANNELS
        }
        tick(f"{name} on {arch}, fewer hidden channels")


def study(archs: Sequence[str], names: Sequence[str], args: Any, tick: Any) -> dict[str, Any]:
    """Simulate every dataset on every chip, in both orders; return the figures' data."""
    data: dict[str, Any] = {"fitted": {name: fitted(name, args) for name in names}, "shapes": {}}
    data |= {f"figure {number}": {arch: {} for arch in archs} for number in (4, 5, 11, 12)}
    data["row by row"] = {}
    data["epochs"] = {arch: {order: {} for order in ORDERS} for arch in archs}
    data["shown"] = "Reddit" if "Reddit" in names else names[-1]
    for name, order in product(names, ORDERS):
        graph = make_graph(
            name, args.planetoid, args.shrink, data["fitted"][name]["lean"] if order == ORDERS[1] else 0.0
        )
        data["shapes"][name] = graph.num_nodes, graph.topology.num_edges, graph.widths
        tick(f"{name}: {graph.num_nodes:,} vertices, {graph.topology.num_edges:,} edges")
        with ThreadPoolExecutor(len(archs)) as pool:  # what is compiled holds no lock
            list(
                pool.map(lambda arch, *of: study_chip(data, arch, *of), archs, *map(repeat, (name, order, graph, tick)))
            )
        if order == ORDERS[1]:
            study_rows(data, main_chip(archs), name, graph, tick)
        make_graph.cache_clear()
    return data


def show(console: Console, data: dict[str, Any], entries: dict[str, Any]) -> None:
    """Print the gains, and the paper's figures beside the simulated ones."""
    paper = [f"{low:.2f} to {high:.2f}" for low, high in (PAPER[f"10, {what}"] for what in GAINED)]
    busy = f"{PAPER['13, utilisation with all steps'][0]:.0%}"
    table = Table("chip", "order", "dataset", "baseline, ms", *STEPS[1:], "all", "utilisation", "cube busy",
                  title="GCN epoch, simulated: gain of each step over the one before")  # fmt: skip
    table.add_row("the paper", "", "", "", *paper, "", busy, "")
    for arch, orders in data["epochs"].items():
        for order, name in product(orders, orders[ORDERS[0]]):
            steps = orders[order][name]
            ms = [steps[step]["ms"] for step in STEPS]
            cells = [f"{before / after:.2f}" for before, after in pairwise(ms)]
            last = steps["+IP"]
            table.add_row(arch, order, name, f"{ms[0]:.3f}", *cells, f"{ms[0] / ms[-1]:.2f}",
                          f"{last['utilisation']:.0%}", f"{last['cube busy']:.1%}")  # fmt: skip
    console.print(table)
    for figure, entry in entries.items():
        ends = {key: " to ".join(f"{end:.3g}" for end in entry[key]) for key in ("paper", "simulated")}
        apart = "" if entry["within"] else ", APART"
        console.print(f"- {figure}: {ends['simulated']} (paper: {ends['paper']}){apart}. {entry['reason']}",
                      highlight=False)  # fmt: skip


def chosen(given: str | None, known: Sequence[str], what: str) -> list[str]:
    """Return the names of a list given by commas, all of them by default.

    Raises:
        ValueError: One is unknown.
    """
    names = [name.strip() for name in given.split(",")] if given else list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} is unknown; use some of {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(
        "ascend_sim",
        __doc__,
        SIZES,
        argv,
        runs=1,
        paths={
            "planetoid": "folder of PyG's Planetoid files, for the real Cora, CiteSeer and PubMed",
            "datasets": f"some of {', '.join(DATASETS)}, separated by commas (default: all)",
            "archs": "some of unified, split, split-20, separated by commas (default: unified,split)",
        },
    )
    names = chosen(args.datasets, DATASETS, "dataset")
    archs = chosen(args.archs, ("unified", "split", "split-20"), "arch") if args.archs else list(ARCHS)
    described = this_machine()
    console = Console()
    larger = [name for name in names if name in LARGE] or names[-1:]
    total = (
        2 * len(names) * (1 + 4 * len(archs))
        + 2 * len(archs) * len(larger)
        + len(names)
        + len(ASSUMPTIONS) * len(archs)
        + 1
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=what)

        data = study(archs, names, args, tick)
        changed = assumptions(archs, args, tick)
        agreed = agreement(archs) if not args.quick else {"note": "not checked in a quick run"}
        tick("agreement with the twin")
    entries = summary(data, changed)
    rows = [
        {"name": f"{arch}, {order}, {name}, {step}", **dict.fromkeys(("median", "min", "max"), figures["ms"])}
        for arch, orders in data["epochs"].items()
        for order, sets in orders.items()
        for name, steps in sets.items()
        for step, figures in steps.items()
    ]
    result = {
        "benchmark": "ascend_sim",
        "title": "GCN epoch on simulated Ascend chips, two layers, 256 hidden channels",
        "unit": "ms, simulated",
        "settings": {
            **args.sizes,
            "runs": 1,
            "real": [name for name in names if is_real(name, args.planetoid)],
            "datasets": {name: vars(SHAPES[name]) for name in names},
        },
        "machine": described,
        "summary": entries,
        "rows": [{**row, "values": [row["median"]]} for row in rows],
        "comparisons": [],
        "extra": {
            "lean, and load max/min over 30 ranges": data["fitted"],
            "graphs: vertices, edges, widths": data["shapes"],
            "epochs": data["epochs"],
            "epochs row by row": data["row by row"],
            "figure 4": data["figure 4"],
            "figure 5, share of the forward pass": {
                arch: {step: part["busy"] for step, part in parts.items()} for arch, parts in data["figure 5"].items()
            },
            "figure 11": data["figure 11"],
            "figure 12": data["figure 12"],
            "gains under other assumptions": changed,
            "agreement with the CPU twin": agreed,
            "chips": {
                arch: {
                    fact: [value.value, value.unit, value.source, value.confidence]
                    for fact, value in machine(arch).facts.items()
                }
                for arch in archs
            },
        },
    }
    result = rounded(result)
    show(console, data, entries)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        draw(data, args.out.with_suffix(".png"))
    return result


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
