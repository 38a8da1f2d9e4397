"""Whatever a transform does to a mini-batch, trimmed models give the seeds the rows of untrimmed ones."""

import copy
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import transforms as T
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import models as pyg

from lightning_gnn import (
    CollectiveDataModule,
    LinkDataModule,
    NeighborDataModule,
    PartitionedDataModule,
    PersistentSamplerDataModule,
)
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.nn import GAT, GCN, GIN, HGT, RGAT, RGCN, GraphSAGE, HeteroGraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.nn.sampled_edges import in_sampled_order, moved
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.pyg import enable_pyg_sampling

CITES, WRITES, READ = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "read", "author")
SIZES = {"num_neighbors": [4, 3], "batch_size": 8}
SEEDS = torch.arange(0, 200, 13)


def graph():
    random = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(200, 8, generator=random),
        y=torch.randint(4, (200,), generator=random),
        edge_index=torch.randint(180, (2, 900), generator=random),
        train_mask=torch.arange(200) % 13 == 0,
    )


def typed_graph():
    random = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(150, 8, generator=random), torch.randn(90, 8, generator=random)
    data["paper"].y = torch.randint(4, (150,), generator=random)
    data["paper"].train_mask = torch.arange(150) % 10 == 0
    data[CITES].edge_index = torch.randint(150, (2, 400), generator=random)
    data[WRITES].edge_index = torch.stack([torch.randint(count, (400,), generator=random) for count in (90, 150)])
    data[READ].edge_index = data[WRITES].edge_index.flip(0)
    return data


def on_edges(change, in_place=False):
    """Return a transform that gives the edges of each relation other ends, from them and the numbers of nodes."""

    def transform(batch):
        for store in batch.edge_stores:
            ends = (store._key[0], store._key[2]) if isinstance(batch, HeteroData) else (None, None)
            counts = [batch.num_nodes if end is None else batch[end].num_nodes for end in ends]
            edges = store.edge_index if in_place else store.edge_index.clone()
            if edges.size(1) > 1 and min(counts) > 1:
                edges = change(edges, counts)
            store.edge_index = edges
        return batch

    return transform


def to_seed(edges, counts):
    edges[:, -1] = torch.tensor([1, 0])
    return edges


def other_targets(edges, counts):
    edges[1, -5:] = torch.randint(counts[1], (min(5, edges.size(1)),))
    return edges


def other_sources(edges, counts):
    edges[0, :5] = torch.randint(counts[0], (min(5, edges.size(1)),))
    return edges


def to_seed_unseen(edges, counts):
    edges.numpy()[:, -1] = 1, 0
    edges.data[:, -2] = torch.tensor([0, 1])
    return edges


def to_random_seeds(batch):
    """Ask for edges between other nodes than the seeds."""
    if isinstance(batch, HeteroData) or "edge_label_index" not in batch:
        return batch
    batch.edge_label_index = torch.randint(batch.num_nodes, batch.edge_label_index.shape)
    return batch


def more_nodes(batch):
    """Add nodes at the end, with an edge from one of them to a seed."""
    if isinstance(batch, HeteroData):
        return batch
    count = batch.num_nodes
    batch.x = torch.cat([batch.x, torch.randn(3, 8)])
    batch.edge_index = torch.cat([batch.edge_index, torch.tensor([[count], [0]])], dim=1)
    return batch


def permuted(batch):
    """Number the nodes otherwise."""
    if isinstance(batch, HeteroData):
        return batch
    order = torch.randperm(batch.num_nodes)
    batch.x, batch.edge_index = batch.x[order], order.argsort()[batch.edge_index]
    return batch


def more_seeds(batch):
    for store in batch.node_stores:
        if "batch_size" in store:
            store.batch_size = min(store.batch_size + 2, store.num_nodes)
    return batch


def features_only(batch):
    for store in batch.node_stores:
        if "x" in store:
            store.x = store.x * 2 + 1
    return batch


def edge_attributes(batch):
    for store in batch.edge_stores:
        store.noise = torch.rand(store.edge_index.size(1))
    return batch


KEEPING = {"none": None, "features": features_only, "edge attributes": edge_attributes, "PyG's": T.NormalizeFeatures()}
REWIRING = {
    "to a seed": on_edges(to_seed),
    "other targets": on_edges(other_targets),
    "other sources": on_edges(other_sources),
    "in place": on_edges(to_seed, in_place=True),
    "in place, unseen": on_edges(to_seed_unseen, in_place=True),
    "another order": on_edges(lambda edges, counts: edges[:, torch.randperm(edges.size(1))]),
    "fewer": on_edges(lambda edges, counts: edges[:, 1:]),
    "undirected": T.ToUndirected(),
    "self-loops": T.AddSelfLoops(),
    "isolated": T.RemoveIsolatedNodes(),
    "more nodes": more_nodes,
    "permuted": permuted,
    "more seeds": more_seeds,
    "other labels": to_random_seeds,
}
TRANSFORMS = KEEPING | REWIRING
MODELS = {
    "GCN": GCN,
    "GraphSAGE": GraphSAGE,
    "GIN": GIN,
    "GAT": GAT,
    "PyG's GraphSAGE": pyg.GraphSAGE,
    "PyG's GCN": pyg.GCN,
}
TYPED_MODELS = {"RGCN": RGCN, "HeteroGraphSAGE": HeteroGraphSAGE, "RGAT": RGAT, "HGT": HGT}


