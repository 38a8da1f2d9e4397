"""Buffers that ranks have written are synchronized to the values that one process would compute."""

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn.distributed.buffer_sync import BufferSync, no_side_effects
from lightning_gnn.distributed.module_tree import map_buffers, named_parts
from tests.full_graph import launch
from tests.hyscale.ranks import joined

SEEDS = [3, 1]


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        zeros = {
            "history": torch.zeros(6, 2, dtype=torch.float64),
            "mean": torch.full((3,), 4.0),
            "scalar": torch.tensor(2.0),
            "counter": torch.tensor(7),
            "total": torch.tensor(10),
            "histogram": torch.zeros(4, dtype=torch.int64),
            "twice": torch.zeros(2, dtype=torch.int32),
            "visited": torch.zeros(5, dtype=torch.bool),
            "flag": torch.tensor(True),
            "empty": torch.zeros(0, 3),
            "halves": torch.ones(2, 2, dtype=torch.float16),
            "cube": torch.zeros(2, 2, 2),
            "odd": torch.full((2,), float("nan")),
            "untouched": torch.arange(3.0),
            "data": torch.zeros(2),
        }
        for name, value in zeros.items():
            self.register_buffer(name, value)
        self.norm = nn.BatchNorm1d(2)


def test_a_walk_without_hashing_finds_what_torch_finds():
    module, shared = Buffers(), nn.BatchNorm1d(3)
    module.nested = nn.ModuleList([nn.Sequential(shared, nn.Linear(2, 2)), shared, MulticlassAccuracy(3)])
    module.nothing, shared.again = None, module.norm
    module.register_module("none", None)
    shared.register_buffer("same", module.data)
    assert [*named_parts(module)] == [*module.named_modules()]
    assert [*map_buffers(module)] == [name for name, _ in module.named_buffers()]
    assert all(buffer is module.get_buffer(name) for name, buffer in map_buffers(module).items())


def change_all_buffers(rank):
    """Run one step with each kind of buffer."""
    module = Buffers()
    with joined():
        shared = BufferSync(module)
        assert not shared.has_changed()
        before = {name: (buffer, buffer.data_ptr()) for name, buffer in module.named_buffers()}
        rows = [[0, 1, 2], [2, 5]][rank]
        module.history[rows] = torch.full((len(rows), 2), 1.0 + rank, dtype=torch.float64)
        module.mean.mul_(0.5).add_([1.0, 3.0][rank])
        module.scalar.fill_([1.0, 3.0][rank])
        module.counter += 1  # counts steps
        module.total += SEEDS[rank]  # counts seeds
        module.histogram += torch.tensor([[2, 1, 0, 0], [0, 0, 0, 1]][rank])
        module.twice[rank] += 5
        module.visited[[[0, 1], [1, 4]][rank]] = True
        if rank == 1:
            module.flag.fill_(False)
            module.cube[1, 0, 1] = 9
        module.empty.add_(1)
        module.halves[rank] = 0.5
        module.odd[0] = module.odd[0]  # NaN as before
        module.data.data[rank] = 3.0  # in-place through .data, which torch does not track
        module.norm(torch.tensor([[[1.0, 2], [3, 4], [5, 9]], [[4.0, 2], [0, 0]]][rank]))
        assert shared.has_changed()
        own = {name: buffer.clone() for name, buffer in module.named_buffers()}
        shared.synchronize(SEEDS)
        assert not shared.has_changed()
        assert before == {name: (buffer, buffer.data_ptr()) for name, buffer in module.named_buffers()}
        shared.synchronize(SEEDS)  # no change since the last call
        return own, dict(module.named_buffers())


