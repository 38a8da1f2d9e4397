import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.lightning import LightningLinkData, LightningNodeData, datamodule
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, link_neighbor_loader, neighbor_loader
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.graph import CSCGraph
from lightning_gnn.pyg import LoaderNeighborSampler, enable_pyg_sampling
from tests.batch_checks import check
from tests.batching_data import small_data

MODULES = (neighbor_loader, link_neighbor_loader, datamodule)


@pytest.fixture
def enabled():
    with enable_pyg_sampling() as handle:
        yield handle


def is_substituted():
    return [module.NeighborSampler is LoaderNeighborSampler for module in MODULES]


def is_untouched():
    return all(module.NeighborSampler is PyGNeighborSampler for module in MODULES)


def test_is_off_until_it_is_enabled_and_after_it_is_disabled_or_an_exception():
    assert is_untouched()
    handle = enable_pyg_sampling()
    try:
        assert all(is_substituted())
        assert repr(handle) == "PyGSampling(enabled)"
    finally:
        handle.disable()
    assert is_untouched()
    assert repr(handle) == "PyGSampling(disabled)"
    handle.disable()
    with pytest.raises(RuntimeError, match="mine"), enable_pyg_sampling():
        raise RuntimeError("mine")
    assert is_untouched()


def test_nested_and_interleaved_use():
    with enable_pyg_sampling() as outer:
        with enable_pyg_sampling():
            assert all(is_substituted())
        assert all(is_substituted())
        inner = enable_pyg_sampling()
        outer.disable()
        assert all(is_substituted())
        inner.disable()
        assert is_untouched()
        with outer:
            assert all(is_substituted())
        assert is_untouched()
    assert is_untouched()


def test_a_loader_outlives_the_switch():
    data = small_data()
    with enable_pyg_sampling():
        loader = NeighborLoader(data, [3, 2], batch_size=100)
        links = LinkNeighborLoader(data, [3, 2], batch_size=1000)
    for batch in [*loader, *links]:
        check(batch, data)


@pytest.mark.usefixtures("enabled")
def test_a_sampler_that_the_user_gives_is_kept():
    data = small_data()
    sampler = LoaderNeighborSampler(data, [1])
    assert NeighborLoader(data, [5], neighbor_sampler=sampler).node_sampler is sampler


@pytest.mark.usefixtures("enabled")
def test_lightning_link_data():
    data = small_data()
    edges = {"input_train_edges": data.edge_index[:, :100], "input_val_edges": data.edge_index[:, 100:150]}
    module = LightningLinkData(
        data, **edges, loader="neighbor", num_neighbors=[3, 2], neg_sampling="binary", batch_size=25
    )  # fmt: skip
    for loader, size in ((module.train_dataloader(), 100), (module.val_dataloader(), 50)):
        batches = list(loader)
        assert sum(batch.input_id.numel() for batch in batches) == size
        for batch in batches:
            check(batch, data)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subgraph_type": "induced", "disjoint": True}, "disjoint"),
        ({"subgraph_type": "both"}, "unknown subgraph_type 'both'; choose one of directional, bidirectional, induced"),
        ({"num_neighbors": [5, -2]}, "-2"),
        ({"num_neighbors": {("a", "to", "b"): [3]}}, "heterogeneous"),
        ({"num_neighbors": 3}, "must be a list of integers, one per hop"),
        ({"num_neighbors": None}, "must be a list of integers, one per hop"),
        ({"num_neighbors": [2.5]}, "holds 2.5, but a fanout is an integer"),
        ({"replace": "no"}, "replace must be True or False, but is 'no'"),
        ({"temporal_strategy": "lats"}, "unknown temporal_strategy 'lats'; choose one of uniform, last"),
        ({"time_attr": "nothing"}, "data has no attribute 'nothing'"),
        ({"time_attr": "time", "weight_attr": "edge_weight"}, "weighted temporal sampling is not"),
        ({"time_attr": "time", "subgraph_type": "induced"}, "needs subgraph_type"),
        ({"weight_attr": "nothing"}, "data has no attribute 'nothing'"),
        ({"weight_attr": "below"}, "weights of edges must be at least 0 and finite, but that of edge 3 is -1"),
    ],
)
def test_refused_options(options, message):
    data = small_data()
    data.time, data.below = torch.arange(400), torch.ones(4000)
    data.below[3] = -1
    with pytest.raises((ValueError, TypeError), match=message):
        NeighborLoader(data, **{"num_neighbors": [3], **options})


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("option", [{"weight_attr": "edge_weight"}, {"time_attr": "time"}])
def test_evaluation_has_no_times_or_weights_of_its_own(option):
    module = LightningNodeData(small_data(), num_neighbors=[3], eval_loader_kwargs=option)
    next(iter(module.train_dataloader()))
    with pytest.raises(NotImplementedError, match="cannot differ between training and evaluation"):
        next(iter(module.val_dataloader()))


