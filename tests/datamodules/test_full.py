import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn.datamodules import FullGraphDataModule
from lightning_gnn.graph import CSCGraph
from tests.batching_data import small_data


def test_the_graph_is_the_batch():
    data = small_data()
    module = FullGraphDataModule(data)
    for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader()):
        assert [batch is data for batch in loader] == [True]


def test_a_stored_topology_becomes_an_edge_index():
    data = small_data()
    edge_index = data.edge_index
    stored = Data(x=data.x, y=data.y, train_mask=data.train_mask, graph=CSCGraph.from_edge_index(edge_index, 400))
    batch = next(iter(FullGraphDataModule(stored).train_dataloader()))
    assert torch.equal(batch.edge_index, edge_index)
    assert "graph" not in batch


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train_mask", None, "no train_mask"),
        ("train_mask", torch.zeros(400, dtype=torch.bool), "training split is empty"),
        ("val_mask", torch.zeros(3, dtype=torch.bool), r"data.val_mask has the shape \[3\]"),
        ("edge_index", torch.tensor([[0], [400]]), r"edge_index\[1\] holds node 400"),
        ("x", torch.full((400, 1), float("inf")), "x of node 0 holds NaN or infinity"),
    ],
)
def test_bad_input_is_named(key, value, message):
    data = small_data()
    data[key] = value
    with pytest.raises(ValueError, match=message):
        FullGraphDataModule(data, check_features=True)
