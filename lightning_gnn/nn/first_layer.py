"""Which aggregation the first layer of a model does, where that is the same in each step and can be computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.dense.linear import Linear

from lightning_gnn.nn.conv import GATConv, GCNConv, GINConv, SAGEConv
from lightning_gnn.nn.conv.graph import REDUCE
from lightning_gnn.nn.models import _InputDropoutGNN
from lightning_gnn.ops.aggregate.definition import Reduce

_STEPS = ("message", "message_and_aggregate", "aggregate", "update", "propagate")
_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate")


@dataclass(frozen=True)
class StaticAggregation:
    """How a node's in-neighbours in the whole graph are aggregated.

    Args:
        reduce: ``"sum"``, ``"mean"`` or ``"max"``; of no neighbours it is zero.
        weighted: Multiply each neighbour's features by ``edge_weight`` of the edge, if the graph has weights.
        normalize: The symmetric normalisation of GCN by the degrees in the whole graph, as PyG's ``gcn_norm`` has it.
        add_self_loops: With ``normalize``: each node counts itself, once.
        improved: With ``normalize`` and weights: self-loops that are added weigh 2.
    """

    reduce: Reduce
    weighted: bool = False
    normalize: bool = False
    add_self_loops: bool = False
    improved: bool = False

    def __str__(self) -> str:
        if not self.normalize:
            return f"{'weighted ' * self.weighted}{self.reduce} of the in-neighbours' features"
        loops = f"with{'out' * (not self.add_self_loops)} self-loops{', improved' * self.improved}"
        return f"GCN-normalised sum of the in-neighbours' features {loops}"


NAMED = {
    "mean": StaticAggregation("mean"),
    "sum": StaticAggregation("sum"),
    "max": StaticAggregation("max"),
    "gcn": StaticAggregation("sum", weighted=True, normalize=True, add_self_loops=True),
}
"""Aggregations by the names under which a user asks for them."""


def static_aggregation(model: nn.Module) -> StaticAggregation:
    """Return what the first layer of a model aggregates, if no parameter and no random number has a part in it.

    Args:
        model: A ``GraphSAGE`` or ``GIN`` of :mod:`lightning_gnn.nn`, or a ``GCN`` of one layer or not normalised.

    Raises:
        ValueError: Says why the aggregation cannot be computed once, or cannot be handed to this model.
    """
    model = getattr(model, "_orig_mod", model)
    name = type(model).__name__
    if not isinstance(model, _InputDropoutGNN):
        raise ValueError(
            f"{name} takes no precomputed first layer; use GraphSAGE or GIN of lightning_gnn.nn, or in a module of "
            f"your own precompute={' or '.join(map(repr, NAMED))}, whose result is batch.x_aggregated"
        )
    if not isinstance(model.input_dropout, nn.Identity) and getattr(model.input_dropout, "p", None) != 0:
        raise ValueError(
            f"{name} drops input features anew in each step (input_dropout), so that their sums are not the same; "
            "give input_dropout=0"
        )
    if model.jk_mode not in (None, "last"):
        raise ValueError(f"{name}(jk={model.jk_mode!r}) joins the outputs of all layers; use jk=None or 'last'")
    try:
        found = aggregation_of_layer(model.convs[0])
    except ValueError as error:
        raise ValueError(f"the first layer of {name}: {error}") from None
    if found.normalize and model.num_layers > 1:
        raise ValueError(
            f"{name} normalises its further layers by the degrees in the mini-batch, which with a hop less lacks the "
            "in-edges of the outermost nodes, and accuracy with them; use GraphSAGE, or GCN(normalize=False)"
        )
    return found


def aggregation_of_layer(conv: Any) -> StaticAggregation:
    """Return what a layer aggregates.

    Raises:
        ValueError: As for :func:`static_aggregation`.
    """
    name = type(conv).__name__
    if isinstance(conv, (pyg.GATConv, pyg.GATv2Conv, GATConv)):
        raise ValueError(f"{name} weighs neighbours by attention, which changes as it is trained")
    if type(conv) not in (SAGEConv, GCNConv, GINConv):
        raise ValueError(f"{name} is not SAGEConv, GCNConv or GINConv of lightning_gnn.nn, which can take its result")
    hooks = [f"_{step}_forward{when}_hooks" for step in _HOOKED for when in ("_pre", "")]
    if any(getattr(conv, hook, None) for hook in hooks) or any(step in vars(conv) for step in _STEPS):
        raise ValueError(f"{name} has hooks on its messages, which would not be called")
    if conv.flow != "source_to_target":
        raise ValueError(f"{name}(flow={conv.flow!r}) is not supported")
    reduce = REDUCE.get(conv.aggr) if isinstance(conv.aggr, str) else None
    if reduce is None:
        raise ValueError(f"{name}(aggr={conv.aggr!r}) is not supported; use one of {', '.join(REDUCE)}")
    if getattr(conv, "project", False):
        raise ValueError(f"{name}(project=True) aggregates features that trained weights project")
    if not isinstance(conv, GCNConv):
        return StaticAggregation(reduce)
    if reduce != "sum":
        raise ValueError(f"{name}(aggr={conv.aggr!r}) is not supported; use aggr='add'")
    hooked = any(conv.lin._forward_hooks) or any(conv.lin._forward_pre_hooks)
    if type(conv.lin) is not Linear or hooked:
        raise ValueError(f"{name}.lin is not PyG's Linear, or has hooks: it would see sums instead of features")
    loops = conv.normalize and conv.add_self_loops
    return StaticAggregation("sum", True, conv.normalize, loops, conv.normalize and conv.improved)
