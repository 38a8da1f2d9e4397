"""Messages for users: argument checks, replacements of removed options, and plain-text tables."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any

OF_NEWER_TORCH = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""Start of the warning that torch 2.13 issues whenever Lightning 2.6 combines loaders."""

_HERE = "lgnn plan strategy=hyscale measures the machine that it runs on; plan.machine=FILE describes another"
_TRACE = "Lightning's PyTorchProfiler writes a trace with named stages; see docs/how-to/profiling.md"
_CACHES = "PersistentSamplerDataModule(cache_bytes=…) counts and plans; .plan_placement() returns the planned caches"
_ROWS = "a graph is stored as plain rows, and chunks are made automatically for aggregation on an NPU; leave it out"
_CHUNKED = "a graph is stored as plain rows; graph.chunked() has the chunks for an NPU"
_SIZED = "chunks fit the memory of a core, and rows are ordered to load fewer of them; leave it out"
_NO_FIELD = "a plan consists of gpu_buffer_size, cpu_buffer_size, lead and row; leave it out"
_SCHEMA = "torch_geometric.contrib.utils.from_relbench makes a graph of tables whose keys are row numbers"
_COUNTED = "lgnn plan … plan.partition=FOLDER plan.network=… counts the requests between ranks; leave it out"
_PREFETCHER = "use lightning_gnn.loading.NodeLoader(…, prefetcher=CollectiveBatching(…))"
REMOVED = {
    "CompressedGraph.backward_order": _CHUNKED,
    "CompressedGraph.element_size": _ROWS,
    "CompressedGraph.limits": _CHUNKED,
    "CompressedGraph.local_bytes": _ROWS,
    "CompressedGraph.num_chunks": _ROWS,
    "CompressedGraph.num_columns_hint": _ROWS,
    "CompressedGraph.order": _ROWS,
    "CompressedGraph.progress": _ROWS,
    "CompressedGraph.save": "save its CSCGraph, and compress that again by CompressedGraph.from_graph",
    "CompressedGraph.redundancy": "graph.chunked().chunks.columns.numel() is the number of rows that an NPU loads",
    "CollectivePlan.backup": _NO_FIELD,
    "CollectivePlan.begin": _NO_FIELD,
    "CollectivePlan.configuration": _NO_FIELD,
    "CollectivePlan.cover": _NO_FIELD,
    "CollectivePlan.machine": _NO_FIELD,
    "backend=pyg_lib": "PyG's NeighborLoader samples with pyg-lib if that is installed; leave it out",
    "callbacks=timeline": _TRACE,
    "lightning_gnn.collective.CollectiveLoader": _PREFETCHER,
    "chunked.element_size": _SIZED,
    "chunked.local_bytes": _SIZED,
    "chunked.num_chunks": _SIZED,
    "chunked.num_columns_hint": _SIZED,
    "chunked.order": _SIZED,
    "chunked.progress": _SIZED,
    "convert.rows": "features are written as x.npy, which datamodule.memory= reads from disk; leave it out",
    "data.memory": "datamodule.memory= alone keeps features on disk; leave it out",
    "datamodule.cache_rows": "cache_bytes= limits the cache of hot rows and lists in bytes, or takes 'auto'; use it",
    "datamodule.cache_plan": "each run measures in its first epoch; plan= takes a file written by lgnn plan",
    "datamodule.cache_dir": "preparing a full graph is fast, so it is not cached; leave it out",
    "datamodule.inference.resume": "an interrupted inference='full' starts again; leave it out",
    "datamodule.num_chunks": _ROWS,
    "datamodule.order": _ROWS,
    "datamodule.replan": "a plan does not change during a run; leave it out",
    "datamodule.precompute": "it made epochs no faster; leave it out, and num_neighbors samples all hops",
    "datamodule.verify_store": "feature files have no checksums; leave it out",
    "lgnn tune": "pytorch_lightning.tuner.Tuner(trainer).lr_find(module, datamodule) finds a learning rate",
    "lightning_gnn.callbacks.StageTimeline": _TRACE,
    "lightning_gnn.callbacks.ShortProgressBar": "Lightning shows its own bar; leave it out",
    "lightning_gnn.datasets.from_tables": _SCHEMA,
    "lightning_gnn.datasets.registry.convert_papers100m": "datasets.convert_tables(source, folder) makes it",
    "lightning_gnn.graph.from_tables": _SCHEMA,
    "lightning_gnn.graph.RowFile": "features on disk are .npy files: give their path to DiskFeatures or store=",
    "lightning_gnn.graph.DualCachePlan": _CACHES,
    "lightning_gnn.graph.plan_dual_cache": _CACHES,
    "lightning_gnn.gpu_sampling.AccessCounts": _CACHES,
    "lightning_gnn.gpu_sampling.count_accesses": _CACHES,
    "lightning_gnn.graph.write_rows": "write features as x.npy by FeatureTable(x, dtype=…).save(path)",
    "partition.batch_size": _COUNTED,
    "partition.batches": _COUNTED,
    "partition.num_neighbors": _COUNTED,
    "partition.tell": "it is progress= now",
    "plan.accelerators": _HERE,
    "plan.platform": _HERE,
    "plan.platform_file": _HERE,
    "strategy.cpu_trainers=numa": "give the number of NUMA nodes; the operating system assigns their cores",
}
"""Choices, options and public names of earlier releases, and their replacements."""


def removed(name: str) -> str | None:
    """Return the message for a removed choice, option or public name; None for any other name."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else None


def whole_number(value: object, name: str, least: int | None = None) -> int:
    """Return an integer as ``int``; raise a ValueError for another value, or one less than ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, but is {value!r}")
    if least is not None and value < least:
        rule = "must not be negative" if least == 0 else f"must be at least {least}"
        raise ValueError(f"{name} {rule}, but is {value}")
    return int(value)


def true_or_false(value: object, name: str) -> bool:
    """Return a bool; raise a ValueError for anything else, since ``"no"`` and ``"false"`` would be truthy."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, but is {value!r}")
    return value


def keywords_of(cls: type) -> set[str]:
    """Return the parameter names of the ``__init__`` of a class and its bases."""
    inits = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    parameters = [parameter for init in inits for parameter in list(inspect.signature(init).parameters.values())[1:]]
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named.union(*(_unpack_keywords(init) for init in inits))


def _unpack_keywords(init: Any) -> set[str]:
    """Return the keywords of the TypedDict in ``**options: Unpack[TypedDict]``, or an empty set."""
    for parameter in inspect.signature(init).parameters.values():
        match = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if parameter.kind == parameter.VAR_KEYWORD and match is not None:
            return {*init.__globals__[match[1]].__annotations__}
    return set()


def closest(name: str, names: Iterable[str], aside: bool = False) -> str:
    """Return ``"; did you mean …?"`` with the most similar name, or an empty string; ``aside``: in parentheses."""
    questions = [f"did you mean {other}?" for other in difflib.get_close_matches(name, names, n=1)]
    return "".join(f" ({question})" if aside else f"; {question}" for question in questions)


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows of cells as lines with right-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def memory_bytes(value: object, name: str) -> int:
    """Parse a number of bytes, an integer or a string with a unit: ``"80GB"``, ``"512 MiB"``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{name} must be a number of bytes, such as 4000000000, '4GB' or '512MiB', but is {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def shown(nbytes: float) -> str:
    """Format a number of bytes: ``"39.0 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
