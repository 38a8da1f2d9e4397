"""The performance model against HyScale-GNN's own numbers: tables VI and VII, and the text on figures 8 to 11.

Nothing is measured: ``python -m benchmarks.hyscale.paper`` runs the model on the paper's machines and data sets (tables
II and III), and compares it with the paper's numbers. Figures 8 to 11 have no numbers, so those in the text are used.
The epoch times of PaGraph, P3 and DistDGLv2, measured on other systems and machines, are used for the speed-ups as
published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from benchmarks.harness import shortened
from benchmarks.hyscale.model import (
    BATCH_SIZE,
    DATASETS,
    cpu_fpga,
    cpu_gpu,
    loading_limits,
    paper_workload,
    peak_flops,
    predicted,
)
from lightning_gnn.hyscale.performance_model.model import PerformanceModel
from lightning_gnn.hyscale.performance_model.workload import Platform, Workload
from lightning_gnn.hyscale.resource_manager.mapping import TaskMapping

Kind = Literal["gcn", "sage"]
PRODUCTS, PAPERS = "ogbn-products", "ogbn-papers100M"
ACCELERATORS = 4


class Case(NamedTuple):
    """Setting of a prediction: a machine, a workload with its batch size, and the prefetching stages."""

    platform: Platform
    workload: Workload
    prefetch: int = 2

    def mapping(self, cpu_trainers: int = 1) -> TaskMapping:
        """Return the best mapping according to the model."""
        return _best_mapping(self.platform, self.workload, cpu_trainers)

    def epoch(self, mapping: TaskMapping | None = None) -> float:
        """Return the seconds of an epoch, by default with the best mapping."""
        mapping = self.mapping() if mapping is None else mapping
        seconds = predicted(PerformanceModel(self.platform, self.workload), mapping, self.prefetch)
        return ceil(self.workload.num_train / mapping.total) * seconds


@cache
def _best_mapping(platform: Platform, workload: Workload, cpu_trainers: int) -> TaskMapping:
    return PerformanceModel(platform, workload).best_mapping(cpu_trainers)


def case(platform: Platform, dataset: str, model: Kind, fanouts: tuple[int, ...] = (25, 10), hidden: int = 256) -> Case:
    """Return one of the paper's experiments as input of the model: 1024 seeds for each of five trainers."""
    first, *_, last = DATASETS[dataset][2]
    workload = paper_workload(dataset, ACCELERATORS + 1, model)
    return Case(platform, replace(workload, fanouts=fanouts, widths=(first, *(hidden,) * (len(fanouts) - 1), last)))


class Cell(NamedTuple):
    """A number of the paper: table or figure, row and column, value, unit, and a function for the model's value."""

    where: str
    what: str
    paper: float
    unit: str
    ours: Callable[[], float]


class Rival(NamedTuple):
    """A system of tables VI and VII: epoch times, TFLOPS of its machine (table VII over VI), and the setup."""

    seconds: dict[tuple[str, Kind], float]
    normalised: dict[tuple[str, Kind], float]
    fanouts: tuple[int, ...]
    hidden: int
    this_work: dict[tuple[str, Kind], float]
    this_work_normalised: dict[tuple[str, Kind], float]
    speedup: float
    normalised_speedup: float


_FOUR: tuple[tuple[str, Kind], ...] = ((PRODUCTS, "gcn"), (PRODUCTS, "sage"), (PAPERS, "gcn"), (PAPERS, "sage"))
_TWO: tuple[tuple[str, Kind], ...] = (_FOUR[1], _FOUR[3])


def _row(places: Iterable[tuple[str, Kind]], *numbers: float) -> dict[tuple[str, Kind], float]:
    return dict(zip(places, numbers, strict=True))


RIVALS = {
    "PaGraph": Rival(
        _row(_FOUR, 1.18, 0.25, 4.00, 1.18),
        _row(_FOUR, 135.1, 28.63, 458.0, 135.1),
        (25, 10),
        256,
        _row(_FOUR, 0.27, 0.49, 0.58, 1.91),
        _row(_FOUR, 2.59, 4.70, 5.55, 18.34),
        1.76,
        21,
    ),
    "P3": Rival(
        _row(_FOUR, 1.11, 1.23, 2.61, 3.11),
        _row(_FOUR, 165.1, 183.0, 388.4, 462.8),
        (25, 10),
        32,
        _row(_FOUR, 0.27, 0.28, 0.57, 0.59),
        _row(_FOUR, 2.59, 2.69, 5.47, 5.66),
        4.57,
        71,
    ),
    "DistDGLv2": Rival(
        _row(_TWO, 0.30, 4.16),
        _row(_TWO, 163.2, 2263),
        (15, 10, 5),
        256,
        _row(_TWO, 1.69, 3.67),
        _row(_TWO, 16.20, 35.23),
        0.45,
        25,
    ),
}


