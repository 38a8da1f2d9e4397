"""User-defined samplers, transforms, attributes and trained features, compared with PyG's loaders."""

import multiprocessing
import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader as PyGNodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from lightning_gnn import NeighborDataModule
from lightning_gnn.collective import CollectiveBatching
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.loading import LinkLoader, NodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batch_checks import assert_same_batches
from tests.batching_data import small_data
from tests.patience import PATIENCE
from tests.sampling.test_loader import Fixed

DATA = small_data()
SAMPLER = NeighborSampler(DATA, [3, 2])


def make_loader(data=DATA, sampler=None, **kwargs):
    return NodeLoader(data, sampler or NeighborSampler(data, [3, 2]), **{"batch_size": 50, **kwargs})


def list_edges(batches):
    return {int(edge) for batch in batches for edge in batch.e_id}


class Predicts(pl.LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch.input_id


def count_overlap(a, b):
    return len(a & b) / len(a | b)


# -- loaders alone in a Trainer


def test_a_loader_alone_can_be_made_anew_by_lightning():
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    links = LinkLoader(DATA, NeighborSampler(DATA, [2]), edge_label_index=DATA.edge_index[:, :70], batch_size=40)
    nodes = make_loader(input_nodes=torch.arange(300, 400))
    assert torch.equal(torch.cat(trainer.predict(Predicts(), nodes)), torch.arange(100))
    assert torch.equal(torch.cat(trainer.predict(Predicts(), links)), torch.arange(70))


def test_a_loader_alone_takes_the_rank_of_the_process_that_iterates(monkeypatch):
    alone, other = make_loader(), make_loader(rank=3)
    first = list_edges(make_loader())
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_rank", lambda: 3)
        third = list_edges(alone)
    assert third == list_edges(other) != first


# -- epochs


def make_orders():
    generator = torch.Generator().manual_seed(0)
    seeds = range(DATA.num_nodes)
    yield {"sampler": SubsetRandomSampler(seeds, generator)}
    yield {"sampler": RandomSampler(seeds, generator=generator)}
    yield {"batch_sampler": BatchSampler(RandomSampler(seeds, generator=generator), 50, drop_last=False)}
    yield {"batch_sampler": [list(range(start, start + 50)) for start in range(0, 400, 50)]}
    yield {"sampler": DistributedSampler(seeds, num_replicas=1, rank=0)}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_differ_with_an_order_of_the_users_own(number, num_workers):
    order = list(make_orders())[number]
    kwargs = {"batch_size": 50, **order} if "sampler" in order else {"batch_size": 1, **order}
    ours = NodeLoader(DATA, NeighborSampler(DATA, [1]), num_workers=num_workers, **kwargs)
    first, second, third = (list_edges(ours) for _ in range(3))
    assert max(count_overlap(first, second), count_overlap(first, third), count_overlap(second, third)) < 0.4


def test_passes_outside_a_trainer_go_on_in_order_and_samples():
    for num_workers in (0, 2):
        module = NeighborDataModule(DATA, num_neighbors=[2], batch_size=40, num_workers=num_workers, seed=5)
        made = module.train_dataloader()
        passes = [list(made), list(made), list(module.train_dataloader())]
        orders = [torch.cat([batch.input_id for batch in batches]).tolist() for batches in passes]
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
        again = NeighborDataModule(DATA, num_neighbors=[2], batch_size=40, seed=5).train_dataloader()
        for one, other in zip(passes, ([*again] for _ in range(3)), strict=True):
            assert_same_batches(one, other)
        evaluation = module.val_dataloader()
        assert_same_batches(list(evaluation), list(evaluation))


# -- attributes


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_data_may_be_edited_between_passes(num_workers):
    data = small_data()
    ours = make_loader(data, num_workers=num_workers)
    list(ours)
    del ours.data.y
    ours.data.age = torch.arange(400)
    for batch in ours:
        assert "y" not in batch
        assert torch.equal(batch.age, batch.n_id)


class Permuted(BaseSampler):
    """A user-defined sampler that returns edges in another order than the data, as PyG's own does, and takes no key."""

    def __init__(self, data, shuffles=False):
        self.permutation = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(0))
        self.inner = Fixed(data, [3, 2])
        self.inverse = self.permutation.argsort()
        self.shuffles = shuffles

    @property
    def edge_permutation(self):
        return self.permutation

    def sample_from_nodes(self, inputs):
        out = self.inner.sample_from_nodes(inputs)
        out.edge = self.inverse[out.edge]
        if self.shuffles:
            keep = torch.rand(out.row.numel()) < random.random() * np.random.rand()
            out.row, out.col, out.edge = out.row[keep], out.col[keep], out.edge[keep]
        return out

    def sample_from_edges(self, inputs, neg_sampling=None):
        raise NotImplementedError


