"""What is said to users: checks of what they gave, each with a message that helps, and tables in plain text."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any

OF_NEWER_TORCH = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""How the warning begins that torch 2.13 has for Lightning 2.6 whenever it puts loaders together, anybody's."""

_HERE = "lgnn plan strategy=hyscale measures the machine that it runs on; leave it out, and plan there"
_TRACE = "Lightning's PyTorchProfiler writes a trace in which the stages have names; see docs/how-to/profiling.md"
_CACHES = "PersistentSamplerDataModule(cache_bytes=…) counts and plans; .plan_placement() returns what it would cache"
_ROWS = "a graph is kept as plain rows, and chunks are made by themselves where an NPU aggregates; leave it out"
_CHUNKED = "a graph is kept as plain rows; the chunks of an NPU are in graph.chunked()"
_SIZED = "chunks fit the memory of a core, and rows are in the order that loads fewer of them; leave it out"
_NO_FIELD = "plans go by gpu_buffer_size, cpu_buffer_size, lead and row alone; leave it out"
_SCHEMA = "torch_geometric.contrib.utils.from_relbench makes a graph of tables whose keys are numbers of rows"
_COUNTED = "lgnn plan … plan.partition=FOLDER plan.network=… counts what ranks ask of each other; leave it out"
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
    "CompressedGraph.save": "save the CSCGraph that it was made of, and CompressedGraph.from_graph makes it again",
    "CompressedGraph.redundancy": "the rows that an NPU loads are graph.chunked().chunks.columns.numel()",
    "CollectivePlan.backup": _NO_FIELD,
    "CollectivePlan.begin": _NO_FIELD,
    "CollectivePlan.configuration": _NO_FIELD,
    "CollectivePlan.cover": _NO_FIELD,
    "CollectivePlan.machine": _NO_FIELD,
    "backend=pyg_lib": "PyG's NeighborLoader samples by pyg-lib where that is installed; leave it out",
    "callbacks=timeline": _TRACE,
    "lightning_gnn.collective.CollectiveLoader": _PREFETCHER,
    "chunked.element_size": _SIZED,
    "chunked.local_bytes": _SIZED,
    "chunked.num_chunks": _SIZED,
    "chunked.num_columns_hint": _SIZED,
    "chunked.order": _SIZED,
    "chunked.progress": _SIZED,
    "convert.rows": "features are written as x.npy, which datamodule.memory= reads from disk; leave it out",
    "data.memory": "datamodule.memory= alone says that features stay on disk; leave it out",
    "datamodule.cache_plan": "each run measures in its first epoch; plan= takes the file that lgnn plan has written",
    "datamodule.cache_dir": "a whole graph takes no time to prepare, so nothing is kept; leave it out",
    "datamodule.inference.resume": "an interrupted inference='full' starts again; leave it out",
    "datamodule.num_chunks": _ROWS,
    "datamodule.order": _ROWS,
    "datamodule.replan": "a plan stays as it was made; leave it out",
    "datamodule.precompute": "epochs took as long with it; leave it out, and num_neighbors samples all hops",
    "datamodule.verify_store": "files of features have no checksums; leave it out",
    "lgnn tune": "pytorch_lightning.tuner.Tuner(trainer).lr_find(module, datamodule) finds a learning rate",
    "lightning_gnn.callbacks.StageTimeline": _TRACE,
    "lightning_gnn.callbacks.ShortProgressBar": "Lightning shows its own bar; leave it out",
    "lightning_gnn.datasets.from_tables": _SCHEMA,
    "lightning_gnn.datasets.registry.convert_papers100m": "datasets.convert_tables(source, folder) makes it",
    "lightning_gnn.graph.from_tables": _SCHEMA,
    "lightning_gnn.graph.RowFile": "features on disk are .npy files, whose path DiskFeatures and store= take",
    "lightning_gnn.graph.DualCachePlan": _CACHES,
    "lightning_gnn.graph.plan_dual_cache": _CACHES,
    "lightning_gnn.gpu_sampling.AccessCounts": _CACHES,
    "lightning_gnn.gpu_sampling.count_accesses": _CACHES,
    "lightning_gnn.graph.write_rows": "write features as x.npy by FeatureTable(x, dtype=…).save(path)",
    "partition.batch_size": _COUNTED,
    "partition.batches": _COUNTED,
    "partition.num_neighbors": _COUNTED,
    "plan.accelerators": _HERE,
    "plan.platform": _HERE,
    "plan.platform_file": _HERE,
    "strategy.cpu_trainers=numa": "give the number of NUMA nodes, and leave their cores to the system",
}
"""Choices, options and public names of earlier releases, and what to use instead."""


def removed(name: str) -> str | None:
    """Return the message for a choice, an option or a name that was removed; None for another."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else None


def whole_number(value: object, name: str, least: int | None = None) -> int:
    """Return a number as ``int``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, but is {value!r}")
    if least is not None and value < least:
        rule = "must not be negative" if least == 0 else f"must be at least {least}"
        raise ValueError(f"{name} {rule}, but is {value}")
    return int(value)


def true_or_false(value: object, name: str) -> bool:
    """Return a bool as it is, and nothing else: ``"no"`` and ``"false"`` would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, but is {value!r}")
    return value


def keywords_of(kind: type) -> set[str]:
    """Return the names that the ``__init__`` of a class and of those above it take."""
    inits = [vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base)]
    parameters = [parameter for init in inits for parameter in list(inspect.signature(init).parameters.values())[1:]]
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named.union(*(_unpacked(init) for init in inits))


def _unpacked(init: Any) -> set[str]:
    """Return the keywords of the TypedDict in ``**options: Unpack[TypedDict]``; none where there is none."""
    for parameter in inspect.signature(init).parameters.values():
        found = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if parameter.kind == parameter.VAR_KEYWORD and found is not None:
            return {*init.__globals__[found[1]].__annotations__}
    return set()


def closest(name: str, names: Iterable[str], aside: bool = False) -> str:
    """Return a question that names the most similar of some names, empty where none is; ``aside`` in parentheses."""
    found = [f"did you mean {other}?" for other in difflib.get_close_matches(name, names, n=1)]
    return "".join(f" ({question})" if aside else f"; {question}" for question in found)


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows of cells as lines whose columns end below one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def memory_bytes(value: object, name: str) -> int:
    """Return a number of bytes, given as such or with a unit: ``"80GB"``, ``"512 MiB"``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{name} must be a number of bytes, such as 4000000000, '4GB' or '512MiB', but is {value!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def shown(nbytes: float) -> str:
    """Return a number of bytes to read: ``"39.0 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
