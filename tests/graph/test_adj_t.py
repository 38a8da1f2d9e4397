"""The values of ``adj_t`` are the weights of its edges, exactly as ``edge_weight`` beside ``edge_index``."""

import copy
from itertools import islice, product

import pytest
import pytorch_lightning as pl
import torch
import torch_geometric.transforms as T
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GraphConv
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import coalesce

from lightning_gnn import (
    CollectiveDataModule,
    CSCGraph,
    FullGraphDataModule,
    LinkDataModule,
    NeighborDataModule,
    NeighborSampler,
    PersistentLinkDataModule,
    PersistentSamplerDataModule,
)
from lightning_gnn.cli.assemble import build_data, build_task
from lightning_gnn.datasets import load_hetero_folder, save_hetero_folder
from lightning_gnn.datasets.folder import load_folder, save_folder
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.loading import NodeLoader
from lightning_gnn.nn import GCN, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.batch_checks import assert_same
from tests.refusals import refuses

NODES, TYPES = 41, [("a", "to", "a"), ("b", "to", "a"), ("a", "to", "b")]
SIZES = {"num_neighbors": [3, 2], "batch_size": 16, "seed": 5}


class OtherSparse(SparseTensor):
    """The methods of torch_sparse's matrix that are used, for an environment without it."""

    def __init__(self, csr):
        self._csr = csr

    def csr(self):
        return self._csr.crow_indices(), self._csr.col_indices(), self._csr.values()

    def size(self, dim):
        return self._csr.size(dim)

    def nnz(self):
        return self._csr._nnz()


LAYOUTS = {
    "csr": lambda matrix: matrix.to_sparse_csr(),
    "coo": lambda matrix: matrix,
    "csc": lambda matrix: matrix.to_sparse_csc(),
    "SparseTensor": lambda matrix: OtherSparse(matrix.to_sparse_csr()),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def draw_edges(sources, targets, seed):
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(count, (160,), generator=generator) for count in (sources, targets)]
    edges = coalesce(torch.stack(ends), sort_by_row=False)  # the order of adj_t
    return edges, torch.rand(edges.size(1), generator=generator) * 10


def draw():
    data = Data(x=torch.randn(NODES, 6, generator=torch.Generator().manual_seed(0)), y=torch.arange(NODES) % 3)
    data.edge_index, data.edge_weight = draw_edges(NODES, NODES, 1)
    data.edge_time = torch.arange(data.num_edges)  # stays beside adj_t
    data.train_mask = data.val_mask = torch.ones(NODES, dtype=torch.bool)
    return data


def draw_typed():
    data, sizes = HeteroData(), {"a": NODES, "b": 30}
    for seed, (name, size) in enumerate(sizes.items()):
        data[name].x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    data["a"].y = torch.arange(NODES) % 3
    data["a"].train_mask = data["a"].val_mask = torch.ones(NODES, dtype=torch.bool)
    for seed, name in enumerate(TYPES):
        data[name].edge_index, data[name].edge_weight = draw_edges(sizes[name[0]], sizes[name[2]], seed)
    return data


def to_adj_t(data, layout, key="edge_weight"):
    """Move the edges and an attribute into ``adj_t``, in another of its layouts."""
    data = copy.copy(data)
    for store in data.edge_stores:
        sizes = tuple(store.size()[::-1])
        matrix = torch.sparse_coo_tensor(store.edge_index.flip(0), store[key], (*sizes, *store[key].shape[1:]))
        store.adj_t = LAYOUTS[layout](matrix.coalesce())
        del store["edge_index"], store[key]
    return data


def assert_same_batches(data, expected):
    loaders = [NeighborDataModule(each, **SIZES).train_dataloader() for each in (data, expected)]
    for batch, other in zip(*loaders, strict=True):
        assert_same(batch, other)


MODULES = {
    "neighbor": lambda data: NeighborDataModule(data, **SIZES),
    "weighted": lambda data: NeighborDataModule(data, weight_attr="edge_weight", **SIZES),
    "persistent": lambda data: PersistentSamplerDataModule(data, device="cpu", **SIZES),
    "collective": lambda data: CollectiveDataModule(data, num_workers=1, gpu_route="cpu", **SIZES),
    "link": lambda data: LinkDataModule(data, neg_sampling="binary", **edges_in(data), **SIZES),
    "persistent link": lambda data: PersistentLinkDataModule(data, device="cpu", **edges_in(data), **SIZES),
}


def edges_in(data):
    return {"input_train_edges": TYPES[1]} if isinstance(data, HeteroData) else {}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "layout"),
    [*product(("neighbor", "link"), LAYOUTS), *((name, "csr") for name in MODULES if name not in ("neighbor", "link"))],
)
@pytest.mark.parametrize("graph", [draw, draw_typed])
def test_mini_batches_are_those_of_edge_index_and_edge_weight(graph, name, layout):
    expected = MODULES[name](graph()).train_dataloader()
    found = MODULES[name](to_adj_t(graph(), layout)).train_dataloader()
    for batch, other in islice(zip(found, expected, strict=True), 2):
        assert all(store.get("edge_weight") is not None for store in batch.edge_stores)
        assert_same(batch, other)


