"""GPU prefetching is ordered: no use before an event, no reuse in flight, no wait of the host."""

import re
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.gpu_sampling import shards
from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.graph import CSCGraph
from lightning_gnn.hyscale.costs import split_seeds
from lightning_gnn.hyscale.sharded_loader import ShardedBatchSampler, ShardedDataLoader
from lightning_gnn.hyscale.staged_prefetcher import PipelineSettings
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.triton_kernels import sample, sample_bulk
from tests.batching_data import small_data
from tests.event_simulator import Simulator
from tests.gpu_sampling.test_datamodule import assert_same_content
from tests.hyscale.staging import make_staged_loader

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
SIZES = {"num_neighbors": [2, 2], "batch_size": 2, "seed": 3}


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """Sample by one launch and copy by another, as on a GPU; Triton's interpreter would take seconds."""
    if "interpreter" in request.node.name:
        return

    def launch(batch):
        simulator = Simulator.at_work
        own = batch.scratch
        scratch = [own.src, own.col, own.eid, own.nodes, own.rowptr, own.state]
        simulator.work([batch.seeds, own.control, *scratch], [own.sizes, *scratch], simulator.kernel_s)
        with simulator.pause():
            graph = CSCGraph.from_csc(*batch.sampler.graph[:2])
            parts = zip(pairwise(getattr(batch, "starts", [0, None])), getattr(batch, "keys", [batch.key]), strict=True)
            batch.made = [sample_neighbors(graph, batch.seeds[a:b], batch.fanouts, key) for (a, b), key in parts]
            own.sizes.zero_()
            own.sizes[1] = sum(made.node.numel() for made in batch.made)

    def emit(batch, sizes):
        simulator = Simulator.at_work
        assert sizes[1] == sum(made.node.numel() for made in batch.made)
        found = []
        for made in batch.made:
            parts = [torch.empty_like(part) for part in made[:3]]
            own = batch.scratch
            simulator.work([own.nodes, own.src, own.eid, own.col], parts, simulator.operator_s)
            with simulator.pause():
                for mine, part in zip(parts, made, strict=False):
                    mine.copy_(part)
            found.append((*parts, None, *made[4:]))
        return found

    monkeypatch.setattr(sample.Batch, "launch", launch)
    monkeypatch.setattr(sample.Batch, "emit", lambda batch, sizes: emit(batch, sizes)[0])
    monkeypatch.setattr(sample_bulk.Bulk, "emit_all", emit)


def make_loader(**options):
    data = small_data(num_nodes=40, num_edges=200)
    data.train_mask = torch.arange(40) < 24
    return PersistentSamplerDataModule(data, **SIZES, device="cpu", **{"bulk": 1, **options}).train_dataloader(), data


def train(simulator, batches, seconds=400.0, launch_s=30.0):
    """Take the steps of an epoch; return copies of the mini-batches, and the peak memory of the stream."""
    seen, most = [], 0
    for batch in batches:
        tensors = [value for _, value in batch if isinstance(value, torch.Tensor)]
        with simulator.pause():
            seen.append(batch.clone())
        simulator.now += launch_s
        simulator.work(tensors, [], seconds)
        most = max(most, sum(size for name, size in simulator.live.items() if name.startswith("stream")))
        del batch, tensors
    return seen, most


def simulate_epoch(monkeypatch, options=None, **costs):
    simulator = Simulator()
    made, data = make_loader(**(options or {}))
    with simulator.install(monkeypatch):
        seen, most = train(simulator, made, **costs)
    return simulator, seen, most, data


@pytest.mark.medium
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 1}, {"bulk": 8}, {"bulk": 3, "prefetch": 1}, {"mode": "persistent"}], ids=str
)
def test_nothing_is_used_too_early_and_the_host_does_not_wait(monkeypatch, options):
    simulator, seen, _, data = simulate_epoch(monkeypatch, options)
    assert simulator.errors == []
    plain = list(NeighborDataModule(data, **SIZES).train_dataloader())
    for a, b in zip(seen, plain, strict=True):
        assert_same_content(a, b)
    assert len(simulator.streams) == 2
    # The host waits for the first mini-batch, and then only when it is two steps ahead of training.
    assert [name for name, _ in simulator.waits].count("stream 1") <= 2
    assert len(plain) == 12