@pytest.mark.medium
def test_every_kind_of_buffer():
    (first, found), (second, other) = launch.run(change_all_buffers, 2)
    assert found.keys() == other.keys()
    for name, value in found.items():
        assert torch.equal(value.nan_to_num(77), other[name].nan_to_num(77)), name
    weighted = {name: (3 * first[name] + second[name]) / 4 for name in ("mean", "scalar", "norm.running_mean")}
    expected = {
        "history": torch.tensor([[1.0] * 2, [1.0] * 2, [1.25] * 2, [0] * 2, [0] * 2, [2.0] * 2], dtype=torch.float64),
        "counter": torch.tensor(8),
        "total": torch.tensor(14),
        "histogram": torch.tensor([2, 1, 0, 1]),
        "twice": torch.tensor([5, 5], dtype=torch.int32),
        "visited": torch.tensor([True, True, False, False, True]),
        "flag": torch.tensor(False),
        "halves": torch.full((2, 2), 0.5, dtype=torch.float16),
        "cube": torch.zeros(2, 2, 2).index_put((torch.tensor(1), torch.tensor(0), torch.tensor(1)), torch.tensor(9.0)),
        "untouched": torch.arange(3.0),
        "data": torch.tensor([3.0, 3.0]),
        "norm.num_batches_tracked": torch.tensor(1),
        **weighted,
        "norm.running_var": (3 * first["norm.running_var"] + second["norm.running_var"]) / 4,
    }
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.allclose(found[name].double(), value.double(), rtol=1e-6), name
    assert bool(found["odd"].isnan().all())


def count_equally(rank, seeds):
    """Counters to which both ranks add the same: steps, equal numbers of seeds, and no seeds on one rank."""
    module = nn.Module()
    module.register_buffer("steps", torch.tensor(0))
    module.register_buffer("seen", torch.tensor(0))
    with joined():
        shared = BufferSync(module)
        for _ in range(3):
            if seeds[rank]:
                module.steps += 1
                module.seen += seeds[rank]
            shared.synchronize(seeds)
        return int(module.steps), int(module.seen)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [[4, 4], [4, 2], [4, 0], [0, 4]], ids=str)
def test_counters_of_steps_and_of_seeds(seeds):
    assert launch.run(count_equally, 2, seeds) == [(3, 3 * sum(seeds))] * 2


def replace_buffers(rank):
    """Buffers that both ranks register, enlarge or replace."""
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(2))
    module.register_buffer("best", torch.zeros(3))
    with joined():
        shared = BufferSync(module)
        module.register_buffer("late", torch.ones(2) * (1 + rank))
        module.queue = torch.ones(4) * (1 + rank)
        module.best = torch.tensor([0.0, 0.0, 5.0]) if rank == 0 else module.best
        shared.synchronize([1, 3])
        return dict(module.named_buffers())


@pytest.mark.medium
def test_new_buffers_and_those_of_another_shape_on_all_ranks():
    for found in launch.run(replace_buffers, 2):
        assert torch.equal(found["late"], torch.full((2,), 1.75))
        assert torch.equal(found["queue"], torch.full((4,), 1.75))
        assert torch.equal(found["best"], torch.tensor([0.0, 0.0, 5.0]))


def reshape_on_one_rank(rank, which):
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(2))
    with joined():
        shared = BufferSync(module)
        if rank == which:
            module.queue = torch.ones(3)
        with pytest.raises(RuntimeError, match="the buffer queue has a different shape on rank"):
            shared.synchronize([1, 1])


@pytest.mark.medium
@pytest.mark.parametrize("which", [0, 1])
def test_a_shape_of_one_rank_alone_is_refused_by_all(which):
    launch.run(reshape_on_one_rank, 2, which)


def test_a_step_that_does_not_count_leaves_no_trace():
    module = Buffers()
    module.accuracy = MulticlassAccuracy(3)
    module.accuracy(torch.tensor([0, 1]), torch.tensor([0, 2]))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    states = {name: getattr(module.accuracy, name).clone() for name in module.accuracy._defaults}
    value, buffers = module.accuracy.compute(), dict(module.named_buffers())
    for error in (None, KeyError):
        try:
            with no_side_effects(module):
                module.norm(torch.randn(4, 2))
                module.counter += 1
                module.history[0] = float("nan")
                module.mean = module.mean * 2
                module.cube = torch.ones(7)
                module.total.resize_(3)
                module.accuracy(torch.tensor([0, 1]), torch.tensor([0, 1]))
                if error:
                    raise error
        except KeyError:
            assert error
        assert all(
            torch.equal(value.nan_to_num(7), before[name].nan_to_num(7)) for name, value in module.named_buffers()
        )
        assert all(torch.equal(getattr(module.accuracy, name), state) for name, state in states.items())
        assert module.accuracy.compute() == value
        assert module.accuracy._update_count == 1
        assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
