"""``semantics="every_hop"``: a node is sampled in every hop from its first on, and each layer has its own edges."""

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn import NeighborDataModule, NeighborSampler, PersistentNeighborSampler, PersistentSamplerDataModule
from lightning_gnn.nn import GAT, GCN, GIN, GraphSAGE, NodeClassifier
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.ops.hashing import layer_key, node_key
from lightning_gnn.ops.library import triton_obstacle
from lightning_gnn.ops.sample.reference import pick_uniform
from lightning_gnn.sampling import layer_blocks
from tests.batch_checks import assert_same_batches
from tests.batching_data import small_data
from tests.refusals import refuses
from tests.strategies import fanouts, graphs, keys, seeds_of

BACKENDS = ("reference", "numba", *["triton"] * (triton_obstacle() is None and not torch.cuda.is_available()))


def sample_plainly(indptr, indices, seeds, hops, key, replace):
    """Sample every hop, as PGSampler's tasks (vertex, hop) after deduplication, sorted by hop and local id."""
    node, local, counts = [*seeds], {}, [len(seeds)]
    for position, v in enumerate(seeds):
        local.setdefault(v, position)
    row, col, edge, edge_counts = [], [], [], []
    for hop, fanout in enumerate(hops):
        hop_key, known, before = layer_key(key, hop) if hop else key, len(node), len(edge)
        for target in range(known):
            v = node[target]
            for e in pick_uniform(indptr[v], indptr[v + 1] - indptr[v], fanout, node_key(hop_key, v), replace):
                if indices[e] not in local:
                    local[indices[e]] = len(node)
                    node.append(indices[e])
                row.append(local[indices[e]])
                col.append(target)
                edge.append(e)
        counts.append(len(node) - known)
        edge_counts.append(len(edge) - before)
    return node, [row, col], edge, counts, edge_counts


@pytest.mark.medium
@pytest.mark.parametrize("backend", BACKENDS)
@given(st.data(), fanouts, keys, st.booleans())
def test_equals_the_definition(backend, data, hops, key, replace):
    graph = data.draw(graphs())
    seeds = data.draw(seeds_of(graph.num_nodes))
    replace = replace and min(hops, default=0) >= 0
    out = sample_neighbors(graph, seeds, hops, key, replace=replace, every_hop=True, backend=backend)
    found = [part.tolist() for part in out[:3]]
    expected = sample_plainly(graph.indptr.tolist(), graph.indices.tolist(), seeds.tolist(), hops, key, replace)
    assert (*found, out.num_sampled_nodes, out.num_sampled_edges) == expected


@pytest.mark.medium
@pytest.mark.skipif("triton" not in BACKENDS, reason="needs Triton's interpreter")
def test_the_kernel_grows_its_memory_and_uses_several_programs():
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler
    from tests.triton_kernels.sampling_cases import GRAPHS

    indptr, indices = (torch.tensor(part) for part in GRAPHS["random"])
    for key, hops in enumerate(([3, 2, 4], [-1, 2], [40, 3])):
        sampler = TritonNeighborSampler(indptr, indices, num_programs=3, num_warps=1, every_hop=True, mode="persistent")
        sampler._start_capacity = 1
        out = sampler.sample(torch.tensor([5, 0, 17, 5]), hops, key)
        found = *(part.tolist() for part in out[:3]), *out[4:]
        assert found == sample_plainly(*GRAPHS["random"], [5, 0, 17, 5], hops, key, False)
        refuses(ValueError, "excludes disjoint", sampler.sample, torch.tensor([5]), hops, 1, disjoint=True)


def test_all_neighbors_give_the_outputs_of_the_full_graph():
    data = small_data(num_nodes=50, num_edges=300)
    sampler = NeighborSampler(data, [-1, -1, -1], semantics="every_hop")
    with pytest.warns(UserWarning, match="PyG's loaders drop which edges belong to a layer"):
        batch = next(iter(NodeLoader(data, sampler, input_nodes=torch.tensor([7, 3, 30]), batch_size=3)))
    for kind in (GraphSAGE, GIN, GAT):
        model = kind(data.num_features, 8, num_layers=3, out_channels=4).eval()
        counts = batch.num_sampled_nodes, batch.num_sampled_edges
        out = model(batch.x, batch.edge_index, None, None, None, None, *counts, every_hop=True)
        torch.testing.assert_close(out, model(data.x, data.edge_index)[[7, 3, 30]])


