"""PyG's own loaders on our samplers must do what they do on PyG's."""

import copy

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import KarateClub
from torch_geometric.index import index2ptr
from torch_geometric.loader import ImbalancedSampler, LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import GraphConv, GraphSAGE
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.testing import MyFeatureStore, MyGraphStore
from torch_geometric.utils import is_undirected, k_hop_subgraph, subgraph

from lightning_gnn.graph import CSCGraph
from lightning_gnn.pyg import LoaderNeighborSampler, enable_pyg_sampling
from tests.batch_checks import check, check_hops
from tests.batching_data import small_data
from tests.strategies import edge_indices, seeds_of


@pytest.fixture(autouse=True, scope="module")
def _enabled():
    with enable_pyg_sampling():
        yield


def pairs(edge_index):
    return set(map(tuple, edge_index.t().tolist()))


def epoch(loader):
    return [batch.e_id.tolist() for batch in loader]


# --- NeighborLoader ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filter_per_worker", [None, True, False])
@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_neighbor_loader(num_workers, subgraph_type, filter_per_worker):
    data = small_data()
    loader = NeighborLoader(
        data,
        [4, 3],
        batch_size=64,
        subgraph_type=subgraph_type,
        filter_per_worker=filter_per_worker,
        num_workers=num_workers,
    )
    assert str(loader) == "NeighborLoader()"
    assert len(loader) == 7
    one = loader([5])
    assert isinstance(one, Data)
    assert one.n_id[0] == 5
    for number, batch in enumerate(loader):
        size = 64 if number < 6 else 16
        assert batch.batch_size == size
        assert batch.input_id.tolist() == batch.n_id[:size].tolist() == list(range(64 * number, 64 * number + size))
        assert batch.n_id.unique().numel() == batch.num_nodes
        assert torch.equal(batch.x, data.x[batch.n_id])
        if subgraph_type == "bidirectional":
            assert is_undirected(batch.edge_index)
            either = pairs(data.edge_index) | pairs(data.edge_index.flip(0))
            assert pairs(batch.n_id[batch.edge_index]) <= either
            assert batch.e_id.shape == (batch.num_edges,)
        else:
            check(batch, data)
        if subgraph_type == "directional":
            check_hops(batch, 2)
            assert int(batch.edge_index[1].bincount().max()) <= 4
        else:
            # Its edges are not sorted by hop, so it must not be trimmed.
            assert "num_sampled_nodes" not in batch
            assert "num_sampled_edges" not in batch


@settings(max_examples=100, deadline=None)
@given(st.data(), edge_indices(), st.integers(1, 3))
def test_all_neighbours_are_the_k_hop_subgraph(draws, graph, num_hops):
    num_nodes, edge_index = graph
    seeds = draws.draw(seeds_of(num_nodes)).unique()
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    loader = NeighborLoader(data, [-1] * num_hops, input_nodes=seeds, batch_size=max(len(seeds), 1))
    for batch in loader:
        reached, _, _, _ = k_hop_subgraph(seeds, num_hops, edge_index, num_nodes=num_nodes)
        assert batch.n_id.sort().values.tolist() == reached.tolist()
        # Only the outermost nodes are left without their in-edges.
        expanded, _, _, _ = k_hop_subgraph(seeds, num_hops - 1, edge_index, num_nodes=num_nodes)
        wanted = torch.isin(edge_index[1], expanded).nonzero().view(-1)
        assert batch.e_id.sort().values.tolist() == wanted.tolist()


@settings(max_examples=100, deadline=None)
@given(st.data(), edge_indices())
def test_induced_is_what_the_graph_has_between_the_sampled_nodes(draws, graph):
    num_nodes, edge_index = graph
    seeds = draws.draw(seeds_of(num_nodes)).unique()
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    loader = NeighborLoader(data, [1, 2], input_nodes=seeds, batch_size=max(len(seeds), 1), subgraph_type="induced")
    for batch in loader:
        _, _, mask = subgraph(batch.n_id, edge_index, num_nodes=num_nodes, return_edge_mask=True)
        assert batch.e_id.sort().values.tolist() == mask.nonzero().view(-1).tolist()
        assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.e_id])


