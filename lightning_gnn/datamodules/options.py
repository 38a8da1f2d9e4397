"""Options of the DataModules: groups for neighbor sampling and feature storage, and checks of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch_geometric.sampler import BaseSampler
from torch_geometric.typing import EdgeType

from lightning_gnn.loading.batch import Batch, Positions
from lightning_gnn.loading.loaders import LinkLoader, NodeLoader
from lightning_gnn.loading.options import validate_options
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.messages import keywords_of, true_or_false
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler, Output

_Group = TypeVar("_Group")
_LOADERS = {"node": NodeLoader, "link": LinkLoader}
_SAMPLER_OPTIONS = ("num_neighbors", "replace", "disjoint", "temporal_strategy", "time_window", "subgraph_type")
_RESERVED = {
    "data", "node_sampler", "link_sampler", "input_nodes", "input_id", "edge_label_index", "edge_label", "seed", "rank",
    "loader_id", "first_batch", "epoch", "loader_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the default sampler of a DataModule; see :class:`~lightning_gnn.NeighborSampler`.

    Args:
        num_neighbors: Fanout of each hop, in in-edges per node; -1 takes all. In a heterogeneous graph optionally a
            dictionary with a list for each edge type.
        replace, disjoint, subgraph_type: Sampling with replacement, a separate subgraph per seed, PyG's subgraph type.
        time_attr, temporal_strategy, time_window: Attribute with node or edge times, and the rules for picking by time.
        weight_attr: Attribute with edge weights.
        sampling, layer_dependency, batch_dependency: ``"labor"`` for LABOR sampling, which can share random variates
            across hops, or across this number of mini-batches.
        semantics: ``"every_hop"`` samples a node in every hop from its first on, instead of only in its first.
        exclude_seed_edges: For link prediction, exclude seed edges and their reverses from message passing; a
            dictionary maps edge types to reverse types that are not named ``rev_…``.
    """

    num_neighbors: Fanouts | None = None
    replace: bool = False
    disjoint: bool = False
    subgraph_type: str | None = None
    time_attr: str | None = None
    temporal_strategy: str | None = None
    time_window: float | None = None
    weight_attr: str | None = None
    sampling: str | None = None
    layer_dependency: bool | None = None
    batch_dependency: int | None = None
    semantics: str | None = None
    exclude_seed_edges: bool | Mapping[EdgeType, EdgeType] = False

    def __post_init__(self) -> None:
        true_or_false(self.replace, "replace")
        true_or_false(self.disjoint, "disjoint")

    def given(self) -> dict[str, Any]:
        """Return the options that are set, i.e. neither None nor False."""
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


@dataclass(frozen=True)
class StorageOptions:
    """Options for storing and reading the features of a DataModule.

    Args:
        check_features: Check for NaN and infinity at construction: in ``x``, ``edge_attr`` and ``edge_weight`` (except
            memory-mapped ones above one gigabyte), and in ``y`` of the seeds.
        feature_dtype: Store ``x`` in this dtype; ``"bfloat16"`` or ``"float16"`` halves memory and bandwidth. Batches
            have this dtype too, so combine it with ``Trainer(precision="bf16-mixed")``.
        share_memory: Let all ranks of a machine share one copy of graph and features (copy-on-write).
        memory: Read ``x`` from disk with direct I/O, using this amount of memory per process (such as ``"8GB"``) for
            cached rows, mini-batches sampled ahead, and ready mini-batches.
        lookahead: With ``memory``, the number of mini-batches to sample ahead of reading, or their bytes
            (``"500MB"``); by default an eighth of the memory.
        store: With ``memory``, the ``.npy`` file to read, or a dictionary of files by node type. A file at a URL is
            fetched whole first. By default the files that ``x`` is memory-mapped from.

    Raises:
        ValueError: Two options exclude each other.
    """

    check_features: bool = True
    feature_dtype: torch.dtype | str | None = None
    share_memory: bool = True
    memory: int | str | None = None
    lookahead: int | str | None = None
    store: str | Path | Mapping[str, str | Path] | None = None

    def __post_init__(self) -> None:
        true_or_false(self.check_features, "check_features")
        true_or_false(self.share_memory, "share_memory")
        if self.memory is None:
            for name in ("lookahead", "store"):
                if getattr(self, name):
                    raise ValueError(f"{name} requires features on disk: set memory= too, such as '8GB'")
        elif self.feature_dtype is not None:
            raise ValueError(
                "feature_dtype converts features in memory, so it cannot be combined with memory=, which reads them "
                "from disk; use FeatureTable(x, dtype=…).save(path) to write a smaller file"
            )