@layouts
@pytest.mark.parametrize("compress", [True, False])
def test_the_whole_graph_as_a_batch(layout, compress):
    wanted, found = (
        next(iter(FullGraphDataModule(data, compress=compress).train_dataloader()))
        for data in (draw(), to_adj_t(draw(), layout))
    )
    assert torch.equal(found.edge_weight, wanted.edge_weight)
    model = GCN(6, 8, 2, 3).eval()
    outputs = [model(batch.x, batch.edge_index, batch.edge_weight) for batch in (found, wanted)]
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], model(found.x, found.edge_index))


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleDict({"__".join(name): GraphConv(6, 3) for name in TYPES})

    def forward(self, x_dict, edge_index_dict, edge_weight_dict):
        outs = {"a": 0, "b": 0}
        for name, edges in edge_index_dict.items():
            conv = self.convs["__".join(name)]
            ends = x_dict[name[0]], x_dict[name[2]]
            outs[name[2]] = outs[name[2]] + conv(ends, edges, edge_weight_dict[name])
        return outs


@layouts
@pytest.mark.parametrize("typed", [False, True])
def test_exact_inference_and_training(layout, typed):
    graph = draw_typed if typed else draw
    outputs, weights = [], []
    for data in (graph(), to_adj_t(graph(), layout)):
        pl.seed_everything(0, verbose=False)
        module = NodeClassifier(
            Typed() if typed else GCN(6, 8, 2, 3), num_classes=3, **{"target": "a"} if typed else {}
        )
        options = SIZES | {"num_neighbors": [3]} if typed else SIZES
        datamodule = NeighborDataModule(data, inference="full", **options)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, datamodule)
        weights.append(torch.cat([value.flatten() for value in module.parameters()]))
        outputs.append(torch.cat(trainer.predict(module, datamodule)))
    assert torch.equal(*weights)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_pyg_s_transform(layout):
    data = draw()
    data.edge_index, data.edge_weight = data.edge_index.flip(1), data.edge_weight.flip(0)
    data.edge_time = data.edge_time.flip(0)
    sparse = T.ToSparseTensor(layout=layout)(data)
    assert not {"edge_weight", "edge_index"} & set(sparse.keys())
    assert_same_batches(sparse, draw())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("graph", [draw, draw_typed])
def test_ones_are_no_weights(layout, graph):
    data = graph()
    for store in data.edge_stores:
        del store["edge_weight"]
    plain = data.clone()
    sparse = T.ToSparseTensor(layout=layout)(data)
    assert_same_batches(sparse, plain)


def test_ones_are_weights_beside_other_weights():
    data = draw_typed()
    data[TYPES[0]].edge_weight = torch.ones(data[TYPES[0]].num_edges)
    found = with_adj_t_values(to_adj_t(data, "csr"))
    for name in TYPES:
        assert torch.equal(found[name].edge_weight, data[name].edge_weight)
    alone = Data(x=torch.eye(2), adj_t=OtherSparse(torch.ones(2, 2).to_sparse_csr()))  # an explicit choice
    assert torch.equal(with_adj_t_values(alone).edge_weight, torch.ones(4))


@layouts
def test_rows_of_values_are_edge_attributes(layout):
    data = draw()
    data.edge_attr = torch.stack([data.edge_weight, -data.edge_weight], 1)
    sparse = to_adj_t(data, layout, "edge_attr")
    assert_same_batches(sparse, data)
    if layout == "coo":  # as PyG's own layers read the matrix
        layer = GATConv(6, 3, edge_dim=2, add_self_loops=False)
        ours = with_adj_t_values(sparse)
        assert torch.allclose(layer(data.x, ours.adj_t), layer(data.x, data.edge_index, ours.edge_attr), atol=1e-6)


def test_parallel_edges_keep_their_order():
    edges, weights = torch.tensor([[2, 0, 0, 1], [1, 2, 2, 0]]), torch.tensor([4.0, 1, 2, 3])
    data = Data(x=torch.eye(3), adj_t=torch.sparse_coo_tensor(edges.flip(0), weights, (3, 3)))
    assert torch.equal(CSCGraph.from_data(data).to_edge_index(), edges)
    assert torch.equal(with_adj_t_values(data).edge_weight, weights)


def test_one_s_own_loader_and_sampler():
    loaders = [
        NodeLoader(data, NeighborSampler(data, [3], seed=1, weight_attr="edge_weight"), batch_size=9)
        for data in (draw(), to_adj_t(draw(), "csr"))
    ]
    for batch, other in zip(*loaders, strict=True):
        assert_same(batch, other)


