"""A system on one screen: its mini-batches are seeds with all in-neighbors, and all edges among these nodes.

python examples/minimal_system.py

An installed package adds it to ``lgnn`` and ``lgnn doctor`` by its entry point (docs/how-to/add-a-system.md).
"""

import pytorch_lightning as pl
import torch
from torch_geometric.sampler import BaseSampler, SamplerOutput

from lightning_gnn import CSCGraph, NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.systems import Plugin, System


class EgoSampler(BaseSampler):
    """Samples seeds, all their in-neighbors, and all edges among these nodes."""

    def __init__(self, data):
        self.edge_index, self.num_nodes = CSCGraph.from_data(data).to_edge_index(), data.num_nodes

    def sample_from_nodes(self, inputs, key):
        """Return the subgraph around some seeds, which come first; the key would be the seed of random numbers."""
        (source, target), place = self.edge_index, torch.full((self.num_nodes,), -1)
        place[inputs.node] = torch.arange(inputs.node.numel())
        others = source[place[target] >= 0].unique()
        node = torch.cat([inputs.node, others[place[others] < 0]])
        place[node] = torch.arange(node.numel())
        edge = ((place[source] >= 0) & (place[target] >= 0)).nonzero().view(-1)
        row, col = place[source[edge]], place[target[edge]]
        return SamplerOutput(node, row, col, edge, metadata=(inputs.input_id, inputs.time))

    sample_from_edges = None  # no prediction of links


class EgoDataModule(NeighborDataModule):
    """Mini-batches of seeds and their in-neighbors."""

    sampling_options = None

    def make_sampler(self, data):
        """Create the sampler."""
        return EgoSampler(data)


DATAMODULES = (Plugin("EgoDataModule", "ego", "CPU threads", "neighborhoods are small"),)
SYSTEM = System("minimal_system", "neighborhoods", title="Ego", use_when="neighborhoods are small",
                devices=("cpu",), page="https://example.org/ego", datamodules=DATAMODULES)  # fmt: skip

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    data = planted_power_law(2_000, 20_000)
    module = NodeClassifier(GraphSAGE(data.num_features, 32, 2, int(data.y.max()) + 1), int(data.y.max()) + 1)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=10, logger=False, enable_checkpointing=False)
    datamodule = EgoDataModule(data, batch_size=64, num_workers=1, inference="full")
    trainer.fit(module, datamodule)
    trainer.test(module, datamodule)
