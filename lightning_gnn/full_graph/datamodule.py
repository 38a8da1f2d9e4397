"""DataModule for full-graph training, with the whole graph as the only batch."""

import copy
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningNodeData
from torch_geometric.loader import NeighborLoader
from typing_extensions import override

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datamodules.full_batch import FullBatch, inference_settings, only_batch
from lightning_gnn.datamodules.link import as_edges
from lightning_gnn.datamodules.resumable import ResumableDataModule
from lightning_gnn.features.table import with_feature_dtype
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.checks import check_edge_data, check_labels, check_node_data, check_nodes
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.nn.conv.graph import check_takes_graph, keep_constant
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.messages import closest, keywords_of, true_or_false

STRATEGY = "ascend_hybrid"


class FullGraphDataModule(ResumableDataModule):
    """Yields the whole graph as one batch per epoch; the module selects a split by ``train_mask`` and similar masks.

    For link prediction, give labeled edges: of all stages in ``data`` (``edge_label_index`` and ``edge_label``, as from
    PyG's ``RandomLinkSplit``), or of each stage, in the arguments of :class:`~lightning_gnn.LinkDataModule`.

    The batch's ``edge_index`` is a :class:`~lightning_gnn.compressed.graph.CompressedGraph`, which the layers of
    :mod:`lightning_gnn.nn` accept in place of the tensor. Several devices require the strategy ``"ascend_hybrid"``,
    which shards the graph. If the first layer sums or averages neighbor features, the result is computed once and
    cached for all epochs. It is as large as ``x``, and reused while the batch's ``x`` is the same, unmodified tensor.

    Args:
        data: The graph, with a topology and bool masks ``[num_nodes]``: ``train_mask``, and optionally ``val_mask`` and
            ``test_mask``; without masks if there are labeled edges.
        inference: ``"full"`` or :class:`~lightning_gnn.nn.FullInference`: evaluate layer by layer, with outputs in
            files if they do not fit into memory; by default, evaluate as in training.
        compress: If False, the batch has the ``edge_index`` tensor, for models with PyG's own layers.
        check_features: Whether to check for NaN and infinity: ``x``, ``edge_attr`` and ``edge_weight``, unless they are
            memory-mapped and larger than a gigabyte, and ``y`` of the nodes in a mask.
        share_memory: On several devices, whether the ranks of one machine share one copy of graph and features,
            however they were started. Pages are copied only when a rank writes to them
            (:func:`~lightning_gnn.runtime.shared_arrays.share_equal_arrays`).
        input_train_edges: Training edges, int64 ``[2, n]``, which the graph should not contain.
        input_val_edges, input_test_edges, input_pred_edges: Edges for validation, testing and prediction; without them,
            the stage has no loader.
        input_train_labels, input_val_labels, input_test_labels, input_pred_labels: Labels ``[n]``, 1 for links and 0
            for non-links. Negative edges are not sampled.
        feature_dtype: Store ``x`` in this dtype. ``"bfloat16"`` or ``"float16"`` halves the memory and the read time,
            preferably with ``Trainer(precision="bf16-mixed")``.
        **kwargs: Not accepted; the error for an unknown option names the closest valid one.

    Raises:
        TypeError: The graph is not homogeneous, a mask is not bool, or an option is unknown.
        ValueError: A mask is missing or has the wrong length, the training split is empty, an edge is out of range, a
            feature is NaN, or an argument is out of range.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import FullGraphDataModule
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> train_mask = torch.tensor([True, True, False, False])
        >>> data = Data(torch.eye(4), edge_index, y=torch.tensor([0, 1, 0, 1]), train_mask=train_mask)
        >>> datamodule = FullGraphDataModule(data)
        >>> loader = datamodule.train_dataloader()
        >>> len(loader)
        1
        >>> next(iter(loader)).edge_index
        CompressedGraph(num_sources=4, num_targets=4, num_edges=4)
    """

    def __init__(
        self,
        data: Data,
        inference: str | FullInference | None = None,
        compress: bool = True,
        check_features: bool = True,
        share_memory: bool = True,
        feature_dtype: torch.dtype | str | None = None,
        input_train_edges: Tensor | None = None,
        input_train_labels: Tensor | None = None,
        input_val_edges: Tensor | None = None,
        input_val_labels: Tensor | None = None,
        input_test_edges: Tensor | None = None,
        input_test_labels: Tensor | None = None,
        input_pred_edges: Tensor | None = None,
        input_pred_labels: Tensor | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        for name in kwargs:
            is_loader_option = name in keywords_of(LightningNodeData) | keywords_of(NeighborLoader)
            reason = ": the whole graph is the only batch, and data's masks define the splits"
            raise TypeError(
                f"unknown option {name}{reason if is_loader_option else closest(name, keywords_of(type(self)))}"
            )
        self.share_memory = true_or_false(share_memory, "share_memory")
        labeled = {
            "train": (input_train_edges, input_train_labels),
            "val": (input_val_edges, input_val_labels),
            "test": (input_test_edges, input_test_labels),
            "predict": (input_pred_edges, input_pred_labels),
        }
        labeled = {stage: pair for stage, pair in labeled.items() if any(value is not None for value in pair)}
        given = data
        data = with_adj_t_values(data) if isinstance(data, Data) else data
        topology, masks = _check(data, inference, compress, check_features, "train" in labeled)
        self._user_data: weakref.ref[Data] | None = weakref.ref(given)  # has the edge_index that the batch replaces
        data = copy.copy(with_feature_dtype(data, feature_dtype, check_features))  # do not modify the user's object
        self.graph = CompressedGraph.from_graph(topology) if compress else None
        self.data = _convert(data.update(masks), topology, self.graph, inference_settings(inference))
        self._batches = {stage: _with_labels(self.data, stage, *pair) for stage, pair in labeled.items()}
        """Batches by stage; empty if all stages have the same batch."""
        if labeled and "train" not in labeled:
            raise ValueError("input_train_edges is missing: the other stages have labeled edges")
        for stage in ("val", "test", "predict"):
            if labeled and stage not in labeled:
                setattr(self, f"{stage}_dataloader", None)

    def setup(self, stage: str) -> None:
        """Check that the model accepts the batch, and that several devices shard the graph.

        Raises:
            TypeError: No layer of the model accepts a compressed graph.
            ValueError: The trainer uses several devices with a strategy that does not shard the graph.
        """
        super().setup(stage)
        if self.trainer is None:
            return
        model = self.trainer.lightning_module
        # With mixed layers, only a forward pass would show which of them read the batch's edge_index.
        layers = [] if model is None or self.graph is None or "runner" in self.data else model.modules()
        if layers and not any(getattr(layer, "takes_graph", False) for layer in layers):
            check_takes_graph(model)
        if self.trainer.world_size == 1:
            return
        if getattr(self.trainer.strategy, "strategy_name", None) != STRATEGY:
            raise ValueError(
                f"the trainer has {self.trainer.world_size} devices, which would all train on the same graph; "
                f"strategy={STRATEGY} shards the graph across them"
            )
        if self.graph is None:
            raise ValueError(
                f"strategy={STRATEGY} shards a compressed graph: leave compress=True, with the layers of "
                "lightning_gnn.nn; a model with other layers trains on one device with another strategy"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_user_data": None}

    def large_arrays(self) -> dict[str, object]:
        """Return the batch, and the user's graph if it still exists."""
        return {"batch": self.data, "data": None if self._user_data is None else self._user_data()}

    @override
    def make_loader(self, stage: str) -> DataLoader[Data]:
        return only_batch(self._batches.get(stage, self.data))

    @override
    def describe(self) -> str:
        return "full graph, full inference" if "runner" in self.data else "full graph"


def _check(
    data: Data, inference: object, compress: bool, check_features: bool, has_edges: bool
) -> tuple[CSCGraph, dict[str, Tensor]]:
    """Return the topology of a valid graph and its masks as bool tensors ``[num_nodes]``."""
    if inference == "sampled":
        raise ValueError("inference='sampled' needs a DataModule that samples; this one always uses the whole graph")
    if not true_or_false(compress, "compress") and inference is not None:
        raise ValueError("inference='full' runs on the compressed graph; leave compress=True")
    check_node_data(data, true_or_false(check_features, "check_features"), dense=compress)
    topology = CSCGraph.from_data(data)
    check_edge_data(data)
    masks = {
        name: check_nodes(data[name], data.num_nodes, f"data.{name}")
        for name in ("train_mask", "val_mask", "test_mask")
        if data.get(name) is not None
    }
    for name, mask in masks.items() if check_features else ():
        check_labels(data, mask, f"data.{name}")
    if not (has_edges or "edge_label_index" in data or "src_index" in data):
        if "train_mask" not in masks:
            raise ValueError(
                "data has no train_mask: full-graph training selects its nodes by masks, or predicts labeled edges"
            )
        if not bool(masks["train_mask"].any()):
            raise ValueError("the training split is empty: data.train_mask has no true entry")
    return topology, masks


def _convert(data: Data, topology: CSCGraph, graph: CompressedGraph | None, settings: FullInference | None) -> Data:
    """Return the batch: with the compressed graph, or else with the ``edge_index`` tensor, added to ``data``."""
    for key in ("x", "y", "edge_attr", "edge_weight"):
        if isinstance(value := data.get(key), np.ndarray) and value.dtype.kind in "biuf":
            data[key] = torch.as_tensor(value)
    if graph is not None:
        if settings is None:  # full inference is used when memory is scarce
            keep_constant(graph, data.get("x"))
        return FullBatch.from_data(data, graph, **({} if settings is None else {"runner": settings}))
    if "graph" in data or "adj_t" in data or data.get("edge_index") is None:  # the topology is in CSC order only
        data.edge_index = topology.to_edge_index()
        for key in {"graph", "adj_t"} & {*data.keys()}:
            del data[key]
    return data


def _with_labels(data: Data, stage: str, edges: Tensor | None, labels: Tensor | None) -> Data:
    """Return a shallow copy of the batch with a stage's labeled edges."""
    edges, labels = as_edges(edges, labels, (data.num_nodes, data.num_nodes), stage)
    if labels is None and stage != "predict":
        raise ValueError(f"input_{stage}_labels is missing: full-graph training draws no negative edges")
    labeled = copy.copy(data)
    labeled.edge_label_index = edges
    if labels is not None:
        labeled.edge_label = labels
    return labeled
