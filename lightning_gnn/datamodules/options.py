"""The options that DataModules share, in groups: how neighbors are sampled, and where features lie."""

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


class _Group:
    """A group of options, taken out of a DataModule's keywords."""

    @classmethod
    def pop_from(cls, keywords: dict[str, Any]) -> Self:
        """Return the options of this group, and remove them from the keywords."""
        names = [one.name for one in fields(cls) if one.name in keywords]  # type: ignore[arg-type]
        return cls(**{name: keywords.pop(name) for name in names})


@dataclass(frozen=True)
class SamplingOptions(_Group):
    """How a DataModule samples neighbors where no sampler is given, as :class:`~lightning_gnn.NeighborSampler`.

    Args:
        num_neighbors: In-edges to pick per node, one number per hop; -1 takes all. In a heterogeneous graph also a list
            for each edge type.
        replace, disjoint, subgraph_type, sampler: With replacement, one tree per seed, which edges, and LABOR.
        time_attr, temporal_strategy, time_window: Attribute with times of nodes or edges, and how they are picked by.
        weight_attr: Attribute with the weights of edges.
        layer_dependency, batch_dependency: With LABOR, hops, or so many mini-batches, share variates.
        exclude_seed_edges: In link prediction, take seed edges and their reverses out of the messages; a dict names
            reverse edge types that are not called ``rev_…``.
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
    exclude_seed_edges: bool | Mapping[EdgeType, EdgeType] = False

    def __post_init__(self) -> None:
        true_or_false(self.replace, "replace")
        true_or_false(self.disjoint, "disjoint")

    def given(self) -> dict[str, Any]:
        """Return the options that ask for something."""
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


@dataclass(frozen=True)
class StorageOptions(_Group):
    """Where the features of a DataModule lie.

    Args:
        check_features: Look for NaN and infinity first: in ``x``, ``edge_attr`` and ``edge_weight``, unless they are
            memory-mapped and of more than a gigabyte, and in ``y`` of the seeds.
        feature_dtype: Keep ``x`` in this dtype, ``"bfloat16"`` (or float16) for half of the memory, and of the time to
            read it; batches have it too, best with ``Trainer(precision="bf16-mixed")``.
        share_memory: On several devices, let the ranks of one machine use one copy of graph and features: pages are
            copied only where a rank writes to them.
        memory: Leave ``x`` on disk and read it past the page cache, with so much memory (``"8GB"``) in each process for
            rows that will be used soonest, mini-batches that were sampled ahead, and those that are ready.
        lookahead: With ``memory``, how many mini-batches are sampled ahead of the one that is read, or bytes of them
            (``"500MB"``); by default an eighth of the memory.
        store: With ``memory``, the ``.npy`` file to read; in a heterogeneous graph one for each type that is to be read
            so. By default those that ``x`` is memory-mapped from.

    Raises:
        ValueError: Options that exclude each other.
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
                    raise ValueError(f"{name} is for features that stay on disk: give memory= too, such as '8GB'")
        elif self.feature_dtype is not None:
            raise ValueError(
                "feature_dtype makes a table in memory, so it does not go with memory=, which leaves features on disk; "
                "FeatureTable(x, dtype=…).save(path) makes a smaller file"
            )


class DataModuleOptions(LoaderOptions, total=False):
    """The keywords of both groups and of the loaders, for tools that read signatures."""

    replace: bool
    disjoint: bool
    exclude_seed_edges: bool | Mapping[EdgeType, EdgeType]
    check_features: bool
    feature_dtype: torch.dtype | str | None
    share_memory: bool
    memory: int | str | None
    lookahead: int | str | None
    store: str | Path | Mapping[str, str | Path] | None
