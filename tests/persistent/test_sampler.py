"""The GPU's sampler gives the CPU's mini-batches; without a GPU, Triton's interpreter stands in for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.graph import CSCGraph, FeatureTable
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.persistent.sampler import PersistentNeighborSampler
from lightning_gnn.pyg import enable_pyg_sampling, gpu_of
from lightning_gnn.sampling.link_datamodule import LinkDataModule
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.triton_kernels.sample import MODES
from tests.batching_data import small_data
from tests.ops.test_sample import assert_equal
from tests.sampling.test_typed import WRITES, contents, typed_data
from tests.strategies import edge_indices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_cpu(sample):
    return [part.cpu() if isinstance(part, torch.Tensor) else part for part in sample]


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
        a, b = ours.draw(seeds, key, first), theirs.draw(seeds, key, first)
        assert_equal(on_cpu(a), b)
        assert torch.equal(ours.original_edges(a.edge).cpu(), theirs.original_edges(b.edge))


@pytest.mark.parametrize("num_hot", [0, 7, 60])
def test_hot_adjacency_lists_change_nothing(num_hot):
    data = small_data(num_nodes=60, num_edges=400)
    graph = CSCGraph.from_data(data)
    hot = torch.argsort(graph.in_degrees, descending=True)[:num_hot]
    for mode in ("fused", "persistent"):
        ours = PersistentNeighborSampler(data, [3, -1], device=DEVICE, topology="pinned", mode=mode, hot_nodes=hot)
        seeds = torch.arange(0, 60, 7)
        assert_equal(on_cpu(ours.draw(seeds, 4)), sample_neighbors(graph, seeds, [3, -1], 4))


def test_the_triton_backend_of_the_operator():
    graph = CSCGraph.from_edge_index(torch.randint(50, (2, 300)), 50).to(DEVICE)
    seeds = torch.arange(5)
    expected = sample_neighbors(graph.to("cpu"), seeds, [3, 3], 9)
    for options in ({"replace": False}, {"replace": True}, {"disjoint": True, "first_tree": 4}):
        expected = sample_neighbors(graph.to("cpu"), seeds, [3, 3], 9, **options)
        sample = sample_neighbors(graph, seeds.to(DEVICE), [3, 3], 9, backend="triton", **options)
        assert_equal(on_cpu(sample), expected)


def kinds():
    """Samplers that do more than to pick uniformly in a graph of one type: name, graph, options, times of seeds."""
    generator = torch.Generator().manual_seed(0)
    one = small_data(num_nodes=60, num_edges=400)
    one.time = torch.randint(50, (60,), generator=generator)
    typed = typed_data()
    return {
        "times": (one, {"time_attr": "time", "temporal_strategy": "last"}),
        "weights": (one, {"weight_attr": "edge_weight"}),
        "LABOR": (one, {"sampler": "labor", "layer_dependency": True}),
        "types": (typed, {}),
        "types with times": (typed, {"time_attr": "time", "time_window": 500}),
        "induced": (one, {"subgraph_type": "induced"}),
        "types, induced": (typed, {"subgraph_type": "induced"}),
        "types, bidirectional": (typed, {"subgraph_type": "bidirectional"}),
        "types with weights": (typed, {"weight_attr": "weight", "disjoint": True}),
        "bidirectional": (one, {"subgraph_type": "bidirectional"}),
        "induced, with weights": (one, {"subgraph_type": "induced", "weight_attr": "edge_weight"}),
        "types, induced, with weights": (typed, {"subgraph_type": "induced", "weight_attr": "weight"}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(kinds()))
def test_other_samples_equal_the_cpus(kind):
    data, options = kinds()[kind]
    topology = "pinned" if kind in ("times", "types") else "device"
    ours = PersistentNeighborSampler(data, [3, 2], seed=1, device=DEVICE, topology=topology, **options)
    theirs = NeighborSampler(data, [3, 2], seed=1, **options)
    seeds = torch.tensor([3, 17, 3, 59])
    inputs = NodeSamplerInput(seeds, seeds, input_type="paper" if isinstance(data, HeteroData) else None)
    assert_same_output(*(sampler.sample_from_nodes(inputs, key=8) for sampler in (ours, theirs)))


def assert_same_output(a, b):
    for name in ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges"):
        got, want = getattr(a, name), getattr(b, name)
        got, want = (part if isinstance(part, dict) else {"": part} for part in (got, want))
        assert list(got) == list(want)
        for key, value in want.items():
            same = torch.equal(got[key].cpu(), value) if isinstance(value, torch.Tensor) else got[key] == value
            assert same, (name, key)


@pytest.mark.parametrize("typed", [False, True])
def test_induced_subgraphs_in_evaluation_alone_have_all_edges_too(typed):
    data, options = (typed_data(), "weight") if typed else (small_data(num_nodes=60, num_edges=400), "edge_weight")
    samplers = [
        PersistentNeighborSampler(data, [3], seed=1, device=DEVICE, weight_attr=options),
        NeighborSampler(data, [3], seed=1, weight_attr=options),
    ]
    seeds = torch.tensor([3, 17, 3, 59])
    inputs = NodeSamplerInput(seeds, seeds, input_type="paper" if typed else None)
    induced = [sampler.with_options(subgraph_type="induced") for sampler in samplers]
    assert_same_output(*(sampler.sample_from_nodes(inputs, key=8) for sampler in induced))
    again = induced[0].with_options(num_neighbors=[2])
    assert again.whole_graph is induced[0].whole_graph  # and is not copied again


@settings(max_examples=25)
@given(edge_indices(max_nodes=12), st.integers(1, 9), st.integers(0, 99))
def test_of_several_edges_between_two_nodes_a_bidirectional_subgraph_has_the_first(graph, num_seeds, seed):
    num_nodes, edge_index = graph
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    seeds = torch.arange(min(num_seeds, num_nodes))
    plain, both = (
        NeighborSampler(data, [3, 2], subgraph_type=kind).sample_from_nodes(NodeSamplerInput(None, seeds), key=seed)
        for kind in ("directional", "bidirectional")
    )
    expected = {}
    ends = [*zip(plain.row.tolist(), plain.col.tolist(), strict=True)]
    edges = plain.edge.tolist()
    for (row, col), edge in zip([*ends, *((b, a) for a, b in ends)], edges + edges, strict=True):
        expected.setdefault((col, row), edge)
    found = zip(both.col.tolist(), both.row.tolist(), strict=True)
    assert dict(zip(found, both.edge.tolist(), strict=True)) == expected
    assert sorted(expected) == [*zip(both.col.tolist(), both.row.tolist(), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("kind", ["one type", "one type, disjoint", "types", "types with times"])
def test_samples_of_links_equal_the_cpus(kind, negatives):
    typed = kind.startswith("types")
    data = typed_data() if typed else small_data(num_nodes=60, num_edges=400)
    options = {"exclude_seed_edges": True, "disjoint": "disjoint" in kind}
    if kind == "types with times":
        data["author"].time = torch.randint(1000, (120,))
        options["time_attr"] = "time"
    edges = data[WRITES].edge_index[:, :6] if typed else data.edge_index[:, :6]
    time = torch.arange(500, 506) if kind == "types with times" else None
    inputs = EdgeSamplerInput(None, *edges, time=time, input_type=WRITES if typed else None)
    negatives = None if negatives is None else NegativeSampling(negatives, 1)
    ours = PersistentNeighborSampler(data, [8, 4], seed=1, device=DEVICE, **options)
    theirs = NeighborSampler(data, [8, 4], seed=1, **options)
    a, b = (sampler.sample_from_edges(inputs, negatives, key=8) for sampler in (ours, theirs))
    assert_same_output(a, b)
    assert len(a.metadata) == len(b.metadata)
    for got, want in zip(a.metadata[1:], b.metadata[1:], strict=True):
        assert got is want is None or torch.equal(got.cpu(), want)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_links_are_predicted_on_samples_of_the_gpu(num_workers):
    data = typed_data()
    options = {"neg_sampling": "binary", "batch_size": 4, "seed": 3, "num_workers": num_workers}
    edges = (WRITES, data[WRITES].edge_index[:, :8])
    samplers = [
        kind(data, [3], exclude_seed_edges=True, **more)
        for kind, more in ((PersistentNeighborSampler, {"device": DEVICE}), (NeighborSampler, {}))
    ]
    tables = {(name, "x"): FeatureTable(data[name].x).to(DEVICE) for name in ("paper", "author")}
    ours = LinkDataModule(data, edges, link_sampler=samplers[0], tables=tables, **options)
    theirs = LinkDataModule(data, edges, link_sampler=samplers[1], **options)
    for a, b in zip(ours.train_dataloader(), theirs.train_dataloader(), strict=True):
        assert contents(a) == contents(b)
        assert a["paper"].x.device.type == a[WRITES].edge_index.device.type == DEVICE


def test_in_pygs_node_loader():
    data = small_data(num_nodes=60, num_edges=400)
    sampler = PersistentNeighborSampler(data, [3, 2], device=DEVICE)
    for batch in NodeLoader(data, sampler, input_nodes=torch.arange(0, 60, 3), batch_size=10):
        assert torch.equal(batch.n_id.cpu()[batch.edge_index.cpu()], data.edge_index[:, batch.e_id.cpu()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_samples_the_same():
    data = small_data()
    with pytest.warns(UserWarning, match="No GPU for the persistent sampler"):
        ours = PersistentNeighborSampler(data, [4, 2], seed=1)
    assert_equal(ours.draw(torch.arange(9), 3), NeighborSampler(data, [4, 2], seed=1).draw(torch.arange(9), 3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topology": "disk"}, ValueError, "topology='disk' is unknown"),
        ({"fetch_size": 0}, ValueError, "fetch_size must be at least 1"),
        ({"mode": "quick"}, ValueError, "unknown sampling mode 'quick'"),
        ({"hot_nodes": torch.tensor([400]), "topology": "pinned"}, IndexError, "400"),
        (
            {"hot_nodes": torch.tensor([4]), "weight_attr": "edge_weight"},
            ValueError,
            "graphs of one type without times",
        ),
        ({"exclude_seed_edges": "no"}, TypeError, "exclude_seed_edges must be True, False or a dict"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        PersistentNeighborSampler(small_data(), [2], device=DEVICE, **options)


def test_bad_seeds_are_named():
    sampler = PersistentNeighborSampler(small_data(), [2], device=DEVICE)
    with pytest.raises(IndexError, match="seeds hold node 400, but the graph has 400 nodes"):
        sampler.draw(torch.tensor([400]), 1)
    with pytest.raises(ValueError, match="num_neighbors holds -3"):
        PersistentNeighborSampler(small_data(), [-3], device=DEVICE)


def test_refused_page_locked_memory_is_said_with_its_size(monkeypatch):
    from lightning_gnn.graph.memory import pinned

    class Refusing:
        def pin_memory(self):
            raise RuntimeError("CUDA error: out of memory\nand more")

    with pytest.raises(RuntimeError, match=r"page-locked memory for the topology, 3\.00 GB, was refused .*ulimit"):
        pinned(Refusing(), 3_000_000_000, torch.device("cuda"), "the topology")


def test_a_graph_too_large_for_the_device_stays_in_host_memory(monkeypatch):
    from lightning_gnn.graph.memory import choose_place

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    assert choose_place("auto", 10**8, torch.device("cuda"), "it") == "device"
    with pytest.warns(UserWarning, match=r"it takes 0\.60 GB, more than half of the 1\.00 GB free"):
        assert choose_place("auto", 6 * 10**8, torch.device("cuda"), "it") == "pinned"


@pytest.mark.parametrize("disjoint", [False, True])
def test_pygs_loader_samples_on_the_gpu_where_the_data_is(disjoint):
    data = small_data(num_nodes=60, num_edges=400)
    batches = []
    for device in (None, DEVICE):
        torch.manual_seed(3)
        with enable_pyg_sampling():
            loader = NeighborLoader(data, [3, 2], input_nodes=torch.arange(0, 60, 9), batch_size=4, disjoint=disjoint)
        # Data on a GPU sets this; under the interpreter there is none.
        loader.node_sampler.device = None if device is None else torch.device(device)
        batches.append(list(loader))
    for a, b in zip(*batches, strict=True):
        assert torch.equal(a.n_id, b.n_id.cpu())
        assert torch.equal(a.e_id, b.e_id.cpu())
        assert torch.equal(a.edge_index, b.edge_index.cpu())
        assert torch.equal(a.x, b.x.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["times", "bidirectional", "types with times", "types, induced, with weights"])
def test_pygs_loaders_sample_other_kinds_on_the_gpu_where_the_data_is(kind):
    data, options = kinds()[kind]
    options = {name: value for name, value in options.items() if name != "time_window"}
    kind = ("paper",) if isinstance(data, HeteroData) else ()
    batches = []
    for device in (None, DEVICE):
        torch.manual_seed(3)
        with enable_pyg_sampling():
            loader = NeighborLoader(
                data, [3, 2], input_nodes=(*kind, torch.arange(0, 60, 20)) if kind else torch.arange(0, 60, 20),
                batch_size=2, **options,
            )  # fmt: skip
        loader.node_sampler.device = None if device is None else torch.device(device)
        batches.append([contents(batch) for batch in loader])
        assert (loader.node_sampler._on_device is None) == (device is None)
    assert batches[0] == batches[1]


@pytest.mark.slow
def test_pygs_link_loader_samples_types_on_the_gpu():
    data = typed_data()
    batches = []
    for device in (None, DEVICE):
        torch.manual_seed(3)
        with enable_pyg_sampling():
            loader = LinkNeighborLoader(
                data, [3], edge_label_index=(WRITES, data[WRITES].edge_index[:, :4]), neg_sampling="binary",
                batch_size=2, time_attr="time", edge_label_time=torch.arange(500, 504),
            )  # fmt: skip
        loader.link_sampler.device = None if device is None else torch.device(device)
        batches.append([contents(batch) for batch in loader])
    assert batches[0] == batches[1]


def test_pygs_loaders_find_the_gpu_of_all_edges():
    def graph(*devices):
        data = HeteroData()
        data["a"].num_nodes = 3
        for number, device in enumerate(devices):
            data["a", str(number), "a"].edge_index = torch.empty((2, 0), dtype=torch.int64, device=device)
        return data

    assert gpu_of(graph("cpu", "cpu")) is None
    assert gpu_of(graph()) is None
    assert gpu_of(graph("meta", "cpu")) is None
    if torch.cuda.is_available():
        assert gpu_of(graph("cuda", "cpu")) is None
        assert gpu_of(graph("cuda", "cuda")).type == "cuda"
