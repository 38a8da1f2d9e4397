"""Random chunks as plain arrays: any vertex order, isolated vertices, parallel edges, hubs split across chunks."""

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ChunkArrays:
    """The fields of lightning_gnn.graph.Chunks, and the edges as (vertex, column) per entry."""

    rows: np.ndarray
    row_ptr: np.ndarray
    indptr: np.ndarray
    local: np.ndarray
    columns: np.ndarray
    column_ptr: np.ndarray
    target: np.ndarray
    source: np.ndarray

    @property
    def tables(self):
        return self.rows, self.row_ptr, self.indptr, self.local, self.columns, self.column_ptr

    @property
    def num_chunks(self):
        return self.row_ptr.size - 1

    def even_ranges(self, parts):
        bounds = [self.num_chunks * part // parts for part in range(parts + 1)]
        return list(itertools.pairwise(bounds))


def build_chunks(target, source, num_vertices, num_chunks, *, shuffle=None, most_entries=None):
    """Split a graph into chunks of about equally many rows; vertices with over ``most_entries`` entries get several."""
    order = np.arange(num_vertices) if shuffle is None else shuffle.permutation(num_vertices)
    sorted_by_target = np.argsort(target, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=num_vertices))])
    parts = []
    for vertex in order:
        entries = sorted_by_target[ptr[vertex] : ptr[vertex + 1]]
        step = most_entries or max(entries.size, 1)
        parts += [(vertex, entries[at : at + step]) for at in range(0, max(entries.size, 1), step)]
    bounds = [len(parts) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    edges = np.concatenate([part for _, part in parts]) if parts else np.zeros(0, np.int64)
    columns, local, column_ptr = [], [], [0]
    for start, stop in itertools.pairwise(bounds):
        entries = np.concatenate([part for _, part in parts[start:stop]] + [np.zeros(0, np.int64)]).astype(np.int64)
        used, index = np.unique(source[entries], return_inverse=True)
        columns.append(used)
        local.append(index)
        column_ptr.append(column_ptr[-1] + used.size)
    return ChunkArrays(
        rows=np.array([vertex for vertex, _ in parts], np.int32),
        row_ptr=np.array(bounds, np.int64),
        indptr=np.concatenate([[0], np.cumsum([part.size for _, part in parts])]).astype(np.int64),
        local=np.concatenate([*local, np.zeros(0)]).astype(np.int32),
        columns=np.concatenate([*columns, np.zeros(0)]).astype(np.int32),
        column_ptr=np.array(column_ptr, np.int64),
        target=target[edges],
        source=source[edges],
    )


def draw_chunks(seed, num_vertices, num_edges, num_chunks, *, num_sources=None, shuffled=True, most_entries=None):
    """Draw a graph in which few vertices are the targets and sources of most edges."""
    draw = np.random.default_rng(seed)
    num_sources = num_sources or num_vertices
    target = (num_vertices * draw.random(num_edges) ** 2).astype(np.int64)
    source = (num_sources * draw.random(num_edges) ** 1.5).astype(np.int64)
    shuffle = draw if shuffled else None
    return build_chunks(target, source, num_vertices, num_chunks, shuffle=shuffle, most_entries=most_entries)
