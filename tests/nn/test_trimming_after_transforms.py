"""For any transform of a mini-batch, trimmed models compute the same seed rows as untrimmed ones."""

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


def draw():
    random = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(200, 8, generator=random),
        y=torch.randint(4, (200,), generator=random),
        edge_index=torch.randint(180, (2, 900), generator=random),
        train_mask=torch.arange(200) % 13 == 0,
    )


def draw_typed():
    random = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(150, 8, generator=random), torch.randn(90, 8, generator=random)
    data["paper"].y = torch.randint(4, (150,), generator=random)
    data["paper"].train_mask = torch.arange(150) % 10 == 0
    data[CITES].edge_index = torch.randint(150, (2, 400), generator=random)
    data[WRITES].edge_index = torch.stack([torch.randint(count, (400,), generator=random) for count in (90, 150)])
    data[READ].edge_index = data[WRITES].edge_index.flip(0)
    return data


def change_edges(change, in_place=False):
    """Return a transform that replaces each relation's edges by ``change(edges, numbers of nodes)``."""

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


def move_to_seed(edges, counts):
    edges[:, -1] = torch.tensor([1, 0])
    return edges


def change_targets(edges, counts):
    edges[1, -5:] = torch.randint(counts[1], (min(5, edges.size(1)),))
    return edges


def change_sources(edges, counts):
    edges[0, :5] = torch.randint(counts[0], (min(5, edges.size(1)),))
    return edges


def move_unseen(edges, counts):
    edges.numpy()[:, -1] = 1, 0
    edges.data[:, -2] = torch.tensor([0, 1])
    return edges


def change_labels(batch):
    """Add an edge_label_index between other nodes than the seeds."""
    if isinstance(batch, HeteroData) or "edge_label_index" not in batch:
        return batch
    batch.edge_label_index = torch.randint(batch.num_nodes, batch.edge_label_index.shape)
    return batch


def append_nodes(batch):
    """Append nodes, with an edge from one of them to a seed."""
    if isinstance(batch, HeteroData):
        return batch
    count = batch.num_nodes
    batch.x = torch.cat([batch.x, torch.randn(3, 8)])
    batch.edge_index = torch.cat([batch.edge_index, torch.tensor([[count], [0]])], dim=1)
    return batch


def permute(batch):
    if isinstance(batch, HeteroData):
        return batch
    order = torch.randperm(batch.num_nodes)
    batch.x, batch.edge_index = batch.x[order], order.argsort()[batch.edge_index]
    return batch


def append_seeds(batch):
    for store in batch.node_stores:
        if "batch_size" in store:
            store.batch_size = min(store.batch_size + 2, store.num_nodes)
    return batch


def scale_features(batch):
    for store in batch.node_stores:
        if "x" in store:
            store.x = store.x * 2 + 1
    return batch


def add_noise(batch):
    for store in batch.edge_stores:
        store.noise = torch.rand(store.edge_index.size(1))
    return batch