def arrays():
    data = small_data()
    data.heights, data.lengths = np.arange(400.0).reshape(200, 2).repeat(2, axis=0), np.arange(4000)
    return data


def without_edges(out: SamplerOutput) -> SamplerOutput:
    out.edge = None
    return out


def outer():
    """Return a mini-batch with its own n_id and e_id, from which to sample."""
    return next(iter(make_loader(shuffle=False)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("graph", "sampler_of", "options", "holds"),
    [
        (lambda: DATA, Permuted, {}, lambda batch: True),
        (lambda: DATA, Fixed, {"transform_sampler_output": without_edges}, lambda batch: batch.edge_attr is None),
        (arrays, Fixed, {}, lambda batch: batch.heights.dtype == torch.float64),
        (outer, Fixed, {}, lambda batch: torch.equal(batch.x, DATA.x[batch.n_id])
         and torch.equal(batch.edge_attr, DATA.edge_attr[batch.e_id])),
    ],
    ids=["a sampler without keys, of edges in another order", "no edge ids", "arrays of numpy", "a mini-batch"],
)  # fmt: skip
def test_what_users_bring_gives_pygs_mini_batches(graph, sampler_of, options, holds, num_workers):
    data = graph()
    sampler = sampler_of(data) if sampler_of is Permuted else sampler_of(data, [3, 2])
    own = {"num_workers": num_workers, "thread_safe": sampler_of is Permuted}
    ours = list(NodeLoader(data, sampler, batch_size=50, **own, **options))
    assert_same_batches(ours, PyGNodeLoader(data, sampler, batch_size=50, **options))
    assert all(holds(batch) for batch in ours)


class Passing(NeighborSampler):
    """Draws random numbers in addition to the key that it passes on."""

    def sample_from_nodes(self, inputs, **kwargs):
        torch.rand(3)
        return super().sample_from_nodes(inputs, **kwargs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_passes_the_key_on_gives_the_same_samples_and_disturbs_nothing(num_workers):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert_same_batches(make_loader(sampler=Passing(DATA, [3, 2]), num_workers=num_workers), make_loader())
    assert torch.equal(torch.get_rng_state(), before)


# -- random numbers


def noisy(batch):
    """Transform that draws from all three generators."""
    batch.noise = torch.rand(3)
    batch.numpy_noise, batch.python_noise = float(np.random.rand()), random.random()
    return batch


def drop_edges(out: SamplerOutput) -> SamplerOutput:
    keep = torch.rand(out.row.numel()) < random.random()
    out.row, out.col, out.edge = out.row[keep], out.col[keep], out.edge[keep]
    return out


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def generate_runs(make, passes=2):
    """Yield the batches with 0, 1 and 3 workers; check that the surrounding code draws its own random numbers."""
    for num_workers, seed in ((0, 1), (1, 2), (3, 3)):
        seed_all(seed)
        batches, drawn = [], []
        made = make(num_workers)
        for _ in range(passes):
            for batch in made:
                batches.append(batch)
                drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
        seed_all(seed)
        assert drawn == [(torch.rand(2).tolist(), np.random.rand(), random.random()) for _ in drawn]
        yield batches


@pytest.mark.parametrize(
    "options",
    [
        {"transform": noisy},
        {"transform": noisy, "transform_sampler_output": drop_edges},
        {"transform": noisy, "sampler": Permuted(DATA, shuffles=True)},
    ],
    ids=["transform", "transform_sampler_output", "sampler"],
)
def test_what_the_users_code_draws_follows_from_the_key_alone(options):
    own = {key: value for key, value in options.items() if key != "sampler"}
    sampler = options.get("sampler", SAMPLER)
    first, *others = generate_runs(lambda n: NodeLoader(DATA, sampler, batch_size=50, num_workers=n, seed=4, **own))
    for other in others:
        assert_same_batches(first, other)
    noises = [tuple(batch.noise.tolist()) for batch in first]
    assert len(set(noises)) == len(noises) == 16
    assert len({batch.numpy_noise for batch in first}) == len({batch.python_noise for batch in first}) == 16


def stops(*args, **kwargs):
    raise StopIteration


def forgets(batch):
    batch.more = 1


class Stops(NeighborSampler):
    """Draws from the key only, and raises StopIteration."""

    def sample_from_nodes(self, inputs, key=None):
        raise StopIteration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({where: code, "thread_safe": safe}, message)
          for code, message in ((stops, "stops raised StopIteration"), (forgets, "forgets returned None: end it with"))
          for where in ("transform", "transform_sampler_output") for safe in (False, True)),
        ({"sampler": Stops(DATA, [2])}, "the sampler Stops raised StopIteration"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_workers", [0, 2])
def test_code_that_stops_or_returns_nothing_is_named(options, message, num_workers):
    with pytest.raises((RuntimeError, TypeError), match=message):
        list(make_loader(num_workers=num_workers, **options))


def note(base):
    """Return a user-defined loader class with an override of ``filter_fn`` that adds an attribute."""

    class Noted(base):
        def filter_fn(self, out):
            batch = super().filter_fn(out)
            batch.sums, batch.noise = batch.x.sum(dim=1), torch.rand(2)
            return batch

    return Noted


@pytest.mark.parametrize("thread_safe", [False, True])
def test_a_filter_fn_of_the_users_own_is_called_as_pyg_calls_it(thread_safe):
    sampler = Fixed(DATA, [3, 2])
    theirs = list(note(PyGNodeLoader)(DATA, sampler, batch_size=50, transform=noisy))
    for num_workers in (0, 2):
        options = {"batch_size": 50, "num_workers": num_workers, "transform": noisy, "thread_safe": thread_safe}
        for a, b in zip(note(NodeLoader)(DATA, sampler, **options), theirs, strict=True):
            assert torch.equal(a.sums, b.sums)
            assert sorted(a.keys()) == sorted(b.keys())
    if not thread_safe:
        first, *others = generate_runs(lambda n: note(NodeLoader)(DATA, SAMPLER, batch_size=50, num_workers=n))
        for other in others:
            assert_same_batches(first, other)


def test_a_collate_fn_of_the_users_own_is_refused_since_nobody_would_call_it():
    class Collating(NodeLoader):
        def collate_fn(self, index):
            return super().collate_fn(index)

    with pytest.raises(TypeError, match=r"Collating\.collate_fn would not be called"):
        Collating(DATA, SAMPLER)


STEPS = [0.0, -2.0, -4.0]


def train_three_steps(loader, name):
    """Train the one row of ``data.x`` that each mini-batch holds, by steps of -2."""
    seen, x = [], loader.data.x
    for batch in loader:
        seen.append(batch[name].item())
        batch[name].sum().backward()
        with torch.no_grad():
            x -= 2 * x.grad
            x.grad = None
    return seen


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [(NodeLoader, "x", {}), (note(NodeLoader), "sums", {}), (note(NodeLoader), "sums", {"thread_safe": True})],
    ids=["plain", "own filter_fn", "own filter_fn, thread-safe"],
)
def test_rows_are_those_after_the_step_before(make, name, options):
    data = Data(x=nn.Parameter(torch.zeros(4, 1)), edge_index=torch.empty(2, 0, dtype=torch.int64))
    options = {"batch_size": 1, "num_workers": 2, "sampler": [0, 0, 0], **options}
    assert train_three_steps(make(data, NeighborSampler(data, [1]), **options), name) == STEPS


# -- features that are trained


def make_embedded_data():
    data = small_data()
    data.x = nn.Parameter(data.x)
    data.edge_attr = nn.Parameter(data.edge_attr)
    return data


def train_features(make, optimizer, sparse=False):
    data = make_embedded_data()
    steps = optimizer([data.x, data.edge_attr])
    for batch in make(data):
        steps.zero_grad()
        messages = batch.x[batch.edge_index[0]] * batch.edge_attr.sum(dim=1, keepdim=True)
        loss = (
            torch.zeros_like(batch.x).index_add(0, batch.edge_index[1], messages).pow(2).mean() + batch.x.exp().mean()
        )
        loss.backward()
        assert data.x.grad.is_sparse == sparse
        steps.step()
    return data.x.detach(), data.edge_attr.detach()


def test_trained_features_that_cannot_be_right_are_refused():
    class Endless:
        def __iter__(self):
            return iter([[0], [1]])

    data = make_embedded_data()
    with pytest.raises(ValueError, match=r"data\.x requires gradients, but the batch_sampler has no __len__"):
        NodeLoader(data, SAMPLER, batch_sampler=Endless())
    data.x = nn.Parameter(torch.zeros(400))
    with pytest.raises(ValueError, match=r"sparse_grad=True requires row-wise data, but the trainable data\.x"):
        make_loader(data, sparse_grad=True)


# -- forks


def _send_next(iterator, queue):
    try:
        next(iterator)
        queue.put("went on")
    except RuntimeError as error:
        queue.put(str(error))


@pytest.mark.parametrize("kind", ["plain", "collective"])
def test_an_iterator_does_not_hang_in_a_fork(kind):
    if kind == "plain":
        ours = make_loader(num_workers=2)
    else:
        batching = CollectiveBatching(plan=CollectivePlan("cpu", 1, 2))
        ours = NodeLoader(DATA, SAMPLER, batch_size=50, num_workers=2, prefetcher=batching)
    iterator = iter(ours)
    next(iterator)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_send_next, args=(iterator, queue), daemon=True)
    process.start()
    try:
        assert "is a fork of it" in queue.get(timeout=PATIENCE)
        process.join(PATIENCE)
        assert process.exitcode == 0
    finally:
        process.kill()
    assert len(list(iterator)) == 7
