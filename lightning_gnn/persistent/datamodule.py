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
        topology: ``"device"``, ``"shard"``, ``"pinned"`` (page-locked host memory, read over PCIe) or ``"auto"``.
            Topology, features, caches and mini-batches share three quarters of the device's free memory by one plan
            (:attr:`placement`), which is said when the first loader is made; the rest is the model's. ``"shard"`` deals
            the edges of a graph of one type, without times and weights, out to the GPUs of a machine, one per process
            of the run, which read each other's memory. Where they cannot, ``"shard"`` is refused, and ``"auto"``
            places as for one GPU.
        features: ``"device"``, ``"shard"``, ``"pinned"`` or ``"auto"`` for the features, of any graph; other attributes
            of nodes and edges always lie on the device. With ``memory=``, what is on disk comes by way of the host.
        cache_rows: Feature rows of the nodes with most out-edges that the device holds where features are pinned.
        cache_bytes: Instead, at most so many bytes (``4 << 30``, ``"4GB"``) for hot feature rows and hot adjacency
            lists, or ``"auto"``, whatever the plan leaves. Mini-batches are sampled first to count what is read, until
            more of them would hardly raise the hit rate, and each byte goes where it saves most (DUCATI's dual cache).
            Lists have a share in uniform sampling of graphs of one type; else rows, of all types, have all of it.
        quantize: Store ``x`` as int8 with one scale per row, a quarter of float32, dequantised when gathered.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, which samples uniformly in
            graphs of one type; all else runs hop by hop); the samples are equal.
        fetch_size: Tasks that a program of the persistent queue claims at a time.
        prefetch: Mini-batches prepared beyond the one that is trained on, on a stream of their own; 0 prepares them in
            turn with training.
        bulk: Mini-batches that are sampled in one launch, in uniform sampling of graphs of one type with
            ``mode="fused"``; fewer where their words, 8 bytes for each node of the graph and mini-batch, would take
            more than an eighth of the free memory, or all mini-batches on the device more than a quarter. Everything
            else is sampled one mini-batch at a time.
        device: Where to sample; by default the trainer's device, or the current GPU.
        device_memory: Bytes that the device has free (``"80GB"``); by default it is asked. With it
            :meth:`plan_placement` needs no GPU.
        gpus: GPUs of the machine that :meth:`plan_placement` plans for; a run has one for each of its processes there.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, such as ``num_neighbors``.

    Raises:
        ValueError: What :class:`~lightning_gnn.NeighborDataModule` refuses; an unknown place; a cache for features on
            the device; when the first loader is made, more wanted on the device than it has, another number of
            ``gpus``, or ``"shard"`` among GPUs that do not read each other's memory.
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
