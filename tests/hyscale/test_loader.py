"""Each rank makes its slice of every mini-batch; together the slices equal the undivided mini-batch, for any loader."""

import gc
import threading
import time
import warnings
from itertools import count, islice

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.loader import ImbalancedSampler, LinkNeighborLoader, NeighborLoader
from torch_geometric.loader import NodeLoader as PyGNodeLoader
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput

from lightning_gnn.hyscale.costs import split_seeds
from lightning_gnn.hyscale.sharded_loader import (
    ShardedBatchSampler,
    ShardedDataLoader,
    UnshardedDataLoader,
    is_shardable,
)
from lightning_gnn.hyscale.staged_prefetcher import PipelineSettings
from lightning_gnn.hyscale.transfer import PackedRows, Transfer
from lightning_gnn.loading import NodeLoader
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.full_graph import launch
from tests.hyscale.ranks import joined
from tests.hyscale.staging import list_steps, make_staged_loader
from tests.hyscale.training import make_data, make_graph
from tests.patience import PATIENCE
from tests.refusals import refuses
from tests.threads import list_threads

CPU = torch.device("cpu")
WEIGHTS = [[1.0, 2.0, 0.0, 4.0], [0.5, 0.5], [1.0]]


def load(fanouts=(3, 3), **options):
    return make_data(fanouts, **options).train_dataloader()


def slice_by(weights, part):
    return lambda num_seeds, number: split_seeds(num_seeds, weights)[part]


def staged(loader, weights=(1.0,), part=0, settings=None, arrived=lambda share: None, **options):
    """Return the loader of one rank."""
    batch_options = {name: options.pop(name) for name in ("first_batch", "num_batches", "on_epoch") if name in options}
    batches = ShardedBatchSampler(loader, slice_by(weights, part), part, **batch_options)
    return make_staged_loader(loader, batches, settings, arrived, **options)


def assert_same(found, expected):
    found, expected = found.to_dict(), expected.to_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        equal = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert equal, name


# -- this package's loaders


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 3])
def test_one_rank_with_all_seeds_has_what_the_users_loader_yields(prefetch, workers):
    settings = PipelineSettings(prefetch, (max(1, workers), 2))
    loader, plain = staged(load(num_workers=workers), settings=settings), load(num_workers=workers)
    assert len(loader) == len(plain) == 4
    assert (loader.batch_size, loader.dataset) == (60, loader.loader.dataset)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        plain.sampler.set_epoch(epoch)
        for found, expected in zip(loader, plain, strict=True):
            assert_same(found, expected)
    assert (loader.times.batches, loader.times.nodes, loader.times.edges) == (8, plain.times.nodes, plain.times.edges)
    assert not list_threads("hyscale")


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_slices_are_together_the_undivided_mini_batches_and_have_their_samples(weights, prefetch):
    shares = [[] for _ in weights]
    ranks = [
        staged(load(), weights, part, PipelineSettings(prefetch, (2, 1)), shares[part].append)
        for part in range(len(weights))
    ]
    for number, (whole, *parts) in enumerate(zip(load(), *ranks, strict=True)):
        seeds, edges = [], set()
        for share, part in zip([share[number] for share in shares], parts, strict=True):
            assert (share.number, share.total) == (number, whole.batch_size)
            assert set(share.seconds) == {"sample", "load"}
            assert part.batch_size == max(1, share.seeds)
            if share.seeds:
                seeds += part.input_id.tolist()
                edges |= set(part.e_id.tolist())
                assert torch.equal(part.n_id[part.edge_index], make_graph().edge_index[:, part.e_id])
                assert torch.equal(part.x, make_graph().x[part.n_id])
        assert seeds == whole.input_id.tolist()
        assert edges == set(whole.e_id.tolist())  # the same edges for each node on all ranks
    assert not list_threads("hyscale")


def collect_trees(batch, first=0):
    """Return nodes and edges of the tree of each seed of a disjoint mini-batch, by position of the seed."""
    found = {}
    for number in range(batch.batch_size):
        mine = batch.batch == number
        found[first + number] = (batch.n_id[mine].tolist(), batch.e_id[mine[batch.edge_index[1]]].tolist())
    return found


