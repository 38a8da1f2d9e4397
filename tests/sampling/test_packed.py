"""Sampled subgraphs survive packing and unpacking unchanged."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from lightning_gnn.loading.compact_ids import CompactIds, shared_base
from lightning_gnn.sampling.deferred_edges import LazyEdgeIds

IDS = st.one_of(
    st.lists(st.integers(0, 600), max_size=20),
    st.lists(st.integers(0, 2**40), max_size=5),
    st.lists(st.integers(-(2**31) - 1, 2**31), max_size=5),
)
TENSORS = st.builds(
    lambda ids, rising, dtype: torch.tensor(sorted(ids) if rising else ids, dtype=torch.int64).to(dtype),
    IDS,
    st.booleans(),
    st.sampled_from([torch.int64, torch.int64, torch.int32]),
)


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.device == expected.device
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert [*found] == [*expected]
        for kind, value in expected.items():
            assert_same(found[kind], value)
    elif isinstance(expected, LazyEdgeIds):
        assert_same(found.ids(), expected.ids())
    else:
        assert found == expected


@given(TENSORS, TENSORS, TENSORS, st.one_of(st.none(), TENSORS), st.booleans())
def test_what_was_packed_comes_out(node, row, col, edge, deferred):
    if deferred and edge is not None:
        edge = LazyEdgeIds(edge, lambda positions: positions + 1)
    out = SamplerOutput(node, row, col, edge, batch=node, num_sampled_nodes=[1, 2], metadata=(row, None))
    packed = CompactIds(out)
    assert_same(packed.nodes(None).long(), node.long())
    found = packed.decode()
    for name, value in vars(out).items():
        assert_same(getattr(found, name), value)
    assert packed.num_nodes == node.numel()
    assert packed.num_bytes <= sum(8 * ids.numel() for ids in (node, row, col, node)) + (
        0 if edge is None else 8 * (edge.positions if deferred else edge).numel()
    )


def test_types_and_rows_of_one_tensor():
    both = {("a", "to", "b"): torch.tensor([[7, 300, 2], [0, 0, 9]]), ("b", "to", "a"): torch.tensor([[5], [2**40]])}
    out = HeteroSamplerOutput(
        {"a": torch.arange(3), "b": None},
        {kind: edges[0] for kind, edges in both.items()},
        {kind: edges[1] for kind, edges in both.items()},
        dict.fromkeys(both),
    )
    packed = CompactIds(out)
    found = packed.decode()
    for name in ("node", "row", "col", "edge"):
        assert_same(getattr(found, name), getattr(out, name))
    for kind, edges in both.items():
        assert_same(shared_base(found.row[kind], found.col[kind]), edges)
    assert packed.nodes("b") is None
    assert packed.nodes("c") is None
    assert packed.num_bytes == 3 * 4 + 3 * (4 + 1) + (4 + 1)
