"""GNNAutoScale: mini-batches of clusters, whose neighbors' layer outputs come from a table of earlier steps.

Source: "GNNAutoScale: Scalable and Expressive Graph Neural Networks via Historical Embeddings" (ICML 2021,
arXiv:2106.05609); clusters as in "Cluster-GCN" (KDD 2019, arXiv:1905.07953). The memory of a step is that of the
clusters and their direct neighbors, for any number of layers, and no edge into a cluster is dropped.

Reading order: ``sampler.py`` (nodes and edges of a mini-batch), ``history.py`` (the tables, and the model's layers),
``datamodule.py``.
"""

from lgnn_gas.datamodule import ClusterDataModule
from lgnn_gas.history import History
from lgnn_gas.sampler import ClusterSampler
from lightning_gnn.systems import Plugin, System

__all__ = ["SYSTEM", "ClusterDataModule", "ClusterSampler", "History"]

SYSTEM = System(
    package="lgnn_gas",
    title="GNNAutoScale",
    what="mini-batches of clusters, with a history of layer outputs for their neighbors",
    use_when="many layers make sampled neighborhoods too large",
    devices=("cpu", "cuda"),
    page="https://arxiv.org/abs/2106.05609",
    datamodules=(Plugin("ClusterDataModule", "clusters", "CPU threads", "layers are many"),),
    names=("ClusterSampler", "History"),
)
