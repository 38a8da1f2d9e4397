"""Models of graphs with types: HeteroGraphSAGE, RGCN, RGAT, HGT.

Reading order: ``rows`` (features of all types, and what of a mini-batch each layer reads), ``layers`` and
``attention`` (a layer in one operator), ``models``, ``table`` (which of them are fused).
"""

from lightning_gnn.nn.hetero.models import HGT, RGAT, RGCN, HeteroGraphSAGE

__all__ = ["HGT", "RGAT", "RGCN", "HeteroGraphSAGE"]