@pytest.fixture(scope="module", autouse=True)
def _pyg_samples():
    with enable_pyg_sampling():
        yield


@pytest.fixture(scope="module")
def parts():
    with tempfile.TemporaryDirectory() as folder:
        partition_graph(graph(), folder, 2, "ldg")
        yield folder


def links(kind, data, transform, **more):
    return kind(data, input_train_edges=graph().edge_index[:, :16], transform=transform, **SIZES, **more)


def joined(datamodule):
    datamodule.setup("fit")
    try:
        return list(datamodule.train_dataloader())
    finally:
        datamodule.teardown("fit")


LOADERS = {
    "neighbor": lambda t, parts: NeighborDataModule(graph(), transform=t, **SIZES).train_dataloader(),
    "temporal": lambda t, parts: NeighborDataModule(timed(), transform=t, time_attr="time", **SIZES).train_dataloader(),
    "both ways": lambda t, parts: NeighborDataModule(
        graph(), transform=t, subgraph_type="bidirectional", **SIZES
    ).train_dataloader(),
    "persistent, kernels": lambda t, parts: PersistentSamplerDataModule(
        graph(), transform=t, device="cpu", **SIZES
    ).train_dataloader(),
    "collective": lambda t, parts: CollectiveDataModule(
        graph(), transform=t, gpu_route="cpu", num_workers=1, **SIZES
    ).train_dataloader(),
    "partitioned": lambda t, parts: joined(PartitionedDataModule(parts, transform=t, cache=2000, **SIZES)),
    "PyG's": lambda t, parts: NeighborLoader(graph(), [4, 3], input_nodes=SEEDS, batch_size=8, transform=t),
}
LINK_LOADERS = {
    "neighbor": lambda t, parts: links(LinkDataModule, graph(), t, neg_sampling="binary").train_dataloader(),
    "triplets": lambda t, parts: links(LinkDataModule, graph(), t, neg_sampling="triplet").train_dataloader(),
    "PyG's": lambda t, parts: LinkNeighborLoader(
        graph(), [4, 3], edge_label_index=graph().edge_index[:, :20], neg_sampling="binary", batch_size=8, transform=t
    ),
}


def timed():
    data = graph()
    data.time = torch.arange(200)
    return data


def untrimmed(batch):
    batch = copy.copy(batch)
    for store in batch.stores:
        for name in ("num_sampled_nodes", "num_sampled_edges"):
            if name in store:
                del store[name]
    return batch


def answer(module, batch):
    """Return what is predicted, and how many rows the model computes."""
    with torch.no_grad():
        rows = module(batch)
        rows = sum(map(len, rows.values())) if isinstance(rows, dict) else len(rows)
        return module.predict_step(batch, 0), rows


def compare(modules, loader, keeps):
    batches = list(loader)
    assert len(batches) > 1
    for batch in batches:
        for module in modules:
            found, computed = answer(module, batch)
            expected, whole = answer(module, untrimmed(batch))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            if keeps is not None:
                assert (computed < whole) == (keeps and type(module.model) is not pyg.GCN)


def crossed(loaders, transforms):
    """Pair the first loader with every transform, as what these do is the same after all, and all with a few."""
    few = ("none", "features", "to a seed", "other sources", "undirected", "more nodes", "metapaths")
    pairs = [(loader, name) for loader in loaders for name in transforms if loader == "neighbor" or name in few]
    return pytest.mark.parametrize(("loader", "transform"), pairs)


@crossed(LOADERS, TRANSFORMS)
def test_no_transform_makes_trimmed_rows_of_nodes_wrong(loader, transform, parts):
    torch.manual_seed(0)
    models = [NodeClassifier(model(8, 16, 2, 4), num_classes=4).eval() for model in MODELS.values()]
    keeps = True if transform in KEEPING and loader != "both ways" else None
    compare(models, LOADERS[loader](TRANSFORMS[transform], parts), keeps)


@crossed(LINK_LOADERS, TRANSFORMS)
def test_no_transform_makes_trimmed_scores_of_edges_wrong(loader, transform, parts):
    torch.manual_seed(0)
    models = [LinkPredictor(model(8, 16, 2, 4)).eval() for model in MODELS.values()]
    compare(models, LINK_LOADERS[loader](TRANSFORMS[transform], parts), True if transform in KEEPING else None)


def metapaths(batch):
    return T.AddMetaPaths([[WRITES, READ]])(batch)