@pytest.mark.medium
@pytest.mark.parametrize("options", [{"bulk": 8}, {"bulk": 3, "prefetch": 1}, {"bulk": 1, "prefetch": 3}], ids=str)
def test_a_share_of_hyscale_is_prepared_by_the_same_launches_and_stream(monkeypatch, options):
    def split(count, number):
        leads.append(number - len(shares))
        return split_seeds(count, [1, number % 3])[number % 2]

    def shard(loader):
        batches = ShardedBatchSampler(loader, split)
        batches.batches = list(loader.batch_sampler)  # the simulator would count computing it as work of the device
        return batches

    simulator, shares, leads = Simulator(), [], []
    made, data = make_loader(**options)
    with simulator.install(monkeypatch):
        seen, _ = train(simulator, ShardedDataLoader(made, shard(made), shares.append, on_stream=True))
    assert simulator.errors == []
    assert len(simulator.streams) == 2
    assert [(share.number, share.total) for share in shares] == [(number, 2) for number in range(12)]
    assert all(share.seconds["prepare"] > 0 for share in shares)
    # Decisions of hyscale take effect after the mini-batches that are begun; one more is about to be delivered.
    assert min(3, options["bulk"]) - 1 <= max(leads) <= made.prefetcher.most_ahead
    plain = NeighborDataModule(data, **SIZES).train_dataloader()
    staged = make_staged_loader(plain, shard(plain), PipelineSettings(prefetch=0))
    for ours, theirs in zip(seen, staged, strict=True):
        assert_same_content(ours, theirs)


@pytest.mark.slow
def test_nothing_is_used_too_early_under_tritons_interpreter(monkeypatch):
    simulator = Simulator()
    made, data = make_loader()
    with simulator.install(monkeypatch):
        seen, _ = train(simulator, (batch for batch, _ in zip(made, range(2), strict=False)))
    assert simulator.errors == []
    for a, b in zip(seen, NeighborDataModule(data, **SIZES).train_dataloader(), strict=False):
        assert_same_content(a, b)


class UnorderedStream:
    """Main stream that ignores events of other streams."""

    def __new__(cls, simulator):
        stream = simulator.current[-1]
        if stream is simulator.main:
            stream.wait_event = lambda event: None
        return stream


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([(Simulator, "current_stream", lambda self, device=None: UnorderedStream(self))], "main reads .*stream 1"),
        ([(Simulator, "record_stream", lambda self, tensor, stream: tensor)], "is freed, but main may still use it"),
        (
            [
                (sample.AsyncHostCopy, "array", lambda self: self.words.numpy()),
                (sample.AsyncHostCopy, "is_complete", lambda self: True),
            ],
            "the host looks into",
        ),
    ],
    ids=["a training stream that does not wait", "memory that is not recorded", "sizes that are read too early"],
)
def test_a_fault_is_found(monkeypatch, faults, said):
    for fault in faults:
        monkeypatch.setattr(*fault)
    simulator, *_ = simulate_epoch(monkeypatch)
    assert any(re.search(said, error) for error in simulator.errors)


def test_a_sampler_that_waits_where_it_is_begun_is_found(monkeypatch):
    begin = sample.TritonNeighborSampler.begin

    def waiting(self, *args, **kwargs):
        begun = begin(self, *args, **kwargs)
        begun.end()
        return begun

    monkeypatch.setattr(sample.TritonNeighborSampler, "begin", waiting)
    simulator, seen, *_ = simulate_epoch(monkeypatch)
    assert [name for name, _ in simulator.waits].count("stream 1") >= len(seen) - 1


def test_another_loader_may_sample_between(monkeypatch):
    data = small_data(num_nodes=40, num_edges=200)
    data.train_mask, data.val_mask = torch.arange(40) < 20, torch.arange(40) > 27
    module = PersistentSamplerDataModule(data, **SIZES, device="cpu")
    plain = NeighborDataModule(data, **SIZES)
    simulator = Simulator()
    with simulator.install(monkeypatch):
        training = iter(module.train_dataloader())
        seen, _ = train(simulator, [next(training)])
        held = train(simulator, module.val_dataloader())[0]  # with a mini-batch of the other in flight
        seen += train(simulator, training)[0]
    assert simulator.errors == []
    for ours, theirs in ((seen, plain.train_dataloader()), (held, plain.val_dataloader())):
        for a, b in zip(ours, theirs, strict=True):
            assert_same_content(a, b)


