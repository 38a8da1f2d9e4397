"""Edges of our samplers are sorted by target, which is remembered on a device."""

import copy

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn import CSCGraph, NeighborDataModule, NeighborSampler
from lightning_gnn.nn import GraphSAGE
from lightning_gnn.nn.sampled_edges import moved, remember
from lightning_gnn.ops.aggregate_update.edge_order import first_edges, is_sorted
from tests.ops.sample_cases import random_types


def ascends(target):
    return bool((target[1:] >= target[:-1]).all())


def draw():
    some = torch.Generator().manual_seed(0)
    x, edge_index = torch.randn(90, 4, generator=some), torch.randint(90, (2, 900), generator=some)
    return Data(x=x, edge_index=edge_index, y=torch.arange(90) % 3, train_mask=torch.ones(90, dtype=torch.bool))


@pytest.mark.parametrize(
    "options",
    [{}, {"replace": True}, {"disjoint": True}, {"sampling": "labor"}],
    ids=["uniform", "replace", "disjoint", "LABOR"],
)
def test_samples_are_sorted_by_target(options):
    graph = CSCGraph.from_edge_index(draw().edge_index, 90)
    sampler = NeighborSampler(graph, [5, 4, 3], seed=1, **options)
    assert ascends(sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(20))).col)


def test_samples_of_types_are_sorted_by_target():
    graph = random_types({"a": 60, "b": 30, "c": 20}, 300, seed=3)
    seeds = NodeSamplerInput(None, torch.arange(9), input_type="a")
    out = NeighborSampler(graph, [4, 3], seed=1).sample_from_nodes(seeds)
    assert all(ascends(target) for target in out.col.values())


def test_sorted_edges_are_known_on_a_device_until_they_change():
    batch = next(iter(NeighborDataModule(draw(), num_neighbors=[4, 3], batch_size=8).train_dataloader()))
    assert not is_sorted(batch.edge_index)  # the CPU looks at them
    reversed_hop = copy.copy(batch)
    first = batch.num_sampled_edges[0]
    reversed_hop.edge_index = torch.cat([batch.edge_index[:, :first].flip(1), batch.edge_index[:, first:]], 1)
    assert not is_sorted(moved(reversed_hop, lambda batch: batch.to("meta")).edge_index)
    on_meta = moved(batch, lambda batch: batch.to("meta"))
    edges = on_meta.edge_index
    assert is_sorted(edges)
    assert is_sorted(first_edges(edges, first))
    with torch.inference_mode():
        assert is_sorted(first_edges(edges, first))
    assert not is_sorted(edges.clone())
    edges[0, 0] = 1
    assert not is_sorted(edges)
    assert not is_sorted(first_edges(edges, first))
    remember(on_meta)
    assert is_sorted(edges)


def test_hops_of_every_hop_are_known_each_alone():
    options = {"num_neighbors": [4, 3], "batch_size": 8, "semantics": "every_hop"}
    batch = next(iter(NeighborDataModule(draw(), **options).train_dataloader()))
    first, last = batch.num_sampled_edges[0], batch.edge_index.size(1)
    assert ascends(batch.edge_index[1, :first])
    assert ascends(batch.edge_index[1, first:])
    assert not ascends(batch.edge_index[1])
    for change in (None, "transform", "write"):
        if change == "transform":
            batch.edge_index = torch.cat([batch.edge_index[:, :first].flip(1), batch.edge_index[:, first:]], 1)
        edges = moved(batch, lambda batch: batch.to("meta")).edge_index
        if change == "write":
            edges[0, 0] = 1
        known = change is None
        assert not is_sorted(edges)
        assert is_sorted(first_edges(edges, first)) == known
        assert is_sorted(first_edges(edges, last, first)) == known
        assert not is_sorted(first_edges(edges, last))
        assert not is_sorted(first_edges(edges, last - 1, first))


@pytest.mark.medium
def test_a_compiled_model_and_a_subclass_do_not_ask():
    x, edges = torch.randn(20, 6), torch.randint(5, (2, 30), generator=torch.Generator().manual_seed(1))
    model, counts = GraphSAGE(6, 8, 2, 3), ([5, 5, 10], [30, 0])
    wanted = model(x, edges, None, None, None, None, *counts)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, edges, None, None, None, None, *counts), wanted)
    assert not is_sorted(EdgeIndex(edges, sparse_size=(20, 20)))
