"""The graph that the tests of accelerators train on: Cora where its files are, else one drawn at random."""

from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid

RAW = Path(__file__).parents[2].parent / "shared" / "data" / "planetoid"


def training_graph():
    return copy(_read())  # a batch is moved to its device in place


@cache
def _read():
    if not RAW.is_dir():
        return _drawn()
    with TemporaryDirectory() as folder:
        (Path(folder) / "Cora").mkdir()
        (Path(folder) / "Cora" / "raw").symlink_to(RAW / "Cora" / "raw")
        data = Planetoid(folder, "Cora", transform=T.NormalizeFeatures())[0]
    return data


def _drawn(num_nodes=500, num_classes=4):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (num_nodes,), generator=generator)
    x = torch.nn.functional.one_hot(y, 32).float() + torch.rand(num_nodes, 32, generator=generator)
    edge_index = torch.randint(num_nodes, (2, 6000), generator=generator)
    edge_index = edge_index[:, y[edge_index[0]] == y[edge_index[1]]]
    place = torch.rand(num_nodes, generator=generator)
    return Data(
        x, edge_index, y=y, train_mask=place < 0.3, val_mask=(place >= 0.3) & (place < 0.5), test_mask=place >= 0.5
    )
