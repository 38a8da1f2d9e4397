"""How well the simulated chip agrees with the CPU twin, which runs the real kernels on real numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import ascend_sim_model as model
from benchmarks.ascend_sim_machines import Machine, machine
from lightning_gnn.ascend_ops.tiling import (
    aggregate_vector_tiling,
    combine_tiling,
    cube_tables,
    row_tables,
    up,
    update_constants,
    update_tiling,
)
from lightning_gnn.ascend_ops.twin import ReadOnly, Scratch, default_twin, launch
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings, plan_cores
from lightning_gnn.graph.synthetic import planted_power_law


def compare_vector(chip: Machine, chunks: Any, plan: Any, flat: bool = False) -> tuple[model.Launch, Any]:
    """Run aggregate_vector in the model and in the twin; ``flat``: HBM costs nothing."""
    rows = chunks.num_rows
    tables = row_tables(
        model.tables_of(chunks), chunk_ranges=plan.chunk_ranges, num_groups=plan.num_groups,
        num_columns=plan.num_columns,
    )  # fmt: skip
    wide = up(plan.num_columns)
    packed = aggregate_vector_tiling(tables, wide, weighted=True)
    setting, parameters = _setting(chip, plan.num_workers, flat)
    inputs = (np.zeros((rows, wide), np.float16), tables.vertices, tables.columns,
              np.ones(chunks.num_edges, np.float32), tables.plan)  # fmt: skip
    args = [*map(ReadOnly, inputs), np.zeros((rows, wide), np.float16), ReadOnly(packed)]
    real = launch("aggregate_vector", args, plan.num_workers, arch=chip.arch, parameters=parameters)
    return model.aggregate_vector(setting, tables, rows, rows, True), real


def compare_cube(
    chip: Machine, chunks: Any, plan: Any, flat: bool = False, twin: Any = None, buffers: int = 2
) -> tuple[model.Launch, Any]:
    """Run aggregate_cube in the model and in the twin, which has it for split cores only."""
    rows = chunks.num_rows
    tables = cube_tables(model.tables_of(chunks), plan.chunk_ranges, plan.num_groups, plan.num_columns)
    wide = up(plan.num_columns)
    setting, parameters = _setting(chip, 2 * plan.num_workers, flat)
    inputs = (np.zeros((rows, wide), np.float16), tables.plan, tables.row_blocks, tables.tiles, tables.columns,
              tables.positions, tables.values(None)[0], tables.runs)  # fmt: skip
    args = [
        *map(ReadOnly, inputs),
        np.zeros((rows, wide), np.float16),
        Scratch(np.zeros((max(tables.num_parts, 1), wide), np.float32)),
        Scratch(np.zeros(tables.workspace_bytes // 2, np.float16)),
        ReadOnly(tables.tiling),
    ]
    real = (twin or default_twin()).launch("aggregate_cube", args, plan.num_workers, parameters=parameters)
    return model.aggregate_cube(setting.with_buffers(buffers), tables, rows, rows, slots=2), real


def compare_update(chip: Machine, m: int, k: int, n: int, flat: bool = False, **how: Any) -> tuple[model.Launch, Any]:
    """Run update in the model and in the twin, on four blocks; ``how``: transpose_a, transpose_b, bias, split_k."""
    lda, ldb = up(m if how.get("transpose_a") else k), up(k if how.get("transpose_b") else n)
    packed = update_tiling(m, k, n, lda, ldb, **how)
    a = np.zeros((k if how.get("transpose_a") else m, lda), np.float16)
    b = np.zeros((n if how.get("transpose_b") else k, ldb), np.float16)
    parts = min(how.get("split_k", 1), -(-k // 128))
    y = np.zeros((m * parts, up(n)), np.float32 if parts > 1 else np.float16)
    setting, parameters = _setting(chip, 4, flat)
    inputs = (a, b, np.zeros((16, up(n)), np.float16), update_constants())
    real = launch("update", [*map(ReadOnly, inputs), y, ReadOnly(packed)], 4, parameters=parameters)
    return model.update(setting, m, k, n, blocks=4, **how), real


def compare_combine(chip: Machine, first_part: np.ndarray, columns: int, flat: bool = False) -> tuple[Any, Any]:
    """Run combine_parts in the model and in the twin, on four blocks."""
    rows = first_part.size - 1
    listed = np.zeros((rows, 4), np.int32)
    listed[:, 0], listed[:, 1], listed[:, 2] = np.arange(rows), first_part[:-1], first_part[1:]
    setting, parameters = _setting(chip, 4, flat)
    inputs = (np.zeros((int(first_part[-1]), columns), np.float32), listed)
    packed = combine_tiling(rows, columns)
    args = [*map(ReadOnly, inputs), np.zeros((rows, columns), np.float16), ReadOnly(packed)]
    real = launch("combine_parts", args, 4, parameters=parameters)
    return model.combine_parts(setting, first_part, columns, blocks=4), real


def _setting(chip: Machine, readers: int, flat: bool) -> tuple[model.Setting, dict[str, float]]:
    parameters = chip.parameters(readers)
    if flat:
        parameters["hbm_bytes"] = 1e9
    changes = {name: value for name, value in parameters.items() if name in chip.facts}
    return model.Setting(chip, share_hbm=False, changes=tuple(changes.items())), parameters


def small_graph(nodes: int = 400, edges: int = 6000) -> CompressedGraph:
    """Return a graph that the twin is quick to run on."""
    data = planted_power_law(nodes, edges, 4, 1, homophily=0.0)
    return CompressedGraph.from_graph(CSCGraph.from_edge_index(data.edge_index, nodes), num_chunks=12)


def agreement(archs: Sequence[str]) -> dict[str, Any]:
    """Return the cycles of the model over those of the twin, kernel by kernel."""
    chunks = small_graph().forward
    plan = plan_cores(100, chunks.loads.numpy(), PlanSettings(num_groups=2), 6)
    result: dict[str, Any] = {}
    for arch in archs:
        chip = machine(arch)
        pairs = {"aggregate_vector": compare_vector(chip, chunks, plan)}
        if not chip.unified:
            pairs["aggregate_cube"] = compare_cube(chip, chunks, plan)
            pairs["update"] = compare_update(chip, 400, 100, 256, transpose_b=True, bias=True)
        result[arch] = {kernel: ours.cycles / real.makespan for kernel, (ours, real) in pairs.items()}
    return result
