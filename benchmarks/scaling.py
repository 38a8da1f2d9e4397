"""How time and peak memory grow with a graph: measured at several sizes, and predicted for larger and published graphs.

Steps of ``benchmarks.billion`` run at sizes that grow tenfold; its own result is a further size. Costs are fitted by
least squares of relative errors with coefficients of at least 0, of a constant and mostly the logarithm of the table
that is read at random. The error is that of the largest size, predicted by a fit of the others.

On another machine, a cost is the larger of two: the measured cores' time over the number of cores, and the bytes moved
over the memory's bandwidth. Finished steps are kept in ``--folder``. The full sizes require 9 GB of disk.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, gcd, log2
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.billion import DEGREE, FEATURES, measure_steps
from benchmarks.harness import RESULTS, machine, parse, publish, shortened
from benchmarks.hyscale.model import CORES, DUAL_EPYC_7763

SIZES = {"smallest": (1_000_000, 20_000), "largest": (100_000_000, 20_000)}
STEPS = ("draw", "convert", "sample", "gather", "aggregate", "partition")
BILLION = RESULTS / "billion.json"
ROW_BYTES, BLOCK_BYTES, ROWS = 2 * FEATURES, 4096, 200_000  # of a measured row, of a block on disk; loaded at once
EDGES_PER_VALUE = 0.1  # time to convert a feature value, over that of an edge, as lightning_gnn.datasets.convert has it
Host = tuple[int, float]  # cores, GB/s of memory


@dataclass(frozen=True)
class Graph:
    """A graph by its sizes."""

    nodes: int
    edges: int
    features: int = FEATURES
    row_bytes: int = ROW_BYTES  # of a node's features

    @property
    def topology(self) -> int:
        """Bytes of the in-edge lists: 8 per node, and a source of 4 bytes per edge."""
        return 8 * self.nodes + 4 * self.edges

    @property
    def blocks_per_row(self) -> float:
        """Distinct blocks on disk for each row of a mini-batch."""
        rows, blocks = min(ROWS, self.nodes), self.nodes * self.row_bytes / BLOCK_BYTES
        spanned = 1 + (self.row_bytes - gcd(self.row_bytes, BLOCK_BYTES)) / BLOCK_BYTES
        return -blocks * expm1(-rows * spanned / blocks) / rows


LARGE, HERE = "10 B edges", "measured machine"
GRAPHS = {
    LARGE: Graph(1_000_000_000, 10_000_000_000),
    "papers100M": Graph(111_059_956, 1_615_685_872, 128, 512),
    "MAG240M": Graph(244_160_499, 1_728_364_232, 768, 1536),
    "Twitter": Graph(41_652_230, 1_468_365_182, 256, 512),
    "uk-2006-05": Graph(77_741_046, 2_965_197_340, 256, 512),
}
"""Each edge in one direction. Twitter and UK have no features; MorphGL gives them 256 in float16."""
MACHINES: dict[str, Host | None] = {
    HERE: None,
    "PGSampler": (28, 2 * 76.8),
    "MorphGL, machine A": (12, 140.8),
    "HyScale-GNN": (CORES, DUAL_EPYC_7763.memory_bandwidth / 1e9),
    "NeutronAscend": (48, 2 * 128.0),
}
"""Cores and GB/s of two Xeon E5-2680v4, a Gold 6248R, two EPYC 7763 and two Platinum 8163 (96 hardware threads)."""


@dataclass(frozen=True)
class Cost:
    """A cost that a step reports, and its model: ``work`` times the sum of ``terms``, each with a coefficient."""

    step: str
    key: str
    unit: str
    terms: Callable[[Graph], list[float]]
    work: Callable[[Graph], float] = lambda graph: 1.0
    all_cores: bool | None = None  # whether it was measured on all cores, or on one; None: for this machine only
    moved: Callable[[Graph], float] = lambda graph: 0.0  # bytes read and written in memory

    def predict(self, factors: Sequence[float], graph: Graph, host: Host | None = None, cores: int = 1) -> float:
        """Return the cost on the measured machine, which has ``cores``, or on another."""
        cost = self.work(graph) * float(np.dot(factors, self.terms(graph)))
        return max(cost * (cores if self.all_cores else 1) / host[0], self.moved(graph) / host[1]) if host else cost


def doublings(table_bytes: float) -> float:
    """Return the logarithm of a table's size; 0 for 1 MB and less."""
    return log2(max(1.0, table_bytes / 1e6))