def test_the_deprecated_directed_means_induced():
    data = small_data()
    with pytest.warns(UserWarning, match="induced"):
        loader = NeighborLoader(data, [2], batch_size=50, directed=False)
    batch = next(iter(loader))
    assert int(subgraph(batch.n_id, data.edge_index)[0].size(1)) == batch.num_edges


def test_counts_per_hop_where_hops_meet_again():
    # 0 <- {1, 2} <- 3, 3 <- 0, 1 <- 2: the second hop finds one new node over three edges, the third none over one.
    edge_index = torch.tensor([[1, 2, 3, 3, 2, 0], [0, 0, 1, 2, 1, 3]])
    loader = NeighborLoader(Data(edge_index=edge_index, num_nodes=5), [2, 2, 2], input_nodes=torch.tensor([0]))
    batch = next(iter(loader))
    assert batch.num_sampled_nodes == [1, 2, 1, 0]
    assert batch.num_sampled_edges == [2, 3, 1]


def test_disjoint_trees():
    data = small_data()
    for batch in NeighborLoader(data, [3, 2], batch_size=32, disjoint=True):
        check(batch, data)
        check_hops(batch, 2)
        assert torch.equal(batch.batch[: batch.batch_size], torch.arange(batch.batch_size))
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        inside = torch.stack([batch.batch, batch.n_id])
        assert inside.unique(dim=1).size(1) == batch.num_nodes
    assert "batch" not in next(iter(NeighborLoader(data, [3], batch_size=32)))


def test_with_replacement_each_node_with_in_edges_gets_all_its_draws():
    data = small_data(num_edges=600)
    degree = data.edge_index[1].bincount(minlength=data.num_nodes)
    batch = next(iter(NeighborLoader(data, [9], batch_size=400, replace=True)))
    check(batch, data)
    assert batch.edge_index[1].bincount(minlength=400).tolist() == torch.where(degree > 0, 9, 0).tolist()
    without = next(iter(NeighborLoader(data, [2], batch_size=400)))
    assert without.edge_index[1].bincount(minlength=400).tolist() == degree.clamp(max=2).tolist()
    assert without.e_id.unique().numel() == without.num_edges


def test_picks_are_uniform():
    data = Data(edge_index=torch.stack([torch.arange(1, 7), torch.zeros(6, dtype=torch.int64)]), num_nodes=7)
    loader = NeighborLoader(data, [2], input_nodes=torch.zeros(3000, dtype=torch.int64))
    torch.manual_seed(1)
    counts = torch.cat([batch.e_id for batch in loader]).bincount(minlength=6)
    # 1000 each are expected, with a standard deviation of 26.
    assert counts.sub(1000).abs().max() < 120


@pytest.mark.parametrize("kind", ["mask", "ids", "list", "int32"])
def test_input_id_and_kinds_of_input_nodes(kind):
    data = small_data()
    ids = data.val_mask.nonzero().view(-1)
    nodes = {"mask": data.val_mask, "ids": ids, "list": ids.tolist(), "int32": ids.int()}[kind]
    seen = []
    for batch in NeighborLoader(data, [2], input_nodes=nodes, batch_size=10, shuffle=True):
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(seeds, batch.input_id if kind == "mask" else ids[batch.input_id])
        assert data.val_mask[seeds].all()
        seen.append(seeds)
    assert torch.equal(torch.cat(seen).sort().values, ids)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", ["tensor", "EdgeIndex", "sorted"])
def test_kinds_of_edge_index(kind, dtype):
    edge_index = small_data().edge_index.to(dtype)
    if kind == "sorted":
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    given_index = EdgeIndex(edge_index, sparse_size=(400, 400)) if kind == "EdgeIndex" else edge_index
    data = Data(edge_index=given_index, num_nodes=400, edge_attr=torch.arange(4000))
    for batch in NeighborLoader(data, [3, 3], batch_size=100, is_sorted=kind == "sorted"):
        assert not isinstance(batch.edge_index, EdgeIndex)
        assert torch.equal(batch.edge_attr, batch.e_id)
        assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.e_id].long())


class SparseTensorDouble:
    """What the sampler reads of a torch_sparse.SparseTensor."""

    def __init__(self, rowptr, col):
        self.parts = rowptr, col, None

    def csr(self):
        return self.parts

    def cpu(self):
        return self


