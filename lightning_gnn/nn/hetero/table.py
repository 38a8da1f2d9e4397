"""Which models of graphs with types run their layers as fused operators on mini-batches."""

from lightning_gnn.nn.hetero.attention import TransformerConv
from lightning_gnn.nn.hetero.layers import RelationalConv
from lightning_gnn.nn.hetero.models import HGT, RGAT, RGCN, HeteroGraphSAGE


def fused_models() -> list[tuple[str, str]]:
    """Return the classes of models, and what of a layer runs as one operator."""
    return [
        (HeteroGraphSAGE.__name__, RelationalConv.fused.what),
        (RGCN.__name__, RelationalConv.fused.what),
        (RGAT.__name__, TransformerConv.fused.what),
        (HGT.__name__, TransformerConv.fused.what),
    ]
