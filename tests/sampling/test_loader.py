import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader as PyGNodeLoader
from torch_geometric.utils import k_hop_subgraph

from lightning_gnn.loading import NodeLoader
from lightning_gnn.ops import batch_key
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batch_checks import assert_same as assert_same
from tests.batch_checks import assert_same_batches, check, check_hops
from tests.batching_data import small_data
from tests.strategies import edge_indices


class Fixed(NeighborSampler):
    """Samples every batch with one key, to compare PyG's loader with ours."""

    def sample_from_nodes(self, inputs, key=None):
        return super().sample_from_nodes(inputs, key=5)

    def sample_from_edges(self, inputs, neg_sampling=None, key=None):
        return super().sample_from_edges(inputs, neg_sampling, key=5)


def test_what_is_neither_of_nodes_nor_of_edges_stays_as_it_is_as_in_pyg():
    data = small_data()
    data.names, data.num_nodes = [f"node {v}" for v in range(5)], 400
    sampler = Fixed(data, [4, 3])
    theirs = PyGNodeLoader(data, sampler, input_nodes=data.val_mask, batch_size=17)
    ours = NodeLoader(data, sampler, input_nodes=data.val_mask, batch_size=17, num_workers=2)
    assert assert_same_batches(ours, theirs) == len(ours) == len(theirs)
    assert all(batch.edge_index.is_contiguous() for batch in ours)


def test_a_batch_depends_on_seed_rank_loader_epoch_and_number():
    data = small_data()
    loader = NodeLoader(data, NeighborSampler(data, [3]), batch_size=50, seed=1, rank=2, loader_id=1)
    expected = NeighborSampler(data, [3]).sample_from_nodes(
        loader.input_data[list(range(50, 100))], batch_key(1, 2, 1, 0, 1)
    )
    assert torch.equal(list(loader)[1].e_id, expected.edge)


def test_a_kept_batch_is_never_overwritten():
    data = small_data(num_nodes=5000, num_edges=100_000)
    loader = NodeLoader(data, NeighborSampler(data, [10, 10]), batch_size=500, num_workers=2)
    copies = [(batch, batch.x.clone(), batch.edge_index.clone(), batch.n_id.clone()) for batch in loader]
    for batch, x, edge_index, n_id in copies:
        assert torch.equal(batch.x, x)
        assert torch.equal(batch.edge_index, edge_index)
        assert torch.equal(batch.n_id, n_id)


@settings(max_examples=60, deadline=None)
@given(edge_indices(), st.integers(1, 3), st.integers(1, 7))
def test_all_neighbours_equal_pygs_k_hop_subgraph(graph, hops, batch_size):
    num_nodes, edge_index = graph
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    for batch in NodeLoader(data, NeighborSampler(data, [-1] * hops), batch_size=batch_size):
        nodes, _, _, _ = k_hop_subgraph(batch.input_id, hops, edge_index, num_nodes=num_nodes)
        assert sorted(batch.n_id.tolist()) == nodes.tolist()
        check(batch, data)
        check_hops(batch, hops)
        expanded = batch.n_id[: sum(batch.num_sampled_nodes[:-1])]
        assert sorted(batch.e_id.tolist()) == torch.isin(edge_index[1], expanded).nonzero().view(-1).tolist()


def test_transforms_and_errors_reach_the_caller():
    data = small_data()

    def bad(batch):
        raise RuntimeError("the transform failed")

    loader = NodeLoader(data, NeighborSampler(data, [2]), transform=bad, num_workers=2, batch_size=8)
    with pytest.raises(RuntimeError, match="the transform failed"):
        next(iter(loader))


def test_times_are_counted():
    data = small_data()
    loader = NodeLoader(data, NeighborSampler(data, [2]), batch_size=40, num_workers=1)
    edges = sum(batch.num_edges for batch in loader)
    assert (loader.times.batches, loader.times.edges) == (10, edges)
    assert loader.times.sampling_s > 0
    loader.times.reset()
    assert loader.times.batches == 0


def test_what_is_no_graph_is_refused():
    with pytest.raises(TypeError, match="expected a homogeneous"):
        NeighborSampler(3, [2])