def test_adj_t_keeps_the_order_of_its_entries():
    graph = CSCGraph.from_edge_index(small_data().edge_index)
    sampler = LoaderNeighborSampler(Data(adj_t=SparseTensorDouble(graph.indptr, graph.indices.long())), [3])
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(50)))
    assert sampler.edge_permutation is None
    assert torch.equal(out.node[out.row], graph.indices[out.edge].long())
    assert bool((graph.indptr[out.node[out.col]] <= out.edge).all())


def test_stores_of_a_homogeneous_graph():
    data = small_data()
    features, topology = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    topology.put_edge_index((data.edge_index[0], data.edge_index[1]), edge_type=None, layout="coo", size=(400, 400))
    options = {"num_neighbors": [-1, -1], "input_nodes": torch.arange(60), "batch_size": 20}
    for ours, stored in zip(
        NeighborLoader(data, **options), NeighborLoader((features, topology), **options), strict=True
    ):
        assert ours.num_edges == stored.num_edges
        assert ours.n_id.sort().values.tolist() == stored.n_id.sort().values.tolist()
        assert torch.equal(stored.x, data.x[stored.n_id])
        assert torch.equal(stored.n_id[stored.edge_index], data.edge_index[:, stored.e_id])


@pytest.mark.parametrize("time_attr", [None, "time"])
@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
def test_stores_give_the_mini_batches_of_data(layout, time_attr):
    generator = torch.Generator().manual_seed(0)
    data, features, topology = HeteroData(), MyFeatureStore(), MyGraphStore()
    sizes = {"user": 20, "item": 30}
    for name, count in sizes.items():
        data[name].time, data[name].num_nodes = torch.randint(100, (count,), generator=generator), count
        features.put_tensor(data[name].time, group_name=name, attr_name="time", index=None)
    for source, target in (("user", "item"), ("item", "user")):
        name, ends = (source, "to", target), (sizes[source], sizes[target])
        row, col = (torch.randint(count, (300,), generator=generator) for count in ends)
        if layout != "coo":
            order = (col if layout == "csc" else row).sort(stable=True).indices
            row, col = row[order], col[order]
        data[name].edge_index = torch.stack([row, col])
        kept = {
            "coo": (row, col),
            "csc": (row, index2ptr(col, ends[1])),
            "csr": (index2ptr(row, ends[0]), col),
        }[layout]
        topology.put_edge_index(kept, edge_type=name, layout=layout, size=ends)
    epochs = []
    for graph in (data, (features, topology)):
        torch.manual_seed(0)
        loader = NeighborLoader(graph, [3, 3], ("item", torch.arange(30)), batch_size=8, time_attr=time_attr)
        epochs.append(list(loader))
    for ours, stored in zip(*epochs, strict=True):
        for name in data.node_types:
            assert torch.equal(ours[name].n_id, stored[name].n_id)
        for name in data.edge_types:
            assert torch.equal(ours[name].edge_index, stored[name].edge_index)
            assert torch.equal(ours[name].e_id, stored[name].e_id)


@pytest.mark.parametrize("data", [Data(num_nodes=30), Data(x=torch.ones(30, 2), edge_index=torch.empty(2, 0).long())])
@pytest.mark.parametrize("num_neighbors", [[], [3, 3], [0]])
def test_no_edges_or_no_hops(data, num_neighbors):
    for batch in NeighborLoader(data, num_neighbors, batch_size=10):
        assert batch.num_nodes == 10
        assert batch.num_sampled_nodes == [10] + [0] * len(num_neighbors)
        assert batch.num_sampled_edges == [0] * len(num_neighbors)
    links = LinkNeighborLoader(data, num_neighbors, edge_label_index=torch.randint(30, (2, 20)), batch_size=5)
    for batch in links:
        assert batch.num_nodes == batch.edge_label_index.unique().numel()


def test_features_in_a_memory_map(tmp_path):
    rows = np.random.default_rng(0).random((400, 8), dtype=np.float32)
    np.save(tmp_path / "x.npy", rows)
    data = small_data()
    data.x = np.load(tmp_path / "x.npy", mmap_mode="r")
    for batch in NeighborLoader(data, [4, 4], batch_size=100, num_workers=2):
        assert isinstance(batch.x, torch.Tensor)
        assert np.array_equal(batch.x.numpy(), rows[batch.n_id])


