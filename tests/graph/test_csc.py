import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

from lightning_gnn.graph import CSCGraph
from tests.refusals import refuses
from tests.strategies import edge_indices


@given(edge_indices())
def test_edges_are_sorted_stably_and_come_back_in_the_users_order(graph):
    num_nodes, edge_index = graph
    csc = CSCGraph.from_edge_index(edge_index, num_nodes)
    assert torch.equal(csc.to_edge_index(), edge_index)
    assert csc.indices.dtype == torch.int32
    order = torch.sort(edge_index[1], stable=True).indices
    assert torch.equal(csc.indices.long(), edge_index[0, order])
    ids = torch.arange(edge_index.size(1)) if csc.edge_ids is None else csc.edge_ids.long()
    assert torch.equal(ids, order)


@given(edge_indices(), st.booleans())
def test_saved_and_loaded(tmp_path_factory, graph, mmap):
    num_nodes, edge_index = graph
    csc = CSCGraph.from_edge_index(edge_index, num_nodes)
    folder = tmp_path_factory.mktemp("graph")
    loaded = CSCGraph.load(csc.save(folder), mmap=mmap)
    assert torch.equal(loaded.to_edge_index(), edge_index)
    assert (loaded.edge_ids is None) == (csc.edge_ids is None)


def test_from_data_takes_edge_index_adj_t_or_graph():
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])
    data = Data(edge_index=edge_index, num_nodes=4)
    csc = CSCGraph.from_data(data)
    assert (csc.num_nodes, csc.num_edges) == (4, 4)
    adj_t = torch.sparse_csr_tensor(csc.indptr, csc.indices.long(), torch.ones(4), size=(4, 4))
    from_adj = CSCGraph.from_data(Data(adj_t=adj_t, num_nodes=4))
    assert torch.equal(from_adj.indices, csc.indices)
    assert CSCGraph.from_data(Data(graph=csc, num_nodes=4)) is csc


def test_share_memory_and_mapped_arrays_do_not_write_to_the_file(tmp_path):
    csc = CSCGraph.from_edge_index(torch.tensor([[0, 1], [1, 0]]))
    csc.save(tmp_path)
    mapped = CSCGraph.load(tmp_path)
    mapped.indices[0] = 0
    assert int(CSCGraph.load(tmp_path).indices[0]) == 1
    assert csc.share_memory_().indices.is_shared()


ONE = torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "error", "message"),
    [
        (torch.tensor([[0, 5000], [1, 2]]), 2708, ValueError, r"edge_index\[0\] holds node 5000, .* has 2708 nodes"),
        (torch.tensor([[0, 1], [1, -3]]), 4, ValueError, r"edge_index\[1\] holds node -3"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 2, TypeError, "must be int32 or int64, but is torch.float32"),
        (torch.tensor([0, 1]), 2, ValueError, r"shape \[2, num_edges\], but has \[2\]"),
        (torch.zeros(3, 5).long(), 2, ValueError, r"but has \[3, 5\]"),
        ([[0], [0]], 2, TypeError, "must be a torch.Tensor, but is list"),
        (torch.tensor([[2**62], [0]]), None, ValueError, "largest id in edge_index is 4611686018427387904: number the"),
        (torch.tensor([[0], [2**45]]), None, ValueError, "the offsets of 35184372088833 nodes need 281475 GB"),
        (ONE, 2**62, ValueError, "correct num_nodes"),
        (ONE[:, :0], -3, ValueError, "num_nodes must not be negative, but is -3"),
        *((ONE, number, TypeError, f"num_nodes must be an integer, but is {number!r}") for number in (2.5, "7", True)),
    ],
)
def test_bad_edges_and_numbers_of_nodes_are_named(edge_index, num_nodes, error, message):
    refuses(error, message, CSCGraph.from_edge_index, edge_index, num_nodes)


@pytest.mark.parametrize("adj_t", [torch.eye(4), torch.eye(4).to_sparse_bsr((2, 2))])
def test_an_adj_t_of_another_layout_is_named(adj_t):
    data = Data(adj_t=adj_t, num_nodes=4)
    refuses(TypeError, f"see to_sparse_csr.*layout {adj_t.layout}", CSCGraph.from_data, data)
    adj_t = torch.sparse_coo_tensor(torch.zeros(3, 1).long(), torch.ones(1), (4, 4, 4))
    refuses(ValueError, "2 sparse dimensions, .* has 3", CSCGraph.from_data, Data(adj_t=adj_t, num_nodes=4))


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 3, 2], [0, 0], "must not descend, but indptr"),
        ([1, 2], [0, 0], "must start at 0"),
        ([0, 1], [0, 0], "end at the number of edges, 2"),
        ([0, 2], [0, 9], "indices holds node 9"),
        ([], [], "must start at 0"),
    ],
)
def test_bad_csc_is_named(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        CSCGraph.from_csc(torch.tensor(indptr, dtype=torch.int64), torch.tensor(indices, dtype=torch.int64))
