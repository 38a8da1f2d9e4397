"""Node-level training on neighborhoods that a GPU samples."""

from __future__ import annotations

from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.gpu_sampling.placement import PlacedOnGPU


class PersistentSamplerDataModule(PlacedOnGPU, NeighborDataModule):
    """Mini-batches sampled and gathered by the GPU that trains on them, equal to those of :class:`NeighborDataModule`.

    The graph and the features are placed when the first loader is made, on the trainer's device. On a machine without a
    GPU it says so in one line, and is a :class:`NeighborDataModule`.

    Arguments of :class:`~lightning_gnn.gpu_sampling.PlacementOptions` choose where graph and features are stored, and
    how the GPU samples: ``topology``, ``features``, ``cache_rows``, ``cache_bytes``, ``quantize``, ``mode``,
    ``fetch_size``, ``prefetch`` and ``bulk``. The plan is :attr:`placement`. ``device``, ``device_memory`` and ``gpus``
    are the GPU, and what :meth:`plan_placement` plans for.

    Args:
        *args: Graph and seeds of :class:`~lightning_gnn.NeighborDataModule`.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, such as ``num_neighbors``.

    Raises:
        ValueError: What :class:`~lightning_gnn.NeighborDataModule` or ``PlacementOptions`` refuse; when the first
            loader is made, more wanted on the device than it has, another number of ``gpus``, or ``"shard"`` among
            GPUs that do not read each other's memory.
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
        with_seeds = [stage for stage in self._types if self._nodes[stage] is not None]
        stage = "train" if "train" in with_seeds or not with_seeds else with_seeds[0]  # of who only evaluates
        kind, seeds, _ = get_input_nodes(self.data, self._seeds(stage))
        return NodeSamplerInput(None, seeds, self._times[stage], kind), None
