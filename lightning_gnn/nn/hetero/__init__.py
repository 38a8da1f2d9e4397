"""Models for heterogeneous graphs: HeteroGraphSAGE, RGCN, RGAT, HGT.

Reading order: ``rows``, ``layers`` and ``attention`` (fused layers), ``models``.
"""

from lightning_gnn.nn.hetero.models import HGT, RGAT, RGCN, HeteroGraphSAGE

__all__ = ["HGT", "RGAT", "RGCN", "HeteroGraphSAGE"]
