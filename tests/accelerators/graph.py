import torch
from torch_geometric.data import Data


def training_graph(num_nodes=500, num_classes=4):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (num_nodes,), generator=generator)
    x = torch.nn.functional.one_hot(y, 32).float() + torch.rand(num_nodes, 32, generator=generator)
    edge_index = torch.randint(num_nodes, (2, 6000), generator=generator)
    edge_index = edge_index[:, y[edge_index[0]] == y[edge_index[1]]]
    place = torch.rand(num_nodes, generator=generator)
    return Data(
        x, edge_index, y=y, train_mask=place < 0.3, val_mask=(place >= 0.3) & (place < 0.5), test_mask=place >= 0.5
    )