def _peak(step: str, counted: Callable[[Graph], float]) -> Cost:
    return Cost(step, "peak, GB", "GB", lambda graph: [1, counted(graph) / 1e9])


COSTS = {
    "sampling, one core": Cost("sample", "ns per edge", "ns per sampled edge", lambda g: [1, doublings(g.topology)],
                               all_cores=False, moved=lambda g: 128),
    "loading from memory": Cost("gather", "ns per row from memory", "ns per row",
                                lambda g: [1, doublings(g.nodes * g.row_bytes)],
                                lambda g: g.row_bytes / ROW_BYTES, all_cores=True, moved=lambda g: 2 * g.row_bytes),
    "loading from disk": Cost("gather", "ns per row from disk", "ns per row", lambda g: [1, g.blocks_per_row]),
    "aggregation": Cost("aggregate", "ns per edge", "ns per edge", lambda g: [1, doublings(32 * g.nodes)],
                        all_cores=True, moved=lambda g: 68),
    "partitioning": Cost("partition", "wall, s", "ns per edge", lambda g: [1, doublings(2 * g.nodes), 1e6 / g.edges]),
    "conversion": Cost("convert", "wall, s", "ns per edge", lambda g: [1, doublings(g.topology), 1e6 / g.edges],
                       lambda g: 1 + EDGES_PER_VALUE * g.features * g.nodes / g.edges),
    "peak of sampling": _peak("sample", lambda g: g.topology + 4 * g.edges + 8 * g.nodes),
    "peak of loading": _peak("gather", lambda g: (g.row_bytes + 12) * g.nodes),
    "peak of aggregation": _peak("aggregate", lambda g: g.topology + 64 * g.nodes),
    "peak of partitioning": _peak("partition", lambda g: 4 * g.edges + 55 * g.nodes),
    "peak of conversion": _peak("convert", lambda g: min(10e9, 24 * g.edges)),
}  # fmt: skip
"""Sampling moves two cache lines per edge; an aggregation of 8 columns moves one, and a source."""


