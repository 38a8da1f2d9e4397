"""Node-level training on neighbourhoods that a GPU samples."""

from __future__ import annotations

from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.persistent.placement import PlacedOnGPU
from lightning_gnn.sampling.node_datamodule import NeighborDataModule


class PersistentSamplerDataModule(PlacedOnGPU, NeighborDataModule):
    """Mini-batches sampled and gathered by the GPU that trains on them, equal to those of :class:`NeighborDataModule`.

    The graph and the features are placed when the first loader is made, on the trainer's device. On a machine without a
    GPU it says so in one line, and is a :class:`NeighborDataModule`.

    Args:
        *args: Graph and seeds of :class:`~lightning_gnn.NeighborDataModule`.
        topology: ``"device"``, ``"pinned"`` (page-locked host memory, read over PCIe) or ``"auto"`` (the device, if at
            most half of its free memory is needed).
        features: ``"device"``, ``"pinned"`` or ``"auto"`` for the features; other attributes of nodes and edges always
            lie on the device.
        cache_rows: Feature rows of the nodes with most out-edges that the device holds where features are pinned.
        cache_bytes: Instead, a budget that hot feature rows and hot adjacency lists share; some mini-batches are
            sampled first to count what is read, and each byte goes where it saves most (DUCATI's dual cache). Lists
            have a share in uniform sampling of graphs of one type; else rows, of all types, have all of it.
        quantize: Store ``x`` as int8 with one scale per row, a quarter of float32, dequantised when gathered.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, which samples uniformly in
            graphs of one type; all else runs hop by hop); the samples are equal.
        fetch_size: Tasks that a program of the persistent queue claims at a time.
        prefetch: Mini-batches prepared beyond the one that is trained on, on a stream of their own; 0 prepares them in
            turn with training.
        bulk: Mini-batches that are sampled in one launch, in uniform sampling of graphs of one type with
            ``mode="fused"``; fewer where their words, 8 bytes for each node of the graph and mini-batch, would take
            more than an eighth of the free memory. Everything else is sampled one mini-batch at a time.
        device: Where to sample; by default the trainer's device, or the current GPU.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, such as ``num_neighbors``.

    Raises:
        ValueError: What :class:`~lightning_gnn.NeighborDataModule` refuses; an unknown place; a cache for features on
            the device.
        RuntimeError: Page-locked memory was refused, when the first loader is made.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import PersistentSamplerDataModule
        >>> path = Data(x=torch.eye(5), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> datamodule = PersistentSamplerDataModule(
        ...     path, input_train_nodes=torch.tensor([4, 2]), num_neighbors=[1, 1], batch_size=1, shuffle=False
        ... )
        >>> for batch in datamodule.train_dataloader():
        ...     print(batch.n_id.tolist(), list(batch.x.shape))
        [4, 3, 2] [3, 5]
        [2, 1, 0] [3, 5]
    """

    on_cpu = "NeighborDataModule"

    def _training_seeds(self) -> tuple[NodeSamplerInput, None]:
        kind, seeds, _ = get_input_nodes(self.data, self._seeds("train"))
        return NodeSamplerInput(None, seeds, self._times["train"], kind), None
