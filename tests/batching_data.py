"""A small graph with every kind of attribute, for tests of loaders."""

import torch
from torch_geometric.data import Data


def small_data(num_nodes=400, num_edges=4000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = Data(
        x=torch.randn(num_nodes, 12, generator=generator),
        edge_index=torch.randint(num_nodes, (2, num_edges), generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        edge_attr=torch.randn(num_edges, 3, generator=generator),
        edge_weight=torch.rand(num_edges, generator=generator),
    )
    split = torch.rand(num_nodes, generator=generator)
    data.train_mask, data.val_mask, data.test_mask = split < 0.5, (split >= 0.5) & (split < 0.7), split >= 0.7
    return data
