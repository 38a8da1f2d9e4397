"""Launches of kernels on a simulated Ascend chip: the tables that the real kernels read in, cycles and bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.ascend_sim_engine import DATA_LINE, LOGGED, PATHS, UNITS, Chip, layout, make_chip
from benchmarks.ascend_sim_kernels import queues, run_combine, run_cube, run_cube_unified, run_update, run_vector
from benchmarks.ascend_sim_machines import Machine
from lightning_gnn.ascend_ops.tiling import CubeTables, RowTables, aggregate_vector_tiling, fields, up

UPDATE_TILE = 128


@dataclass(frozen=True, eq=False)
class Setting:
    """How a chip is simulated.

    Args:
        machine: The chip.
        buffers: 2 for double buffering, 1 for none.
        serial: Without double buffering, nothing of a tile begins before all of the last one has ended, where
            otherwise every stage has a buffer of its own.
        share_hbm: Whether the cores share HBM; otherwise each has its own rate, as in the CPU twin.
        l2_scale: Share of L2 that there is, for graphs that are smaller than what they stand for.
        changes: Facts of the machine to change, as pairs.
        rows_at_once: Rows that aggregate_vector asks for at once; 0 for as many as the kernel does.
        own_lists: Whether aggregate_vector lists the edges of each vertex by themselves, which the kernel does not.
        log: Instructions of the first block to keep.
    """

    machine: Machine
    buffers: int = 2
    serial: bool = False
    share_hbm: bool = True
    l2_scale: float = 1.0
    changes: tuple[tuple[str, float], ...] = ()
    rows_at_once: int = 0
    own_lists: bool = False
    log: int = 0

    @property
    def parameters(self) -> dict[str, float]:
        """The machine's numbers, changed and scaled."""
        parameters = {name: fact.value for name, fact in self.machine.facts.items()} | dict(self.changes)
        return parameters | {"l2_bytes": parameters["l2_bytes"] * self.l2_scale}

    def chip(self, cores: int, num_lines: int, num_table_lines: int, log_cores: int = 1) -> Chip:
        """Return an idle chip."""
        parameters = self.parameters
        rate = parameters["hbm_gb_s"] * 1e3 / parameters["clock_mhz"] if self.share_hbm else None
        return make_chip(cores, parameters, num_lines, num_table_lines, rate, self.log, log_cores)

    def with_buffers(self, buffers: int) -> Setting:
        """Return the same with another number of buffers."""
        return replace(self, buffers=buffers)


@dataclass(frozen=True, eq=False)
class Launch:
    """What a launch took.

    Args:
        kernel: Its name.
        ends: Cycles until each block was done, ``[blocks]``.
        busy: Cycles that each unit has worked, summed over the cores.
        busiest: The same of the busiest core, for each unit.
        bytes: Bytes by path.
        fractals: Products of 16 x 16 x 16 on the cube units.
        elements: Elements of vector instructions.
        log: Instructions of the first block: core in the block, unit, start, finish.
    """

    kernel: str
    ends: np.ndarray
    busy: dict[str, float]
    busiest: dict[str, float]
    bytes: dict[str, float]
    fractals: float
    elements: float
    log: np.ndarray

    @property
    def cycles(self) -> float:
        """Cycles until all blocks were done."""
        return float(self.ends.max())


def _launch(kernel: str, chip: Chip, ends: np.ndarray) -> Launch:
    units = [(unit, index) for index, unit in enumerate(UNITS) if unit]
    return Launch(
        kernel=kernel,
        ends=ends,
        busy={unit: float(chip.busy[:, index].sum()) for unit, index in units},
        busiest={unit: float(chip.busy[:, index].max()) for unit, index in units},
        bytes=dict(zip(PATHS, chip.moved.tolist(), strict=True)),
        fractals=float(chip.work[0]),
        elements=float(chip.work[1]),
        log=chip.log[: chip.ctl[LOGGED]],
    )


def aggregate_vector(setting: Setting, tables: RowTables, num_rows: int, num_sources: int, weighted: bool) -> Launch:
    """Launch aggregate_vector.

    Args:
        setting: The chip.
        tables: What the kernel reads.
        num_rows: Rows of y.
        num_sources: Rows of x.
        weighted: Whether there are weights.
    """
    plan, at = tables.plan, tables.panel_offset
    panels = np.ascontiguousarray(plan[at:].reshape(-1, 4)).astype(np.int64)
    ld = int((panels[:, 0] + panels[:, 1]).max())
    blocks = tables.num_groups * tables.num_members
    edges = tables.columns.size
    lines = layout(num_sources * ld * 2, num_rows * ld * 2, edges * 4, edges * 4)
    read = layout(64, plan.size * 4, tables.vertices.size * 4, line=DATA_LINE)
    chip = setting.chip(blocks, lines[-1], read[-1])
    ends = np.zeros(blocks)
    of_kernel = fields("RowsTiling", aggregate_vector_tiling(tables, ld, weighted))
    run_vector(
        chip, np.array(lines), np.array(read), tables.vertices.astype(np.int64), tables.columns.astype(np.int64),
        plan[: tables.range_offset].astype(np.int64), panels, plan[tables.range_offset : at].astype(np.int64),
        tables.num_members, ld, weighted, setting.buffers, of_kernel["batch"],
        setting.rows_at_once or of_kernel["atOnce"], setting.own_lists, queues(blocks, 3), ends,
    )  # fmt: skip
    return _launch("aggregate_vector", chip, ends)