def test_an_epoch_is_resumed_and_dropped_with_mini_batches_under_way(monkeypatch):
    made, data = make_loader()
    plain = list(NeighborDataModule(data, **SIZES).train_dataloader())
    simulator = Simulator()
    with simulator.install(monkeypatch):
        first = iter(made)
        next(first)
        first.close()
        assert list(first) == []
        made.first_batch = lambda: 2
        made.epoch = lambda number: 0
        seen, _ = train(simulator, made)
    assert simulator.errors == []
    for a, b in zip(seen, plain[2:], strict=True):
        assert_same_content(a, b)


def test_an_error_comes_with_its_own_mini_batch(monkeypatch):
    made, _ = make_loader()
    gather, calls = DevicePipeline.gather, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("the third")
        return gather(self, *args)

    monkeypatch.setattr(DevicePipeline, "gather", failing)
    with Simulator().install(monkeypatch):
        batches = iter(made)
        assert [next(batches).batch_size for _ in range(2)] == [2, 2]
        with pytest.raises(RuntimeError, match="the third"):
            next(batches)


class TwoGPUs(shards.LocalMachine):
    """First of two processes with peer access; the second one writes its rows on a stream of its own."""

    def __init__(self, simulator, monkeypatch, mutate=lambda made: made):
        self.group, self.device, self.rank, self.size = None, torch.device("cpu"), 0, 2
        self.simulator, self.patch, self.mutate = simulator, monkeypatch, mutate

    def gather(self, value):
        return [value] * self.size

    def broadcast_first(self, make):
        return make()

    def share(self, table, shift=shards.ROW_SHIFT):
        dealt = shards.BlockCyclicLayout(table.size(0), self.size, shift)
        symmetric = self.simulator.make_allocator(lambda rank, part: dealt.copy_shard(table, rank, part), self.size)
        self.patch.setattr(shards, "allocate_symmetric", lambda *args: self.mutate(symmetric(*args)))
        return super().share(table, shift)


def simulate_two_gpus(monkeypatch, mutate=lambda made: made):
    """Train an epoch with features on two GPUs; return the mini-batches, and those of the CPU's DataModule."""
    simulator = Simulator()
    data = small_data(num_nodes=40, num_edges=200)
    data.train_mask = torch.arange(40) < 24
    machine = TwoGPUs(simulator, monkeypatch, mutate)
    monkeypatch.setattr(PersistentSamplerDataModule, "_rendezvous", lambda datamodule, device: machine)
    with simulator.install(monkeypatch):
        placed = {"device": "cpu", "bulk": 1, "topology": "device", "features": "shard"}
        made = PersistentSamplerDataModule(data, **SIZES, **placed)
        seen, _ = train(simulator, made.train_dataloader())
        simulator.main.synchronize()
        del made
    return simulator.errors, seen, list(NeighborDataModule(data, **SIZES).train_dataloader())


def test_rows_of_another_gpu_are_read_once_they_are_written(monkeypatch):
    errors, seen, wanted = simulate_two_gpus(monkeypatch)
    assert errors == []
    for a, b in zip(seen, wanted, strict=True):
        assert_same_content(a, b)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda local, addresses, barrier, held: (local, addresses, lambda: None, held),
         "reads the part of rank 1 .*, which rank 1 may not have written yet"),
        (lambda local, addresses, barrier, held: (local, addresses, barrier, None),
         "reads the part of rank 1 .*, which is not mapped any more"),
    ],
    ids=["nobody waits for the others", "the mapping is not kept"],
)  # fmt: skip
def test_a_fault_in_reading_another_gpu_is_found(monkeypatch, mutate, message):
    errors, _, _ = simulate_two_gpus(monkeypatch, lambda made: mutate(*made))
    assert any(re.search(message, error) for error in errors), errors


def test_rows_that_are_dropped_while_a_kernel_reads_them_are_found(monkeypatch):
    for waits in (False, True):
        simulator = Simulator()
        with simulator.install(monkeypatch):
            made = TwoGPUs(simulator, monkeypatch).share(torch.arange(12.0).view(6, 2))
            made.take(torch.tensor([5, 0, 3]), torch.empty(3, 2))
            if waits:
                simulator.main.synchronize()
            del made
        found = re.findall(r"part of rank 1 \S+ \S+ of host is freed, but main may still", str(simulator.errors))
        assert len(found) == (0 if waits else 1), simulator.errors