def tables() -> list[Cell]:
    """Return HyScale-GNN's cells of tables VI and VII, and their mean speed-ups."""
    cells = []
    teraflops = peak_flops(cpu_fpga(ACCELERATORS)) / 1e12

    def epoch(rival: Rival, place: tuple[str, Kind], factor: float) -> float:
        return factor * case(cpu_fpga(ACCELERATORS), *place, rival.fanouts, rival.hidden).epoch()

    def speedup(rival: Rival, theirs: dict[tuple[str, Kind], float], factor: float) -> float:
        return exp(fmean(log(theirs[place] / epoch(rival, place, factor)) for place in theirs))

    for name, rival in RIVALS.items():
        for place, paper in rival.this_work.items():
            what = f"this work, set up as {name}: {place[1].upper()}, {place[0]}"
            cells.append(Cell("table VI", what, paper, "s", partial(epoch, rival, place, 1.0)))
            normalised = rival.this_work_normalised[place]
            cells.append(Cell("table VII", what, normalised, "s x TFLOPS", partial(epoch, rival, place, teraflops)))
        what = f"this work over {name}, geometric mean"
        cells.append(Cell("table VI", what, rival.speedup, "x", partial(speedup, rival, rival.seconds, 1.0)))
        mean = partial(speedup, rival, rival.normalised, teraflops)
        cells.append(Cell("table VII", what, rival.normalised_speedup, "x", mean))
    return cells


_ALL: tuple[tuple[str, Kind], ...] = tuple((dataset, kind) for dataset in DATASETS for kind in ("gcn", "sage"))


def multi_gpu_baseline(place: tuple[str, Kind]) -> float:
    """Return the seconds of an epoch of PyG on the GPUs alone: sequential loading, transfer and training."""
    found = case(cpu_gpu(ACCELERATORS), *place)
    mapping = found.mapping(0)
    times = PerformanceModel(found.platform, found.workload).stage_times(mapping)
    stages = (times.load or 0.0) + (times.transfer or 0.0) + max(seconds or 0.0 for seconds in times.train_accelerator)
    return ceil(found.workload.num_train / mapping.total) * max(stages, times.sample_cpu or 0.0)


def figures() -> list[Cell]:
    """Return the numbers in the text on figures 8 to 11."""
    gpus, fpgas = cpu_gpu(ACCELERATORS), cpu_fpga(ACCELERATORS)

    def most(of: Callable[[tuple[str, Kind]], float]) -> Callable[[], float]:
        return lambda: max(of(place) for place in _ALL)

    def epoch(platform: Platform, place: tuple[str, Kind]) -> float:
        return case(platform, *place).epoch()

    def over_alone(place: tuple[str, Kind], prefetch: int) -> float:
        """Figure 11, relative to the FPGAs alone; assumes that the manager finds the model's mapping."""
        found = case(fpgas, *place)
        single = found._replace(prefetch=1)
        return single.epoch(single.mapping(0)) / found._replace(prefetch=prefetch).epoch()

    def limited() -> float:
        found = case(fpgas, "MAG240M (homo)", "gcn")
        each = replace(found.workload, batch_size=BATCH_SIZE)
        counts = range(1, 32)
        return next((float(count) for count in counts if loading_limits(found.platform, each, count)), 32.0)

    def model_error() -> float:
        found = [cell for cell in tables() if cell.where == "table VI" and cell.unit == "s"]
        return 100 * fmean(abs(cell.ours() / cell.paper - 1) for cell in found)

    return [
        Cell("figure 8", "error of the model against this work's epochs of table VI, mean", 14, "%", model_error),
        Cell("figure 9", "FPGAs from which Feature Loading limits, MAG240M (homo), GCN", 12, "", limited),
        Cell("figure 10", "CPU-GPU over PyG on the GPUs, up to", 2.08, "x",
             most(lambda place: multi_gpu_baseline(place) / epoch(gpus, place))),
        Cell("figure 10", "CPU-FPGA over PyG on the GPUs, up to", 12.6, "x",
             most(lambda place: multi_gpu_baseline(place) / epoch(fpgas, place))),
        Cell("figure 10", "CPU-FPGA over CPU-GPU, middle of 5x to 6x", 5.5, "x",
             lambda: exp(fmean(log(epoch(gpus, place) / epoch(fpgas, place)) for place in _ALL))),
        Cell("figure 11", "+ DRM, up to", 1.33, "x", most(lambda place: over_alone(place, 1))),
        Cell("figure 11", "+ two-stage prefetch, up to", 1.79, "x", most(lambda place: over_alone(place, 2))),
    ]  # fmt: skip


def compared(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return a row for each number: the paper's, ours, and the error in percent."""
    rows = []
    for cell in cells:
        ours = cell.ours()
        error = round(100 * (ours / cell.paper - 1), 1)
        rows.append({**cell._asdict(), "ours": shortened(ours), "error_percent": error})
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare, print a table, and write the JSON file."""
    parser = argparse.ArgumentParser("python -m benchmarks.hyscale.paper", description=__doc__)
    parser.add_argument("--only", default="", help="compare only tables or figures with this text in their name")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    rows = compared(cell for cell in (*tables(), *figures()) if args.only in cell.where)
    print("| where | what | paper | ours | error |\n|---|---|---|---|---|")
    for row in rows:
        numbers = " | ".join(f"{row[side]:g} {row['unit']}".strip() for side in ("paper", "ours"))
        print(f"| {row['where']} | {row['what']} | {numbers} | {row['error_percent']:+.0f} % |")
    result = {"benchmark": "hyscale_paper", "rows": rows}
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
