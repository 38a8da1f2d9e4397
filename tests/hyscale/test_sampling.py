"""Accelerators sample a part of each iteration: the mini-batches stay what they are, and the part follows the times."""

import json
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import BaseSampler

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling, _on_host, can_sample_on
from lightning_gnn.hyscale.first_mapping import first_mapping, first_share
from lightning_gnn.hyscale.options import Trainers
from lightning_gnn.hyscale.pipeline import HybridBatch, HybridLoader, PipelineSettings, split_seeds
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.hyscale.work_balance import WorkBalance
from lightning_gnn.sampling.loader import ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.hyscale.models import Module, data_module, fit, graph, hybrid, left_threads, trainer
from tests.hyscale.test_resume import SaveAt, run, same

CPU = torch.device("cpu")
TRAINERS = Trainers.of(1, [CPU])


def stand_in(share, **options):
    fixed = {"devices": ["cpu"], "shares": [0.5, 0.5], "threads": [1, 1, 1]}
    return hybrid(1, **fixed, accelerator_sampling=share, **options)


@pytest.fixture
def sampled_by(monkeypatch):
    """In which stage's threads the parts of iterations are sampled: lists of their seeds."""
    found = defaultdict(list)
    original = NeighborSampler.draw

    def draw(self, seeds, key):
        name = threading.current_thread().name
        if name.startswith("hybrid-"):  # not those of validation
            found[name.rstrip("0123456789-")].append(seeds.tolist())
        return original(self, seeds, key)

    monkeypatch.setattr(NeighborSampler, "draw", draw)
    return found


GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_batches_are_those_of_the_cpu(share, prefetch, device):
    def batches(sampling):
        data = data_module(fanouts=[3, 2], num_workers=2, data=graph(dtype=torch.float32))
        loader = data.train_dataloader()
        sampling = AcceleratorSampling(loader.node_sampler, [CPU, CPU, device, device], 2) if sampling else None
        options = PipelineSettings([None] * 4, prefetch, (2, 2))
        ours = HybridLoader(
            loader, lambda n, _: split_seeds(n, [1, 2, 0, 4]), options, sampling=sampling, share=lambda: share
        )
        assert next(step[0][0] for step in ours.stages()) == ("sample" if sampling is None else "sample_accelerator")
        for _ in range(2):
            yield from ours

    there = whole = 0
    for ours, theirs in zip(batches(True), batches(False), strict=True):
        assert (ours.seeds, ours.total, ours.number) == (theirs.seeds, theirs.total, theirs.number)
        assert theirs.sampled_there is None
        there, whole = there + ours.sampled_there, whole + ours.total
        for part, expected in zip(ours.parts, theirs.parts, strict=True):
            assert (part is None) == (expected is None)
            if part is None:
                continue
            found, expected = part.to_dict(), expected.to_dict()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                equal = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
                assert equal, name
    assert there == pytest.approx(share * whole, abs=0.1 * whole)
    assert not left_threads()


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.integers(0, 5), st.floats(0, 1))
def test_parts_are_assigned_so_that_the_share_is_met(seeds, num_cpu, share):
    num_cpu = min(num_cpu, len(seeds) - 1)
    sampling = AcceleratorSampling(data_module().graph_sampler, [CPU] * len(seeds), num_cpu)
    rounds, done = 300, 0
    for number in range(rounds):
        places = sampling.assign(seeds, share, number)
        assert places == sampling.assign(seeds, share, number)
        assert all(place is None or (n and 0 <= place < len(sampling)) for n, place in zip(seeds, places, strict=True))
        accelerators = [place for n, place in zip(seeds[num_cpu:], places[num_cpu:], strict=True) if n]
        assert None not in accelerators or not any(place is not None for place in places[:num_cpu])
        done += sum(n for n, place in zip(seeds, places, strict=True) if place is not None)
    assert done == pytest.approx(share * sum(seeds) * rounds, abs=5 * max(seeds, default=0) + 1e-6)


def test_accelerators_take_turns():
    sampling = AcceleratorSampling(data_module().graph_sampler, [CPU] * 4, 1)
    places = [place for number in range(30) for place in sampling.assign([9, 9, 9, 9], 0.5, number)]
    assert [places.count(place) for place in range(3)] == [20, 20, 20]
    places = [place for number in range(30) for place in sampling.assign([9, 9, 9, 9], 1.0, number)]
    assert [places.count(place) for place in range(3)] == [40, 40, 40]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_weights_are_those_without(share, sampled_by):
    plain, _ = run(stand_in(0.0))
    assert set(sampled_by) == {"hybrid-sample"}
    whole = sum(map(len, sampled_by.pop("hybrid-sample")))
    ours, _ = run(stand_in(share))
    assert same(ours, plain)
    assert sum(map(len, sampled_by["hybrid-sample_accelerator"])) == pytest.approx(share * whole, abs=4)
    assert ("hybrid-sample" in sampled_by) == (share < 1)
    assert not left_threads()