def aggregate_cube(
    setting: Setting, tables: CubeTables, num_rows: int, num_sources: int, slots: int | None = None
) -> Launch:
    """Launch aggregate_cube.

    Args:
        setting: The chip.
        tables: What the kernel reads; for a unified core, tiles of at most :data:`UNIFIED_COLUMNS` columns.
        num_rows: Rows of y.
        num_sources: Rows of x.
        slots: Slots of the workspace between vector and cube cores, by default as many as buffers.
    """
    field = fields("AggregateTiling", tables.tiling)
    members, at = field["members"], field["panelOffset"]
    plan = tables.plan.astype(np.int64)
    panels = np.ascontiguousarray(plan[at:].reshape(-1, 4))
    blocks, ld = tables.num_blocks, field["ldx"]
    accumulators = min(field["accumulators"], setting.buffers)
    serial = setting.serial and setting.buffers == 1
    lines = layout(
        num_sources * ld * 2, num_rows * ld * 2, tables.columns.nbytes, tables.positions.nbytes,
        tables.positions.nbytes, tables.num_parts * ld * 4, tables.workspace_bytes,
    )  # fmt: skip
    read = layout(
        64, plan.size * 4, tables.row_blocks.size * 4, tables.tiles.size * 4, tables.runs.size * 4, line=DATA_LINE
    )
    common = (
        tables.row_blocks.astype(np.int64), tables.tiles.astype(np.int64), tables.columns, tables.runs.astype(np.int64),
        plan[: field["rangeOffset"]], panels, plan[field["rangeOffset"] : at], members, ld,
    )  # fmt: skip
    ends = np.zeros(blocks)
    if setting.machine.unified:
        chip = setting.chip(blocks, lines[-1], read[-1])
        run_cube_unified(
            chip, np.array(lines), np.array(read), *common, field["tileRows"], field["tileColumns"], accumulators,
            setting.buffers, serial, queues(blocks, 5), queues(blocks, 6), ends,
        )  # fmt: skip
    else:
        chip = setting.chip(3 * blocks, lines[-1], read[-1], 3)
        run_cube(
            chip, np.array(lines), np.array(read), *common, field["tileRows"], field["tileColumns"],
            field["slotHalves"], accumulators, setting.buffers, setting.buffers if slots is None else slots, serial,
            queues(blocks, 2, 5), queues(blocks, 5), ends,
        )  # fmt: skip
    return _launch("aggregate_cube", chip, ends)


UNIFIED_COLUMNS = 64
"""Columns of a tile on a unified core: its UB alone holds the gathered rows, the dense tile and the results."""


def update(
    setting: Setting, m: int, k: int, n: int, *, transpose_a: bool = False, transpose_b: bool = False,
    bias: bool = False, split_k: int = 1, blocks: int | None = None,
) -> Launch:  # fmt: skip
    """Launch update: y ``[m, n]`` = a ``[m, k]`` times b ``[k, n]``.

    Args:
        setting: The chip.
        m: Rows of the result.
        k: Length of the products.
        n: Columns of the result.
        transpose_a: Whether a is stored ``[k, m]``.
        transpose_b: Whether b is stored ``[n, k]``.
        bias: Whether a bias is added.
        split_k: Into how many parts k is cut at most.
        blocks: Blocks, by default one per cube core.
    """
    split_k = min(split_k, -(-k // UPDATE_TILE))
    blocks = blocks or setting.machine.cube_cores
    wide = up(n)
    lda, ldb = up(m if transpose_a else k), up(k if transpose_b else n)
    a, b = (k if transpose_a else m) * lda, (n if transpose_b else k) * ldb
    lines = layout(a * 2, b * 2, 32 * wide, 8192, m * split_k * wide * 4)
    chip = setting.chip(blocks, lines[-1], 1)
    ends = np.zeros(blocks)
    run_update(
        chip, np.array(lines), m, k, wide, lda, ldb, transpose_a, transpose_b, bias, n, split_k, split_k > 1,
        setting.machine.unified, setting.buffers, queues(blocks, 6), ends,
    )  # fmt: skip
    return _launch("update", chip, ends)


def combine_parts(
    setting: Setting, first_part: Sequence[int] | np.ndarray, num_columns: int, float_out: bool = False,
    blocks: int | None = None,
) -> Launch:  # fmt: skip
    """Launch combine_parts: row i is the sum of the parts ``[first_part[i], first_part[i + 1])``."""
    blocks = blocks or setting.machine.vector_cores
    first = np.asarray(first_part, np.int64)
    wide, size = up(num_columns), 4 if float_out else 2
    lines = layout(int(first[-1]) * wide * 4, (first.size - 1) * wide * size)
    read = layout(32, (first.size - 1) * 16, line=DATA_LINE)
    chip = setting.chip(blocks, lines[-1], read[-1])
    ends = np.zeros(blocks)
    run_combine(chip, np.array(lines), np.array(read), first, wide, size, setting.buffers, queues(blocks, 2), ends)
    return _launch("combine_parts", chip, ends)


def tables_of(chunks: Any) -> tuple[np.ndarray, ...]:
    """Return the arrays of :class:`lightning_gnn.graph.chunks.Chunks` that the tables are made from."""
    names = ("rows", "row_ptr", "indptr", "local", "columns", "column_ptr")
    return tuple(getattr(chunks, name).numpy() for name in names)
