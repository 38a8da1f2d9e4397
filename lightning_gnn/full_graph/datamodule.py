"""Full-graph training: the whole graph is the batch."""

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

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datamodules.full_batch import FullBatch, inference_settings, only_batch
from lightning_gnn.datamodules.resumable import ResumableDataModule
from lightning_gnn.features.table import with_feature_dtype
from lightning_gnn.graph.checks import check_edge_data, check_labels, check_node_data, check_nodes
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.nn.conv.graph import check_takes_graph, keep_constant
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.messages import closest, keywords_of, removed, true_or_false

STRATEGY = "ascend_hybrid"


class FullGraphDataModule(ResumableDataModule):
    """One batch per epoch, the graph itself; the module picks the split by ``train_mask``, ``val_mask``, ``test_mask``.

    The batch's ``edge_index`` is a :class:`~lightning_gnn.compressed.graph.CompressedGraph`, which the layers of
    :mod:`lightning_gnn.nn` take in place of the tensor. On several devices it needs the strategy ``"ascend_hybrid"``,
    which shares out the graph. A first layer that sums or averages its neighbors' features does so once for all
    epochs and keeps the result, as large as ``x``, as long as the batch's ``x`` is the same tensor and not written to.

    Args:
        data: The graph, with a topology and the masks, bool ``[num_nodes]``; only ``train_mask`` must be there.
        inference: ``"full"`` or :class:`~lightning_gnn.nn.FullInference`: evaluate layer by layer, from file to file
            where outputs do not fit into memory; by default as in training.
        compress: Without, the batch holds the ``edge_index`` tensor, for models with layers of PyG's own.
        check_features: Look for NaN and infinity first: in ``x``, ``edge_attr`` and ``edge_weight``, unless they are
            memory-mapped and of more than a gigabyte, and in ``y`` where a mask is true.
        share_memory: On several devices, let the ranks of one machine use one copy of graph and features, however they
            were started: pages are copied only where a rank writes to them
            (:func:`~lightning_gnn.runtime.shared_arrays.share_equal_arrays`).
        feature_dtype: Keep ``x`` in this dtype, ``"bfloat16"`` (or float16) for half of the memory, and of the time to
            read it, best with ``Trainer(precision="bf16-mixed")``.
        **kwargs: None; the error for a wrong one names the closest there is.

    Raises:
        TypeError: The graph is not homogeneous, a mask is not bool, an option is unknown.
        ValueError: A mask is missing or of the wrong length, the training split is empty, an edge is out of range, NaN,
            an argument is out of range.

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
        **kwargs: object,
    ) -> None:
        super().__init__()
        for name in kwargs:
            if (gone := removed(f"datamodule.{name}")) is not None:
                raise TypeError(gone)
            known = name in keywords_of(LightningNodeData) | keywords_of(NeighborLoader)
            why = ": the whole graph is the only batch, and the masks of data tell the splits"
            raise TypeError(f"there is no option {name}{why if known else closest(name, keywords_of(type(self)))}")
        true_or_false(compress, "compress")
        self.share_memory = true_or_false(share_memory, "share_memory")
        check_node_data(data, true_or_false(check_features, "check_features"), dense=compress)
        self._given: weakref.ref[Data] | None = weakref.ref(data)  # whose edge_index the batch has not
        topology = CSCGraph.from_data(data)
        check_edge_data(data)
        data = with_feature_dtype(data, feature_dtype, check_features)
        made: dict[str, Tensor] = {}
        for key in ("x", "y", "edge_attr", "edge_weight"):
            if isinstance(value := data.get(key), np.ndarray) and value.dtype.kind in "biuf":
                made[key] = torch.as_tensor(value)
        for name in ("train_mask", "val_mask", "test_mask"):
            if data.get(name) is None:
                continue
            chosen = check_nodes(data[name], data.num_nodes, f"data.{name}")
            if chosen is not data[name]:
                made[name] = chosen
            if check_features:
                check_labels(data, chosen, f"data.{name}")
        if made:
            data = copy.copy(data)  # the user's own stays as it is
            data.update(made)
        if data.get("train_mask") is None:
            raise ValueError("data has no train_mask: full-graph training picks its nodes by masks")
        if not bool(data.train_mask.any()):
            raise ValueError("the training split is empty: data.train_mask has no true entry")
        if inference == "sampled":
            raise ValueError(
                "inference='sampled' needs a DataModule that samples; this one always sees the whole graph"
            )
        settings = inference_settings(inference)
        self.graph: CompressedGraph | None = None
        if compress:
            self.graph = CompressedGraph.from_graph(topology)
            if settings is None:  # else memory may be what is short
                keep_constant(self.graph, data.get("x"))
            data = FullBatch.from_data(data, self.graph, **({} if settings is None else {"inference": settings}))
        elif "graph" in data or data.get("edge_index") is None:  # the topology is there in CSC order alone
            data = data.clone()
            data.edge_index = topology.to_edge_index()
            for key in ("graph", "adj_t"):
                if key in data:
                    del data[key]
        if not compress and settings is not None:
            raise ValueError("inference='full' runs over the compressed graph; leave compress=True")
        self.data = data

    def setup(self, stage: str) -> None:
        """Refuse a model that cannot read the batch, and several devices that would all train on the same one.

        Raises:
            TypeError: No layer of the model can read a compressed graph.
            ValueError: The trainer uses several devices, and not by the strategy that shares out the graph.
        """
        super().setup(stage)
        if self.trainer is None:
            return
        model = self.trainer.lightning_module
        # Of a model of mixed layers, only a forward pass shows which of them read the batch's edge_index.
        layers = [] if model is None or self.graph is None or "inference" in self.data else model.modules()
        if layers and not any(getattr(layer, "takes_graph", False) for layer in layers):
            check_takes_graph(model)
        if self.trainer.world_size == 1:
            return
        if getattr(self.trainer.strategy, "strategy_name", None) != STRATEGY:
            raise ValueError(
                f"the trainer has {self.trainer.world_size} devices, which would all train on the same graph; "
                f"strategy={STRATEGY} shares it out among them"
            )
        if self.graph is None:
            raise ValueError(
                f"strategy={STRATEGY} shares out a compressed graph: leave compress=True, with the layers of "
                "lightning_gnn.nn; a model of other layers trains on one device with another strategy"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None}

    def large_arrays(self) -> dict[str, object]:
        """Return the batch, and the user's own graph as long as there is one."""
        return {"batch": self.data, "data": None if self._given is None else self._given()}

    def train_dataloader(self) -> DataLoader[Data]:
        """Return the graph as the only batch."""
        return only_batch(self.data)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
