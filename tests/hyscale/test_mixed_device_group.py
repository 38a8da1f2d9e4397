"""Ranks on unlike devices add up, tell one another numbers, and become alike; CPUs stand for the accelerators."""

import functools

import pytest
import torch
import torch.distributed as dist

from lightning_gnn.distributed.gradient_reducer import GradientReducer
from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup
from tests.full_graph import launch
from tests.hyscale.ranks import joined

CPU = torch.device("cpu")


def groups_used(monkey):
    """Note the size of the group of each all-reduce."""
    used, original = [], dist.all_reduce

    def all_reduce(tensor, *args, group=None, **kwargs):
        used.append(dist.get_world_size(group))
        return original(tensor, *args, group=group, **kwargs)

    monkey.setattr(dist, "all_reduce", all_reduce)
    return used


def add_up(rank, accelerators):
    found = {}
    with joined(), pytest.MonkeyPatch.context() as monkey:
        group = MixedDeviceGroup([CPU] * dist.get_world_size(), accelerators, rank)
        used = groups_used(monkey)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
            tensor = torch.arange(6, dtype=dtype).reshape(2, 3) + 10 * rank
            group.all_reduce_sum(tensor)
            found[dtype] = tensor
        found["dense"] = tuple(used)
        index = torch.tensor([[rank, 4]])
        sparse = torch.sparse_coo_tensor(index, torch.ones(2, 2), (5, 2), check_invariants=True).coalesce()
        group.all_reduce_sum(sparse)
        found["sparse"] = sparse.to_dense()
        weight = torch.nn.Parameter(torch.zeros(3))
        weight.grad = torch.full((3,), 3.0 * (rank + 1))
        GradientReducer(group.size, group.all_reduce_sum).reduce([weight])
        found["mean"] = weight.grad
    return found


@pytest.mark.parametrize("accelerators", [[], [0], [0, 1], [1, 2], [0, 1, 2]], ids=str)
def test_sums_over_all_ranks(accelerators):
    results = launch.run(add_up, 3, accelerators)
    near = 1 < len(accelerators) < 3
    for rank, found in enumerate(results):
        for dtype, tensor in ((kind, value) for kind, value in found.items() if isinstance(kind, torch.dtype)):
            assert torch.equal(tensor, (torch.arange(6) * 3 + 30).reshape(2, 3).to(dtype))
        # Accelerators among themselves, then the first of them with the others.
        leads = near and rank == accelerators[0]
        assert found["dense"] == 5 * ((2, 2) if leads else (2,) if near else (3,))
        expected = torch.ones(5, 2)
        expected[3], expected[4] = 0, 3
        assert torch.equal(found["sparse"], expected)
        assert torch.equal(found["mean"], torch.full((3,), 6.0))


def tell(rank):
    with joined():
        group = MixedDeviceGroup([CPU] * dist.get_world_size(), [0, 1], rank)
        huge = 2.0**53 - rank  # times and counts must not lose digits
        mixed = [
            rank,
            torch.tensor(0.1, dtype=torch.float64),
            True,
            torch.tensor([huge], dtype=torch.float64),
            torch.tensor(float("nan")),
            -1.5,
        ]
        return (
            group.all_gather_floats(mixed),
            group.all_gather_floats([rank / 3]),
            group.all_gather_objects({"rank": rank}),
        )


def test_tables_of_numbers_and_objects():
    results = launch.run(tell, 3)
    for mixed, numbers, objects in results:
        assert [row[:4] + row[5:] for row in mixed] == [[rank, 0.1, 1.0, 2.0**53 - rank, -1.5] for rank in range(3)]
        assert all(row[4] != row[4] for row in mixed)
        assert numbers == [[0.0], [1 / 3], [2 / 3]]
        assert objects == [{"rank": rank} for rank in range(3)]


class Told:
    """A piggyback that notes what all tell, and halves the gradients."""

    def __init__(self, group, row):
        self.group, self.row, self.rows = group, row, []

    def write(self, like):
        return self.group.encode_for_sum(self.row, like)

    def read(self, sums):
        self.rows.append(self.group.decode_from_sum(sums))
        return 0.5


