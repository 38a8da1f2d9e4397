"""Accelerators sample some mini-batches of their rank: the samples do not change, and the share follows the times."""

import threading
from collections import defaultdict

import pytest
import torch
from torch_geometric.loader import NeighborLoader

from lightning_gnn import LinkDataModule, PersistentSamplerDataModule
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling, _copy_to_host, can_sample_on, find_sampling
from lightning_gnn.hyscale.analytic import (
    describe_workload,
    measure_sampling_share,
    model_of,
)
from lightning_gnn.hyscale.costs import TaskMapping, split_seeds
from lightning_gnn.hyscale.drm import BalanceController, StepReport
from lightning_gnn.hyscale.options import TrainerSet
from lightning_gnn.hyscale.sharded_loader import ShardedBatchSampler
from lightning_gnn.hyscale.staged_prefetcher import PipelineSettings
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.full_graph import launch
from tests.hyscale.staging import list_steps, make_staged_loader
from tests.hyscale.training import Plain, copy_state, fit, make_data, make_graph
from tests.threads import list_threads

CPU = torch.device("cpu")
TRAINERS = TrainerSet.of(1, [CPU])
GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def make_loader(fanouts=(3, 2), **options):
    return make_data(fanouts, batch_size=20, **options).train_dataloader()


def record_sampling(monkey):
    """Record the numbers of seeds of the mini-batches that each stage's threads sample."""
    found, original = defaultdict(list), NeighborSampler._sample

    def draw(self, seeds, *args, **kwargs):
        found[threading.current_thread().name.rstrip("0123456789-")].append(len(seeds))
        return original(self, seeds, *args, **kwargs)

    monkey.setattr(NeighborSampler, "_sample", draw)
    return found


@pytest.mark.medium
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize(
    ("disjoint", "share", "prefetch"),
    [(False, 0.0, 1), (True, 0.3, 0), (False, 0.3, 2), (True, 0.5, 1), (False, 0.5, 0), (True, 1.0, 2)],
)
def test_batches_are_those_of_the_cpu(disjoint, share, prefetch, device, monkeypatch):
    found = record_sampling(monkeypatch)

    def batches(sampled_on_accelerator):
        loader, shares = make_loader(disjoint=disjoint), []
        sampling = AcceleratorSampling(loader.node_sampler, device) if sampled_on_accelerator else None
        made = make_staged_loader(
            loader,
            ShardedBatchSampler(loader, lambda n, number: split_seeds(n, [1, 2])[1], 1),
            PipelineSettings(prefetch, (2, 1)),
            shares.append,
            sampling=sampling,
            share=lambda: share,
        )
        names = [name for stage in list_steps(made, prefetch) for name in stage]
        assert names == (["sample_accelerator"] if sampled_on_accelerator else []) + ["sample", "load"]
        for _ in range(3):
            for batch in made:
                yield batch, shares[-1]

    there = whole = 0
    for (ours, ours_share), (theirs, theirs_share) in zip(batches(True), batches(False), strict=True):
        assert (ours_share.seeds, ours_share.total) == (theirs_share.seeds, theirs_share.total)
        assert theirs_share.sampled_on_accelerator is None
        assert ours_share.sampled_on_accelerator == AcceleratorSampling.should_sample(ours_share.number, share)
        there, whole = there + ours_share.sampled_on_accelerator, whole + 1
        one, other = ours.to_dict(), theirs.to_dict()
        assert one.keys() == other.keys()
        for name, value in other.items():
            equal = torch.equal(one[name], value) if isinstance(value, torch.Tensor) else one[name] == value
            assert equal, name
    assert whole == 30
    assert there == pytest.approx(share * whole, abs=3.1)
    if prefetch and device is CPU:
        assert len(found.get("hyscale-sample_accelerator", ())) == there
        assert len(found["hyscale-sample"]) == 2 * whole - there
    assert not list_threads("hyscale")


def train(rank, share, record=None, replay=None, times=None):
    """Train a CPU rank and one that stands in for an accelerator; return the weights and the mappings."""
    with pytest.MonkeyPatch.context() as monkey:
        found = record_sampling(monkey)
        in_force = []
        begin = BalanceController.begin

        def noting(self):
            begin(self)
            mapping = self.current
            in_force.append((list(mapping.seeds), mapping.threads, mapping.accelerator_sampling))

        monkey.setattr(BalanceController, "begin", noting)
        if times is not None:
            monkey.setattr(StepReport, "of", make_report_function(times))
        options = {"threads": [1, 1, 1], "accelerator_sampling": share, "decision_log": record}
        fixed = {"shares": [0.5, 0.5], "drm": record is not None}
        strategy = HyScaleStrategy(1, devices=["cpu"], **(options | fixed if replay is None else {"drm": replay}))
        module = Plain()
        data = make_data((2,), batch_size=20)
        fit(module, strategy, data, epochs=2 if times is None else 15)
        seen = [
            (each.sample_cpu, each.sample_accelerator) for each, _ in strategy.balance.history if sum(each.seeds) == 20
        ]
        return copy_state(module), dict(found), in_force, seen


def make_report_function(times):
    """Return a function for reports with these milliseconds per seed for sampling on CPU and accelerator."""

    def report(share, train=0.0, iteration=-1.0):
        if share is None:
            return StepReport()
        sampled = share.sampled_on_accelerator
        device = {None: -1.0, True: 1.0, False: 0.0}[sampled]
        stage, seconds = ("sample_accelerator", times[1]) if sampled else ("sample", times[0])
        stages = {stage: 1e-3 * seconds * share.seeds, "load": 1e-5, "train": 1e-5 * share.seeds}
        return StepReport(share.seeds, device, **stages)

    return report


