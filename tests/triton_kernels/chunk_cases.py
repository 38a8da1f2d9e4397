"""Random matrices in chunks for hypothesis: hubs in several rows, duplicates, empty rows and chunks, not square."""

import torch
from hypothesis import strategies as st

from lightning_gnn.graph.chunks import Chunks


def made_chunks(row, column, num_rows, num_columns, num_chunks, max_entries, seed=0):
    """Cut a matrix, given by the ends of its entries, at random places of a random order of rows.

    Returns:
        The chunks, and the place of each of their entries in ``row`` and ``column``.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_rows, generator=generator)
    cuts = torch.randint(0, num_rows + 1, (num_chunks - 1,), generator=generator).sort().values.tolist()
    rows, row_ptr, indptr, local, columns, column_ptr, entries = [], [0], [0], [], [], [0], []
    for first, last in zip([0, *cuts], [*cuts, num_rows], strict=True):
        pieces = []
        for vertex in order[first:last].tolist():
            own = torch.nonzero(row == vertex).flatten()
            pieces += [(vertex, piece) for piece in own[column[own].argsort(stable=True)].split(max_entries)]
        used = torch.unique(torch.cat([column[piece] for _, piece in pieces])) if pieces else column[:0]
        for vertex, piece in pieces:
            rows.append(vertex)
            local += torch.searchsorted(used, column[piece]).tolist()
            entries += piece.tolist()
            indptr.append(len(local))
        columns += used.tolist()
        row_ptr.append(len(rows))
        column_ptr.append(len(columns))
    kinds = (torch.int32, torch.int64, torch.int64, torch.int32, torch.int32, torch.int64)
    lists = (rows, row_ptr, indptr, local, columns, column_ptr)
    tensors = [torch.tensor(values, dtype=kind) for values, kind in zip(lists, kinds, strict=True)]
    chunks = Chunks(*tensors, None, num_rows, num_columns)
    return chunks, torch.tensor(entries, dtype=torch.int64)


def tensors_of(chunks, device="cpu"):
    """Return the six tensors that the operators take."""
    names = ("rows", "row_ptr", "indptr", "local", "columns", "column_ptr")
    return [getattr(chunks, name).to(device) for name in names]


@st.composite
def matrices(draw, max_vertices=40, max_entries=150):
    """Draw the six tensors and the numbers of rows and columns."""
    num_rows, num_columns = draw(st.integers(1, max_vertices)), draw(st.integers(1, max_vertices))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, max_entries))
    hubs = draw(st.integers(1, num_rows))
    row = torch.randint(hubs, (count,), generator=generator)
    column = torch.randint(draw(st.integers(1, num_columns)), (count,), generator=generator)
    chunks, _ = made_chunks(
        row, column, num_rows, num_columns, draw(st.integers(1, 4)), draw(st.sampled_from([3, 20, 200]))
    )
    return tensors_of(chunks), num_rows, num_columns
