"""DataModule for node-level training with neighborhoods sampled on the GPU."""

from __future__ import annotations

from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.gpu_sampling.placement import PlacedOnGPU


class PersistentSamplerDataModule(PlacedOnGPU, NeighborDataModule):
    """Samples and gathers the mini-batches of :class:`NeighborDataModule` on the GPU that trains on them.

    Graph and features are placed for the trainer's device when the first loader is created. Without a GPU, it warns
    and behaves as :class:`NeighborDataModule`.

    Arguments of :class:`~lightning_gnn.gpu_sampling.PlacementOptions` choose where graph and features are stored, and
    how the GPU samples: ``topology``, ``features``, ``cache_rows``, ``cache_bytes``, ``quantize``, ``mode``,
    ``fetch_size``, ``num_warps``, ``programs_per_sm``, ``prefetch`` and ``bulk``. The plan is :attr:`placement`.
    ``device``, ``device_memory`` and ``gpus`` describe the GPU, also for :meth:`plan_placement`.

    Args:
        *args: Graph and seeds of :class:`~lightning_gnn.NeighborDataModule`.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, such as ``num_neighbors``.

    Raises:
        ValueError: :class:`~lightning_gnn.NeighborDataModule` or ``PlacementOptions`` reject an argument. When the
            first loader is created: the device has too little memory, ``gpus`` differs from the run, or ``"shard"`` is
            used without peer access between the GPUs.
        RuntimeError: Page-locked memory cannot be allocated when the first loader is created.

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
        stage = "train" if "train" in with_seeds or not with_seeds else with_seeds[0]  # without training seeds
        node_type, seeds, _ = get_input_nodes(self.data, self._seeds(stage))
        return NodeSamplerInput(None, seeds, self._times[stage], node_type), None
