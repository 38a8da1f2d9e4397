"""Checks of models before training on a full graph that is sharded by rows."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import norm as pyg

_NORMS_OVER_NODES = (
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


def check_norms(model: nn.Module) -> None:
    """Raise ValueError for layers with statistics over all nodes, which would differ on a rank's rows."""
    layers = [
        f"{name} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if (isinstance(layer, _NORMS_OVER_NODES) and not isinstance(getattr(layer, "module", layer), nn.SyncBatchNorm))
        or (isinstance(layer, pyg.LayerNorm) and layer.mode == "graph")
    ]
    if layers:
        raise ValueError(
            f"{', '.join(layers)} normalizes over all nodes, which are sharded across ranks: the results would depend "
            "on the number of devices; use LayerNorm(mode='node') or another norm over features, "
            "Trainer(sync_batchnorm=True) for batch normalization on GPUs, or one device"
        )
