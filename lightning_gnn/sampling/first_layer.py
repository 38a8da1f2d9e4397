"""The option ``precompute``: the first layer's aggregation as a feature of each node, and a hop less to sample."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.nn.aggregated_features import aggregated_features
from lightning_gnn.nn.first_layer import NAMED, StaticAggregation, static_aggregation
from lightning_gnn.nn.models import _InputDropoutGNN
from lightning_gnn.nn.module import GNNModule
from lightning_gnn.sampling.neighbor import NeighborSampler

FROM_MODEL = "first_layer"
"""Asks for the aggregation of the model that is trained."""


def check_option(precompute: Any, data: Data) -> str | None:
    """Return the option as it is.

    Raises:
        ValueError: It is unknown, or the graph has an attribute of the name of what it adds.
    """
    if precompute is None:
        return None
    if precompute not in (FROM_MODEL, *NAMED):
        choices = ", ".join(map(repr, (FROM_MODEL, *NAMED)))
        raise ValueError(f"precompute={precompute!r} is unknown; use one of {choices}, or None")
    if "x_aggregated" in data:
        raise ValueError("precompute adds data.x_aggregated, but the graph has one already; rename it")
    return str(precompute)


def one_hop_less(sampler: Any) -> NeighborSampler:
    """Return a sampler that leaves out the last hop, whose features are in the sums.

    Raises:
        ValueError: It is not this package's.
    """
    if not isinstance(sampler, NeighborSampler):
        raise ValueError(
            f"precompute leaves out the last hop, which a {type(sampler).__name__} would not; give num_neighbors "
            "instead of a sampler of your own"
        )
    return sampler.with_options(num_neighbors=sampler.num_neighbors[:-1] or [0])


def aggregation_of(precompute: str, module: nn.Module | None) -> StaticAggregation:
    """Return what is to be computed.

    Args:
        precompute: The option.
        module: The LightningModule that is trained or evaluated; None where loaders are used without a Trainer.

    Raises:
        ValueError: The model cannot take it, or has another aggregation; says why.
    """
    if not isinstance(module, GNNModule) or type(module).forward is not GNNModule.forward:
        if precompute != FROM_MODEL:
            return NAMED[precompute]
        where = f"{type(module).__name__} is a module of your own" if module is not None else "there is no Trainer yet"
        raise ValueError(
            f"precompute={precompute!r} reads the first layer of NodeClassifier's or LinkPredictor's model, but "
            f"{where}: say which aggregation, {' or '.join(map(repr, NAMED))}, and use batch.x_aggregated"
        )
    model = getattr(module.model, "_orig_mod", module.model)
    wanted = NAMED.get(precompute)
    if wanted is None or isinstance(model, _InputDropoutGNN):
        found = static_aggregation(model)
        if wanted not in (None, found):
            raise ValueError(
                f"precompute={precompute!r} is a {wanted}, but the first layer of {type(model).__name__} needs the "
                f"{found}; use precompute={FROM_MODEL!r}"
            )
        wanted = found
    if "x_aggregated" not in signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__}.forward takes no x_aggregated, which precompute={precompute!r} adds")
    return wanted


class FirstLayer:
    """The graph with what the first layer aggregates, computed when it is first asked for.

    Args:
        precompute: The option.
    """

    def __init__(self, precompute: str) -> None:
        self.precompute = precompute
        self._made: tuple[Any, Tensor] | None = None

    @property
    def rows(self) -> Tensor | None:
        """The aggregated features ``[N, F]``, None before they are computed."""
        return None if self._made is None else self._made[1]

    def added_to(self, data: Data, graph: CSCGraph, module: nn.Module | None) -> Data:
        """Return the graph with ``x_aggregated``.

        Args:
            data: The user's graph, which stays as it is.
            graph: Its topology.
            module: As for :func:`aggregation_of`.

        Raises:
            TypeError: Features or weights are not floating.
            ValueError: What is asked for cannot be computed once; says why.
        """
        how = aggregation_of(self.precompute, module)
        x, edge_weight = _tensor(data.get("x")), _tensor(data.get("edge_weight"))
        if x is None:
            raise ValueError(f"precompute={self.precompute!r} needs features of the nodes, data.x")
        state = (how, _state(x), _state(edge_weight) if how.weighted else None)
        if self._made is None or self._made[0] != state:
            self._made = state, aggregated_features(graph, x, how, edge_weight)
        more = copy.copy(data)
        more.x_aggregated = self._made[1]
        return more


class KeepsFeatures:
    """A transform of the user's that must leave ``x`` as it is, for ``x_aggregated`` has been computed from it.

    Args:
        transform: The transform.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, batch: Data) -> Any:
        """Apply it.

        Raises:
            ValueError: It changes ``x``.
        """
        x = batch.x
        before = _state(x)
        out = self.transform(batch)
        if (get := getattr(out, "get", None)) is not None and (get("x") is not x or _state(x) != before):
            raise ValueError(
                "the transform changes x of a mini-batch, but precompute has aggregated the features as they were; "
                "apply the transform to the whole graph before"
            )
        return out


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _state(value: Any) -> Any:
    """Return what changes whenever a tensor is replaced or written to."""
    if not isinstance(value, Tensor):
        return None
    version = None if value.is_inference() else value._version
    return value.data_ptr(), tuple(value.shape), value.stride(), version
