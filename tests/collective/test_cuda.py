"""Collective batching with a real device: streams, page-locked memory, reads over PCIe."""

import gc

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data import Data

from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.runtime.timeline import Timeline
from tests.gpu_sampling.test_datamodule import assert_same_content
from tests.sampling.test_node_datamodule import Model, make_trainer
from tests.sampling.test_typed import collect_contents, typed_data

pytestmark = [
    pytest.mark.usefixtures("no_thread_left"), pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip
SIZES = {"num_neighbors": [10, 5], "batch_size": 256, "seed": 3}
COLLECTIVE = CollectivePlan("collective", 4, 3)
PLANS = [COLLECTIVE, CollectivePlan("cpu", 1, 4), CollectivePlan("gpu", 1, 0)]
PLACES = [
    {"topology": "device", "features": "device"},
    {"topology": "pinned", "features": "pinned"},
    {"topology": "pinned", "features": "pinned", "cache_bytes": 500_000},
]


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    num_nodes, num_edges = 20_000, 400_000
    hubs = (torch.rand(num_edges, generator=generator) ** 3 * num_nodes).long()
    graph = Data(
        x=torch.randn(num_nodes, 12, generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        edge_index=torch.stack([hubs, torch.randint(num_nodes, (num_edges,), generator=generator)]),
        edge_attr=torch.randn(num_edges, 2, generator=generator),
    )
    graph.train_mask = torch.rand(num_nodes, generator=generator) < 0.5
    graph.val_mask = ~graph.train_mask
    return graph


@pytest.fixture(scope="module")
def epochs(data):
    """Return the mini-batches of two epochs, prepared by the CPU only."""
    loader = NeighborDataModule(data, **SIZES).train_dataloader()
    return [list(loader) for _ in range(2)]


@pytest.fixture(scope="module")
def plain(epochs):
    return epochs[0]


def make_loader(data, plan=COLLECTIVE, **kwargs):
    return CollectiveDataModule(data, plan=plan, **{**SIZES, "num_workers": 3, **kwargs})


def test_the_published_schedule_trains_the_same_mini_batches(data, plain):
    loader = make_loader(data, schedule="paper").train_dataloader()
    batches, numbers = list(loader), loader.prefetcher.trained
    assert sorted(numbers) == list(range(len(plain)))
    for batch, number in zip(batches, numbers, strict=True):
        assert_same_content(batch, plain[number])


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.mode)
@pytest.mark.parametrize("places", PLACES, ids=lambda places: "-".join(map(str, places.values())))
def test_batches_that_are_kept_equal_those_of_the_cpu(data, epochs, places, plan):
    loader = make_loader(data, plan, **places).train_dataloader()
    for plain in epochs:
        batches = list(loader)
        for batch, expected in zip(batches, plain, strict=True):
            assert batch.x.is_cuda
            assert batch.edge_index.is_cuda
            assert_same_content(batch, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"time_attr": "time"},
        {"weight_attr": "weight", "subgraph_type": "induced"},
        {"sampling": "labor", "batch_dependency": 2},
        {"subgraph_type": "bidirectional"},
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.mode)
def test_batches_of_every_kind_equal_those_of_the_cpu(options, plan):
    options = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 3, **options}
    places = {"topology": "pinned", "features": "pinned", "cache_bytes": 20_000}
    ours = CollectiveDataModule(typed_data(), plan=plan, num_workers=2, **options, **places)
    theirs = NeighborDataModule(typed_data(), **options)
    for name in ("train_dataloader", "val_dataloader"):
        for a, b in zip(getattr(ours, name)(), getattr(theirs, name)(), strict=True):
            assert collect_contents(a) == collect_contents(b)
            assert all(part.x.is_cuda for part in a.node_stores if "x" in part)
            assert all(part.edge_index.is_cuda for part in a.edge_stores)


def test_batches_are_whole_when_the_model_reads_them_at_once(data, plain):
    loader = make_loader(data, topology="pinned", features="pinned").train_dataloader()
    expected = torch.stack([batch.x.sum(dim=0) for batch in plain])
    sums = []
    weight = torch.eye(12, device="cuda")
    for batch in loader:
        x = batch.x
        for _ in range(20):  # so that the host runs ahead of the busy device
            x = x @ weight
        sums.append(x.sum(dim=0))
        del batch, x
    torch.testing.assert_close(torch.stack(sums).cpu(), expected, rtol=1e-3, atol=1e-2)


