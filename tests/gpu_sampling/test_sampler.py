"""The GPU sampler yields the CPU's mini-batches; without a GPU, Triton's interpreter stands in for it."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.features import FeatureTable
from lightning_gnn.gpu_sampling.sampler import MODES, PersistentNeighborSampler
from lightning_gnn.graph import CSCGraph
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batch_checks import assert_same_batches
from tests.batching_data import small_data
from tests.sampling.cases import GRAPHS, WRITES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same_samples(ours, theirs, seeds, key, first=0):
    """Assert that both samplers return the same samples in the same order."""
    a, b = ours._sample(seeds, None, key, first), theirs._sample(seeds, None, key, first)
    for name in ("node", "row", "col", "edge", "batch"):
        found, expected = getattr(a, name), getattr(b, name)
        assert expected is None if found is None else torch.equal(found.cpu(), expected)
    assert (a.num_sampled_nodes, a.num_sampled_edges) == (b.num_sampled_nodes, b.num_sampled_edges)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", ["device", "pinned"])
@pytest.mark.parametrize("disjoint", [False, True])
def test_samples_equal_the_cpus(mode, topology, disjoint):
    data = small_data(num_nodes=60, num_edges=400)
    seeds = torch.tensor([3, 17, 3, 59])
    ours = PersistentNeighborSampler(
        data, [4, 2], disjoint=disjoint, seed=1, device=DEVICE, topology=topology, mode=mode, fetch_size=3
    )
    theirs = NeighborSampler(data, [4, 2], disjoint=disjoint, seed=1)
    for key, first in ((1, 0), (-5, 11)):
        assert_same_samples(ours, theirs, seeds, key, first)


@pytest.mark.medium
@pytest.mark.parametrize("num_hot", [0, 7, 60])
def test_hot_adjacency_lists_change_nothing(num_hot):
    data = small_data(num_nodes=60, num_edges=400)
    graph = CSCGraph.from_data(data)
    hot = torch.argsort(graph.in_degrees, descending=True)[:num_hot]
    for mode in ("fused", "persistent"):
        ours = PersistentNeighborSampler(data, [3, -1], device=DEVICE, topology="pinned", mode=mode, hot_nodes=hot)
        seeds = torch.arange(0, 60, 7)
        assert_same_samples(ours, NeighborSampler(data, [3, -1]), seeds, 4)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_links_are_predicted_on_samples_of_the_gpu(num_workers):
    data = GRAPHS["typed"]()
    options = {"neg_sampling": "binary", "batch_size": 4, "seed": 3, "num_workers": num_workers}
    samplers = [
        kind(data, [3], exclude_seed_edges=True, **more)
        for kind, more in ((PersistentNeighborSampler, {"device": DEVICE}), (NeighborSampler, {}))
    ]
    tables = {(name, "x"): FeatureTable(data[name].x).to(DEVICE) for name in ("paper", "author")}
    edges = (WRITES, data[WRITES].edge_index[:, :8])
    ours = LinkDataModule(data, edges, link_sampler=samplers[0], tables=tables, **options).train_dataloader()
    assert_same_batches(ours, LinkDataModule(data, edges, link_sampler=samplers[1], **options).train_dataloader())
    assert {store.x.device.type for batch in ours for store in batch.node_stores if "x" in store} == {DEVICE}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_samples_the_same():
    data = small_data()
    with pytest.warns(UserWarning, match="No GPU for the persistent sampler"):
        ours = PersistentNeighborSampler(data, [4, 2], seed=1)
    assert_same_samples(ours, NeighborSampler(data, [4, 2], seed=1), torch.arange(9), 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topology": "disk"}, ValueError, "topology='disk' is unknown"),
        ({"topology": "shard"}, ValueError, "use PersistentSamplerDataModule"),
        ({"fetch_size": 0}, ValueError, "fetch_size must be at least 1"),
        ({"mode": "quick"}, ValueError, "unknown sampling mode 'quick'"),
        ({"hot_nodes": torch.tensor([400]), "topology": "pinned"}, IndexError, "400"),
        ({"hot_nodes": torch.tensor([4]), "weight_attr": "edge_weight"}, ValueError, "homogeneous graphs without"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        PersistentNeighborSampler(small_data(), **{"num_neighbors": [2], "device": DEVICE, **options})


def test_bad_seeds_are_named():
    sampler = PersistentNeighborSampler(small_data(), [2], device=DEVICE)
    with pytest.raises(IndexError, match="seeds hold node 400, but the graph has 400 nodes"):
        sampler._sample(torch.tensor([400]), None, 1)


def test_refused_page_locked_memory_is_said_with_its_size(monkeypatch):
    from lightning_gnn.features.memory_pool import pinned

    class Refusing:
        def pin_memory(self):
            raise RuntimeError("CUDA error: out of memory\nand more")

    with pytest.raises(RuntimeError, match=r"page-locked memory for the topology, 3\.00 GB, was refused .*ulimit"):
        pinned(Refusing(), 3_000_000_000, torch.device("cuda"), "the topology")


def test_a_graph_too_large_for_the_device_stays_in_host_memory(monkeypatch):
    from lightning_gnn.features.memory_pool import choose_place

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    assert choose_place("auto", 10**8, torch.device("cuda"), "it") == "device"
    with pytest.warns(UserWarning, match=r"it takes 0\.60 GB, more than half of the 1\.00 GB free"):
        assert choose_place("auto", 6 * 10**8, torch.device("cuda"), "it") == "pinned"
