"""Option groups of the DataModules: neighbor sampling, and feature storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch_geometric.typing import EdgeType
from typing_extensions import Self

from lightning_gnn.loading.options import LoaderOptions
from lightning_gnn.runtime.messages import true_or_false
from lightning_gnn.sampling.neighbor import Fanouts


class _OptionGroup:
    """Base class of option groups."""

    @classmethod
    def pop_from(cls, keywords: dict[str, Any]) -> Self:
        """Remove the options of this group from the keywords and return them."""
        names = [option.name for option in fields(cls) if option.name in keywords]  # type: ignore[arg-type]
        return cls(**{name: keywords.pop(name) for name in names})


@dataclass(frozen=True)
class SamplingOptions(_OptionGroup):
    """Options of the default sampler of a DataModule; see :class:`~lightning_gnn.NeighborSampler`.

    Args:
        num_neighbors: Fanout of each hop, in in-edges per node; -1 takes all. In a heterogeneous graph optionally a
            dictionary with a list for each edge type.
        replace, disjoint, subgraph_type: Sampling with replacement, a separate subgraph per seed, PyG's subgraph type.
        time_attr, temporal_strategy, time_window: Attribute with node or edge times, and the rules for picking by time.
        weight_attr: Attribute with edge weights.
        sampler, layer_dependency, batch_dependency: ``"labor"`` for LABOR sampling, which can share random variates
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
    sampler: str | None = None
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
class StorageOptions(_OptionGroup):
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


class DataModuleOptions(LoaderOptions, total=False):
    """Keywords of both groups and of the loaders, declared for tools that read signatures."""

    replace: bool
    disjoint: bool
    exclude_seed_edges: bool | Mapping[EdgeType, EdgeType]
    check_features: bool
    feature_dtype: torch.dtype | str | None
    share_memory: bool
    memory: int | str | None
    lookahead: int | str | None
    store: str | Path | Mapping[str, str | Path] | None
