"""Models of graphs with types: HeteroGraphSAGE, RGCN, RGAT, HGT.

Reading order: ``rows``, ``layers`` and ``attention`` (a layer in one operator), ``models``.
"""

from lightning_gnn.nn.hetero.models import HGT, RGAT, RGCN, HeteroGraphSAGE

__all__ = ["HGT", "RGAT", "RGCN", "HeteroGraphSAGE"]
