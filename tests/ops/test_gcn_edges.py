"""GCN's normalization in one pass: PyG's numbers, in the order of sorted edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_gnn.ops.aggregate_update.edge_order import first_rows
from lightning_gnn.ops.aggregate_update.gcn_edges import gcn_edges
from tests.strategies import edge_indices


def normalize_densely(edge_index, weight, num_nodes):
    """Return the matrix A[target, source]; parallel edges add up."""
    out = torch.zeros(num_nodes, num_nodes, dtype=weight.dtype)
    return out.index_put((edge_index[1], edge_index[0]), weight, accumulate=True)


@given(
    edge_indices(),
    st.integers(0, 100),
    st.sampled_from(["none", "positive", "any"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_it_is_pygs_normalization_sorted(graph, share, weights, improved, loops, ordered, dtype):
    num_nodes, edge_index = graph
    if ordered:
        edge_index = edge_index[:, torch.argsort(edge_index[1], stable=True)]
    generator = torch.Generator().manual_seed(0)
    weight = None if weights == "none" else torch.rand(edge_index.size(1), generator=generator, dtype=dtype)
    if weights == "any" and weight is not None:
        weight = (weight * 4).round() - 1  # zero and negative degrees
    num_targets = num_nodes * share // 100
    arguments = (edge_index, num_nodes, num_targets, weight, 2.0 if improved else 1.0, loops, dtype)
    wanted = normalize_densely(*gcn_norm(edge_index, weight, num_nodes, improved, loops, dtype=dtype), num_nodes)
    for found in (torch.ops.lightning_gnn.gcn_edges(*arguments), gcn_edges(*arguments)):
        indptr, indices, values = first_rows(found, num_targets)
        assert (indptr.dtype, indices.dtype, values.dtype) == (torch.int64, torch.int32, dtype)
        assert found[1].numel() == found[2].numel() == edge_index.size(1) + num_targets * loops
        if loops:
            last = indptr[1:] - 1
            assert torch.equal(indices[last], torch.arange(num_targets, dtype=torch.int32))
        rows = torch.repeat_interleave(indptr.diff())
        whole = normalize_densely(torch.stack([indices.long(), rows]), values, num_nodes)
        torch.testing.assert_close(
            whole[:num_targets], wanted[:num_targets], rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-12,
            equal_nan=True,
        )  # fmt: skip


@pytest.mark.parametrize("row", [0, 1])
def test_bad_edges_are_named(row):
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    edge_index[row, 1] = 3
    with pytest.raises(IndexError, match=rf"edge_index\[{row}\] holds node 3 \(edge 1\), but there are 3"):
        torch.ops.lightning_gnn.gcn_edges(edge_index, 3, 3, None, 1.0, True, torch.float32)
