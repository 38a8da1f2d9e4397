"""Start of a hybrid run: platform measurements, threads, seeds per iteration."""

from dataclasses import replace
from math import inf

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import CSCGraph, NeighborDataModule
from lightning_gnn.hyscale import HyScaleStrategy, analytic, options
from lightning_gnn.hyscale.analytic import (
    PerformanceModel,
    Platform,
    Processor,
    cached_platform,
    describe_workload,
    measure_platform,
)
from lightning_gnn.hyscale.options import TrainerSet, default_threads
from lightning_gnn.planning.hyscale import Node, forecast, stages
from lightning_gnn.runtime import machine_rates
from lightning_gnn.runtime.devices import num_cores
from tests.full_graph import launch
from tests.hyscale.training import SILENT, Plain, copy_state, fit, make_data, make_graph, make_hybrid

CPU = torch.device("cpu")


def make_loader():
    return make_loader_on(make_graph())


def make_loader_on(data):
    return NeighborDataModule(data, num_neighbors=[3, 2], batch_size=20, seed=0).train_dataloader()


def make_trainer(strategy):
    return pl.Trainer(strategy=strategy, **SILENT)


@pytest.mark.slow
def test_a_machine_without_accelerators_is_measured():
    threads = torch.get_num_threads()
    platform = measure_platform(TrainerSet.of(2, []), 1e6)
    assert (platform.accelerator, platform.num_accelerators, platform.pcie_bandwidth) == (None, 0, inf)
    assert platform.cores == num_cores()
    assert platform.sampling == 1e6
    assert 0 < platform.core_bandwidth <= platform.cpu.memory_bandwidth
    assert torch.get_num_threads() == threads
    workload, _ = describe_workload(make_loader(), Plain(), 20)
    mapping = PerformanceModel(platform, workload).best_mapping(2)
    assert sum(mapping.seeds) == 20
    assert len(mapping.seeds) == 2


def test_a_machine_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_rates, "is_busy", lambda: False)
    there = Platform(Processor(1e12, 1e11), 4, Processor(1e13, 1e12), 1, gather_bandwidth=1e9)
    calls = []
    monkeypatch.setattr(analytic, "measure_platform", lambda *given: calls.append(given) or there)
    trainers = TrainerSet.of(1, [CPU])
    for sampled in (2e6, 3e6):
        found = cached_platform(trainers, sampled, 1e7)
        assert found == replace(there, sampling=sampled, accelerator_sampling=1e7)
    assert len(calls) == 1
    cached_platform(TrainerSet.of(1, [CPU, CPU]), 1.0)
    assert len(calls) == 2
    monkeypatch.setattr(machine_rates, "is_busy", lambda: True)
    for _ in range(2):  # what a busy machine reaches is not cached
        assert cached_platform(trainers, 1.0, gathers=True) == replace(there, sampling=1.0)
    assert len(calls) == 4


def test_the_edges_of_a_graph_in_csc_order_are_in_the_workload():
    data = make_graph()
    edges = data.num_edges
    data.graph = CSCGraph.from_data(data)
    del data.edge_index
    assert data.num_edges == 0
    workload, _ = describe_workload(make_loader_on(data), Plain(), 20)
    assert workload.num_edges == edges > 0


def test_a_plan_for_one_core_and_features_in_fewer_bits(monkeypatch):
    there = Platform(Processor(1e12, 1e11), 1, Processor(1e12, 1e11), 1, 1e9, 1e6)
    monkeypatch.setattr(analytic, "measure_platform", lambda *given: there)
    found = []
    for dtype in (None, "int8"):
        data, run = make_data(batch_size=1000), make_trainer(make_hybrid(1, transfer_dtype=dtype, threads=(1, 1, 1)))
        found.append(forecast(data, Plain(), run))
    rows = [{name: (seconds, bound) for name, seconds, bound in stages(each.model, each.best)} for each in found]
    assert [each.best.total for each in found] == [200, 200]
    assert all(row["CPU cores"][1] == "3 threads take turns on 1" for row in rows)
    assert "features as int8" in rows[1]["Data Transfer"][1]
    work = found[1].model.workload
    assert (work.row_bytes, work.transferred_row_bytes) == (48, 10)
    assert all(sum(each.best.threads) == 3 for each in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),  # the best mapping's
        ({"accelerator_sampling": 0.25}, 0.25),
        ({"cpu_share": 0.5}, 3 / 4),  # both sides finish at the same time
    ],
)
def test_the_share_of_the_sampling_in_a_plan_is_that_of_the_run(options, expected):
    there = Platform(Processor(1e12, 1e11), 3, Processor(1e13, 1e12), 1, 1e9, 1e6, accelerator_sampling=3e6)
    workload, _ = describe_workload(make_loader(), Plain(), 20)
    strategy = HyScaleStrategy(devices=["cpu"], **{"accelerator_sampling": "auto", "threads": (1, 1, 1), **options})
    wanted = strategy.options.accelerator_sampling
    model, trainers = PerformanceModel(there, workload), TrainerSet.of(1, [CPU])
    found = Node(model, strategy.options, trainers, (1, 1, 1), wanted, "measured").forecast(1, None)
    assert 0 < found.best.accelerator_sampling < 1
    assert found.begin.accelerator_sampling == (found.best.accelerator_sampling if expected is None else expected)


@pytest.mark.parametrize(
    ("cores", "workers", "trains", "expected"),
    [
        (8, 4, True, (2, 2, 4)),
        (8, 64, True, (4, 3, 1)),
        (8, 64, False, (4, 4, 1)),
        (4, 0, True, (1, 1, 2)),
        (2, 16, True, (1, 1, 1)),
        (1, 16, True, (1, 1, 1)),
    ],
)
def test_balanced_threads_are_no_more_than_cores(cores, workers, trains, expected, monkeypatch):
    monkeypatch.setattr(options, "num_cores", lambda: cores)
    assert default_threads(workers, TrainerSet.of(int(trains), [CPU]), True) == expected
    assert sum(expected[: 2 + trains]) <= max(cores, 3)
    unbalanced = default_threads(workers, TrainerSet.of(int(trains), [CPU]), False)
    assert unbalanced == (max(1, (workers + 1) // 2), max(1, workers // 2), cores if trains else 1)


def eleven(batch_size):
    return NeighborDataModule(make_graph(), torch.arange(11), num_neighbors=[-1], batch_size=batch_size, seed=0)


def split_few_seeds(rank, seeds, num_ranks):
    strategy = make_hybrid(num_ranks, drm=True, shares=None, threads=[1, 1, 1], accelerator_sampling=0.0)
    module = Plain()
    trained = fit(module, strategy, eleven(seeds), epochs=1)
    return trained.global_step, strategy.balance.mapping.total, copy_state(module)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "num_ranks"), [(1, 2), (2, 3)])
def test_batches_smaller_than_the_trainers(seeds, num_ranks):
    module = Plain()
    fit(module, data=eleven(seeds), epochs=1)
    for steps, total, weights in launch.run(split_few_seeds, num_ranks, seeds, num_ranks):
        assert (steps, total) == (-(-11 // seeds), seeds)
        for name, value in copy_state(module).items():
            assert torch.allclose(weights[name], value, rtol=1e-12, atol=1e-14), name