class Wrapped(BaseSampler):
    """A user-defined sampler that does not support positions."""

    def __init__(self, inner):
        self.inner = inner

    def sample_from_nodes(self, inputs, key=None):
        return self.inner.sample_from_nodes(inputs, key=key)

    def sample_from_edges(self, inputs, neg_sampling=None):
        raise NotImplementedError


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("shifting", [False, True])
def test_disjoint_trees_do_not_depend_on_how_mini_batches_are_split(shifting, wrap):
    data = make_graph(dtype=torch.float32)
    sampler = NeighborSampler(data, [2, 2], disjoint=True)

    def loader():
        # Duplicate seeds, also within a mini-batch.
        nodes = torch.arange(41) % 7
        return NodeLoader(data, Wrapped(sampler) if wrap else sampler, nodes, batch_size=20, seed=3, rank=0)

    def split(num_seeds, number):
        return split_seeds(num_seeds, [1 + number, 1, 2] if shifting else [1, 0, 4])

    whole = [collect_trees(batch) for batch in loader()]
    parts = [{} for _ in whole]
    for rank in range(3):
        mine, shares = loader(), []
        batches = ShardedBatchSampler(mine, lambda n, number, rank=rank: split(n, number)[rank], rank)
        for batch in make_staged_loader(mine, batches, on_batch=shares.append):
            share = shares[-1]
            if share.seeds:
                parts[share.number].update(collect_trees(batch, split(share.total, share.number)[rank][0]))
    assert parts == whole
    # Seeds 0, 7 and 14 of each full mini-batch are the same node with different trees.
    assert all(batch[0] != batch[7] or batch[0] != batch[14] for batch in whole[:2])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_resumed_epoch_leaves_out_the_first_mini_batches(prefetch):
    whole, begun, shares = list(load()), [], []
    loader = staged(
        load(),
        settings=PipelineSettings(prefetch),
        arrived=shares.append,
        first_batch=lambda: 2,
        num_batches=lambda: 3,
        on_epoch=begun.append,
    )
    for found, expected in zip(loader, whole[2:3], strict=True):
        assert_same(found, expected)
    assert begun == [2]
    assert [share.number for share in shares] == [2]
    assert not list_threads("hyscale")


class LeadRecorder:
    """Measures how many mini-batches a loader has split ahead of those that it has yielded."""

    def __init__(self):
        self.cut = self.most = 0

    def split(self, num_seeds, number):
        self.cut = number
        return 0, num_seeds

    def hand_out(self, share):
        self.most = max(self.most, self.cut - share.number)


@pytest.mark.parametrize(("sizes", "ahead"), [((1, 1), 2), ((1, 1), 6), ((4, 4), 3), ((9, 9), 12)], ids=str)
def test_no_more_is_cut_ahead_than_is_allowed(sizes, ahead):
    loader, furthest = load(batch_size=5), LeadRecorder()
    batches = ShardedBatchSampler(loader, furthest.split)
    made = make_staged_loader(
        loader, batches, PipelineSettings(2, sizes, ahead), furthest.hand_out, transfer=Transfer(CPU)
    )
    for number, _ in enumerate(made):
        made.resize((9, 9) if number % 8 == 3 else sizes)
    assert 0 < furthest.most <= ahead
    assert number == 39


