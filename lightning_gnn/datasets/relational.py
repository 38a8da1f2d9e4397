"""From the tables of a relational database to a graph with types and times, in the form of RelBench."""

import warnings
from collections.abc import Mapping
from datetime import date
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

Array = npt.NDArray[Any]
MOST_CATEGORIES = 32  # different strings in a column up to which each gets a feature


def from_tables(
    tables: Mapping[str, Any],
    primary_keys: Mapping[str, str],
    foreign_keys: Mapping[tuple[str, str], str],
    time_columns: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> HeteroData:
    """Make a node of each row and an edge of each foreign key, as in RelBench (arXiv:2407.20060).

    Numbers, booleans and dates become one feature each, of mean 0 and standard deviation 1 (missing ones 0); strings
    with up to 32 different values a feature per value, others are left out with a warning; a table without any
    gets a feature that is 1.

    Args:
        tables: By name; data frames of pandas or Polars, or dictionaries of columns.
        primary_keys: For each table that others refer to, the column that identifies a row; its values are unique.
        foreign_keys: For a table and one of its columns, the table to whose rows the column refers. An empty entry
            (None, NaN) refers to none.
        time_columns: For tables whose rows have a time, the column with it: dates (kept as seconds since 1970) or
            numbers. Rows of the other tables have always been there.
        labels: For tables to be predicted, the column with what is to be predicted; it is no feature.

    Returns:
        ``HeteroData`` with a node type per table, ``x`` float32 ``[N, F]``, ``time`` int64 or float64 ``[N]`` and ``y``
        ``[N]`` (strings as class numbers), and per foreign key the edge types ``(table, "f2p_COLUMN", other)`` and
        ``(other, "rev_f2p_COLUMN", table)``. ``data[table].feature_names`` lists the features.

    Raises:
        KeyError: A table or column that there is not.
        ValueError: Keys that are not unique or refer to no row, columns of different lengths, a time that is missing.

    Examples:
        >>> from lightning_gnn.datasets import from_tables
        >>> users = {"id": ["ann", "bob"], "age": [20, 30]}
        >>> orders = {"user": ["bob", "bob", None], "day": [1, 2, 3]}
        >>> data = from_tables({"user": users, "order": orders}, {"user": "id"}, {("order", "user"): "user"},
        ...                    time_columns={"order": "day"})
        >>> data["order", "f2p_user", "user"].edge_index
        tensor([[0, 1],
                [1, 1]])
    """
    # Convert all tables, and check that the columns named exist.
    time_columns, labels = time_columns or {}, labels or {}
    frames = {name: _columns(table, name) for name, table in tables.items()}
    for what, given in (("primary_keys", primary_keys), ("time_columns", time_columns), ("labels", labels)):
        for name, column in given.items():
            _column(frames, name, column, what)
    # Sort the primary keys, so that foreign keys can be found by binary search; they must be unique.
    data, keys = HeteroData(), {}
    for name, column in primary_keys.items():
        values = frames[name][column]
        if _missing(values).any():
            raise ValueError(f"primary key {name}.{column} is missing in row {int(_missing(values).argmax())}")
        values = _of_one_kind(values)
        order = np.argsort(values, kind="stable")
        if (same := np.flatnonzero(values[order][1:] == values[order][:-1])).size:
            raise ValueError(f"primary key {name}.{column} holds {_plain(values[order][same[0]])!r} more than once")
        keys[name] = values[order], order
    # Keys, times and labels are not features.
    used: dict[str, set[str]] = {name: set() for name in frames}
    for given in (primary_keys, time_columns, labels):
        for name, column in given.items():
            used[name].add(column)
    for name, column in foreign_keys:
        _column(frames, name, column, "foreign_keys")
        used[name].add(column)
    # Each table becomes a node type.
    for name, columns in frames.items():
        data[name].x, data[name].feature_names = _features(name, columns, used[name])
        if name in time_columns:
            data[name].time = _times(columns[time_columns[name]], f"{name}.{time_columns[name]}")
        if name in labels:
            data[name].y = _labels(columns[labels[name]])
    # Each foreign key becomes two edge types, one for each direction.
    for (name, column), other in foreign_keys.items():
        if other not in keys:
            raise ValueError(f"{name}.{column} refers to {other!r}, which has no primary key; give primary_keys")
        edges = _edges(frames[name][column], *keys[other], f"{name}.{column}", other)
        data[name, f"f2p_{column}", other].edge_index = edges
        data[other, f"rev_f2p_{column}", name].edge_index = edges.flip(0)
    return data


def _columns(table: Any, name: str) -> dict[str, Array]:
    found = {str(column): np.asarray(table[column]) for column in getattr(table, "columns", table)}
    lengths = {column: len(values) for column, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of {name!r} have different lengths: {lengths}")
    if not found:
        raise ValueError(f"table {name!r} has no columns")
    return found


def _column(frames: Mapping[str, Mapping[str, Array]], name: str, column: str, what: str) -> Array:
    if name not in frames:
        raise KeyError(f"{what}: there is no table {name!r}, only {', '.join(frames)}")
    if column not in frames[name]:
        raise KeyError(f"{what}: {name!r} has no column {column!r}, only {', '.join(frames[name])}")
    return frames[name][column]


def _missing(values: Array) -> npt.NDArray[np.bool_]:
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind == "O":
        return np.array([_is_missing(value) for value in values], dtype=bool)
    return np.zeros(values.shape, dtype=bool)


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)  # NaN is not itself
    except TypeError:  # pandas.NA is neither itself nor not
        return True


def _of_one_kind(values: Array) -> Array:
    """Return objects, none of which is missing, as an array of numbers or strings, none of which is cut."""
    return np.array(values.tolist()) if values.dtype.kind == "O" else values


def _plain(value: Any) -> Any:
    """Return NumPy's numbers and strings as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _edges(values: Array, keys: Array, order: Array, name: str, other: str) -> Tensor:
    """Look up each key that is there."""
    rows = np.flatnonzero(~_missing(values))
    wanted = _of_one_kind(values[rows])
    if not wanted.size:
        return torch.empty(2, 0, dtype=torch.int64)
    if wanted.dtype.kind == "f" and keys.dtype.kind in "iu":  # integers with gaps
        whole = wanted.astype(np.int64)
        if (broken := np.flatnonzero(whole != wanted)).size:
            raise ValueError(f"{name} refers to {_plain(wanted[broken[0]])!r}, which is no row of {other!r}")
        wanted = whole
    if keys.size and (wanted.dtype.kind in "US") != (keys.dtype.kind in "US"):
        raise ValueError(f"{name} holds {wanted.dtype}, but the keys of {other!r} are {keys.dtype}")
    at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    unknown = np.flatnonzero(keys[at] != wanted) if len(keys) else np.arange(len(wanted))
    if unknown.size:
        raise ValueError(f"{name} refers to {_plain(wanted[unknown[0]])!r}, which is no row of {other!r}")
    return torch.from_numpy(np.stack([rows, order[at] if len(keys) else at]))


def _features(name: str, columns: Mapping[str, Array], used: set[str]) -> tuple[Tensor, list[str]]:
    # Numbers and dates are standardized, and strings become a feature per value.
    parts, names, dropped = [], [], []
    count = len(next(iter(columns.values())))
    for column, values in columns.items():
        if column in used:
            continue
        # Data frames hold numbers with missing values as objects.
        if values.dtype.kind == "O" and all(isinstance(v, Number) or _is_missing(v) for v in values):
            values = np.array([np.nan if _is_missing(v) else float(v) for v in values])
        if values.dtype.kind in "biuf":
            parts.append(_scaled(values.astype(np.float64)))
            names.append(column)
        elif values.dtype.kind in "mM":
            # Dates count in seconds; a missing one stays missing until it is standardized.
            seconds = values.astype(f"{values.dtype.kind}8[s]").astype(np.int64).astype(np.float64)
            parts.append(_scaled(np.where(np.isnat(values), np.nan, seconds)))
            names.append(column)
        else:
            # A missing string belongs to no category.
            missing = _missing(values)
            text = np.array([str(value) for value in values], dtype=str)
            kinds = np.unique(text[~missing])
            if len(kinds) > MOST_CATEGORIES:
                dropped.append(column)
                continue
            parts += [((text == kind) & ~missing).astype(np.float32) for kind in kinds]
            names += [f"{column}={kind}" for kind in kinds]
    if dropped:
        warnings.warn(
            f"{name}: {', '.join(dropped)} hold more than {MOST_CATEGORIES} different strings and are no features; add "
            "an encoding of your own to data[…].x",
            stacklevel=3,
        )
    # Models need at least one feature, so that a constant stands in.
    if not parts:
        parts, names = [np.ones(count, np.float32)], ["1"]
    return torch.from_numpy(np.stack(parts, 1).astype(np.float32)), names


def _scaled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros_like(values)
    mean, spread = values[finite].mean(), values[finite].std()
    return np.where(finite, (np.where(finite, values, mean) - mean) / (spread or 1.0), 0.0)


def _times(values: Array, name: str) -> Tensor:
    if _missing(values).any():
        raise ValueError(f"{name} is a time, but is missing in row {int(_missing(values).argmax())}")
    if values.dtype.kind == "O" and all(isinstance(value, date) for value in values):
        values = values.astype("M8[s]")
    if values.dtype.kind == "M":
        return torch.from_numpy(values.astype("M8[s]").astype(np.int64))
    if values.dtype.kind in "iu":
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float64))
    raise ValueError(f"{name} is a time, but holds neither dates nor numbers: {values.dtype}")


def _labels(values: Array) -> Tensor:
    if values.dtype.kind in "biu":
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float32))
    return torch.from_numpy(np.unique(np.array([str(value) for value in values]), return_inverse=True)[1])
