"""DataModule for training on clusters with a history of layer outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler
from torch_geometric.typing import InputNodes

from lgnn_gas.history import History
from lgnn_gas.sampler import ClusterSampler
from lightning_gnn import FullInference, NeighborDataModule
from lightning_gnn.datamodules import as_ids, seeds_in
from lightning_gnn.graph.checks import check_nodes
from lightning_gnn.loading import NodeLoader
from lightning_gnn.nn import GNNModule, check_layered


class ClusterDataModule(NeighborDataModule):
    """Mini-batches of clusters, whose neighbors' layer outputs come from earlier steps (GNNAutoScale).

    A mini-batch has all edges into its clusters. A layer computes the clusters' nodes alone, and reads the previous
    layer's outputs of their neighbors outside from a table, the ``history``, which each step updates. So the memory of
    a step does not grow with the number of layers. Evaluation runs on the whole graph, layer by layer.

    Training needs a module of :mod:`lightning_gnn.nn` with GCN, GraphSAGE, GIN or GAT, or a module of your own that
    calls ``run_model(model, batch)``. Checkpoints contain the clusters, 2 bytes per node, and the history, 4 bytes per
    node and hidden channel; a resumed run continues with both.

    Args:
        data: The graph, homogeneous.
        input_train_nodes: Training seeds, as a bool mask ``[num_nodes]`` or int64 ids; by default ``data.train_mask``.
        parts: Number of clusters; those without training seeds are merged with others.
        method: How nodes are assigned to clusters: ``"ldg"``, ``"metis"`` or ``"random"``, as in
            :func:`~lightning_gnn.partitioned.assign_nodes`.
        inference: ``"full"`` or :class:`~lightning_gnn.FullInference`.
        **options: Those of :class:`~lightning_gnn.NeighborDataModule` that do not concern sampling; ``batch_size`` is
            the number of clusters per mini-batch.

    Raises:
        TypeError, ValueError: The graph or an option is invalid, there are no training seeds, or, in :meth:`setup`, the
            layers of the model cannot use a history, or there are several processes.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lgnn_gas import ClusterDataModule
        >>> two = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 0, 4, 5, 3, 3]])  # two cycles, and an edge between them
        >>> data = Data(x=torch.eye(6), y=torch.zeros(6), edge_index=two, train_mask=torch.ones(6, dtype=torch.bool))
        >>> datamodule = ClusterDataModule(data, parts=2, shuffle=False)
        >>> [batch.n_id.tolist() for batch in datamodule.train_dataloader()]  # node 0 is a neighbor of the second one
        [[0, 1, 2], [3, 4, 5, 0]]
    """

    sampling_options = None
    graph_sampler: ClusterSampler

    def __init__(
        self,
        data: Data,
        input_train_nodes: InputNodes = None,
        *args: Any,
        parts: int,
        method: str = "ldg",
        inference: str | FullInference = "full",
        **options: Any,
    ) -> None:
        if options.get("node_sampler") is not None:
            raise TypeError("unknown option node_sampler: clusters take all edges into their nodes; omit it")
        if inference in (None, "sampled"):
            raise ValueError(f"inference={inference!r} would read the history of other nodes; use inference='full'")
        self.parts, self.method, self._train_nodes = parts, method, input_train_nodes
        super().__init__(data, input_train_nodes, *args, inference=inference, **options)
        self.history = History(self.compressed_graph, self.data.get("edge_weight"))
        self.data = copy.copy(self.data)  # do not modify the user's object
        self.data.runner = self.history

    def make_sampler(self, data: Data) -> ClusterSampler:
        """Assign the nodes to clusters, with equal numbers of training seeds."""
        if not isinstance(data, Data):
            raise TypeError(f"clusters need a homogeneous graph (torch_geometric.data.Data), not {type(data).__name__}")
        name, nodes = "input_train_nodes", self._train_nodes
        if nodes is None:
            name, nodes = seeds_in(data, "train")
        if nodes is None:
            raise ValueError("training requires input_train_nodes or a data.train_mask")
        seeds = as_ids(check_nodes(nodes, data.num_nodes, name))
        if not seeds.numel():
            raise ValueError("the training split is empty; give input_train_nodes or a train_mask with true entries")
        return ClusterSampler(data, seeds, self.parts, self.method, self.seed)

    def sampled_loader(self, stage: str, data: Data, sampler: BaseSampler, **options: Any) -> NodeLoader:
        """Return the loader of training, whose seeds are numbers of clusters."""
        clusters = torch.arange(self.graph_sampler.num_clusters)
        arguments = self.loader_arguments(stage, clusters.numel()) | options
        return NodeLoader(data, sampler, input_nodes=clusters, **arguments)

    def setup(self, stage: str) -> None:
        """Check that one process trains, and that the layers of the model can use a history."""
        super().setup(stage)
        if self.trainer is None or stage != "fit":
            return
        if self.trainer.world_size > 1:
            raise ValueError(
                f"the trainer has {self.trainer.world_size} processes, whose histories would differ: use devices=1, or "
                "another DataModule"
            )
        if isinstance(module := self.trainer.lightning_module, GNNModule):
            check_layered(module.model)

    def describe(self) -> str:
        """Return the number of clusters, and of those in a mini-batch."""
        return f"{self.graph_sampler.num_clusters} clusters, batch {self.batch_size}, full inference"

    def state_dict(self) -> dict[str, Any]:
        """Return clusters and history, and the state of the base class."""
        return {**super().state_dict(), "part": self.graph_sampler.part, "history": self.history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the base class and, for training, clusters and history.

        Raises:
            ValueError: They are those of another graph.
        """
        super().load_state_dict(state_dict)
        if self.trainer is None or self.trainer.state.fn == "fit":
            self.graph_sampler.assign(state_dict["part"])
            self.history.load_state_dict(state_dict["history"])