def test_host_memory_is_page_locked_and_goes_round(data):
    loader = make_loader(data).train_dataloader()
    for _ in range(2):
        for _ in loader:
            pass
    ring = loader.prefetcher.ring
    assert ring.pins
    assert loader.prefetcher.routes._stream is not None
    assert 0 < ring.num_slots == len(ring._idle) <= ring.capacity == COLLECTIVE.cpu_buffer_size + 3
    assert all(block.is_pinned() for slot in ring._idle for block in slot._blocks.values())
    loader.prefetcher.close()
    assert ring.num_slots == 0


def test_transfers_and_reads_do_not_overlap_on_the_bus(data, plain):
    loader = make_loader(data, topology="pinned", features="pinned").train_dataloader()
    list(loader)  # compile kernels
    loader.prefetcher.timeline = Timeline()
    for batch in loader:
        batch.x @ batch.x.t()
    intervals = loader.prefetcher.timeline.intervals
    by = {stage: {i.batch: i for i in intervals if i.stage == stage} for stage in {i.stage for i in intervals}}
    assert set(by) == {"cpu_batching", "dma", "gpu_batching", "uva", "model"}
    assert sorted([*by["dma"], *by["uva"]]) == sorted(by["model"]) == list(range(len(plain)))
    assert set(by["cpu_batching"]) == set(by["dma"])
    slack = 1e-4  # the resolution of events, and the offset between two clocks
    for transfer in by["dma"].values():
        assert by["cpu_batching"][transfer.batch].end <= transfer.end + slack
        assert transfer.end <= by["model"][transfer.batch].start + slack
        for read in by["uva"].values():
            assert transfer.end <= read.start + slack or read.end <= transfer.start + slack


def test_training_measures_plans_and_trains_the_same_batches(data):
    def fitted(module):
        pl.seed_everything(1, verbose=False)
        model = Model()
        make_trainer(max_epochs=3, accelerator="gpu", devices=1).fit(model, module)
        return model.history

    options = {"profile_batches": 5, "gpu_buffer_size": 4, "topology": "pinned", "features": "pinned"}
    module = make_loader(data, "auto", **options)
    found, expected = fitted(module), fitted(NeighborDataModule(data, **SIZES))
    times = module.plan.times
    assert all(getattr(times, stage).mean > 0 for stage in ("cpu_batching", "dma", "gpu_batching", "uva", "model"))
    assert times.cpu_workers == 3
    content = [[step[1:3] for step in history] for history in (found, expected)]
    assert content[0] == content[1]


@pytest.mark.parametrize("taken", [1, 6])
def test_stopping_early_frees_the_device(data, taken):
    loader = make_loader(data, CollectivePlan("collective", 8, 4)).train_dataloader()
    list(loader)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    del iterator
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    loader.prefetcher.close()


def test_an_error_on_the_device_reaches_the_caller(data):
    def bad(batch):
        if batch.x.is_cuda:
            raise RuntimeError("the transform failed")
        return batch

    loader = make_loader(data, transform=bad).train_dataloader()
    with pytest.raises(RuntimeError, match="the transform failed"):
        list(loader)


def test_sparse_matrices_arrive_whole(data, plain):
    def sparse(batch):
        shape = (batch.num_nodes, batch.num_nodes)
        weight = batch.edge_attr[:, 0].contiguous()
        batch.adjacency = torch.sparse_coo_tensor(batch.edge_index, weight, shape).coalesce().to_sparse_csr()
        return batch

    expected = [sparse(batch.clone()).adjacency for batch in plain]
    loader = make_loader(data, transform=sparse).train_dataloader()
    for batch, adjacency in zip(loader, expected, strict=True):
        assert batch.adjacency.is_cuda
        assert torch.equal(batch.adjacency.crow_indices().cpu(), adjacency.crow_indices())
        assert torch.equal(batch.adjacency.col_indices().cpu(), adjacency.col_indices())
        torch.testing.assert_close(batch.adjacency.values().cpu(), adjacency.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_first_has_all_to_itself(data, plain):
    device = torch.device("cuda", 1)
    with torch.cuda.device(device):
        loader = make_loader(data, device=device, topology="pinned", features="pinned").train_dataloader()
        for batch, expected in zip(loader, plain, strict=True):
            assert batch.x.device == batch.edge_index.device == device
            assert_same_content(batch, expected)
    assert loader.prefetcher.routes.recorder.clock.device == loader.prefetcher.routes._stream.device == device