def test_transforms():
    data = small_data()

    def only_seeds(out):
        out = copy.copy(out)
        out.row, out.col, out.edge = out.row[:1], out.col[:1], out.edge[:1]
        return out

    def mark(batch):
        batch.mark = batch.num_nodes
        return batch

    loader = NeighborLoader(data, [4], batch_size=50, transform=mark, transform_sampler_output=only_seeds)
    for batch in loader:
        assert batch.num_edges == 1
        assert batch.mark == batch.num_nodes
        check(batch, data)


def test_batches_share_no_memory_with_the_graph_or_each_other():
    data = small_data()
    before = copy.deepcopy(data)
    kept = []
    for batch in NeighborLoader(data, [-1, -1], batch_size=200):
        kept.append((batch, copy.deepcopy(batch)))
        scratch = next(iter(NeighborLoader(data, [-1, -1], batch_size=200)))
        for name in ("x", "y", "edge_index", "edge_attr", "n_id", "e_id"):
            scratch[name].zero_()
    for name in data.keys():  # noqa: SIM118
        assert torch.equal(data[name], before[name])
    for batch, snapshot in kept:
        assert torch.equal(batch.edge_index, snapshot.edge_index)
        check(batch, data)


def test_imbalanced_sampler():
    data = small_data()
    torch.manual_seed(0)
    sampler = ImbalancedSampler(data.y, num_samples=400)
    for batch in NeighborLoader(data, [3], batch_size=100, sampler=sampler):
        # Nodes are drawn with replacement: a seed given twice keeps both places.
        assert torch.equal(batch.n_id[:100], batch.input_id)
        check(batch, data)