def test_leaving_an_epoch_early_leaves_nothing_and_the_next_one_begins_anew():
    loader = staged(load(batch_size=10))
    first = next(epoch := iter(loader))
    assert list_threads("hyscale")
    assert loader.close() == []
    assert not list_threads("hyscale")
    del epoch
    found = list(loader)
    assert len(found) == 20
    assert not list_threads("hyscale")
    assert first.batch_size == found[0].batch_size == 10
    next(iterator := iter(loader))
    del iterator, loader  # without an explicit shutdown
    deadline = time.monotonic() + PATIENCE
    while list_threads("hyscale") and time.monotonic() < deadline:
        gc.collect()  # a running job may hold objects in reference cycles
        time.sleep(0.01)
    assert not list_threads("hyscale")


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["staged", "sliced"])
def test_nothing_is_left_of_twenty_epochs(kind):
    source = load(batch_size=40) if kind == "staged" else ListLoader()
    if kind == "staged":
        loader = staged(source, [0.5, 0.5], 1, transfer=Transfer(CPU, "int8"))
    else:
        loader = ShardedDataLoader(
            source, ShardedBatchSampler(source, slice_by([1, 1], 1)), lambda share: None, transfer=Transfer(CPU)
        )
    counts = []
    for _ in range(20):
        assert sum(1 for _ in loader) == len(loader)
        gc.collect()
        batches = sum(issubclass(type(each), Data) for each in gc.get_objects())
        counts.append((batches, len(threading.enumerate()), len(loader.batches.shares)))
    assert counts[2:] == counts[2:3] * 18


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("stage", ["sample", "gather"])
def test_an_error_in_a_stage_is_raised_at_its_mini_batch(stage, prefetch, monkeypatch):
    loader = load(batch_size=20)
    seen, original = count(), getattr(loader.pipeline, stage)

    def failing(*args, **kwargs):
        if next(seen) == 4:
            raise KeyError("odd")
        return original(*args, **kwargs)

    monkeypatch.setattr(loader.pipeline, stage, failing)
    made, found = staged(loader, settings=PipelineSettings(prefetch)), []
    with pytest.raises(KeyError, match="odd"):
        found.extend(iter(made))
    assert len(found) == 4
    assert made.close() == []
    assert not list_threads("hyscale")


@pytest.mark.medium
def test_a_stage_that_makes_no_progress_ends_the_run_and_shows_where(monkeypatch):
    loader, gate = load(batch_size=20), threading.Event()
    monkeypatch.setattr(loader.pipeline, "gather", lambda *args: gate.wait(PATIENCE))
    made = staged(loader, settings=PipelineSettings(stall_timeout=0.2))
    with pytest.raises(TimeoutError, match=r"no progress for 0.2 s; thread hyscale-load-0:\n(.|\n)*gate.wait"):
        next(iter(made))
    gate.set()
    assert made.close() == []
    assert not list_threads("hyscale")


class Doubles:
    def __call__(self, batch):
        batch.noise = torch.rand(1)
        return batch


def test_what_must_be_made_in_the_training_thread_is_made_there_with_numbers_of_the_slice():
    """A transform draws different numbers for different slices, and the same ones for any prefetch."""
    found = {}
    for prefetch in (0, 2):
        for part in range(2):
            loader = staged(load(transform=Doubles()), [1, 1], part, PipelineSettings(prefetch), transfer=Transfer(CPU))
            assert list_steps(loader, prefetch) == [["sample"], ["load"]]
            found[prefetch, part] = [float(batch.noise) for batch in loader]
    assert found[0, 0] == found[2, 0] != found[0, 1] == found[2, 1]


# -- quantized features and other dtypes


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_features_travel_in_fewer_bits(dtype, prefetch):
    transfer = Transfer(CPU, dtype)
    loader = staged(load(), settings=PipelineSettings(prefetch), transfer=transfer)
    names = list_steps(loader, prefetch)
    assert names == [["sample"], ["load"], ["transfer"]] if prefetch == 2 else [["sample"], ["load", "transfer"]]
    for found, expected in zip(loader, load(), strict=True):
        step = {None: 0.0, "float16": 2.0**-11, "int8": 1 / 254}[dtype]
        assert found.x.dtype == torch.float64
        assert bool(((found.x - expected.x).abs() <= step * 1.01 * expected.x.abs().amax(1, keepdim=True)).all())
        assert dtype is None or not torch.equal(found.x, expected.x)
        found.x = expected.x
        assert_same(found, expected)


def test_heterogeneous_features_travel_in_fewer_bits_and_others_as_they_are():
    batch = HeteroData()
    batch["paper"].x, batch["paper"].y = torch.randn(5, 3), torch.arange(5)
    batch["author"].x, batch["term"].x = torch.arange(6).reshape(3, 2), torch.rand(4)
    batch["paper", "by", "author"].edge_index = torch.tensor([[0, 1], [2, 0]])
    expected = batch.clone()
    found = Transfer(CPU, "int8")(batch)
    assert torch.allclose(found["paper"].x, expected["paper"].x, atol=0.02)
    assert not torch.equal(found["paper"].x, expected["paper"].x)
    assert torch.equal(found["author"].x, expected["author"].x)
    assert torch.equal(found["term"].x, expected["term"].x)
    assert torch.equal(found["paper"].y, expected["paper"].y)


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


