"""Device batches leave no tensor on the host and need no synchronization, checked with tensors without values."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling import pipeline as module
from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.loading import BatchTask, NodeLoader
from lightning_gnn.runtime import devices
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data

GPU = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")


class WaitCounter(TorchDispatchMode):
    """Counts operations that make the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        before = {value.device.type for value in given}
        name = function.overloadpacket.__name__
        moves = name in ("_to_copy", "copy_", "to")
        if "cuda" in before and name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item"):
            self.found.append(name)
        out = function(*args, **kwargs)
        after = {value.device.type for value in tree_leaves(out) if isinstance(value, torch.Tensor)}
        if (
            moves
            and len(before | after) > 1
            and not (kwargs.get("non_blocking") or any(value is True for value in args))
        ):
            self.found.append(f"{name} from {sorted(before)} to {sorted(after)}")
        return out


class Sampler(NeighborSampler):
    """Returns a sample of known sizes, as a GPU does once the sizes are copied."""

    can_begin = True

    def bulk_size(self, wanted):
        return 1

    def begin(self, seeds, sizes, keys, share, first):
        assert seeds.device == GPU
        return self

    def is_ready(self):
        return True

    def end(self, begun):
        from torch_geometric.sampler import SamplerOutput

        node, row, col, edge = (torch.empty(n, dtype=torch.int64, device=GPU) for n in (25, 30, 30, 30))
        return [SamplerOutput(node, row, col, edge, None, [10, 15], [30])]


@pytest.mark.parametrize("order", ["torch's", "the user's"])
def test_batches_are_born_on_the_device_and_nobody_waits(monkeypatch, order):
    data = small_data()
    sampler = Sampler(data, [3])
    # A copy from page-locked memory is asynchronous.
    monkeypatch.setattr(module, "to_device_async", lambda tensor, device: tensor.to(device, non_blocking=True))
    monkeypatch.setattr(devices, "works", lambda attempt: False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # torch 2.8 moves only fake tensors to a device that is not there.
        placed = data.clone()
        tables = {
            "x": FeatureTable(mode.from_tensor(data.x).to(GPU)),
            "edge_attr": FeatureTable(mode.from_tensor(data.edge_attr).to(GPU)),
        }
        for name in {*placed.keys()} - {"x", "edge_attr", "edge_index"}:
            placed[name] = mode.from_tensor(placed[name]).to(GPU)
        batches = {"batch_sampler": [[*range(10)]] * 3} if order == "the user's" else {"batch_size": 10}
        stages = partial(DevicePipeline, device=GPU)
        loader = NodeLoader(placed, sampler, **batches, tables=tables, seed=1, pipeline=stages)
        pipeline = loader.pipeline
        pipeline._device_seeds = mode.from_tensor(loader.input_data.node).to(GPU), None  # as after the first mini-batch
        there = (torch.empty(10, dtype=torch.int64, device=GPU) for _ in range(2))
        tasks = (
            list(loader.tasks(0)) if order == "the user's" else [BatchTask(0, n, ids) for n, ids in enumerate(there)]
        )
        with WaitCounter() as waits:
            sampled = [one for task in tasks[:2] for one in pipeline.result(pipeline.launch([task]))]
            batches = [pipeline.finish(pipeline.gather(one)) for one in sampled]
    assert waits.found == []
    for batch in batches:
        tensors = {key: value for key, value in batch if isinstance(value, torch.Tensor)}
        assert set(tensors) >= {"x", "y", "n_id", "e_id", "input_id", "edge_index"}
        assert {key for key, value in tensors.items() if value.device != GPU} == set()
        assert batch.batch_size == 10


def test_a_blocking_copy_and_a_look_at_a_number_are_found():
    with FakeTensorMode(allow_non_fake_inputs=True), WaitCounter() as waits:
        there = torch.arange(3).to(GPU)
        torch.arange(3).to(GPU, non_blocking=True)
        with pytest.raises(Exception, match=r"item|_local_scalar_dense"):
            there.sum().item()
    assert waits.found[0].startswith("_to_copy from ['cpu'] to ['cuda']")
    assert waits.found[1:] == ["_local_scalar_dense"]
