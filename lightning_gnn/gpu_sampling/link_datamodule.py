"""DataModule for link-level training with neighborhoods sampled on the GPU."""

from __future__ import annotations

from typing import Any

from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.gpu_sampling.datamodule import PlacedOnGPU


class PersistentLinkDataModule(PlacedOnGPU, LinkDataModule):
    """Samples and gathers the mini-batches of :class:`LinkDataModule` on the GPU that trains on them.

    One launch samples the neighborhoods of the endpoints of positive and negative edges. Otherwise it behaves as
    :class:`~lightning_gnn.PersistentSamplerDataModule`.

    Args:
        *args: Graph and edges of :class:`~lightning_gnn.LinkDataModule`.
        **kwargs: Its further arguments, such as ``neg_sampling``, and those of
            :class:`~lightning_gnn.gpu_sampling.PlacementOptions` except ``bulk``, which only applies to node batches.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import PersistentLinkDataModule
        >>> path = Data(x=torch.eye(5), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> datamodule = PersistentLinkDataModule(
        ...     path, num_neighbors=[1], neg_sampling_ratio=1, batch_size=4, shuffle=False
        ... )
        >>> batch = next(iter(datamodule.train_dataloader()))
        >>> batch.edge_label.tolist(), batch.n_id[batch.edge_label_index[:, :4].to(batch.n_id.device)].tolist()
        ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [[0, 1, 2, 3], [1, 2, 3, 4]])
    """

    on_cpu = "LinkDataModule"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "bulk" in kwargs:
            raise TypeError("unknown option bulk: mini-batches of edges are sampled one by one; leave it out")
        super().__init__(*args, bulk=1, **kwargs)

    def _training_seeds(self) -> tuple[EdgeSamplerInput, NegativeSampling | None]:
        edges, labels = self.seed_edges("train")
        inputs = EdgeSamplerInput(None, edges[0], edges[1], labels, self._times["train"], self._types["train"])
        return inputs, self.neg_sampling
