"""Trainable embeddings for node types without features."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.nn.type_modules import TypeModules


class TypeEmbeddings(nn.Module):
    """An embedding table, which provides ``x``, for each node type without features.

    A table is a ``torch.nn.Embedding`` that is indexed by ``batch[type].n_id``. Pass this module to
    :class:`~lightning_gnn.nn.NodeClassifier`, :class:`~lightning_gnn.nn.NodeRegressor` or
    :class:`~lightning_gnn.nn.LinkPredictor` as ``embeddings``: it is trained with the model, saved in checkpoints, and
    used by full inference.

    Args:
        data: The graph, whose node types without ``x`` get tables; or the number of nodes of each such type.
        num_features: Columns of a table, for all types or for each type.
        sparse: SparseAdam updates only the rows of the mini-batch, so that a step takes time and memory for these rows
            only, at the module's learning rate and without weight decay. False: the module's optimizer trains all rows.
        optimizer: With ``sparse``: takes the tables and returns an optimizer that replaces SparseAdam.

    Raises:
        ValueError: All types have features, or a size is out of range; for a batch: a type has features already, or
            its number of nodes differs from the rows of its table.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import HeteroData
        >>> from lightning_gnn.nn import TypeEmbeddings
        >>> data = HeteroData()
        >>> data["author"].num_nodes, data["paper"].x = 5, torch.ones(3, 8)
        >>> embeddings = TypeEmbeddings(data, 16)
        >>> embeddings(data)["author"].shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        data: HeteroData | Mapping[NodeType, int],
        num_features: int | Mapping[NodeType, int] = 64,
        sparse: bool = True,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        # For a graph, the node types without features get embeddings.
        if isinstance(data, HeteroData):
            data = {store._key: store.num_nodes for store in data.node_stores if store.get("x") is None}
        if not data:
            raise ValueError("all node types have features x; remove the embeddings")
        if isinstance(num_features, int):
            num_features = dict.fromkeys(data, num_features)
        # Each table needs a known number of rows and a width.
        for name, count in data.items():
            if count is None or count < 1:
                raise ValueError(f"the number of {name!r} nodes is unknown: set data[{name!r}].num_nodes")
            if num_features.get(name, 0) < 1:
                raise ValueError(f"num_features must be at least 1 for {name!r}, got {num_features.get(name)}")
        self.num_features: dict[NodeType, int] = {name: num_features[name] for name in data}  # columns of each table
        self.sparse = sparse
        self.optimizer = optimizer
        self.tables = TypeModules(
            {name: nn.Embedding(count, num_features[name], sparse=sparse) for name, count in data.items()}
        )

    def forward(self, batch: HeteroData) -> dict[NodeType, Tensor]:
        """Return embeddings by node type, ``[N_t, num_features]``: at the batch's ``n_id``, or all without it."""
        rows: dict[NodeType, Tensor] = {}
        for name, table in self.tables.items():
            if name not in batch.node_types:
                continue
            store = batch[name]
            if store.get("x") is not None:
                raise ValueError(f"nodes of {name!r} have both features x and embeddings; remove one of them")
            nodes, count = store.get("n_id"), table.num_embeddings
            if nodes is None and "num_sampled_nodes" in store:
                raise ValueError(f"the mini-batch lacks n_id of {name!r}, which indexes the embeddings: keep it")
            if nodes is None and store.num_nodes != count:
                raise ValueError(f"the batch has {store.num_nodes} nodes of {name!r}, but embeddings have {count} rows")
            if nodes is None and not (self.sparse and torch.is_grad_enabled()):
                rows[name] = table.weight
                continue
            if nodes is None:
                nodes = torch.arange(count, device=table.weight.device)
            elif nodes.is_cpu and nodes.numel() and int(nodes.max()) >= count:
                raise ValueError(f"the batch has node {int(nodes.max())} of {name!r}, but embeddings have {count} rows")
            rows[name] = table(nodes)
        return rows