def test_a_run_that_is_interrupted_goes_on_bit_for_bit(tmp_path):
    whole, _ = run(stand_in(0.4))
    run(stand_in(0.4), [SaveAt(tmp_path / "middle.ckpt", 4, stop=True)])
    resumed, _ = run(stand_in(0.4), ckpt_path=tmp_path / "middle.ckpt")
    assert same(resumed, whole)


def timed(monkeypatch, cpu, there):
    """Sampling seems to take these milliseconds per seed, anything else less."""
    original = WorkBalance.times

    def times(self, batch, seconds, iteration):
        if batch.sampled_there is None:
            return original(self, batch, seconds, iteration)
        on_cpu = batch.batch_size - batch.sampled_there
        batch.seconds.update(
            {"sample": 1e-3 * cpu * on_cpu, "sample_accelerator": 1e-3 * there * batch.sampled_there, "load": 2e-5}
        )
        return original(self, batch, [1e-5 * n for n in batch.seeds], None)

    monkeypatch.setattr(WorkBalance, "times", times)


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "there", "begin", "best"), [(3.0, 1.0, 0.2, 0.75), (1.0, 4.0, 0.7, 0.2)])
def test_sampling_moves_to_where_it_is_faster_and_is_replayed(cpu, there, begin, best, monkeypatch, tmp_path):
    timed(monkeypatch, cpu, there)
    record = tmp_path / "decisions.jsonl"
    strategy = stand_in(begin, drm=True, decision_log=record)
    data = graph(600)
    modules, assigned = [], []
    original = AcceleratorSampling.assign

    def assign(self, seeds, share, number):
        assigned.append(original(self, seeds, share, number))
        return assigned[-1]

    monkeypatch.setattr(AcceleratorSampling, "assign", assign)

    def train(strategy):
        modules.append(Module("adam").double())
        options = {"max_epochs": 100, "max_steps": 150, "limit_val_batches": 0}
        trainer(strategy, **options).fit(
            modules[-1], datamodule=data_module(data=data, fanouts=[2, 2], num_workers=1, batch_size=40)
        )

    train(strategy)
    found = strategy.balance.mapping
    assert found.accelerator_sampling == pytest.approx(best, abs=0.1)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    shares = [line["mapping"]["accelerator_sampling"] for line in lines]
    assert shares[0] == begin
    assert len(set(shares)) > 1
    assert any("sampled there" in line["explanation"] for line in lines)
    first, assigned = assigned, []
    train(HyScaleStrategy(1, devices=["cpu"], drm=record))
    assert assigned == first
    assert same(*modules)
    train(stand_in("auto"))
    assert assigned == first  # nothing samples there by itself
    assert not left_threads()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 1.0])
def test_times_are_those_of_the_long_run(share):
    """With 3 ms a seed on the CPU, two threads, and 1 ms a seed there."""
    balance = WorkBalance(TRAINERS, [0.5, 0.5], (2, 1, 1), 20, False, lambda threads: None, sampling=share)
    sampling = AcceleratorSampling(data_module().graph_sampler, [CPU, CPU], 1)
    seen = set()
    for number in range(40):
        assert balance.split(20) == [(0, 10), (10, 20)]
        places = sampling.assign([10, 10], balance.accelerator_sampling, number)
        there = sum(10 for place in places if place is not None)
        seconds = {"sample": 0.003 * (20 - there), "sample_accelerator": 0.001 * there, "load": 0.1}
        batch = HybridBatch(["part", "part"], [10, 10], 20, number, seconds, there)
        balance.observe(batch, [0.1, 0.1])
        times, _ = balance.history[-1]
        assert (times.sample_cpu is None) == (there == 20)
        assert (times.sample_accelerator is None) == (there == 0)
        if times.sample_cpu is not None:
            assert times.sample_cpu == pytest.approx((1 - share) * 20 * 0.003 / 2)
        if times.sample_accelerator is not None:
            assert times.sample_accelerator == pytest.approx(share * 20 * 0.001)
        seen.add(there)
    assert seen == {0.1: {0, 10}, 0.5: {10}, 0.8: {10, 20}, 1.0: {20}}[share]


def test_times_of_both_kinds_of_sampling_are_measured():
    strategy = stand_in(0.5)
    fit(Module(), strategy)
    full = [times for times, _ in strategy.balance.history if sum(times.seeds) == 20]
    assert full
    for times in full:
        assert times.sample_cpu > 0
        assert times.sample_accelerator > 0


class OfTheUser(NeighborSampler):
    pass


def test_it_is_off_where_nothing_draws_the_same_samples():
    loader = data_module().train_dataloader()
    assert can_sample_on(loader, CPU)
    assert not can_sample_on(loader, torch.device("xpu:0"))
    if not torch.cuda.is_available():
        assert not can_sample_on(loader, torch.device("cuda:0"))
    loader.node_sampler = OfTheUser(graph(), [2])
    assert not can_sample_on(loader, CPU)
    loader.node_sampler = NeighborSampler(graph(), [2], backend="pyg_lib")
    assert not can_sample_on(loader, CPU)


