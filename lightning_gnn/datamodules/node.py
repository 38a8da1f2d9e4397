"""DataModule for node prediction with neighbor sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import BaseSampler
from torch_geometric.typing import InputNodes, NodeType
from typing_extensions import Unpack, override

from lightning_gnn.datamodules.base import LOADER_IDS, MiniBatchDataModule, seed_times
from lightning_gnn.datamodules.full_batch import FullBatch, mask_of
from lightning_gnn.datamodules.options import DataModuleOptions
from lightning_gnn.graph.checks import check_labels, check_nodes
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.loaders import NodeLoader
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.sampling.neighbor import Fanouts


class NeighborDataModule(MiniBatchDataModule):
    """Mini-batches of seed nodes with sampled neighborhoods, with the keywords of PyG's ``LightningNodeData``.

    Args:
        data: The graph, homogeneous or heterogeneous. Batches contain all node and edge attributes.
        input_train_nodes: Training seeds, as a bool mask ``[num_nodes]`` or int64 ids; by default ``data.train_mask``.
            In a heterogeneous graph a pair (node type, seeds), or the node type for all of its nodes; by default the
            one node type with a ``train_mask``.
        input_val_nodes, input_test_nodes: Seeds for validation and testing. Without them, the stage has no loader.
        input_pred_nodes: Seeds for prediction; by default all nodes.
        input_train_time, input_val_time, input_test_time, input_pred_time: Seed times ``[n]`` in a temporal graph; by
            default the times of the seed nodes.
        num_neighbors: Fanout of each hop, in in-edges per node; -1 takes all. In a heterogeneous graph optionally a
            dictionary with a list for each edge type.
        batch_size: Seeds per mini-batch.
        num_workers: Number of threads that prefetch mini-batches; each uses 4 bytes per node.
        seed: Random seed; by default torch's initial seed, which ``seed_everything`` sets.
        node_sampler: A custom sampler with PyG's interface.
        inference: ``"sampled"``; or ``"full"`` or :class:`~lightning_gnn.nn.FullInference` to run validation, testing
            and prediction on the full graph, layer by layer, without sampling.
        eval_loader_kwargs: Options that the evaluation loaders and their sampler override, such as ``num_neighbors``.
        **options: :class:`~lightning_gnn.datamodules.SamplingOptions` (such as ``disjoint``, ``time_attr``,
            ``weight_attr`` or ``sampling="labor"``), :class:`~lightning_gnn.datamodules.StorageOptions` (such as
            ``memory="8GB"``), and further arguments of :class:`~lightning_gnn.loading.NodeLoader`, such as
            ``shuffle=False``. PyG's options for worker processes are accepted without effect:
            :data:`~lightning_gnn.loading.options.WITHOUT_EFFECT`.

    Raises:
        TypeError, ValueError: ``data`` is not a PyG graph, seeds do not match it, the training split is empty, features
            contain NaN, or an option is unknown or invalid.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import NeighborDataModule
        >>> path = Data(x=torch.eye(5), y=torch.arange(5) % 2, edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> datamodule = NeighborDataModule(
        ...     path, input_train_nodes=torch.tensor([4, 1]), num_neighbors=[1], batch_size=2, shuffle=False
        ... )
        >>> batch = next(iter(datamodule.train_dataloader()))
        >>> batch.n_id, batch.y[: batch.batch_size]
        (tensor([4, 1, 3, 0]), tensor([0, 1]))
        >>> batch.edge_index  # as in PyG: from neighbors to seeds, in local ids
        tensor([[2, 3],
                [0, 1]])
    """

    def __init__(
        self,
        data: Data | HeteroData,
        input_train_nodes: InputNodes = None,
        input_train_time: Tensor | None = None,
        input_val_nodes: InputNodes = None,
        input_val_time: Tensor | None = None,
        input_test_nodes: InputNodes = None,
        input_test_time: Tensor | None = None,
        input_pred_nodes: InputNodes = None,
        input_pred_time: Tensor | None = None,
        *,
        num_neighbors: Fanouts | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        seed: int | None = None,
        node_sampler: BaseSampler | None = None,
        inference: str | FullInference = "sampled",
        eval_loader_kwargs: dict[str, Any] | None = None,
        **options: Unpack[DataModuleOptions],
    ) -> None:
        keywords = {"num_workers": num_workers, **options}
        super().__init__(data, node_sampler, seed, batch_size, num_neighbors, inference, eval_loader_kwargs, keywords)
        given = (input_train_nodes, input_val_nodes, input_test_nodes, input_pred_nodes)
        times = (input_train_time, input_val_time, input_test_time, input_pred_time)
        self._nodes: dict[str, Any] = {}
        self._types: dict[str, NodeType | None] = {}
        self._times: dict[str, Tensor | None] = {}
        for stage, nodes, time in zip(LOADER_IDS, given, times, strict=True):
            name = f"input_{stage.removesuffix('ict')}_nodes"
            node_type: NodeType | None = None
            if isinstance(data, HeteroData):
                name, node_type, nodes = _resolve_seeds(data, nodes, name, stage)
            elif nodes is None:
                name, nodes = seeds_in(data, stage)
            part = data if node_type is None else data[node_type]
            self._types[stage] = node_type
            self._nodes[stage] = None if nodes is None else check_nodes(nodes, part.num_nodes, name)
            if nodes is None and stage in ("val", "test"):
                setattr(self, f"{stage}_dataloader", None)  # makes Lightning skip the stage
            if self.storage_options.check_features and nodes is not None and stage != "predict":
                check_labels(part, self._nodes[stage], name)
            if time is not None:
                count = None if nodes is None and stage != "predict" else self.num_seeds(stage)
                time = seed_times(self.graph_sampler, stage, time, count, "seeds")
            self._times[stage] = time
        if self._nodes["train"] is not None and not self.num_seeds("train"):
            raise ValueError("the training split is empty; give input_train_nodes or a train_mask with true entries")

    def large_arrays(self) -> dict[str, object]:
        """Return graph, features and seeds, by name."""
        return {**super().large_arrays(), **{f"{stage} nodes": nodes for stage, nodes in self._nodes.items()}}

    def _seeds(self, stage: str) -> InputNodes:
        """Return the seeds of a stage as input for PyG's loaders."""
        nodes, node_type = self._nodes[stage], self._types[stage]
        if stage == "train" and nodes is None:
            raise ValueError("training requires input_train_nodes or a data.train_mask")
        if stage == "predict" and nodes is None:
            node_type = self._types["train"]  # predict all nodes of the training type
        if node_type is None and isinstance(self.data, HeteroData):
            raise ValueError(f"the {stage} stage requires input_{stage.removesuffix('ict')}_nodes")
        return nodes if node_type is None else (node_type, nodes)

    @override
    def num_seeds(self, stage: str) -> int:
        return int(get_input_nodes(self.data, self._seeds(stage))[1].numel())

    @override
    def sampled_loader(self, stage: str, data: Batch, sampler: BaseSampler, **options: Any) -> NodeLoader:
        arguments = self.loader_arguments(stage, self.num_seeds(stage)) | options
        if (times := self._times[stage]) is not None:
            arguments["input_time"] = times
        return NodeLoader(data, sampler, input_nodes=self._seeds(stage), **arguments)

    @override
    def full_loader(self, stage: str) -> DataLoader[FullBatch]:
        if isinstance(self.data, HeteroData):
            node_type, _ = self._seeds(stage)
            return self.evaluation.loader(stage, node_type, **self._marks(stage))
        # All stages share one batch.
        return self.evaluation.loader("nodes", **self._marks("val"), **self._marks("test"), **self._marks("predict"))

    def _marks(self, stage: str) -> dict[str, Tensor]:
        """Return the seeds of a stage as an attribute of the full graph: a split mask, or ``pred_nodes``."""
        nodes, node_type = self._nodes[stage], self._types[stage]
        if nodes is None:
            return {}
        part = self.data if node_type is None else self.data[node_type]
        return (
            {"pred_nodes": as_ids(nodes)} if stage == "predict" else {f"{stage}_mask": mask_of(nodes, part.num_nodes)}
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data}, num_neighbors={self.num_neighbors}, {self.loader_kwargs})"