class DataModuleOptions(TypedDict, total=False):
    """Keywords of both groups and of the loaders, declared for tools that read signatures."""

    sampler: Any  # torch's order of the seeds, or a class_path from LightningCLI
    shuffle: bool | None
    drop_last: bool
    batch_sampler: Iterable[Positions]
    prefetch_factor: int | None
    pin_memory: bool
    transform: Callable[[Batch], Batch] | None
    transform_sampler_output: Callable[[Output], Output] | None
    thread_safe: bool
    sparse_grad: bool
    sums_ahead: bool
    subgraph_type: str
    time_attr: str | None
    temporal_strategy: str
    time_window: float | None
    weight_attr: str | None
    sampling: str
    layer_dependency: bool
    batch_dependency: int
    semantics: str
    replace: bool
    disjoint: bool
    exclude_seed_edges: bool | Mapping[EdgeType, EdgeType]
    check_features: bool
    feature_dtype: torch.dtype | str | None
    share_memory: bool
    memory: int | str | None
    lookahead: int | str | None
    store: str | Path | Mapping[str, str | Path] | None


def pop_options(group: type[_Group], keywords: dict[str, Any]) -> _Group:
    """Remove the options of a group from the keywords and return them."""
    return group(**{name: keywords.pop(name) for name in keywords_of(group) if name in keywords})


def training_keywords(owner: type, kind: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the training loader from the user's additional keywords."""
    kwargs = dict(kwargs)
    loader = kwargs.pop("loader", "neighbor")
    if loader not in ("neighbor", "link_neighbor", "custom"):
        raise ValueError(f"loader={loader!r} is not supported here; FullGraphDataModule trains on the full graph")
    options = _check_options(owner, kind, kwargs, keywords_of(owner))
    if options.get("shuffle") and ("sampler" in options or "batch_sampler" in options):
        raise ValueError("shuffle=True and a custom sampler exclude each other; omit shuffle")
    return options


def evaluation_keywords(
    owner: type, kind: str, eval_loader_kwargs: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that evaluation loaders override, and those that their sampler overrides."""
    if not isinstance(eval_loader_kwargs, (Mapping, type(None))):
        raise TypeError(f"eval_loader_kwargs must be a dictionary, but is {eval_loader_kwargs!r}")
    given = dict(eval_loader_kwargs or {})
    overrides = {name: given.pop(name) for name in _SAMPLER_OPTIONS if name in given}
    try:
        if "seed" in given:
            raise ValueError("seed belongs to the DataModule, which derives a different stream for each loader")
        options = _check_options(owner, kind, given)
        if options.pop("shuffle", False):
            raise ValueError("shuffle=True is not supported: evaluation outputs are in the order of the seeds")
        for name in ("replace", "disjoint"):
            true_or_false(overrides.get(name, False), name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"eval_loader_kwargs: {error}") from None
    return options, overrides


def with_overrides(sampler: BaseSampler, overrides: Mapping[str, Any]) -> BaseSampler:
    """Return the evaluation sampler: the same one, or (as in PyG) a copy with some attributes set."""
    if not overrides:
        return sampler
    other = copy.copy(sampler)
    for name, value in overrides.items():
        if not hasattr(sampler, name):
            raise ValueError(f"eval_loader_kwargs: {type(sampler).__name__} has no attribute {name}")
        setattr(other, name, value)
    if isinstance(other, NeighborSampler):
        other.check_options()
    return other


def check_sampler(sampler: BaseSampler, kind: str, given: Mapping[str, object]) -> None:
    """Validate a user's sampler, and warn about options that have no effect with it."""
    method = f"sample_from_{'nodes' if kind == 'node' else 'edges'}"
    if not callable(getattr(sampler, method, None)):
        raise TypeError(f"{kind}_sampler must be a PyG sampler with {method}, but is {sampler!r}")
    if given:
        rank_zero_warn(f"{', '.join(given)} has no effect: {kind}_sampler brings its own settings")


def _check_options(owner: type, kind: str, kwargs: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    if reserved := sorted(_RESERVED & set(kwargs)):
        raise TypeError(f"unknown option {reserved[0]}: {owner.__name__} sets it for its loaders")
    if kwargs.get("generator") is not None:
        raise ValueError("generator is not supported: seed= determines the order, so that a run can be resumed")
    options = validate_options(kwargs, kind, {*keywords_of(_LOADERS[kind]), *also}, _RESERVED - {*also})
    options.pop("generator", None)
    if options.get("batch_sampler") is not None:
        for name in ("sampler", "drop_last"):
            if options.get(name):
                raise ValueError(f"batch_sampler and {name} exclude each other; omit {name}")
    return options