@pytest.mark.usefixtures("enabled")
def test_times_without_time_attr_are_refused():
    module = LightningNodeData(small_data(), num_neighbors=[3], input_train_time=torch.arange(400))
    with pytest.raises(ValueError, match="edges have no times: give time_attr"):
        next(iter(module.train_dataloader()))


def test_sample_directions():
    with pytest.raises(ValueError, match="unknown sample_direction 'sideways'; choose one of forward, backward"):
        LoaderNeighborSampler(small_data(), [3], sample_direction="sideways")
    typed = HeteroData()
    typed["a"].num_nodes = 3
    typed["a", "to", "a"].edge_index = torch.tensor([[0, 1], [1, 2]])
    for data in (small_data(), typed):
        with pytest.raises(NotImplementedError, match="cannot run backward: omit time_attr='time'"):
            LoaderNeighborSampler(data, [3], sample_direction="backward", time_attr="time")
    out = LoaderNeighborSampler(typed, [-1, -1], sample_direction="backward").sample_from_nodes(
        NodeSamplerInput(None, torch.tensor([0]), input_type="a")
    )
    assert out.node["a"].tolist() == [0, 1, 2]
    assert out.row["a", "to", "a"].tolist() == [0, 1]
    assert out.col["a", "to", "a"].tolist() == [1, 2]
    assert out.edge["a", "to", "a"].tolist() == [0, 1]


def test_seeds_of_a_node_type_are_refused():
    inputs = NodeSamplerInput(None, torch.arange(3), input_type="paper")
    with pytest.raises(ValueError, match="type 'paper' were given, but the graph is homogeneous"):
        LoaderNeighborSampler(small_data(), [3]).sample_from_nodes(inputs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(num_nodes=3, edge_index=torch.tensor([[2**62], [0]])), "node 4611686018427387904"),
        (Data(edge_index=torch.tensor([[2**62], [0]])), "largest id in edge_index is 4611686018427387904"),
        (Data(num_nodes=3, adj=torch.eye(3)), "data.adj "),
        (Data(num_nodes=3, adj_t=torch.eye(3).to_sparse_csr()), "sparse_csr: use data.edge_index"),
        (Data(num_nodes=3, graph=CSCGraph.from_edge_index(torch.tensor([[0], [1]]), 3)), "data.graph"),
        (Data(num_nodes=3, edge_index=torch.tensor([[0], [5]])), "node 5"),
        (Data(num_nodes=3, edge_index=np.array([[0], [1]])), "edge_index must be a torch.Tensor, but is ndarray"),
        (
            HeteroData(
                {"a": {"num_nodes": 3}, ("a", "to", "a"): {"graph": CSCGraph.from_edge_index(torch.eye(2).long())}}
            ),
            r"need data\[\('a', 'to', 'a'\)\].edge_index: for its graph use the loaders of lightning_gnn",
        ),
        (
            HeteroData({"a": {"num_nodes": 3}, ("a", "to", "a"): {"adj_t": torch.eye(3).to_sparse_csr()}}),
            r"sparse_csr: use data\[\('a', 'to', 'a'\)\].edge_index",
        ),
    ],
)
def test_refused_graphs(data, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LoaderNeighborSampler(data, [3])


@pytest.mark.usefixtures("enabled")
def test_a_seed_outside_the_graph_is_named():
    with pytest.raises(IndexError, match="node 400"):
        NeighborLoader(small_data(), [2], input_nodes=torch.tensor([400]))([0])