def are_equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.medium
def test_weights_are_those_without_and_times_of_both_kinds_are_measured():
    plain = launch.run(train, 2, 0.0)
    for share in (0.5, 1.0):
        ours = launch.run(train, 2, share)
        for (weights, _, in_force, times), (expected, before, *_) in zip(ours, plain, strict=True):
            assert are_equal(weights, expected)
            assert set(before) == {"hyscale-sample"}
            assert in_force[0][2] == share
            assert all(cpu > 0 and there != 0 for cpu, there in times)
            assert any(there is not None for _, there in times)
        # Rank 0 stands in for the accelerator, and can sample at most its own half.
        assert set(ours[0][1]) == {"hyscale-sample_accelerator"}
        assert set(ours[1][1]) == {"hyscale-sample"}


@pytest.mark.slow
@pytest.mark.parametrize(("milliseconds", "begin"), [((3.0, 1.0), 0.1), ((1.0, 8.0), 0.45)])
def test_sampling_moves_to_where_it_is_faster_and_is_replayed(milliseconds, begin, tmp_path):
    record = tmp_path / "decisions.jsonl"
    ranks = launch.run(train, 2, begin, record, None, milliseconds)
    shares = [share for *_, share in ranks[0][2]]
    assert ranks[0][2] == ranks[1][2]
    assert shares[0] == begin
    assert shares[-1] > begin if milliseconds[0] > milliseconds[1] else shares[-1] < begin
    assert "sampled on accelerators" in record.read_text()
    replayed = launch.run(train, 2, begin, None, record, milliseconds)
    for (weights, drawn, in_force, _), (others, drawn_again, in_force_again, _) in zip(ranks, replayed, strict=True):
        assert in_force_again == in_force
        assert {name: len(each) for name, each in drawn_again.items()} == {
            name: len(each) for name, each in drawn.items()
        }
        assert are_equal(others, weights)


class OfTheUser(NeighborSampler):
    pass


def test_it_is_off_where_nothing_draws_the_same_samples():
    loader = make_loader()
    assert can_sample_on(loader, CPU)
    assert not can_sample_on(loader, torch.device("xpu:0"))
    if not torch.cuda.is_available():
        assert not can_sample_on(loader, torch.device("cuda:0"))
    loader.node_sampler = OfTheUser(make_graph(), [2])
    assert not can_sample_on(loader, CPU)
    loader.node_sampler = NeighborSampler(make_graph(), [2], backend="triton")
    assert not can_sample_on(loader, CPU)
    with enable_pyg_sampling():
        assert not can_sample_on(NeighborLoader(make_graph(), [2], input_nodes=torch.arange(9)), CPU)


@pytest.mark.parametrize(
    ("wanted", "trainers", "found"),
    [(0.5, TRAINERS, True), (0.0, TRAINERS, False), ("auto", TRAINERS, False), (0.5, TrainerSet.of(2, []), False)],
)
def test_a_cpu_that_stands_for_an_accelerator_samples_only_if_asked(wanted, trainers, found):
    loader = make_loader()
    sampling = find_sampling(wanted, loader, trainers)
    assert (sampling is not None) == found
    if found:
        assert find_sampling(wanted, loader, trainers, sampling) is sampling  # the sampler of the same graph is reused
        assert find_sampling(wanted, make_loader(), trainers, sampling) is not sampling
        loader.node_sampler = OfTheUser(make_graph(), [2])
        with pytest.warns(UserWarning, match=r"accelerator_sampling=0.5 has no effect"):
            assert find_sampling(wanted, loader, trainers, sampling) is None


def test_a_datamodule_that_samples_on_the_gpu_is_the_reason():
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    datamodule = PersistentSamplerDataModule(make_graph(), num_neighbors=[2], batch_size=20, device="cpu")
    said = "accelerator_sampling=0.5 has no effect: .* all mini-batches there already; .* use NeighborDataModule"
    with pytest.warns(UserWarning, match=said):
        assert find_sampling(0.5, datamodule.train_dataloader(), TRAINERS) is None


def test_threads_go_to_the_trainers_that_use_them():
    for on_stream, threads in (([], (1, 1)), ([False, True], (4, 2))):
        balance = BalanceController(TRAINERS, TaskMapping((5, 15), 1, (4, 2, 2)), False, on_stream=on_stream)
        assert balance.rank_threads(0)[:2] == threads


def test_links_are_modeled_as_nodes_are():
    edges = make_graph().edge_index[:, :50]
    links = LinkDataModule(make_graph(), edges, num_neighbors=[2], batch_size=20, neg_sampling="binary")
    workload, rate = describe_workload(links.train_dataloader(), Plain(), 20)
    assert (workload.fanouts, workload.num_train, workload.measured[-1].seeds) == ((2,), 50, 20)
    assert workload.measured[-1].vertices[-1] > 40  # two nodes of each edge, and of each negative one
    assert rate > 0


@pytest.mark.medium
def test_the_share_to_begin_with_is_measured():
    loader = make_loader()
    sampling = AcceleratorSampling(loader.node_sampler, CPU)
    assert 0 < measure_sampling_share(sampling, loader, 20, 2) < 1
    model = model_of(TrainerSet.of(1, [CPU] * 2), loader, Plain(), 20, sampling)
    assert 0 < model.best_mapping().accelerator_sampling < 1


def test_what_comes_from_a_device_keeps_the_rows_of_one_edge_index():
    sampler = make_loader().node_sampler
    loader = make_loader()
    out = sampler.sample_from_nodes(loader.input_data[list(range(9))], key=7)
    expected = [value.clone() for value in (out.node, out.row, out.col, out.edge)]
    moved = _copy_to_host(out)
    assert moved.row._base is moved.col._base is not None
    for found, value in zip((moved.node, moved.row, moved.col, moved.edge), expected, strict=True):
        assert torch.equal(found, value)
