"""The strategy on one device: its settings affect the graph, and it works where processes cannot be started."""

import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GIN

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from lightning_gnn.nn import GATConv, NodeClassifier
from tests.full_graph.training import DROPPING, SideBySide, small_data, train, trainer_of


@pytest.mark.medium
def test_without_dropout_it_trains_as_lightning_s_own_strategy_does():
    module, other = (SideBySide((("gcn", 0.0), ("gat", 0.0))) for _ in range(2))
    train(1, module=module, max_epochs=3)
    trainer_of("auto", 1, max_epochs=3).fit(other, datamodule=FullGraphDataModule(small_data()))
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_several_processes_by_fork_are_refused_and_one_is_not():
    with pytest.raises(ValueError, match="2 processes cannot be started by fork"):
        trainer_of("ascend_hybrid_fork", 2)
    assert trainer_of("ascend_hybrid_fork", 1).strategy.launcher is None


def test_mini_batches_are_refused():
    data = small_data()
    for batch, kind in ((data, "Tensor"), ((data.x, data.y), "tuple"), (Data(x=data.x), "NoneType")):
        loader = DataLoader([batch], batch_size=None, collate_fn=lambda batch: batch)
        with pytest.raises(TypeError, match=f"trains on full graphs.*got a {kind}"):
            trainer_of("ascend_hybrid", 1).fit(SideBySide(DROPPING), loader)


def test_advice_leads_out_of_the_circle():
    layers = NodeClassifier(GIN(6, 8, 2, 7).double(), num_classes=7)
    # For other layers, the advice is not to compress, which this strategy refuses, and to change the strategy.
    with pytest.raises(TypeError, match=r"compress=False.*another strategy than 'ascend_hybrid'"):
        trainer_of("ascend_hybrid", 1).fit(layers, datamodule=FullGraphDataModule(small_data()))
    tensors = FullGraphDataModule(small_data(), compress=False)
    with pytest.raises(TypeError, match=r"compress=True.*layers of lightning_gnn\.nn.*another strategy.*other layers"):
        trainer_of("ascend_hybrid", 1).fit(layers, datamodule=tensors)
    trainer_of("auto", 1, max_epochs=1).fit(layers, datamodule=tensors)
    edges = GATConv(4, 3, edge_dim=2)
    with pytest.raises(ValueError, match=r"leave edge_dim out, or.*another strategy than 'ascend_hybrid'"):
        edges(torch.randn(40, 4), FullGraphDataModule(small_data()).graph)


def test_a_batch_made_in_inference_mode_trains_and_its_changes_are_seen():
    strategy = AscendHybridParallelStrategy(num_groups=1, cores_per_device=1)
    with torch.inference_mode():
        data = small_data()
        for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
            data[name] = data[name].clone()
            assert data[name].is_inference()
    module = SideBySide(DROPPING)
    before = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    datamodule = FullGraphDataModule(data)
    trainer_of(strategy, 1, max_epochs=1).fit(module, datamodule=datamodule)
    assert not torch.equal(before, torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]))
    cache, batch = strategy._batch_cache, datamodule.data
    first = cache.prepare(batch)
    assert cache.prepare(batch) is first
    with torch.inference_mode():
        batch.x.mul_(2)
    assert torch.equal(cache.prepare(batch).x, batch.x)
    assert not torch.equal(first.x, batch.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": "some"}, "num_groups"),
        ({"cores_per_device": 0}, "num_workers"),
        ({"bandwidth_ratio": 0.5}, "bandwidth_ratio"),
        ({"grouping": "best"}, "grouping='best' is unknown"),
        ({"chunks": "best"}, "chunks='best' is unknown"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"memory_limit": "lots"}, "memory_limit"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        AscendHybridParallelStrategy(**options)
