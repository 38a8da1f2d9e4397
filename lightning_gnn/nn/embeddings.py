"""Rows that are trained, for types of nodes without features."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.nn.type_modules import TypeModules


class TypeEmbeddings(nn.Module):
    """A table of rows for each type of nodes without features, from which they get ``x``.

    A table is a ``torch.nn.Embedding``, read at ``batch[type].n_id``. Give it to
    :class:`~lightning_gnn.nn.NodeClassifier`, :class:`~lightning_gnn.nn.NodeRegressor` or
    :class:`~lightning_gnn.nn.LinkPredictor` as ``embeddings``: it is trained with the model, kept in checkpoints, and
    used by full inference.

    Args:
        data: The graph, whose types without ``x`` get tables; or how many nodes there are of each such type.
        num_features: Columns of a table, of all or of each type.
        sparse: A step takes time and memory for the rows of its mini-batch alone, which SparseAdam updates, at the
            module's learning rate and without weight decay; else the module's optimizer trains all rows.
        optimizer: With ``sparse``: takes the tables and returns an optimizer in place of SparseAdam.

    Raises:
        ValueError: No type is without features, a size is out of range; for a batch: a type has features already, or
            another number of nodes than its table has rows.

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
        # By default, the types without features get embeddings.
        if isinstance(data, HeteroData):
            data = {store._key: store.num_nodes for store in data.node_stores if store.get("x") is None}
        if not data:
            raise ValueError("all types have features x; leave the embeddings out")
        if isinstance(num_features, int):
            num_features = dict.fromkeys(data, num_features)
        # Each table needs a known number of rows and a width.
        for name, count in data.items():
            if count is None or count < 1:
                raise ValueError(f"how many nodes of {name!r} there are must be known: set data[{name!r}].num_nodes")
            if num_features.get(name, 0) < 1:
                raise ValueError(f"num_features must be at least 1 for {name!r}, got {num_features.get(name)}")
        self.num_features: dict[NodeType, int] = {name: num_features[name] for name in data}
        """Columns of each type's table."""
        self.sparse = sparse
        self.optimizer = optimizer
        self.tables = TypeModules(
            {name: nn.Embedding(count, num_features[name], sparse=sparse) for name, count in data.items()}
        )

    def forward(self, batch: HeteroData) -> dict[NodeType, Tensor]:
        """Return the rows of a batch's nodes by type: ``[N_t, num_features]``, at ``n_id`` or, without it, of all."""
        found: dict[NodeType, Tensor] = {}
        for name, table in self.tables.items():
            if name not in batch.node_types:
                continue
            store = batch[name]
            if store.get("x") is not None:
                raise ValueError(f"nodes of {name!r} have features x and embeddings; leave one of them out")
            nodes, count = store.get("n_id"), table.num_embeddings
            if nodes is None and "num_sampled_nodes" in store:
                raise ValueError(f"the mini-batch lacks n_id of {name!r}, by which embeddings are read: keep it")
            if nodes is None and store.num_nodes != count:
                raise ValueError(f"there are {store.num_nodes} nodes of {name!r}, but embeddings of {count}")
            if nodes is None and not (self.sparse and torch.is_grad_enabled()):
                found[name] = table.weight
                continue
            if nodes is None:
                nodes = torch.arange(count, device=table.weight.device)
            elif nodes.is_cpu and nodes.numel() and int(nodes.max()) >= count:
                raise ValueError(f"the batch holds node {int(nodes.max())} of {name!r}, but embeddings are of {count}")
            found[name] = table(nodes)
        return found
