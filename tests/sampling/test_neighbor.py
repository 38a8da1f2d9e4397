import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.base import NumNeighbors
from torch_geometric.utils import subgraph

from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.strategies import edge_indices


@pytest.mark.medium
def test_pygs_worker_processes_sample_anew_in_each_epoch():
    data = small_data()
    torch.manual_seed(0)
    loader = NodeLoader(data, NeighborSampler(data, [2]), input_nodes=torch.arange(64), batch_size=16, num_workers=2)
    first, second = ([batch.e_id for batch in loader] for _ in range(2))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_key_fixes_negatives_and_neighbours():
    data = small_data()
    sampler = NeighborSampler(data, [4], seed=3)
    inputs = EdgeSamplerInput(None, data.edge_index[0, :9], data.edge_index[1, :9])
    a, b, c = (sampler.sample_from_edges(inputs, NegativeSampling("binary"), key=key) for key in (1, 1, 2))
    assert torch.equal(a.node, b.node)
    assert torch.equal(a.edge, b.edge)
    assert torch.equal(a.metadata[1], b.metadata[1])
    assert a.node.tolist() != c.node.tolist()


@pytest.mark.parametrize("negatives", [None, NegativeSampling("binary", 1.5), NegativeSampling("triplet", 2)])
def test_each_end_of_an_edge_has_a_tree_of_its_own(negatives):
    data = small_data()
    sampler = NeighborSampler(data, [2, 2], disjoint=True)
    edges = torch.tensor([[0, 1, 0, 5], [1, 0, 1, 5]])  # a duplicate edge, its reverse, a self-loop
    out = sampler.sample_from_edges(EdgeSamplerInput(None, *edges), negatives, key=3)
    ends = out.node[: out.num_sampled_nodes[0]]
    alone = sample_neighbors(sampler.graph, ends, [2, 2], 3, disjoint=True)
    assert torch.equal(out.node, alone.node)
    assert torch.equal(out.row, alone.edge_index[0])
    assert torch.equal(out.batch, alone.batch % 4)  # numbered by edge, as in PyG
    # Node 0 is an end of edges 0, 1 and 2, and node 5 both ends of edge 3.
    for node in (0, 5):
        trees = (ends == node).nonzero().view(-1).tolist()
        picked = [tuple(alone.edge[alone.batch[alone.edge_index[1]] == tree].tolist()) for tree in trees]
        assert len(picked) >= 2
        assert len(set(picked)) > 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_neighbors": {("a", "to", "b"): [3]}}, TypeError, "needs a heterogeneous graph: give one list"),
        ({"num_neighbors": NumNeighbors({("a", "to", "b"): [3]})}, TypeError, "needs a heterogeneous graph"),
        ({"num_neighbors": 5}, TypeError, "must be a list of integers, one per hop"),
        ({"num_neighbors": [True]}, TypeError, "holds True"),
        ({"replace": "no"}, TypeError, "replace must be True or False, but is 'no'"),
        ({"disjoint": None}, TypeError, "disjoint must be True or False, but is None"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, but is 1.5"),
        ({"seed": 2**70}, ValueError, "seed is 1180591620717411303424, but must lie between"),
        ({"backend": "cuda"}, ValueError, "unknown sampling backend 'cuda'; choose one of numba"),
    ],
)
@pytest.mark.parametrize("kind", [NeighborSampler, PersistentNeighborSampler])
def test_bad_options_are_named_when_the_sampler_is_made(kind, options, error, message):
    if "backend" in options and kind is PersistentNeighborSampler:
        pytest.skip("it has none")
    with pytest.raises(error, match=message):
        kind(small_data(), **{"num_neighbors": [2], **options})


NODES, EDGES = NodeSamplerInput(None, torch.arange(3)), EdgeSamplerInput(None, torch.arange(3), torch.arange(3))
TIMED = EdgeSamplerInput(None, torch.arange(3), torch.arange(3), time=torch.arange(3))


@pytest.mark.parametrize("kind", [NeighborSampler, PersistentNeighborSampler])
@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        (lambda sampler: sampler.sample_from_nodes(torch.arange(3)), TypeError,
         r"expected NodeSamplerInput\(None, seeds\), got Tensor"),
        (lambda sampler: sampler.sample_from_edges(NODES), TypeError,
         r"expected EdgeSamplerInput\(None, sources, targets\), got NodeSamplerInput"),
        (lambda sampler: sampler.sample_from_nodes(NODES, key=2**64), ValueError, "must lie between"),
        (lambda sampler: sampler.sample_from_edges(EDGES, NegativeSampling("binary"), key=2**64), ValueError,
         "must lie between"),
        (lambda sampler: sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([2**62]))), IndexError,
         "seeds hold node 4611686018427387904, but the graph has 400 nodes"),
        (lambda sampler: sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3), time=torch.arange(3))),
         ValueError, "edges have no times: give time_attr"),
        (lambda sampler: sampler.sample_from_edges(TIMED), ValueError,
         "edge_label_time needs edges with times"),
        (lambda sampler: sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3), input_type="paper")),
         ValueError, "type 'paper' were given, but the graph is homogeneous"),
    ],
)  # fmt: skip
def test_bad_inputs_are_named(kind, sample, error, message):
    with pytest.raises(error, match=message):
        sample(kind(small_data(), [2]))


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


@settings(max_examples=100, deadline=None)
@given(edge_indices(), st.integers(1, 9), st.integers(0, 99))
def test_an_induced_subgraph_has_what_the_graph_has_between_the_sampled_nodes(graph, num_seeds, seed):
    num_nodes, edge_index = graph
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    seeds = torch.arange(min(num_seeds, num_nodes))
    sampler = NeighborSampler(data, [1, 2], subgraph_type="induced")
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=seed)
    _, _, mask = subgraph(out.node, edge_index, num_nodes=num_nodes, return_edge_mask=True)
    assert out.edge.sort().values.tolist() == mask.nonzero().view(-1).tolist()
    assert torch.equal(torch.stack([out.node[out.row], out.node[out.col]]), edge_index[:, out.edge])