def another_type(batch):
    batch["venue"].x = torch.randn(3, 8)
    batch["venue", "prints", "paper"].edge_index = torch.tensor([[0, 1], [0, 1]])
    return batch


TYPED = {
    name: change for name, change in TRANSFORMS.items() if name not in ("more nodes", "permuted", "other labels")
} | {"metapaths": metapaths, "another type": another_type}


TYPED_LOADERS = {
    "neighbor": lambda t: NeighborDataModule(typed_graph(), "paper", transform=t, **SIZES).train_dataloader(),
    "persistent": lambda t: PersistentSamplerDataModule(
        typed_graph(), "paper", transform=t, **SIZES
    ).train_dataloader(),
    "PyG's": lambda t: NeighborLoader(
        typed_graph(), [4, 3], input_nodes=("paper", torch.arange(0, 150, 10)), batch_size=8, transform=t
    ),
    "link": lambda t: LinkDataModule(
        typed_graph(), (WRITES, typed_graph()[WRITES].edge_index[:, :20]), neg_sampling="binary", transform=t, **SIZES
    ).train_dataloader(),
}


@crossed(TYPED_LOADERS, TYPED)
def test_no_transform_makes_trimmed_rows_of_heterogeneous_graphs_wrong(loader, transform):
    torch.manual_seed(0)
    models = [model(typed_graph().metadata(), 8, 16, 2, 4) for model in TYPED_MODELS.values()]
    if loader == "link":
        modules = [LinkPredictor(model, target=WRITES).eval() for model in models]
    else:
        modules = [NodeClassifier(model, num_classes=4, target="paper").eval() for model in models]
    adds = {"metapaths": False, "another type": False}
    keeps = True if transform in KEEPING else adds.get(transform)
    compare(modules, TYPED_LOADERS[loader](TYPED[transform]), keeps)


@pytest.mark.parametrize("model", TYPED_MODELS)
def test_a_model_that_knows_the_added_relation_reads_it(model):
    torch.manual_seed(0)
    data = typed_graph()
    metadata = metapaths(copy.copy(data)).metadata()
    module = NodeClassifier(TYPED_MODELS[model](metadata, 8, 16, 2, 4), num_classes=4, target="paper").eval()
    loader = NeighborDataModule(data, "paper", transform=metapaths, **SIZES).train_dataloader()
    compare([module], loader, False)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_edges_at_any_place_to_any_node_leave_trimmed_rows_exact(data):
    seed = data.draw(st.integers(0, 9))
    batch = next(iter(NeighborDataModule(graph(), seed=seed, **(SIZES | {"num_neighbors": [3, 2]})).train_dataloader()))
    places = st.lists(st.integers(0, batch.num_edges - 1), max_size=3)
    batch.edge_index = batch.edge_index.clone()
    for place in data.draw(places):
        node = st.integers(0, batch.num_nodes - 1)
        batch.edge_index[:, place] = torch.tensor([data.draw(node), data.draw(node)])
    torch.manual_seed(0)
    modules = [NodeClassifier(model(8, 16, 2, 4), num_classes=4).eval() for model in MODELS.values()]
    compare(modules, [batch, batch], None)


def sampled():
    return next(iter(NeighborDataModule(graph(), **SIZES).train_dataloader()))


def looks(batch):
    """Say whether a device would be waited for: what is on "meta" has no values to look at."""
    try:
        return not in_sampled_order(batch)
    except (RuntimeError, NotImplementedError):
        return True


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_on_a_device_the_edges_that_were_moved_are_known_without_a_look(mode):
    with mode():
        there = moved(sampled(), lambda batch: batch.to("meta"))
        assert not looks(there)
        there.x = there.x * 2
        assert not looks(features_only(copy.copy(there)))
        replaced = copy.copy(there)
        replaced.edge_index = replaced.edge_index.clone()
        assert looks(replaced)
        counted = copy.copy(there)
        counted.num_sampled_nodes = [4, *counted.num_sampled_nodes[1:]]
        assert looks(counted)
        assert looks(copy.deepcopy(there))
        there.edge_index[0, 0] = 3
        assert looks(there)


def test_on_a_device_edges_that_were_rewired_before_they_were_moved_are_looked_at():
    assert looks(moved(on_edges(to_seed)(sampled()), lambda batch: batch.to("meta")))


def test_the_transfer_of_hyscale_keeps_what_is_known():
    assert not looks(Transfer(torch.device("meta"))(sampled()))


def test_a_module_keeps_what_is_known_when_lightning_moves_a_batch():
    module = NodeClassifier(GCN(8, 16, 2, 4), num_classes=4)
    assert not looks(module._apply_batch_transfer_handler(sampled(), torch.device("meta")))

    class Own(NodeClassifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return on_edges(lambda edges, counts: edges)(batch)

    own = Own(GCN(8, 16, 2, 4), num_classes=4)
    assert looks(own._apply_batch_transfer_handler(sampled(), torch.device("meta")))