def ride(rank):
    found = []
    with joined():
        group = MixedDeviceGroup([CPU] * dist.get_world_size(), [], rank)
        mean = GradientReducer(group.size, group.all_reduce_sum)
        row = [rank, torch.tensor(0.1, dtype=torch.float64), -1e-300 * rank, 2.0**53 - rank, 1e300, float("inf")]
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            weights = [torch.nn.Parameter(torch.zeros(3, dtype=each)) for each in (dtype, dtype, torch.float64)]
            for weight in weights[rank:]:
                weight.grad = torch.full_like(weight, rank + 1.0)
            told = Told(group, row)
            mean.reduce(weights, piggyback=told)
            found.append((told.rows, [weight.grad.tolist() for weight in weights]))
        only, told = torch.nn.Parameter(torch.zeros(2)), Told(group, row)
        if rank == 1:
            only.grad = torch.tensor([4.0, -0.1])
        mean.reduce([only], piggyback=told, all_reduce=functools.partial(group.broadcast_from, source=1))
        return found, told.rows, only.grad.tolist()


def test_numbers_ride_with_the_gradients_and_lose_no_digit():
    expected = [[rank, 0.1, -1e-300 * rank, 2.0**53 - rank, 1e300, float("inf")] for rank in range(3)]
    for found, of_one, only in launch.run(ride, 3):
        for rows, gradients in found:
            assert rows == [expected]  # with the first gradients alone
            assert gradients == [[pytest.approx(part / 6, rel=1e-2)] * 3 for part in (1, 3, 6)]
        assert of_one == [[[0.0] * 6, expected[1], [0.0] * 6]]
        assert only == pytest.approx([4 / 6, -0.1 / 6])


def copy(rank):
    with joined():
        group = MixedDeviceGroup([CPU] * dist.get_world_size(), [], rank)
        no_drift = group.broadcast_from_rank0([torch.arange(4.0)])
        weight = torch.nn.Parameter(torch.tensor([[1.0, -8.0], [2.0, 4.0 + 2 * rank]]))
        half = torch.tensor([1.0, 2.0], dtype=torch.float16) + rank
        steps, flag, empty = torch.tensor(5 + rank), torch.tensor([rank == 0]), torch.zeros(0, 3)
        strided = torch.zeros(3, 2).t()
        strided += rank
        sparse = torch.sparse_coo_tensor([[0]], [1.0 + rank], (2,), check_invariants=True)
        tensors = [weight, half, steps, flag, empty, strided, sparse]
        places = [tensor.data_ptr() for tensor in tensors[:-1]]
        drift = group.broadcast_from_rank0([weight])
        group.broadcast_from_rank0(tensors)
        assert places == [tensor.data_ptr() for tensor in tensors[:-1]]
        assert (weight.requires_grad, weight.is_leaf) == (True, True)
        odd = torch.tensor([float("nan"), 1.0]) if rank == 0 else torch.tensor([0.0, 1.0])
        group.broadcast_from_rank0([odd])
        return no_drift, drift, [tensor.detach() for tensor in tensors[:-1]], odd


def test_copies_of_rank_0_and_how_far_the_others_had_parted():
    for rank, (no_drift, drift, tensors, odd) in enumerate(launch.run(copy, 2)):
        assert no_drift == 0.0
        assert drift == (0.25 if rank else 0.0)  # 2 of 8
        weight, half, steps, flag, empty, strided = tensors
        assert torch.equal(weight, torch.tensor([[1.0, -8.0], [2.0, 4.0]]))
        assert torch.equal(half, torch.tensor([1.0, 2.0], dtype=torch.float16))
        assert (int(steps), bool(flag), empty.shape) == (5, True, (0, 3))
        assert torch.equal(strided, torch.zeros(2, 3))
        assert torch.equal(odd.nan_to_num(7), torch.tensor([7.0, 1.0]))