# --- models on its batches --------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(num_features, 16), GraphConv(16, 4)

    def forward(self, x, edge_index, edge_weight):
        return self.conv2(self.conv1(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_a_model_sees_the_whole_neighbourhood(subgraph_type):
    data = KarateClub()[0]
    # One weight per undirected edge, so that it does not matter which direction a bidirectional subgraph kept.
    low, high = data.edge_index.min(dim=0).values, data.edge_index.max(dim=0).values
    data.edge_weight = torch.rand(34, 34)[low, high]
    seeds = torch.tensor([0, 9, 30])
    model = Net(data.num_features)
    loader = NeighborLoader(data, [-1, -1], input_nodes=seeds, batch_size=3, subgraph_type=subgraph_type)
    batch = next(iter(loader))
    whole = model(data.x, data.edge_index, data.edge_weight)[seeds]
    torch.testing.assert_close(model(batch.x, batch.edge_index, batch.edge_weight)[:3], whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("disjoint", [False, True])
def test_trim_to_layer(disjoint):
    data = small_data()
    model = GraphSAGE(12, 16, num_layers=3, out_channels=4)
    for batch in NeighborLoader(data, [4, 3, 2], batch_size=40, disjoint=disjoint):
        whole = model(batch.x, batch.edge_index)[:40]
        trimmed = model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )[:40]
        torch.testing.assert_close(trimmed, whole)


def test_layerwise_inference():
    data = small_data()
    model = GraphSAGE(12, 16, num_layers=2, out_channels=4).eval()
    with torch.no_grad():
        whole = model(data.x, data.edge_index)
        torch.testing.assert_close(model.inference(NeighborLoader(data, [-1], batch_size=64)), whole)


# --- randomness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_seed_everything_reproduces_and_epochs_differ(num_workers):
    data = small_data()
    loader = NeighborLoader(data, [2, 2], batch_size=50, shuffle=True, num_workers=num_workers)
    runs = []
    for seed in (1, 1, 2):
        pl.seed_everything(seed, verbose=False)
        runs.append([epoch(loader), epoch(loader)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_each_worker_process_and_each_epoch_draws_for_itself(persistent, filter_per_worker):
    data = small_data()
    # One and the same seed in every mini-batch.
    loader = NeighborLoader(
        data,
        [2, 2],
        input_nodes=torch.zeros(12, dtype=torch.int64),
        num_workers=3,
        persistent_workers=persistent,
        filter_per_worker=filter_per_worker,
    )
    draws = [tuple(batch.e_id.tolist()) for _ in range(3) for batch in loader]
    assert len(set(draws)) > 0.9 * len(draws)


def test_ranks_with_one_seed_draw_differently(monkeypatch):
    sampler = LoaderNeighborSampler(small_data(), [2, 2])
    picks = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        picks.append(sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(50))).edge.tolist())
    assert picks[0] != picks[1]


@pytest.mark.slow
def test_spawned_worker_processes():
    data = small_data()
    links = LinkNeighborLoader(data, [2], batch_size=2000, num_workers=1, multiprocessing_context="spawn")
    assert links.link_sampler.graph.indices.is_shared()
    for batch in links:
        check(batch, data)


# --- LinkNeighborLoader -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
@pytest.mark.parametrize("ratio", [None, 1.0, 0.5])
def test_link_neighbor_loader(ratio, subgraph_type, num_workers):
    data = small_data()
    links = torch.cat([data.edge_index[:, :100], torch.randint(400, (2, 100))], dim=1)
    labels = torch.cat([torch.ones(100), torch.zeros(100)])
    loader = LinkNeighborLoader(
        data,
        [4, 3],
        edge_label_index=links,
        edge_label=labels if ratio is None else None,
        neg_sampling_ratio=ratio,
        subgraph_type=subgraph_type,
        batch_size=20,
        shuffle=True,
        num_workers=num_workers,
    )
    assert str(loader) == "LinkNeighborLoader()"
    assert len(loader) == 10
    assert set(links[:, 3].tolist()) <= set(loader([3]).n_id.tolist())
    seen = []
    negatives = int(20 * (ratio or 0))
    for batch in loader:
        if subgraph_type != "bidirectional":
            check(batch, data)
        assert batch.e_id.shape == (batch.num_edges,)
        assert batch.edge_label_index.shape == (2, 20 + negatives)
        assert torch.equal(batch.n_id[batch.edge_label_index[:, :20]], links[:, batch.input_id])
        wanted = labels[batch.input_id] if ratio is None else torch.tensor([1.0] * 20 + [0.0] * negatives)
        assert torch.equal(batch.edge_label, wanted)
        seen.append(batch.input_id)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(200))


def test_labels_that_start_at_zero_move_up_for_negatives():
    data = small_data()
    labels = torch.arange(4000) % 3
    for batch in LinkNeighborLoader(data, [2], edge_label=labels, neg_sampling="binary", batch_size=1000):
        assert batch.edge_label.dtype == torch.int64
        assert torch.equal(batch.edge_label[:1000], labels[batch.input_id] + 1)
        assert not batch.edge_label[1000:].any()


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("amount", [1, 3])
def test_triplets(disjoint, amount):
    data = small_data()
    links = torch.randint(400, (2, 100))
    loader = LinkNeighborLoader(
        data,
        [4, 3],
        edge_label_index=links,
        neg_sampling={"mode": "triplet", "amount": amount},
        disjoint=disjoint,
        batch_size=20,
        shuffle=True,
    )
    for batch in loader:
        check(batch, data)
        check_hops(batch, 2)
        assert torch.equal(batch.n_id[batch.src_index], links[0, batch.input_id])
        assert torch.equal(batch.n_id[batch.dst_pos_index], links[1, batch.input_id])
        assert batch.dst_neg_index.shape == ((20,) if amount == 1 else (20, amount))
        assert "edge_label_index" not in batch
        if disjoint:
            assert batch.src_index.tolist() == list(range(20))
            assert batch.dst_pos_index.tolist() == list(range(20, 40))
            assert batch.dst_neg_index.view(20, -1).t().reshape(-1).tolist() == list(range(40, 40 + 20 * amount))
            # All ends of a triplet belong to its tree, and no edge leaves it.
            assert batch.batch[: 40 + 20 * amount].tolist() == list(range(20)) * (2 + amount)
            assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])


def test_weighted_negatives_and_their_reproduction():
    data = small_data()
    weight = torch.zeros(400)
    weight[[7, 11]] = 1.0
    negatives = {"mode": "binary", "amount": 2, "src_weight": weight, "dst_weight": weight}
    loader = LinkNeighborLoader(data, [2], neg_sampling=negatives, batch_size=1000)
    runs = []
    for _ in range(2):
        pl.seed_everything(3, verbose=False)
        runs.append([batch.n_id[batch.edge_label_index[:, 1000:]].tolist() for batch in loader])
    assert runs[0] == runs[1]
    assert {node for batch in runs[0] for side in batch for node in side} == {7, 11}