@pytest.mark.usefixtures("pyg_sampling")
def test_pygs_loaders_sample_on_the_cpu():
    class Data(type(data_module())):
        def train_dataloader(self):
            return NeighborLoader(self.data, [-1, -1], input_nodes=self.data.train_mask, batch_size=20)

    strategy = stand_in(0.5)
    with pytest.warns(UserWarning, match=r"accelerator_sampling=0.5 changes nothing"):
        fit(Module(), strategy, Data(graph(), num_neighbors=[-1], batch_size=20, seed=0), max_epochs=1)
    assert strategy.loader.sampling is None
    assert all(times.sample_accelerator is None for times, _ in strategy.balance.history)


@pytest.mark.parametrize("options", [{}, {"accelerator_sampling": 0.0}, {"accelerator_sampling": "auto"}], ids=str)
def test_a_cpu_that_stands_for_an_accelerator_samples_only_if_asked(options):
    strategy = hybrid(1, devices=["cpu"], drm=True, **options)
    fit(Module(), strategy, max_epochs=1)
    assert next(steps[0][0] for steps in strategy.loader.stages()) == "sample"
    assert strategy.balance.mapping.accelerator_sampling == 0.0
    assert all(times.sample_accelerator is None for times, _ in strategy.balance.history)


def test_the_share_to_begin_with_is_measured():
    loader = data_module(fanouts=[3, 2]).train_dataloader()
    sampling = AcceleratorSampling(loader.node_sampler, [CPU] * 3, 1)
    assert 0 < first_share(sampling, loader, 20, 2) < 1
    mapping = first_mapping(Trainers.of(1, [CPU] * 2), loader, Module(), 20, (1, 1, 1), sampling)
    assert 0 < mapping.accelerator_sampling < 1


def test_what_comes_from_a_device_keeps_the_rows_of_one_edge_index():
    sampler = data_module(fanouts=[3, 2]).graph_sampler
    loader = data_module(fanouts=[3, 2]).train_dataloader()
    out = sampler.sample_from_nodes(loader.input_data[list(range(9))], key=7)
    expected = [value.clone() for value in (out.node, out.row, out.col, out.edge)]
    moved = _on_host(out)
    assert moved.row._base is moved.col._base is not None
    for found, value in zip((moved.node, moved.row, moved.col, moved.edge), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("share", [-0.1, 1.5, "all"])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(ValueError, match="accelerator_sampling is 'auto' or a share"):
        HyScaleStrategy(accelerator_sampling=share)


class Wrapped(BaseSampler):
    """A sampler of the user's own, which knows nothing of positions."""

    def __init__(self, inner):
        self.inner = inner

    def sample_from_nodes(self, inputs, key=None):
        return self.inner.sample_from_nodes(inputs, key=key)

    def sample_from_edges(self, inputs, neg_sampling=None):
        raise NotImplementedError


def trees(batch, first=0):
    """The tree of each seed of a disjoint mini-batch, by the seed's position: its nodes and edges."""
    found = {}
    for number in range(batch.batch_size):
        mine = batch.batch == number
        found[first + number] = (batch.n_id[mine].tolist(), batch.e_id[mine[batch.edge_index[1]]].tolist())
    return found


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("there", [None, 0.6])
@pytest.mark.parametrize(
    "nodes",
    [
        [lambda n, number: split_seeds(n, [1, 2, 0, 4])],
        [lambda n, number: split_seeds(n, [1 + number, 1])],
        # Two nodes, of two trainers each: of the last mini-batch, one has nothing.
        [lambda n, number: [(0, n // 3), (n // 3, n // 2)], lambda n, number: [(n // 2, n - 1), (n - 1, n)]],
    ],
    ids=["one node", "shifting shares", "two nodes"],
)
def test_disjoint_trees_do_not_depend_on_how_mini_batches_are_split(nodes, there, wrap):
    data = graph(dtype=torch.float32)
    sampler = NeighborSampler(data, [2, 2], disjoint=True)

    def loader():
        # Seeds given twice, also within a mini-batch.
        return ThreadedNodeLoader(
            data,
            Wrapped(sampler) if wrap else sampler,
            input_nodes=torch.arange(41) % 7,
            batch_size=20,
            seed=3,
            rank=0,
        )

    whole = [trees(batch) for batch in loader()]
    parts = [{} for _ in whole]
    for split in nodes:
        trainers = len(split(20, 0))
        sampling = None if there is None else AcceleratorSampling(sampler, [CPU] * trainers, 1)
        settings_ = PipelineSettings([None] * trainers)
        for batch in HybridLoader(loader(), split, settings_, sampling=sampling, share=lambda: there):
            for part, (start, stop) in zip(batch.parts, split(batch.total, batch.number), strict=True):
                if start < stop:
                    parts[batch.number].update(trees(part, start))
    assert parts == whole
    # Seeds 0, 7 and 14 of each full mini-batch are one node, whose trees differ.
    assert all(batch[0] != batch[7] or batch[0] != batch[14] for batch in whole[:2])
    assert not left_threads()