def test_weights_beside_adj_t():
    data, weights = to_adj_t(draw(), "csr"), draw().edge_weight
    data.edge_weight = weights.clone()
    assert torch.equal(with_adj_t_values(data).edge_weight, weights)
    data.edge_weight = weights + 1
    refuses(ValueError, r"data.edge_weight and the values of data.adj_t differ", NeighborDataModule, data, **SIZES)
    plain = T.ToSparseTensor(attr=None)(draw())  # its values are ones, which the weights are not
    assert torch.equal(with_adj_t_values(plain).edge_weight, weights)
    wrong = to_adj_t(draw(), "csr")
    wrong.edge_attr = torch.ones(3, 2)
    refuses(ValueError, r"data.edge_attr has the shape \[3, 2\], but the graph", NeighborDataModule, wrong, **SIZES)
    trained = to_adj_t(draw(), "csr")
    trained.adj_t.requires_grad_()
    refuses(ValueError, r"data.adj_t requires gradients: .* edge_weight", NeighborDataModule, trained, **SIZES)
    typed = to_adj_t(draw_typed(), "csr")
    typed[TYPES[0]].adj_t = torch.eye(NODES)
    refuses(TypeError, r"edges of \('a', 'to', 'a'\): adj_t must be a sparse", NeighborDataModule, typed, **SIZES)


def test_an_edge_index_beside_adj_t():
    kept = T.ToSparseTensor(remove_edge_index=False)(draw())
    assert_same_batches(kept, draw())
    kept.edge_index = kept.edge_index.flip(1)
    refuses(ValueError, "different edges or orders.*del data.adj_t", NeighborDataModule, kept, **SIZES)
    del kept.edge_weight
    kept.adj_t.values().fill_(1)
    NeighborDataModule(kept, **SIZES)  # without attributes, the order does not matter


@layouts
def test_folders(layout, tmp_path):
    wanted = draw()
    for data, name in ((wanted, "plain"), (to_adj_t(wanted, layout), "sparse")):
        del data["edge_time"]
        save_folder(data, tmp_path / name)
    plain, sparse = (load_folder(tmp_path / name) for name in ("plain", "sparse"))
    assert torch.equal(sparse.edge_weight, wanted.edge_weight)
    assert torch.equal(sparse.graph.to_edge_index(), wanted.edge_index)
    assert_same_batches(sparse, plain)
    typed = draw_typed()
    save_hetero_folder(to_adj_t(typed, layout), tmp_path / "typed")
    loaded = load_hetero_folder(tmp_path / "typed")
    for name in TYPES:
        assert torch.equal(loaded[name].edge_weight, typed[name].edge_weight)
        assert torch.equal(loaded[name].graph.to_edge_index(), typed[name].edge_index)


def test_folders_keep_the_order_of_edges(tmp_path):
    data = draw()
    order = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(0))
    del data["edge_time"]
    data.edge_index, data.edge_weight = data.edge_index[:, order], data.edge_weight[order]
    data.edge_attr = torch.stack([data.edge_weight, -data.edge_weight], 1)
    save_folder(data, tmp_path / "graph")
    loaded = load_folder(tmp_path / "graph")
    assert_same_batches(loaded, data)
    short = copy.copy(data)
    short.edge_weight = data.edge_weight[:-1]
    refuses(ValueError, "edge_weight has the shape", save_folder, short, tmp_path / "short")
    weighted = Data(x=data.x, graph=CSCGraph.from_data(data).with_weight(data.edge_weight))
    refuses(ValueError, "data.graph has times or weights", save_folder, weighted, tmp_path / "weighted")


@pytest.mark.parametrize("layout", ["csr", "coo"])
@pytest.mark.parametrize("graph", [draw, draw_typed])
def test_partitioned(layout, graph, tmp_path):
    files = []
    for name, data in (("plain", graph()), ("sparse", to_adj_t(graph(), layout))):
        partition_graph(data, tmp_path / name, 2, "ldg")
        paths = sorted((tmp_path / name).rglob("*.npy"))
        files.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths})
    assert "part-00001/edge0.edge_weight.rows.npy" in files[0]
    assert files[0] == files[1]


def make_for_command(sparse=False, typed=False):
    data = draw_typed() if typed else draw()
    return T.ToSparseTensor()(data) if sparse else data


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("task", ["node", "link"])
def test_data_of_the_command_line(typed, task):
    overrides = [f"task={task}", "model=hetero_sage" if typed else "model=gcn", "output_dir=out"]
    overrides += ["datamodule.num_neighbors=[3,2]", "datamodule.batch_size=16", "model.num_layers=2"]
    if task == "link":
        overrides += ["task.split.num_train=40", "task.split.num_val=10", "task.split.num_test=10", "datamodule=link"]
    else:
        overrides += ["datamodule=neighbor"]
    if typed:
        overrides += ["task.target=a" if task == "node" else "task.target=b__to__a"]
    batches = []
    for sparse in (False, True):
        with initialize_config_module("lightning_gnn.conf", version_base=None):
            cfg = compose("train", overrides=overrides)
        OmegaConf.set_struct(cfg, False)
        cfg.data = {"_target_": f"{__name__}.make_for_command", "sparse": sparse, "typed": typed}
        pl.seed_everything(3, verbose=False)
        datamodule, _ = build_task(cfg, build_data(cfg))
        batches.append(list(datamodule.train_dataloader()))
    for batch, other in zip(*batches, strict=True):
        assert all(store.get("edge_weight") is not None for store in batch.edge_stores)
        assert_same(batch, other)