# -- loaders of torch and PyG


class ListLoader(GraphLoader):
    """Yields batches of many small graphs."""

    def __init__(self, **options):
        graphs = [Data(x=torch.full((2, 1), float(each)), y=torch.tensor([each])) for each in range(23)]
        super().__init__(graphs, **{"batch_size": 6, **options})


class AllNeighbors(BaseSampler):
    """Samples the authors of papers."""

    def sample_from_nodes(self, inputs):
        papers = inputs.node
        authors, rows = (papers % 4).unique(return_inverse=True)
        edges = ("author", "writes", "paper")
        return HeteroSamplerOutput(
            {"paper": papers, "author": authors},
            {edges: rows},
            {edges: torch.arange(len(papers))},
            {edges: None},
            metadata=(inputs.input_id, inputs.time),
        )

    def sample_from_edges(self, inputs, neg_sampling=None):
        raise NotImplementedError


def make_hetero_data():
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(30, 2), torch.randn(4, 2)
    data["author", "writes", "paper"].edge_index = torch.stack([torch.arange(30) % 4, torch.arange(30)])
    return data


class EndlessSampler:
    """A user-defined batch sampler that is endless and has no length."""

    def __iter__(self):
        for number in count():
            first = int(torch.randint(20, ()))
            yield [(first + step) % 23 for step in range(2 + number % 3)]


def make_kind(kind, **options):
    """Return a loader, and a function that returns the seeds of a mini-batch."""
    data = make_graph(dtype=torch.float32)
    nodes = {"data": data, "num_neighbors": [2, 2], "input_nodes": data.train_mask, "batch_size": 60}
    labels = (torch.arange(200) > 170).long()
    with enable_pyg_sampling():
        if kind.startswith("neighbor"):
            more = {
                "neighbor": {},
                "neighbor shuffled": {"shuffle": True},
                "neighbor imbalanced": {"sampler": ImbalancedSampler(labels)},
                "neighbor generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
            }[kind]
            return NeighborLoader(**nodes, **more, **options), lambda batch: batch.input_id.tolist()
        if kind == "link":
            edges = {"edge_label_index": data.edge_index[:, :100], "neg_sampling": None, "shuffle": True}
            loader = LinkNeighborLoader(data, [2], **edges, batch_size=30, **options)
            return loader, lambda batch: batch.input_id.tolist()
    if kind == "heterogeneous":
        loader = PyGNodeLoader(
            make_hetero_data(), AllNeighbors(), ("paper", torch.arange(30)), batch_size=8, shuffle=True, **options
        )
        return loader, lambda batch: batch["paper"].input_id.tolist()
    weights = torch.arange(23.0)
    more = {
        "graphs": {},
        "graphs shuffled": {"shuffle": True},
        "graphs weighted": {"sampler": WeightedRandomSampler(weights, 40)},
        "graphs random": {"sampler": RandomSampler(range(23), num_samples=10)},
        "graphs batches": {"batch_sampler": BatchSampler(RandomSampler(range(23)), 5, True), "batch_size": 1},
        "graphs endless": {"batch_sampler": EndlessSampler(), "batch_size": 1},
    }[kind]
    return ListLoader(**more, **options), lambda batch: batch.y.tolist()


KINDS = [
    "neighbor",
    "neighbor shuffled",
    "neighbor imbalanced",
    "neighbor generator",
    "link",
    "heterogeneous",
    "graphs",
    "graphs shuffled",
    "graphs weighted",
    "graphs random",
    "graphs batches",
    "graphs endless",
]
LAST = 5
"""Maximum number of mini-batches per epoch."""


def iterate_plain(kind, options, epochs=2):
    """Return the seeds of each mini-batch of some epochs, and the next number of torch's generator."""
    loader, seeds = make_kind(kind, **options)
    torch.manual_seed(9)
    found = [[seeds(batch) for batch in islice(loader, LAST)] for _ in range(epochs)]
    return found, torch.rand(1).item()