KEEPING = {"none": None, "features": scale_features, "edge attributes": add_noise, "PyG's": T.NormalizeFeatures()}
REWIRING = {
    "to a seed": change_edges(move_to_seed),
    "other targets": change_edges(change_targets),
    "other sources": change_edges(change_sources),
    "in place": change_edges(move_to_seed, in_place=True),
    "in place, unseen": change_edges(move_unseen, in_place=True),
    "another order": change_edges(lambda edges, counts: edges[:, torch.randperm(edges.size(1))]),
    "fewer": change_edges(lambda edges, counts: edges[:, 1:]),
    "undirected": T.ToUndirected(),
    "self-loops": T.AddSelfLoops(),
    "isolated": T.RemoveIsolatedNodes(),
    "more nodes": append_nodes,
    "permuted": permute,
    "more seeds": append_seeds,
    "other labels": change_labels,
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
        partition_graph(draw(), folder, 2, "ldg")
        yield folder


def make_links(kind, data, transform, **more):
    return kind(data, input_train_edges=draw().edge_index[:, :16], transform=transform, **SIZES, **more)


def load_batches(datamodule):
    datamodule.setup("fit")
    try:
        return list(datamodule.train_dataloader())
    finally:
        datamodule.teardown("fit")


LOADERS = {
    "neighbor": lambda t, parts: NeighborDataModule(draw(), transform=t, **SIZES).train_dataloader(),
    "temporal": lambda t, parts: NeighborDataModule(
        draw_timed(), transform=t, time_attr="time", **SIZES
    ).train_dataloader(),
    "both ways": lambda t, parts: NeighborDataModule(
        draw(), transform=t, subgraph_type="bidirectional", **SIZES
    ).train_dataloader(),
    "persistent, kernels": lambda t, parts: PersistentSamplerDataModule(
        draw(), transform=t, device="cpu", **SIZES
    ).train_dataloader(),
    "collective": lambda t, parts: CollectiveDataModule(
        draw(), transform=t, gpu_route="cpu", num_workers=1, **SIZES
    ).train_dataloader(),
    "partitioned": lambda t, parts: load_batches(PartitionedDataModule(parts, transform=t, cache=2000, **SIZES)),
    "PyG's": lambda t, parts: NeighborLoader(draw(), [4, 3], input_nodes=SEEDS, batch_size=8, transform=t),
}
LINK_LOADERS = {
    "neighbor": lambda t, parts: make_links(LinkDataModule, draw(), t, neg_sampling="binary").train_dataloader(),
    "triplets": lambda t, parts: make_links(LinkDataModule, draw(), t, neg_sampling="triplet").train_dataloader(),
    "PyG's": lambda t, parts: LinkNeighborLoader(
        draw(), [4, 3], edge_label_index=draw().edge_index[:, :20], neg_sampling="binary", batch_size=8, transform=t
    ),
}


def draw_timed():
    data = draw()
    data.time = torch.arange(200)
    return data


def disable_trimming(batch):
    batch = copy.copy(batch)
    for store in batch.stores:
        for name in ("num_sampled_nodes", "num_sampled_edges"):
            if name in store:
                del store[name]
    return batch


def predict(module, batch):
    """Return the predictions, and the number of rows that the model computes."""
    with torch.no_grad():
        rows = module(batch)
        rows = sum(map(len, rows.values())) if isinstance(rows, dict) else len(rows)
        return module.predict_step(batch, 0), rows


def compare(modules, loader, keeps):
    batches = list(loader)
    assert len(batches) > 1
    for batch in batches:
        for module in modules:
            found, computed = predict(module, batch)
            expected, whole = predict(module, disable_trimming(batch))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            if keeps is not None:
                assert (computed < whole) == (keeps and type(module.model) is not pyg.GCN)


def pair_with_transforms(loaders, transforms):
    """Pair the first loader with every transform, and all loaders with a few."""
    few = ("none", "features", "to a seed", "other sources", "undirected", "more nodes", "metapaths")
    pairs = [(loader, name) for loader in loaders for name in transforms if loader == "neighbor" or name in few]
    return pytest.mark.parametrize(("loader", "transform"), pairs)


@pytest.mark.slow
@pair_with_transforms(LOADERS, TRANSFORMS)
def test_no_transform_makes_trimmed_rows_of_nodes_wrong(loader, transform, parts):
    torch.manual_seed(0)
    models = [NodeClassifier(model(8, 16, 2, 4), num_classes=4).eval() for model in MODELS.values()]
    keeps = True if transform in KEEPING and loader != "both ways" else None
    compare(models, LOADERS[loader](TRANSFORMS[transform], parts), keeps)


@pytest.mark.medium
@pair_with_transforms(LINK_LOADERS, TRANSFORMS)
def test_no_transform_makes_trimmed_scores_of_edges_wrong(loader, transform, parts):
    torch.manual_seed(0)
    models = [LinkPredictor(model(8, 16, 2, 4)).eval() for model in MODELS.values()]
    compare(models, LINK_LOADERS[loader](TRANSFORMS[transform], parts), True if transform in KEEPING else None)


def add_metapaths(batch):
    # The product of MKL that PyG calls reads unwritten memory where edges repeat (docs/how-to/when-it-hangs.md).
    unique = T.RemoveDuplicatedEdges()(batch)
    added = T.AddMetaPaths([[WRITES, READ]])(unique)
    (metapath,) = added.metapath_dict
    batch[metapath].edge_index = added[metapath].edge_index
    return batch


def add_type(batch):
    batch["venue"].x = torch.randn(3, 8)
    batch["venue", "prints", "paper"].edge_index = torch.tensor([[0, 1], [0, 1]])
    return batch


TYPED = {
    name: change for name, change in TRANSFORMS.items() if name not in ("more nodes", "permuted", "other labels")
} | {"metapaths": add_metapaths, "another type": add_type}


TYPED_LOADERS = {
    "neighbor": lambda t: NeighborDataModule(draw_typed(), "paper", transform=t, **SIZES).train_dataloader(),
    "persistent": lambda t: PersistentSamplerDataModule(draw_typed(), "paper", transform=t, **SIZES).train_dataloader(),
    "PyG's": lambda t: NeighborLoader(
        draw_typed(), [4, 3], input_nodes=("paper", torch.arange(0, 150, 10)), batch_size=8, transform=t
    ),
    "link": lambda t: LinkDataModule(
        draw_typed(), (WRITES, draw_typed()[WRITES].edge_index[:, :20]), neg_sampling="binary", transform=t, **SIZES
    ).train_dataloader(),
}


@pytest.mark.slow
@pair_with_transforms(TYPED_LOADERS, TYPED)
def test_no_transform_makes_trimmed_rows_of_heterogeneous_graphs_wrong(loader, transform):
    torch.manual_seed(0)
    models = [model(draw_typed().metadata(), 8, 16, 2, 4) for model in TYPED_MODELS.values()]
    if loader == "link":
        modules = [LinkPredictor(model, target=WRITES).eval() for model in models]
    else:
        modules = [NodeClassifier(model, num_classes=4, target="paper").eval() for model in models]
    adds = {"metapaths": False, "another type": False}
    keeps = True if transform in KEEPING else adds.get(transform)
    compare(modules, TYPED_LOADERS[loader](TYPED[transform]), keeps)


@pytest.mark.medium
@pytest.mark.parametrize("model", TYPED_MODELS)
def test_a_model_that_knows_the_added_relation_reads_it(model):
    torch.manual_seed(0)
    data = draw_typed()
    metadata = add_metapaths(copy.copy(data)).metadata()
    module = NodeClassifier(TYPED_MODELS[model](metadata, 8, 16, 2, 4), num_classes=4, target="paper").eval()
    loader = NeighborDataModule(data, "paper", transform=add_metapaths, **SIZES).train_dataloader()
    compare([module], loader, False)


@pytest.mark.medium
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_edges_at_any_place_to_any_node_leave_trimmed_rows_exact(data):
    seed = data.draw(st.integers(0, 9))
    batch = next(iter(NeighborDataModule(draw(), seed=seed, **(SIZES | {"num_neighbors": [3, 2]})).train_dataloader()))
    places = st.lists(st.integers(0, batch.num_edges - 1), max_size=3)
    batch.edge_index = batch.edge_index.clone()
    for place in data.draw(places):
        node = st.integers(0, batch.num_nodes - 1)
        batch.edge_index[:, place] = torch.tensor([data.draw(node), data.draw(node)])
    torch.manual_seed(0)
    modules = [NodeClassifier(model(8, 16, 2, 4), num_classes=4).eval() for model in MODELS.values()]
    compare(modules, [batch, batch], None)


def sample():
    return next(iter(NeighborDataModule(draw(), **SIZES).train_dataloader()))


def reads_values(batch):
    """Return whether the check waits for a device: on "meta" there are no values to read."""
    try:
        return not in_sampled_order(batch)
    except (RuntimeError, NotImplementedError):
        return True


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_on_a_device_the_edges_that_were_moved_are_known_without_a_look(mode):
    with mode():
        on_meta = moved(sample(), lambda batch: batch.to("meta"))
        assert not reads_values(on_meta)
        on_meta.x = on_meta.x * 2
        assert not reads_values(scale_features(copy.copy(on_meta)))
        replaced = copy.copy(on_meta)
        replaced.edge_index = replaced.edge_index.clone()
        assert reads_values(replaced)
        counted = copy.copy(on_meta)
        counted.num_sampled_nodes = [4, *counted.num_sampled_nodes[1:]]
        assert reads_values(counted)
        assert reads_values(copy.deepcopy(on_meta))
        on_meta.edge_index[0, 0] = 3
        assert reads_values(on_meta)


def test_on_a_device_edges_that_were_rewired_before_they_were_moved_are_looked_at():
    assert reads_values(moved(change_edges(move_to_seed)(sample()), lambda batch: batch.to("meta")))


def test_the_transfer_of_hyscale_keeps_what_is_known():
    assert not reads_values(Transfer(torch.device("meta"))(sample()))


def test_a_module_keeps_what_is_known_when_lightning_moves_a_batch():
    module = NodeClassifier(GCN(8, 16, 2, 4), num_classes=4)
    assert not reads_values(module._apply_batch_transfer_handler(sample(), torch.device("meta")))

    class Own(NodeClassifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return change_edges(lambda edges, counts: edges)(batch)

    own = Own(GCN(8, 16, 2, 4), num_classes=4)
    assert reads_values(own._apply_batch_transfer_handler(sample(), torch.device("meta")))