def _resolve_seeds(data: HeteroData, given: Any, name: str, stage: str) -> tuple[str, NodeType | None, Any]:
    """Return a name for error messages, the node type, and the seeds of a stage in a heterogeneous graph."""
    if given is None:
        inferred = {store._key: seeds_in(store, stage) for store in data.node_stores}
        inferred = {key: seeds for key, seeds in inferred.items() if seeds[1] is not None}
        if len(inferred) > 1:
            raise ValueError(f"several node types have {stage} seeds: {', '.join(inferred)}; give {name}=(type, nodes)")
        for key, (attribute, nodes) in inferred.items():
            return attribute.replace("data.", f"data[{key!r}]."), key, nodes
        return name, None, None
    is_pair = isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], str)
    node_type, nodes = (given, None) if isinstance(given, str) else (given if is_pair else (None, given))
    if node_type not in data.node_types:
        expected = f"{name}=(type, nodes), with a type out of {', '.join(data.node_types)}"
        if node_type is None:
            raise TypeError(f"a heterogeneous graph requires {expected}")
        raise ValueError(f"no such node type: {node_type!r}; use {expected}")
    return name, node_type, torch.arange(data[node_type].num_nodes) if nodes is None else nodes


def seeds_in(data: Any, stage: str) -> tuple[str, Any]:
    """Return the name and value of the attribute that PyG's ``infer_input_nodes`` would select, or ``("", None)``.

    Args:
        data: A homogeneous graph, or the nodes of one type.
        stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
    """
    for prefix in {"val": ("val", "valid"), "predict": ("pred",)}.get(stage, (stage,)):
        for suffix in ("mask", "idx", "index"):
            if data.get(name := f"{prefix}_{suffix}") is not None:
                return f"data.{name}", data[name]
    return "", None


def as_ids(nodes: Tensor) -> Tensor:
    """Return seeds as ids, int64 ``[n]``: ids as they are, and those of the true entries of a bool mask."""
    return nodes.nonzero().view(-1) if nodes.dtype == torch.bool else nodes
