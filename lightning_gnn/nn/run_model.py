"""What a batch gives to a model: features, edges, the attributes that the model takes, or another way to run it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.nn.conv.graph import check_takes_graph, is_graph
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.layers import widen_features
from lightning_gnn.nn.models import trims_exactly
from lightning_gnn.nn.sampled_edges import in_sampled_order

_TRAIN_FEATURES = (
    ": add features, or train an embedding of each node, which the module owns and the graph shares (before the "
    "DataModule is created): data.x = module.x = torch.nn.Parameter(torch.randn(data.num_nodes, 64)), where module is "
    "the LightningModule, whose model takes 64 features"
)
_COUNTS_BY_TYPE = ("num_sampled_nodes_dict", "num_sampled_edges_dict")


class Runner(Protocol):
    """Another way to run a model on a batch, which a DataModule sets as ``batch.runner``."""

    trains: bool
    """Whether it also runs the model in training mode; otherwise only in evaluation mode."""

    def run(self, model: nn.Module, batch: Any, embeddings: TypeEmbeddings | None = None) -> Any:
        """Return what ``run_model(model, batch, embeddings)`` returns."""


def run_model(model: nn.Module, batch: Data | HeteroData, embeddings: TypeEmbeddings | None = None) -> Any:
    """Return a model's outputs for a batch's nodes, seeds first; by node type for a heterogeneous graph.

    The model is called with ``x`` and ``edge_index`` (by type: dictionaries), and with these, if it takes them:

    - ``edge_weight`` and ``edge_attr`` of the batch;
    - each keyword-only parameter of its ``forward``, with the attribute of the batch of that name: ``n_id``, ``e_id``,
      or what a transform has added. For a heterogeneous graph, a name with ``_dict`` collects an attribute by type;
    - the numbers of sampled nodes and edges per hop, if trimming cannot change the seeds' outputs.

    16-bit features are converted for a float32 model, except under autocast. A batch with the attribute ``runner``, a
    :class:`Runner`, is run by that instead.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to one row per node, or dictionaries by type.
        batch: A mini-batch or a whole graph, on the model's device.
        embeddings: Trainable embeddings for node types without features.

    Returns:
        ``[N, out_channels]``, with trimming only the seeds' rows; by node type for a heterogeneous graph.

    Raises:
        TypeError: The batch is not a graph; it holds a compressed graph, but layers of the model need an ``edge_index``
            tensor; or the dtype of ``x`` differs from the weights.
        ValueError: The batch lacks ``x``, ``edge_index``, or an attribute that the model requires.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn.nn import run_model
        >>> class Embedded(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table = torch.nn.Embedding(3, 2)
        ...     def forward(self, x, edge_index, *, n_id):
        ...         return x + self.table(n_id)
        >>> batch = Data(x=torch.zeros(2, 2), edge_index=torch.tensor([[0], [1]]), n_id=torch.tensor([2, 0]))
        >>> model = Embedded()
        >>> torch.equal(run_model(model, batch), model.table.weight[[2, 0]])
        True
    """
    check_graph(batch)
    runner: Runner | None = getattr(batch, "runner", None)
    if runner is not None and (runner.trains or not model.training):
        return runner.run(model, batch, embeddings)
    try:
        return _run_types(model, batch, embeddings) if isinstance(batch, HeteroData) else _run_nodes(model, batch)
    except (RuntimeError, TypeError) as error:
        dtypes = {store.x.dtype for store in batch.node_stores if store.get("x") is not None}
        weights = {value.dtype for value in model.parameters() if value.is_floating_point()}
        unexpected = sorted(dtypes - weights, key=str)
        if "type" not in str(error) or not unexpected or len(weights) != 1:
            raise
        raise TypeError(_advise_dtype(unexpected[0], *weights)) from error


def check_graph(batch: object) -> None:
    """Raise a TypeError if a batch is not a graph, such as a dict that a transform returned."""
    if not isinstance(batch, Data | HeteroData):
        raise TypeError(
            f"the model needs a batch of torch_geometric.data.Data or HeteroData, but got {type(batch).__name__}: let "
            "the transform return the graph, or use your own LightningModule"
        )


def edge_arguments(model: nn.Module, batch: Data) -> dict[str, Any]:
    """Return ``edge_weight`` and ``edge_attr`` of a homogeneous batch, as far as the model takes them."""
    takes = parameters_of(model)
    return {
        name: batch[name]
        for name in ("edge_weight", "edge_attr")
        if name in takes and getattr(model, f"supports_{name}", True) and batch.get(name) is not None
    }


def parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's ``forward`` by name, also of a compiled model."""
    forward = getattr(model, "_orig_mod", model).forward
    function = getattr(forward, "__func__", None)
    return _parameters(function) if function is not None else inspect.signature(forward).parameters


@lru_cache(maxsize=256)
def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; ``self`` is harmless."""
    return inspect.signature(function).parameters


def _keyword_only(model: nn.Module, batch: Data | HeteroData) -> dict[str, Any]:
    """Return the attributes of a batch that the keyword-only parameters of the model's ``forward`` name."""
    found = {}
    for name, parameter in parameters_of(model).items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if isinstance(batch, HeteroData) and name.endswith("_dict"):
            value = batch.collect(name.removesuffix("_dict"), True) or None
        else:
            value = batch.stores[0].get(name)  # of the graph; getattr would also find methods, such as ``size``
            if value is None and isinstance(getattr(type(batch), name, None), property):
                value = getattr(batch, name)
        if value is not None:
            found[name] = value
        elif parameter.default is parameter.empty:
            names = ", ".join(sorted({key for store in batch.stores for key in store}))
            raise ValueError(
                f"{type(model).__name__}.forward takes {name!r} from the batch, which has only {names}: give it a "
                "default, or add it by a transform of the DataModule"
            )
    return found


def _run_nodes(model: nn.Module, batch: Data) -> Tensor:
    """Return the model's outputs for a homogeneous graph."""
    for name in ("x", "edge_index"):
        if batch.get(name) is None:
            fix = _TRAIN_FEATURES if name == "x" else ""
            raise ValueError(f"the batch has no {name!r}, only {sorted(batch.keys())}{fix}")
    extra: dict[str, Any] = edge_arguments(model, batch) | _keyword_only(model, batch)
    if every_hop := bool(batch.get("every_hop")):
        if "every_hop" not in parameters_of(model):
            raise ValueError(
                f"with semantics='every_hop' each layer has its own edges, but {type(model).__name__} takes one "
                "edge_index: use GraphSAGE, GIN or GAT of lightning_gnn.nn, or layer_blocks(batch)"
            )
        if not in_sampled_order(batch, {None: batch.x.size(0)}):
            raise ValueError("a transform changed the edges, but semantics='every_hop' needs those of each hop")
        extra["every_hop"] = True
    if every_hop or _trims(model, batch):
        extra["num_sampled_nodes_per_hop"] = [int(n) for n in batch.num_sampled_nodes]
        extra["num_sampled_edges_per_hop"] = [int(n) for n in batch.num_sampled_edges]
    # Reject layers that need an edge tensor, by name.
    if is_graph(batch.edge_index):
        check_takes_graph(model)
    rows: Tensor = model(widen_features(batch.x, model), batch.edge_index, **extra)
    return rows


def _run_types(model: nn.Module, batch: HeteroData, embeddings: TypeEmbeddings | None) -> Any:
    """Return the model's outputs by node type, from features and edges by type, as in PyG."""
    # Node types without features need trainable embeddings.
    features = batch.collect("x", True) | (embeddings(batch) if embeddings is not None else {})
    if featureless := [name for name in batch.node_types if name not in features]:
        raise ValueError(
            f"nodes of {featureless[0]!r} have no features x: add features, or trainable embeddings with "
            "NodeClassifier(…, embeddings=TypeEmbeddings(data, 64)), as in every module of lightning_gnn.nn"
        )
    # Pass the counts per hop only if the model takes them and trimming cannot change the seeds' outputs.
    takes = parameters_of(model)
    trims = takes.keys() >= {*_COUNTS_BY_TYPE} and in_sampled_order(
        batch, {name: features[name].size(0) for name in batch.node_types}
    )
    extra = _keyword_only(model, batch) | {
        name: values
        for name in ("edge_weight_dict", "edge_attr_dict", *(_COUNTS_BY_TYPE if trims else ()))
        if name in takes and (values := batch.collect(name.removesuffix("_dict"), True))
    }
    # Run the model, and check that it returns outputs by node type.
    x_dict: dict[NodeType, Tensor] = {name: widen_features(features[name], model) for name in batch.node_types}
    out = model(x_dict, batch.edge_index_dict, **extra)
    if not isinstance(out, Mapping):
        raise TypeError(
            f"a model for heterogeneous graphs must return a dict by node type, but returns {type(out).__name__}"
        )
    return out


def _trims(model: nn.Module, batch: Data) -> bool:
    """Return whether the model takes the numbers of sampled nodes and edges, and trimming cannot change the outputs."""
    if not {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"} <= parameters_of(model).keys():
        return False
    if batch.get("num_sampled_nodes") is None or batch.get("num_sampled_edges") is None:
        return False
    exact = trims_exactly(getattr(model, "_orig_mod", model), len(batch.num_sampled_edges))
    return exact and in_sampled_order(batch, {None: batch.x.size(0)})


def _advise_dtype(found: torch.dtype, weights: torch.dtype) -> str:
    """Return the error message for features of another dtype than the model's weights."""
    fixes = [f"x.to({weights})"]
    if torch.float64 in (found, weights):
        fixes.append("Trainer(precision='64-true')")
    elif weights == torch.bfloat16:
        fixes.append("Trainer(precision='bf16-true')")
    if weights == torch.get_default_dtype() != torch.float32:
        fixes.append("torch.set_default_dtype(torch.float32) before the model is built")
    return f"x is {found}, but the model's weights are {weights}: use {' or '.join(fixes)}"
