"""Trimming layers to the hops that reach a seed changes the cost, but not the seeds' rows."""

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import models as pyg

from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier

MODELS = [
    (GCN, {}),
    (GCN, {"improved": True, "norm": "batch", "act_first": True}),
    (GCN, {"norm": "layer"}),
    (GCN, {"norm": "layer", "norm_kwargs": {"mode": "node"}}),
    (GCN, {"add_self_loops": False, "bias": False}),
    (GCN, {"normalize": False}),
    (GCN, {"jk": "last"}),
    (GCN, {"jk": "cat"}),
    (GraphSAGE, {"norm": "batch"}),
    (GraphSAGE, {"jk": "max"}),
    (GAT, {"heads": 4, "act": "elu", "output_heads": 1}),
    (GAT, {"heads": 2, "v2": True}),
    (pyg.GraphSAGE, {}),
    (pyg.GIN, {}),
    (pyg.GAT, {}),
]
FANOUTS = [[3, 2, 2], [-1, -1, -1], [2, 2, 2, 2], [3, 2], [2]]


def sample(seeds: list[int], fanouts: list[int], edge_index: Tensor, x: Tensor) -> Data:
    """Sample neighbors hop by hop, each node once: PyG's order, in plain Python."""
    generator = torch.Generator().manual_seed(0)
    nodes, frontier = list(seeds), list(seeds)
    edges: list[tuple[int, int]] = []
    num_nodes, num_edges = [len(seeds)], []
    for fanout in fanouts:
        found: list[int] = []
        before = len(edges)
        for target in frontier:
            sources = edge_index[0, edge_index[1] == target]
            keep = torch.randperm(sources.numel(), generator=generator)[: fanout if fanout >= 0 else None]
            for source in sources[keep].tolist():
                if source not in nodes:
                    nodes.append(source)
                    found.append(source)
                edges.append((nodes.index(source), nodes.index(target)))
        frontier = found
        num_nodes.append(len(found))
        num_edges.append(len(edges) - before)
    return Data(
        x=x[nodes],
        edge_index=torch.tensor(edges).t().contiguous(),
        y=torch.arange(len(nodes)) % 5,
        batch_size=len(seeds),
        num_sampled_nodes=num_nodes,
        num_sampled_edges=num_edges,
    )


@pytest.fixture
def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(60, (2, 300), generator=generator)
    # Self-loops are the hard case for GCN, which replaces them with its own.
    edge_index = torch.cat([edge_index, torch.arange(0, 60, 2).expand(2, -1)], dim=1)
    return edge_index, torch.randn(60, 8, generator=generator, dtype=torch.double)


def list_hop_sizes(batch: Data) -> dict[str, list[int]]:
    return {"num_sampled_nodes_per_hop": batch.num_sampled_nodes, "num_sampled_edges_per_hop": batch.num_sampled_edges}


@pytest.mark.parametrize(
    ("cls", "kwargs", "fanouts"),
    [(*model, fanouts) for i, model in enumerate(MODELS) for j, fanouts in enumerate(FANOUTS) if j in (0, 1 + i % 4)],
)
def test_classifier_trims_without_a_trace(
    cls: type, kwargs: dict, fanouts: list[int], graph: tuple[Tensor, Tensor]
) -> None:
    batch = sample([4, 0, 17, 33], fanouts, *graph)
    assert (batch.edge_index[0] == batch.edge_index[1]).any()
    model = cls(8, 12, 3, 5, **kwargs).double().eval()
    module = NodeClassifier(model, num_classes=5).eval()
    torch.testing.assert_close(
        module.predict_step(batch, 0), model(batch.x, batch.edge_index)[:4], rtol=1e-12, atol=1e-12
    )
    trims = len(fanouts) >= 3 and kwargs.get("jk") in (None, "last") and kwargs != {"norm": "layer"}
    assert (module(batch).size(0) < batch.num_nodes) == trims
    if cls.__module__.startswith("lightning_gnn"):
        direct = model(batch.x, batch.edge_index, **list_hop_sizes(batch))
        assert torch.equal(direct, module(batch))


def test_gradients(graph: tuple[Tensor, Tensor]) -> None:
    batch = sample([4, 0, 17, 33], [3, 2], *graph)
    weight = torch.rand(batch.num_edges, dtype=torch.double, requires_grad=True)
    model = GCN(8, 12, 2, 5).double()
    full, trimmed = (
        torch.autograd.grad(
            model(batch.x, batch.edge_index, weight, **extra)[:4].square().sum(), [*model.parameters(), weight]
        )
        for extra in ({}, list_hop_sizes(batch))
    )
    for a, b in zip(full, trimmed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_pyg_gcn_is_run_untrimmed(graph: tuple[Tensor, Tensor]) -> None:
    batch = sample([4, 0, 17, 33], [3, 2, 2], *graph)
    model = pyg.GCN(8, 12, 3, 5).double().eval()
    full = model(batch.x, batch.edge_index)[:4]
    # The reason: PyG's trimming changes the degrees. If PyG fixes this, our GCN needs no code of its own.
    assert not torch.allclose(model(batch.x, batch.edge_index, **list_hop_sizes(batch))[:4], full, rtol=1e-2)
    assert torch.equal(NodeClassifier(model, num_classes=5).predict_step(batch, 0), full)
