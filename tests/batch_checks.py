"""Invariants of mini-batches from any loader, and comparison of mini-batches."""

import torch
from torch_geometric.data import HeteroData


def check(batch, data):
    """Assert that edges and attributes of a batch are those of the graph, for all types."""
    typed = isinstance(data, HeteroData)
    for name in data.edge_types if typed else [None]:
        mine, own = (batch[name], data[name]) if typed else (batch, data)
        source, target = (batch[name[0]], batch[name[2]]) if typed else (batch, batch)
        ends = torch.stack([source.n_id[mine.edge_index[0]], target.n_id[mine.edge_index[1]]])
        assert torch.equal(ends, own.edge_index[:, mine.e_id]), name
        for key in ("edge_attr", "edge_weight", "weight", "edge_time"):
            if key in own:
                assert torch.equal(mine[key], own[key][mine.e_id]), (name, key)
    for name in data.node_types if typed else [None]:
        mine, own = (batch[name], data[name]) if typed else (batch, data)
        assert mine.num_nodes == mine.n_id.numel()
        for key in ("x", "y", "time", "node_time"):
            if key in own:
                assert torch.equal(mine[key], own[key][mine.n_id]), (name, key)


def check_hops(batch, num_hops):
    """Assert that the counts per hop add up to the size of the batch."""
    assert sum(batch.num_sampled_nodes) == batch.num_nodes
    assert sum(batch.num_sampled_edges) == batch.num_edges
    assert len(batch.num_sampled_nodes) == num_hops + 1
    assert len(batch.num_sampled_edges) == num_hops


def assert_equal(found, expected, where=""):
    """Assert that two values are equal bit for bit on any device: tensors, dicts by node or edge type, tuples."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found.cpu(), expected.cpu()), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal(found[key], value, (where, key))
    elif isinstance(expected, tuple):
        assert type(found) is type(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, (where, number))
    else:
        assert found == expected, where


def assert_same(batch, expected):
    """Assert that two mini-batches have the same attributes, bit for bit."""
    assert type(batch) is type(expected)
    assert [store._key for store in batch.stores] == [store._key for store in expected.stores]
    for store, other in zip(batch.stores, expected.stores, strict=True):
        assert set(store.keys()) == set(other.keys()), (store._key, set(store.keys()) ^ set(other.keys()))
        for key, value in other.items():
            assert_equal(store[key], value, (store._key, key))


def assert_same_batches(loader, expected):
    """Assert that two loaders yield the same mini-batches, at least one; return their number."""
    count = 0
    for batch, other in zip(loader, expected, strict=True):
        assert_same(batch, other)
        count += 1
    assert count
    return count
