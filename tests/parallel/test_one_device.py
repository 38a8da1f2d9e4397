"""The strategy on one device: its settings reach the graph, and it works where processes cannot be started."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn.datamodules import FullGraphDataModule
from lightning_gnn.planning.grouping import PlanSettings
from lightning_gnn.strategies import AscendHybridParallelStrategy, ascend_hybrid
from tests.parallel.training import DROPPING, SideBySide, small_data, train, trainer_of


class SeesGraph(pl.Callback):
    def __init__(self):
        self.graphs = []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.graphs.append(batch.edge_index)


def test_the_plan_s_settings_reach_the_graph_once():
    seen = SeesGraph()
    strategy = AscendHybridParallelStrategy(num_groups=2, cores_per_device=4, bandwidth_ratio=5)
    datamodule = FullGraphDataModule(small_data())
    trainer_of(strategy, 1, max_epochs=3, callbacks=[seen]).fit(SideBySide(DROPPING), datamodule=datamodule)
    assert seen.graphs[0].settings == PlanSettings(4, 2, 5)
    assert all(graph is seen.graphs[0] for graph in seen.graphs)
    assert datamodule.graph.settings == PlanSettings()
    assert not torch.distributed.is_initialized()


def test_without_dropout_it_trains_as_lightning_s_own_strategy_does():
    module, other = (SideBySide((("gcn", 0.0), ("gat", 0.0))) for _ in range(2))
    train(1, module=module, max_epochs=3)
    trainer_of("auto", 1, max_epochs=3).fit(other, datamodule=FullGraphDataModule(small_data(), num_chunks=7))
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_dropout_follows_the_seed_alone():
    runs = []
    for seed in (1, 1, 2):
        pl.seed_everything(seed, verbose=False)
        module = SideBySide(DROPPING)
        trainer = trainer_of("ascend_hybrid", 1, max_epochs=2)
        torch.rand(len(runs))  # torch's own generator has no part in it
        trainer.fit(module, datamodule=FullGraphDataModule(small_data()))
        runs.append(torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.allclose(runs[0], runs[2])


@pytest.mark.parametrize("name", ["ascend_hybrid", "ascend_hybrid_notebook", "ascend_hybrid_fork"])
def test_several_processes_from_a_notebook_are_refused_and_one_is_not(name, monkeypatch):
    monkeypatch.setattr(ascend_hybrid, "_IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match="2 processes cannot be started from a notebook"):
        trainer_of(name, 2)
    assert trainer_of(name, 1).strategy.launcher is None


def test_mini_batches_are_refused():
    data = small_data()
    for batch, kind in ((data, "Tensor"), ((data.x, data.y), "tuple"), (Data(x=data.x), "NoneType")):
        loader = DataLoader([batch], batch_size=None, collate_fn=lambda batch: batch)
        with pytest.raises(TypeError, match=f"trains on full graphs.*got a {kind}"):
            trainer_of("ascend_hybrid", 1).fit(SideBySide(DROPPING), loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": "some"}, "num_groups"),
        ({"cores_per_device": 0}, "num_workers"),
        ({"bandwidth_ratio": 0.5}, "bandwidth_ratio"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"memory_limit": "lots"}, "memory_limit"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        AscendHybridParallelStrategy(**options)


def test_npus_speak_hccl():
    strategy = AscendHybridParallelStrategy(parallel_devices=[torch.device("privateuseone", 0)] * 2)
    device = type("Device", (), {"type": "npu"})()
    strategy.__class__ = type("OnNPUs", (AscendHybridParallelStrategy,), {"root_device": device})
    assert strategy._get_process_group_backend() == "hccl"
