"""PyG's loaders behave the same on our samplers as on PyG's."""

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.loader import LinkLoader, LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from lightning_gnn.ops import batch_key
from lightning_gnn.ops.library import runs_triton
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batch_checks import assert_same_batches, check, check_hops
from tests.batching_data import small_data
from tests.sampling.cases import GRAPHS, NODE_CASES, WRITES, make_options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.param(DEVICE, marks=[
    pytest.mark.slow, pytest.mark.skipif(not runs_triton(torch.device(DEVICE)), reason="neither a GPU nor Triton")
])  # fmt: skip
"""Device option as for data on a GPU; Triton's interpreter stands in for one."""


@pytest.fixture(autouse=True, scope="module")
def _enabled():
    with enable_pyg_sampling():
        yield


class Keyed(NeighborSampler):
    """Our sampler with keys from torch's generator, as PyG's loaders draw them."""

    def _next_key(self):
        return int(batch_key(int(torch.randint(2**63 - 1, (), device="cpu"))))


def read(loader, seed=0):
    torch.manual_seed(seed)
    return list(loader)


OF_OUR_OWN = {"sampling", "layer_dependency", "time_window", "eval_loader_kwargs", "seed", "batch_size"}
KINDS = [case for case, (_, options) in NODE_CASES.items() if "sampling" not in options and case != "both ways"]
LINKS = {
    "directional": {}, "disjoint": {"disjoint": True}, "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"}, "times": {"time_attr": "node_time"}, "weights": {"weight_attr": "weight"},
}  # fmt: skip


def make_inputs(case, data):
    """Return the seeds and sampler options of a case."""
    options = {name: value for name, value in make_options(case, data).items() if name not in OF_OUR_OWN}
    seeds = {"input_nodes": options["input_train_nodes"], "batch_size": 8}
    if "input_train_time" in options:
        seeds["input_time"] = options["input_train_time"]
    return seeds, {name: value for name, value in options.items() if not name.startswith("input_")}


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, ON_GPU])
@pytest.mark.parametrize("case", KINDS)
def test_mini_batches_are_those_of_our_sampler(case, device):
    data = GRAPHS[NODE_CASES[case][0]]()
    seeds, options = make_inputs(case, data)
    ours = NeighborLoader(data, **options, **seeds)
    ours.node_sampler.device = None if device is None else torch.device(device)
    assert_same_batches(read(ours), read(NodeLoader(data, Keyed(data, **options), **seeds)))
    assert (ours.node_sampler._gpu_sampler is None) == (device is None)


@pytest.mark.parametrize("kind", LINKS)
def test_mini_batches_of_links_are_those_of_our_sampler(kind):
    data = GRAPHS["typed"]()
    data[WRITES].weight = torch.rand(data[WRITES].num_edges)
    seeds = {"edge_label_index": (WRITES, data[WRITES].edge_index[:, :30]), "edge_label": torch.arange(30)}
    if kind == "times":
        seeds["edge_label_time"] = torch.full((30,), 10)
    ours = LinkNeighborLoader(data, [3, 2], **LINKS[kind], **seeds, batch_size=8)
    assert_same_batches(read(ours), read(LinkLoader(data, Keyed(data, [3, 2], **LINKS[kind]), **seeds, batch_size=8)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["links", "both ways"])
def test_what_pyg_makes_of_samples_of_the_gpu_is_what_it_makes_of_the_cpus(kind):
    data, found = GRAPHS["typed" if kind == "links" else "plain"](), []
    for device in (None, DEVICE):
        if kind == "links":
            loader = LinkNeighborLoader(
                data, [3], edge_label_index=(WRITES, data[WRITES].edge_index[:, :4]), neg_sampling="binary",
                batch_size=2, time_attr="node_time", edge_label_time=torch.arange(10, 14),
            )  # fmt: skip
        else:
            seeds, options = make_inputs(kind, data)
            loader = NeighborLoader(data, **options, **seeds)
        sampler = loader.link_sampler if kind == "links" else loader.node_sampler
        sampler.device = None if device is None else torch.device(device)
        found.append(read(loader))
    assert_same_batches(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("persistent", "filter_per_worker"), [(False, True), (True, False)])
def test_worker_processes_draw_anew_and_follow_the_seed(persistent, filter_per_worker):
    data = small_data()
    # The same seed in every mini-batch.
    loader = NeighborLoader(
        data, [2, 2], input_nodes=torch.zeros(12, dtype=torch.int64), num_workers=3, persistent_workers=persistent,
        filter_per_worker=filter_per_worker,
    )  # fmt: skip
    draws = []
    for seed in (1, 1, 2):
        draws.append([])
        for number in range(3):
            for batch in read(loader, 10 * seed + number):
                check(batch, data)
                check_hops(batch, 2)
                draws[-1].append(tuple(batch.e_id.tolist()))
    assert persistent or draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) > 0.9 * 2 * len(draws[0])


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


def test_stores_of_a_homogeneous_graph():
    data = small_data()
    features, topology = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    topology.put_edge_index((data.edge_index[0], data.edge_index[1]), edge_type=None, layout="coo", size=(400, 400))
    options = {"num_neighbors": [3, 3], "input_nodes": torch.arange(60), "batch_size": 20}
    made = [read(NeighborLoader(graph, **options)) for graph in (data, (features, topology))]
    for ours, stored in zip(*made, strict=True):
        for name in ("n_id", "e_id", "edge_index", "x"):
            assert torch.equal(ours[name], stored[name])


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
        stored = {"coo": (row, col), "csc": (row, index2ptr(col, ends[1])), "csr": (index2ptr(row, ends[0]), col)}[
            layout
        ]
        topology.put_edge_index(stored, edge_type=name, layout=layout, size=ends)
    epochs = []
    for graph in (data, (features, topology)):
        torch.manual_seed(0)
        loader = NeighborLoader(graph, [3, 3], ("item", torch.arange(30)), batch_size=8, time_attr=time_attr)
        epochs.append(list(loader))
    for ours, stored in zip(*epochs, strict=True):
        for name in data.node_types:
            assert torch.equal(ours[name].n_id, stored[name].n_id)
            assert torch.equal(ours[name].time, stored[name].time)
        for name in data.edge_types:
            assert torch.equal(ours[name].edge_index, stored[name].edge_index)
            assert torch.equal(ours[name].e_id, stored[name].e_id)


@pytest.mark.slow
def test_spawned_worker_processes():
    data = small_data()
    links = LinkNeighborLoader(data, [2], batch_size=2000, num_workers=1, multiprocessing_context="spawn")
    assert links.link_sampler.graph.indices.is_shared()
    for batch in links:
        check(batch, data)


@pytest.mark.parametrize("amount", [1, 3])
def test_disjoint_triplets(amount):
    data = small_data()
    links, negatives = torch.randint(400, (2, 100)), {"mode": "triplet", "amount": amount}
    loader = LinkNeighborLoader(
        data, [4, 3], edge_label_index=links, neg_sampling=negatives, disjoint=True, batch_size=20
    )  # fmt: skip
    for batch in loader:
        check(batch, data)
        check_hops(batch, 2)
        assert torch.equal(batch.n_id[batch.src_index], links[0, batch.input_id])
        assert torch.equal(batch.n_id[batch.dst_pos_index], links[1, batch.input_id])
        assert batch.dst_neg_index.shape == ((20,) if amount == 1 else (20, amount))
        # All ends of a triplet belong to its tree, and no edge leaves it.
        assert batch.batch[: 40 + 20 * amount].tolist() == list(range(20)) * (2 + amount)
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
