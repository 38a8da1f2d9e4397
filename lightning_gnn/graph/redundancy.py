"""Rows loaded per aggregation: the figure that the order of the vertices is chosen for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_gnn.graph.build import Layout, Limits, lay_out
from lightning_gnn.graph.chunks import Chunks


@dataclass(frozen=True)
class Redundancy:
    """Rows that one aggregation loads: the distinct in-neighbours of each chunk, summed; prints as a table.

    The other orders are cut by the same rule: into as many chunks of as many vertices or, with ``num_chunks="auto"``,
    into as many as fit the same memory.

    Args:
        order: ``"locality"`` or ``"natural"``: the order that was chosen.
        num_edges: Edges: the rows loaded without any reuse.
        num_vertices: Vertices with an edge out: the rows loaded if everything fitted into one chunk.
        rows_loaded: In the chosen order.
        natural_rows_loaded: In the order of the ids.
        random_rows_loaded: In a random order.
        num_chunks: Chunks in the chosen order.
        natural_num_chunks: Chunks in the order of the ids.
        random_num_chunks: Chunks in the random order.
    """

    order: str
    num_edges: int
    num_vertices: int
    rows_loaded: int
    natural_rows_loaded: int
    random_rows_loaded: int
    num_chunks: int
    natural_num_chunks: int
    random_num_chunks: int

    def __str__(self) -> str:
        lines = [f"{'rows loaded per aggregation':<34}{'rows':>14}{'chunks':>9}{'of natural':>12}{'per edge':>10}"]
        for name, rows, chunks in (
            (f"this graph ({self.order} order)", self.rows_loaded, self.num_chunks),
            ("natural order", self.natural_rows_loaded, self.natural_num_chunks),
            ("random order", self.random_rows_loaded, self.random_num_chunks),
            ("least: each row once", self.num_vertices, 1),
        ):
            natural = rows / max(self.natural_rows_loaded, 1)
            lines.append(f"{name:<34}{rows:>14,}{chunks:>9,}{natural:>12.3f}{rows / max(self.num_edges, 1):>10.3f}")
        return "\n".join(lines)


def measure_redundancy(chunks: Chunks, limits: Limits, order: str, seed: int = 0) -> Redundancy:
    """Count the rows loaded by chunks, and by those of the same matrix in natural and in random order.

    Args:
        chunks: On the CPU.
        limits: How they were cut.
        order: What the chosen order is called.
        seed: For the random order.
    """
    rows, indptr, columns = chunks.rows.numpy(), chunks.indptr.numpy(), chunks.entry_columns().numpy()
    # The parts of a vertex are neighbours, so the first one's begin and the last one's end are the whole vertex's.
    first, last = (np.empty(chunks.num_rows, np.int64) for _ in range(2))
    first[rows[::-1]] = indptr[:-1][::-1]
    last[rows] = indptr[1:]

    def reordered(vertices: np.ndarray) -> Layout:
        return lay_out(vertices, first[vertices], last[vertices], columns, chunks.num_columns, limits)

    natural = reordered(np.arange(chunks.num_rows, dtype=np.int32))
    random = reordered(np.random.default_rng(seed).permutation(chunks.num_rows).astype(np.int32))
    return Redundancy(
        order=order,
        num_edges=chunks.num_edges,
        num_vertices=int(np.unique(chunks.columns.numpy()).size),
        rows_loaded=chunks.columns.numel(),
        natural_rows_loaded=natural.rows_loaded,
        random_rows_loaded=random.rows_loaded,
        num_chunks=chunks.num_chunks,
        natural_num_chunks=natural.row_ptr.size - 1,
        random_num_chunks=random.row_ptr.size - 1,
    )