def iterate_shares(rank, kinds, **options):
    """Return the same for a rank's slices, with the recorded shares."""
    warnings.simplefilter("ignore")
    results = []
    with joined():
        weights = [1.0, 0.0, 2.0][: dist.get_world_size()] if dist.get_world_size() > 2 else [1.0, 3.0]
        for kind in kinds:
            loader, seeds = make_kind(kind, **options)
            shares, found = [], []
            batches = ShardedBatchSampler(loader, slice_by(weights, rank), rank, num_batches=lambda: LAST, rank=rank)
            mine = ShardedDataLoader(loader, batches, shares.append, Transfer(CPU) if rank else None)
            # Ranks draw different numbers in their steps, but the same in hooks.
            torch.manual_seed(9)
            for _ in range(2):
                found.append([seeds(batch) for batch in mine])
            results.append(
                (found, [(share.number, share.seeds, share.total) for share in shares], torch.rand(1).item())
            )
            assert not batches.shares
    return results


@pytest.mark.medium
@pytest.mark.campaign
@pytest.mark.parametrize(("num_ranks", "options"), [(2, {}), (3, {}), (2, {"num_workers": 2})], ids=str)
def test_any_loader_whose_mini_batches_are_made_of_positions(num_ranks, options):
    kinds = KINDS if not options else ["neighbor imbalanced", "link", "heterogeneous", "graphs weighted"]
    results = launch.run(run_shares, num_ranks, kinds, options)
    for place, kind in enumerate(kinds):
        expected, drawn = iterate_plain(kind, options)
        ranks = [result[place] for result in results]
        for epoch, batches in enumerate(expected):
            for number, whole in enumerate(batches):
                joined_again = []
                for found, shares, _ in ranks:
                    share_number, seeds, total = shares[sum(map(len, expected[:epoch])) + number]
                    assert (share_number, total) == (number, len(whole)), kind
                    joined_again += found[epoch][number][:seeds]
                assert joined_again == whole, kind
        if not options and "generator" not in kind and "endless" not in kind:
            assert [after for *_, after in ranks] == [drawn] * num_ranks, kind


def run_shares(rank, kinds, options):
    return iterate_shares(rank, kinds, **options)


def test_a_resumed_epoch_has_the_order_that_it_had():
    def epochs(loader, number):
        found = []
        for _ in range(number):
            found.append([batch.y.tolist() for batch in loader])
            loader.batches.first_batch = lambda: 0
        return found

    def begin(first=0):
        source = ListLoader(shuffle=True)
        batches = ShardedBatchSampler(source, slice_by([1], 0), first_batch=lambda: first)
        return batches, ShardedDataLoader(source, batches, lambda share: None)

    torch.manual_seed(2)
    batches, loader = begin()
    whole = epochs(loader, 1)
    order, torch_state = batches.order_state, torch.get_rng_state()
    whole += epochs(loader, 1)
    torch.manual_seed(77)
    batches, loader = begin(first=2)
    batches.resumed = (order, torch_state)
    assert epochs(loader, 2) == [whole[0][2:], whole[1]]
    # At the end of an epoch, the next one has its own order, drawn from the current state of torch's generator.
    torch.set_rng_state(torch_state)
    batches, loader = begin()
    batches.resumed = (order, torch_state)
    assert epochs(loader, 1) == whole[1:]


def test_a_sampler_that_shares_seeds_out_by_itself_is_refused():
    source = ListLoader(sampler=DistributedSampler(range(23), num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="DistributedSampler"):
        ShardedBatchSampler(source, slice_by([1, 1], 0), rank=0)
    ShardedBatchSampler(source, slice_by([1], 0))  # a single trainer may use it


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_loaders_without_positions_are_run_whole_by_rank_0():
    assert is_shardable(ListLoader())
    assert is_shardable(load())
    for loader in (DataLoader(Stream(), 2), ListLoader(batch_size=None), [1, 2, 3], count()):
        assert not is_shardable(loader)
    for rank in range(2):
        shares = []
        loader = UnshardedDataLoader([4, 5, 6], shares.append, rank)
        assert (len(loader), list(loader)) == (3, [4, 5, 6])
        assert [(share.number, share.seeds, share.total) for share in shares] == [(n, 1 - rank, 1) for n in range(3)]
        endless = UnshardedDataLoader(Stream(), shares.append, rank)
        refuses(TypeError, "has no len", len, endless)
        assert list(endless) == [0, 1, 2, 3, 4]
