"""The stages keep the order, their bounds and their threads; the loader is the PyG loader, shared out."""

import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.loader import NeighborLoader

from lightning_gnn.callbacks import Throughput
from lightning_gnn.hyscale.pipeline import HybridLoader, PackedRows, PipelineSettings, split_seeds
from lightning_gnn.runtime.pipeline import Item, StagePipeline
from tests.hyscale.models import Module, data_module, difference, fit, graph, hybrid, left_threads
from tests.patience import PATIENCE


def stages(count, inside=None, most=None, pause=0.0):
    """Steps that note which items are in which stage, and append their number to the part."""
    lock = threading.Lock()

    def make(stage):
        def step(part, value, note):
            if inside is not None:
                with lock:
                    inside[stage].add(note)
                    most[stage] = max(most[stage], len(inside[stage]))
            time.sleep(random.uniform(0, pause))
            return [*value, stage]

        return [(f"stage{stage}", step)]

    return [make(stage) for stage in range(count)]


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 20), st.integers(1, 2))
def test_items_come_in_order_through_all_stages(threads, parts, num_items, bound):
    pipeline = StagePipeline(stages(len(threads), pause=0.002), threads, bound, stall_timeout=20)
    sent, taken = 0, []
    while len(taken) < num_items:
        while sent < num_items and pipeline.in_flight < pipeline.capacity:
            values = [[] if (sent + part) % 3 or part == 0 else None for part in range(parts)]
            pipeline.submit(Item(values, sent))
            sent += 1
        taken.append(pipeline.take())
    assert [item.note for item in taken] == list(range(num_items))
    for item in taken:
        assert all(value in (None, list(range(len(threads)))) for value in item.parts)
        assert item.parts[0] is not None
        assert len(item.seconds) == len(threads)
    assert pipeline.close() == []


def test_a_slow_stage_keeps_those_before_it_from_running_ahead():
    reached = [0, 0]
    gate = threading.Event()

    def first(part, value, note):
        reached[0] += 1
        return value

    def second(part, value, note):
        reached[1] += 1
        assert gate.wait(PATIENCE)
        return value

    pipeline = StagePipeline([[("first", first)], [("second", second)]], [1, 1], bound=1)
    assert pipeline.capacity == 4
    for number in range(12):
        pipeline.submit(Item([0], number))
    deadline = time.monotonic() + PATIENCE
    while reached != [4, 1] and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)
    assert reached == [4, 1]  # one at work and one ready in each of the two
    gate.set()
    assert [pipeline.take().note for _ in range(12)] == list(range(12))
    assert pipeline.close() == []


def test_threads_can_be_added_and_withdrawn_in_full_run():
    used = set()

    def step(part, value, note):
        used.add(threading.current_thread().name)
        time.sleep(0.002)
        return value

    pipeline = StagePipeline([[("work", step)]], [1], bound=2)

    def run(count):
        used.clear()
        for _ in range(count):
            pipeline.submit(Item([0, 0, 0], 0))
        for _ in range(count):
            pipeline.take()
        return len(used)

    assert run(5) == 1
    pipeline.resize([3])
    assert run(20) > 1
    pipeline.resize([1])
    assert run(20) == 1
    assert pipeline.close() == []


@pytest.mark.parametrize("number", [0, 3])
def test_an_error_is_raised_at_its_item(number):
    def step(part, value, note):
        if note == number and part == 1:
            raise ValueError("odd")
        return value

    pipeline = StagePipeline([[("first", step)], [("second", lambda part, value, note: value)]], [2, 1])
    for each in range(6):
        pipeline.submit(Item([0, 0], each))
    for each in range(number):
        assert pipeline.take().note == each
    with pytest.raises(ValueError, match="odd"):
        pipeline.take()
    assert pipeline.close() == []


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 3])
def test_the_loader_yields_what_the_users_loader_would(prefetch, workers):
    data = data_module(fanouts=[3, 2], data=graph(dtype=torch.float32))
    settings_ = PipelineSettings([None, torch.device("cpu")], prefetch, (max(1, workers), 2))
    loader = HybridLoader(data.train_dataloader(), lambda n, _: split_seeds(n, [0.0, 1.0]), settings_)
    plain = data.train_dataloader()
    assert len(loader) == len(plain)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        plain.sampler.set_epoch(epoch)
        for ours, theirs in zip(loader, plain, strict=True):
            assert ours.parts[0] is None
            found, expected = ours.parts[1].to_dict(), theirs.to_dict()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
                assert same, name
    assert loader.times.batches == 2 * len(plain)
    assert loader.times.edges == plain.times.edges
    assert not left_threads()