def fit(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients, at least 0, with the least squares of relative errors."""
    relative = np.asarray(terms, np.float64) / np.asarray(values, np.float64)[:, None]
    return [float(each) for each in nnls(relative, np.ones(len(values)))[0]]


def fit_cost(cost: Cost, sizes: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Fit a cost to what the steps found at each number of edges; ``error`` is that of the largest, left out."""
    graphs = [Graph(edges // DEGREE, edges) for edges in sorted(sizes)]
    values = [float(sizes[graph.edges][cost.step][cost.key]) for graph in graphs]
    if cost.key == "wall, s":
        values = [1e9 * value / graph.edges for value, graph in zip(values, graphs, strict=True)]
    terms = [[cost.work(graph) * term for term in cost.terms(graph)] for graph in graphs]
    error = cost.predict(fit(terms[:-1], values[:-1]), graphs[-1]) / values[-1] - 1 if values[1:] else None
    measured = {graph.edges: shortened(value) for graph, value in zip(graphs, values, strict=True)}
    factors = fit(terms, values)
    line = {edges: shortened(cost.predict(factors, Graph(edges // DEGREE, edges)))
            for edges in np.geomspace(graphs[0].edges, GRAPHS[LARGE].edges, 17).astype(int).tolist()}  # fmt: skip
    return {"unit": cost.unit, "factors": factors, "error": error, "measured": measured, "line": line}


def predict(fits: Mapping[str, Mapping[str, Any]], cores: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the costs of each graph on each machine; the measured one has ``cores``."""

    def costs(graph: Graph, host: Host | None) -> dict[str, float]:
        chosen = [name for name in fits if host is None or COSTS[name].all_cores is not None]
        return {name: shortened(COSTS[name].predict(fits[name]["factors"], graph, host, cores)) for name in chosen}

    return {name: {place: costs(graph, host) for place, host in MACHINES.items()} for name, graph in GRAPHS.items()}


def tables(result: Mapping[str, Any]) -> str:
    """Return the tables of docs/scaling.md: measured costs, and predicted ones by machine and by graph."""
    described, fits, predicted = result["machine"], result["extra"]["fits"], result["extra"]["predicted"]
    peaks = [name for name in COSTS if name.startswith("peak")]
    sizes = [f"{int(edges):,} edges" for edges in fits["aggregation"]["measured"]]
    first = [["measured", "unit", *sizes, f"{LARGE}, predicted", "error at the largest size"]]
    second = [["predicted", "machine", "ns per sampled edge", "ns per row from memory", "s to aggregate 8 columns"]]
    third = [["predicted", "topology, GB", "features, GB", "s to convert", "s to partition", "ns per row from disk",
              *(f"{name}, GB" for name in peaks)]]  # fmt: skip
    for name, found in fits.items():
        error = "" if found["error"] is None else f"{100 * found['error']:+.0f} %"
        values = (*found["measured"].values(), predicted[LARGE][HERE][name])
        first.append([name, found["unit"], *map(_number, values), error])
    for name, graph in GRAPHS.items():
        for place, costs in predicted[name].items():
            values = costs["sampling, one core"], costs["loading from memory"], costs["aggregation"] * graph.edges / 1e9
            second.append([name, f"{place}, one core to sample" if place == HERE else place, *map(_number, values)])
        costs = predicted[name][HERE]
        seconds = [costs[each] * graph.edges / 1e9 for each in ("conversion", "partitioning")]
        values = (graph.topology / 1e9, graph.row_bytes * graph.nodes / 1e9, *seconds, costs["loading from disk"])
        third.append([name, *map(_number, (*values, *(costs[each] for each in peaks)))])
    where = "Measured on {cores} cores of {cpu} with {ram_gb:g} GB of memory, {date}.".format(**described)
    return "\n\n".join([where, *map(_markdown, (first, second, third))])


def table_of_steps(billion: Mapping[str, Any]) -> str:
    """Return the table of what each step of ``benchmarks.billion`` took and found."""
    names = ("wall, s", "cpu, s", "peak, GB", "with page cache, GB")
    rows = [["step", *names, "found"]]
    for step, found in billion["extra"].items():
        others = {name: value for name, value in found.items() if name not in (*names, "limited")}
        texts = [f"{name}: {' and '.join(map(_number, np.ravel(value)))}" for name, value in others.items()]
        rows.append([step, *(_number(found[name]) if name in found else "" for name in names), "; ".join(texts)])
    return _markdown(rows)


def _number(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


def _markdown(rows: list[list[str]]) -> str:
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("scaling", __doc__, SIZES, argv, runs=1, paths={"folder": "where tables and graphs lie"})
    described, sizes, edges = machine(), {}, args.smallest
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        while edges <= args.largest:
            folder = Path(args.folder or temporary, str(edges))
            folder.mkdir(parents=True, exist_ok=True)
            sizes[edges] = measure_steps(folder, edges, steps=STEPS)
            edges *= 10
    larger = json.loads(BILLION.read_text()) if BILLION.exists() and not args.quick else {"extra": {}}
    if {*STEPS[1:]} <= {*larger["extra"]}:
        sizes.setdefault(larger["settings"]["edges"], larger["extra"])
    fits = {name: fit_cost(cost, sizes) for name, cost in COSTS.items() if args.only in name}
    rows = [{"name": f"{name}, {edges} edges [{found['unit']}]", **dict.fromkeys(("median", "min", "max"), value)}
            for name, found in fits.items() for edges, value in found["measured"].items()]  # fmt: skip
    extra = {"fits": fits, "predicted": predict(fits, described["cores"]), "steps": sizes}
    title, settings = "Costs by number of edges", {**args.sizes, "runs": args.runs}
    return publish({"benchmark": "scaling", "title": title, "unit": "in brackets", "machine": described,
                    "settings": settings, "rows": rows, "comparisons": [], "extra": extra}, args.out)  # fmt: skip


if __name__ == "__main__":
    main()
