"""The whole graph as one batch, for training without sampling and for exact evaluation."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Data, HeteroData

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.messages import OF_NEWER_TORCH


class FullBatch(Data):  # type: ignore[misc]
    """A PyG ``Data`` with a compressed graph; with a ``runner``, modules evaluate it layer by layer."""

    is_handed_out_again = True  # loaders return the same object each time, so it is converted and moved only once

    @classmethod
    def from_data(cls, data: Data, graph: CompressedGraph, **more: object) -> FullBatch:
        """Create a batch that shares the attributes of ``data`` except its topology, and add others."""
        shared = {key: value for key, value in data.to_dict().items() if key not in ("graph", "adj_t", "edge_index")}
        batch: FullBatch = cls.from_dict({**shared, "edge_index": graph, **more})
        return batch

    @property
    def num_edges(self) -> int:
        """Number of edges, which PyG cannot derive from a compressed graph."""
        return int(self.edge_index.num_edges)

    def to(self, device: torch.device | str, *args: str, non_blocking: bool = False) -> FullBatch:
        """Move the batch in place; with ``FullInference``, features and topology above its limit stay on the CPU."""
        device = torch.device(device)
        settings = self.get("runner")
        keys = args or tuple(self.keys())
        if isinstance(settings, FullInference) and not args and device.type != "cpu" and self.x.device.type == "cpu":
            wanted = self.x.nbytes + self.edge_index.num_bytes
            if wanted > settings.limit_on(device):
                keys = tuple(key for key in keys if key not in ("x", "edge_index", "edge_weight", "edge_attr"))
        # Inference tensors, which a validation loop would create here, cannot be used for training.
        with torch.inference_mode(False):
            super().to(device, *keys, non_blocking=non_blocking)
        return self


def make_hetero_batch(data: HeteroData, settings: FullInference) -> HeteroData:
    """Return a heterogeneous graph as one batch, which shares the attributes of ``data``."""
    if settings.folder is not None or settings.memory_limit != "auto":
        raise ValueError("FullInference: heterogeneous graphs run in memory; omit folder and memory_limit")
    batch = copy.copy(data)
    if missing := [kind for kind in batch.edge_types if batch[kind].get("edge_index") is None]:
        relations = HeteroCSCGraph.from_data(data).relations
        for kind in missing:
            batch[kind].edge_index = relations[kind].to_edge_index()
            batch[kind].pop("adj_t", None)
    return batch


def inference_settings(inference: str | FullInference | None) -> FullInference | None:
    """Return the settings of full-graph inference; None for sampled batches."""
    if inference in (None, "sampled"):
        return None
    if inference == "full":
        return FullInference()
    if not isinstance(inference, FullInference):
        raise ValueError(f"inference={inference!r} is unknown; use 'sampled', 'full' or a FullInference")
    return inference


def mask_of(nodes: Tensor, num_nodes: int) -> Tensor:
    """Return nodes, given as a mask or as ids, as a bool mask ``[num_nodes]``."""
    if nodes.dtype == torch.bool:
        return nodes
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask


def only_batch(batch: Data) -> DataLoader[Data]:
    """Return a loader of one batch, which every rank receives."""
    warnings.filterwarnings("ignore", OF_NEWER_TORCH, FutureWarning)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*number of training batches .* is smaller than the logging interval.*")
    # Lightning does not replace a DistributedSampler; its own would assign the batch to one rank.
    sampler: DistributedSampler[Data] = DistributedSampler([batch], num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
    # DataLoader draws from its generator at each iteration, and resuming iterates once more: do not use the global one.
    return DataLoader([batch], batch_size=None, sampler=sampler, generator=torch.Generator())  # type: ignore[arg-type]