def test_leaving_an_epoch_early_leaves_nothing():
    loader = HybridLoader(data_module().train_dataloader(), lambda n, _: [(0, n)], PipelineSettings([None]))
    iterator = iter(loader)
    next(iterator)
    assert left_threads()
    assert loader.close() == []
    assert not left_threads()
    assert len(list(loader)) == len(loader)
    assert not left_threads()


@pytest.mark.usefixtures("pyg_sampling")
def test_pygs_own_loader():
    class Data(type(data_module())):
        def train_dataloader(self):
            return NeighborLoader(self.data, [-1, -1], input_nodes=self.data.train_mask, batch_size=20, shuffle=True)

    def run(strategy):
        module = Module()
        torch.manual_seed(4)
        fit(module, strategy, Data(graph(), num_neighbors=[-1], batch_size=20, seed=0), max_epochs=1)
        return list(module.parameters())

    assert difference(run(hybrid()), run("auto")) < 1e-12
    assert not left_threads()


@pytest.mark.parametrize("place", ["module", "datamodule"])
def test_hooks_around_the_transfer_see_the_batches_of_pyg(place):
    seen = []

    class Hooks:
        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(type(batch).__name__)
            batch.x = batch.x * 2
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            seen.append(str(device))
            return batch.to(device)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            batch.x = batch.x + 1
            return batch

    kinds = {"module": (Module, type(data_module())), "datamodule": (Module, type(data_module()))}[place]
    module_class = type("Hooked", (Hooks, kinds[0]), {}) if place == "module" else kinds[0]
    data_class = type("HookedData", (Hooks, kinds[1]), {}) if place == "datamodule" else kinds[1]

    def run(strategy):
        module = module_class()
        fit(module, strategy, data_class(graph(), num_neighbors=[-1, -1], batch_size=20, seed=5))
        return list(module.parameters())

    plain = run("auto")
    assert difference(run(hybrid()), plain) < 1e-12
    assert set(seen) == {"Data", "cpu"}


def test_throughput_counts_the_edges_of_all_trainers():
    callback, reference = Throughput(), Throughput()
    fit(Module(), hybrid(cpu_trainers=1), callbacks=[callback])
    fit(Module(), callbacks=[reference])
    assert [epoch.edges for epoch in callback.epochs] == [epoch.edges for epoch in reference.epochs]
    assert all(epoch.sampling_s > 0 and epoch.features_s > 0 for epoch in callback.epochs)


@given(st.integers(0, 30), st.integers(1, 20), st.sampled_from([1e-6, 1.0, 1e4]), st.integers(0, 2**32))
def test_quantised_rows_are_off_by_half_a_step_at_most(num_rows, width, size, seed):
    rows = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * size
    rows[: num_rows // 3] = 0
    unpacked = PackedRows.pack(rows, "int8").unpack()
    assert unpacked.dtype == rows.dtype
    step = rows.abs().amax(1, keepdim=True) / 127 if num_rows else rows
    assert bool(((unpacked - rows).abs() <= step * 0.5001).all())


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_features_that_cannot_travel_in_fewer_bits_are_refused(dtype):
    with pytest.raises(ValueError, match="not finite"):
        PackedRows.pack(torch.tensor([[1.0, float("nan")]]), dtype)
    if dtype == "float16":
        with pytest.raises(ValueError, match="65504"):
            PackedRows.pack(torch.tensor([[1e6]]), dtype)