def test_blocks_are_what_bipartite_layers_take():
    data = small_data(num_nodes=50, num_edges=600)
    module = NeighborDataModule(
        data, input_train_nodes=torch.arange(20), num_neighbors=[3, 2], batch_size=5, semantics="every_hop", seed=1
    )
    batch = next(iter(module.train_dataloader()))
    outer, inner = layer_blocks(batch)
    assert (inner.num_targets, outer.num_targets, outer.num_sources) == (5, inner.num_sources, batch.num_nodes)
    assert set(outer.edge_index[1].tolist()) > set(inner.edge_index[1].tolist())  # a seed is a target in both hops
    convs = [SAGEConv(data.num_features, 8), SAGEConv(8, 4)]
    x = batch.x
    for conv, block in zip(convs, (outer, inner), strict=True):
        x = conv((x, x[: block.num_targets]), block.edge_index)
    model = GraphSAGE(data.num_features, 8, num_layers=2, out_channels=4, act=None)
    for ours, theirs in zip(model.convs, convs, strict=True):
        ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(NodeClassifier(model, 4).eval()(batch)[:5], x)
    # Without the option, a node is a target in one hop, and a block has the edges of all hops up to its own.
    usual = NeighborSampler(data, [3, 2]).sample_from_nodes(NodeSamplerInput(None, torch.tensor([4, 9])), key=1)
    sizes = [block.edge_index.size(1) for block in layer_blocks(usual)]
    assert sizes == [usual.row.numel(), usual.num_sampled_edges[0]]


@pytest.mark.medium
def test_the_datamodule_trains_and_the_gpu_samples_the_same():
    data = small_data(num_nodes=60, num_edges=400)
    options = {"input_train_nodes": torch.arange(30), "num_neighbors": [3, 2], "batch_size": 8, "seed": 2}
    options["semantics"] = "every_hop"
    there = {"device": "cuda" if torch.cuda.is_available() else "cpu", "device_memory": "1GB"}
    ours = PersistentSamplerDataModule(data, **options, mode="persistent", fetch_size=5, num_warps=2, **there)
    assert_same_batches(ours.train_dataloader(), NeighborDataModule(data, **options).train_dataloader())
    model = GraphSAGE(data.num_features, 8, num_layers=2, out_channels=int(data.y.max()) + 1)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    trainer.fit(NodeClassifier(model, int(data.y.max()) + 1), NeighborDataModule(data, **options))
    assert trainer.global_step == 4


def test_what_it_cannot_combine_is_refused():
    data = small_data()
    data.w = torch.rand(data.num_edges)
    excluded = {"disjoint": True, "sampling": "labor", "subgraph_type": "induced", "weight_attr": "w"}
    for name, value in {**excluded, "exclude_seed_edges": True}.items():
        refuses(ValueError, f"excludes {name}", NeighborSampler, data, [2], semantics="every_hop", **{name: value})
    refuses(ValueError, "unknown semantics 'each'; choose one of", NeighborSampler, data, [2], semantics="each")


def test_models_that_cannot_take_blocks_are_refused():
    data = small_data(num_nodes=50, num_edges=300)
    sampler = {"num_neighbors": [2, 2], "batch_size": 4, "semantics": "every_hop"}
    batch = next(iter(NeighborDataModule(data, input_train_nodes=torch.arange(9), **sampler).train_dataloader()))

    class Plain(torch.nn.Module):
        def forward(self, x, edge_index):
            return x

    sizes = {"hidden_channels": 8, "out_channels": 4}
    for model, said in (
        (Plain(), "Plain takes one edge_index: use GraphSAGE"),
        (GCN(data.num_features, num_layers=2, **sizes), "GCN normalizes by one degree per node"),
        (GraphSAGE(data.num_features, num_layers=3, **sizes), "needs a hop per layer"),
    ):
        refuses(ValueError, said, NodeClassifier(model, 4), batch)
    batch.edge_index = batch.edge_index.flip(0)
    model = GraphSAGE(data.num_features, num_layers=2, **sizes)
    refuses(ValueError, "a transform changed the edges", NodeClassifier(model, 4), batch)
    refuses(ValueError, "no counts per hop", layer_blocks, Data())
    for options, said in (
        ({"num_warps": 3}, "num_warps=3 is not a power of two"),
        ({"programs_per_sm": 0}, "at least 1"),
    ):
        refuses(ValueError, said, PersistentNeighborSampler, data, [2], **options)
