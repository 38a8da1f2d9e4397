"""What full graphs that are cut into rows cannot be trained with, said before it begins."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import norm as pyg

_OVER_NODES = (
    nn.modules.batchnorm._BatchNorm,
    pyg.BatchNorm,
    pyg.HeteroBatchNorm,
    pyg.InstanceNorm,
    pyg.GraphNorm,
    pyg.GraphSizeNorm,
    pyg.PairNorm,
    pyg.MeanSubtractionNorm,
    pyg.DiffGroupNorm,
)


def refuse_norms_over_nodes(model: nn.Module) -> None:
    """Refuse layers whose statistics run over all nodes: over a rank's rows they would be other ones."""
    found = [
        f"{name} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if (isinstance(layer, _OVER_NODES) and not _synchronized(layer))
        or (isinstance(layer, pyg.LayerNorm) and layer.mode == "graph")
    ]
    if found:
        raise ValueError(
            f"{', '.join(found)} normalizes over all nodes, of which each rank has a part: the results would depend on "
            "the number of devices; use LayerNorm(mode='node') or another norm over features, Trainer(sync_batchnorm="
            "True) for batch normalization on GPUs, or one device"
        )


def _synchronized(layer: nn.Module) -> bool:
    """Say whether this is a ``SyncBatchNorm``, or PyG's wrapper of one."""
    return isinstance(layer, nn.SyncBatchNorm) or isinstance(getattr(layer, "module", None), nn.SyncBatchNorm)
