"""DataModule options: those of PyG work, and mistakes are reported at once."""

import math

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningLinkData, LightningNodeData
from torch_geometric.loader import LinkLoader
from torch_geometric.sampler import NegativeSampling

from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.datamodules.base import EpochPosition
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.folder import save_folder
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.link_datamodule import PersistentLinkDataModule
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.runtime.messages import keywords_of
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batch_checks import assert_same, assert_same_batches
from tests.batching_data import small_data
from tests.cli.command import NODE, lgnn
from tests.sampling.test_loader import Fixed

SAMPLED = [
    NeighborDataModule, PersistentSamplerDataModule, CollectiveDataModule, LinkDataModule, PersistentLinkDataModule
]  # fmt: skip
EDGES = small_data().edge_index[:, :40]


def build(kind, data=None, **kwargs):
    sizes = {} if kind is FullGraphDataModule else {"num_neighbors": [2], "batch_size": 8, "num_workers": 0}
    return kind(small_data() if data is None else data, **{**sizes, **kwargs})


def alter(**attributes):
    """Return a graph with other attributes."""
    data = small_data()
    data.update(attributes)
    return data


def weigh(weight):
    """Return a negative sampling whose targets are drawn by weights."""
    return {"neg_sampling": NegativeSampling("triplet", 1, dst_weight=weight)}


MISTAKES = {
    tuple(SAMPLED): [
        ({"batchsize": 4}, TypeError, "unknown option batchsize; did you mean batch_size"),
        ({"num_neighbours": [4]}, TypeError, "did you mean num_neighbors"),
        ({"eval_loader_kwarg": {}}, TypeError, "did you mean eval_loader_kwargs"),
        ({"num_workers": -1}, ValueError, "num_workers must not be negative"),
        ({"seed": "a"}, ValueError, "seed must be a whole number, but is 'a'"),
        ({"shuffle": "no"}, ValueError, "shuffle must be True or False"),
        ({"shuffle": True, "sampler": [1]}, ValueError, "exclude each other"),
        ({"batch_sampler": [[1]], "drop_last": True}, ValueError, "exclude each other; omit drop_last"),
        ({"replace": "no"}, ValueError, "replace must be True or False, but is 'no'"),
        ({"check_features": "no"}, ValueError, "check_features must be True or False"),
        ({"generator": torch.Generator()}, ValueError, "generator is not supported: seed= determines the order"),
        ({"collate_fn": print}, ValueError, "collate_fn: .*use transform= to modify"),
        ({"rank": 1}, TypeError, "sets it for its loaders"),
        ({"num_neighbors": None}, ValueError, "num_neighbors is missing"),
        ({"input_train_time": torch.arange(3)}, ValueError, "input_train_time requires edges with times"),
        ({"loader": "full"}, ValueError, "FullGraphDataModule"),
        ({"eval_loader_kwargs": [1]}, TypeError, r"eval_loader_kwargs must be a dictionary, but is \[1\]"),
        ({"eval_loader_kwargs": {"seed": 1}}, ValueError, "eval_loader_kwargs: seed belongs to the DataModule"),
        ({"eval_loader_kwargs": {"shuffle": True}}, ValueError, "evaluation outputs are in the order"),
        ({"eval_loader_kwargs": {"batchsize": 1}}, TypeError, "eval_loader_kwargs: unknown option batchsize; did"),
        ({"eval_loader_kwargs": {"num_neighbours": [1]}}, TypeError, "did you mean num_neighbors"),
        ({"eval_loader_kwargs": {"check_features": True}}, TypeError, "unknown option check_features"),
        ({"eval_loader_kwargs": {"disjoint": 1}}, ValueError, "eval_loader_kwargs: disjoint must be True or False"),
        ({"eval_loader_kwargs": {"time_attr": "t"}}, TypeError, "eval_loader_kwargs: .*time_attr.* belongs to"),
        ({"eval_loader_kwargs": {"rank": 1}}, TypeError, "eval_loader_kwargs: unknown option rank"),
    ],
    (NeighborDataModule,): [
        # A name that would be refused is not suggested.
        ({"eval_loader_kwargs": {"sed": 1}}, TypeError, "unknown option sed$"),
        ({"eval_loader_kwargs": {"neg_samplng": 1}}, TypeError, "unknown option neg_samplng$"),
        ({"data": [1]}, TypeError, "homogeneous"),
        ({"data": Data(edge_index=EDGES, num_nodes=400.0)}, TypeError, "must be a whole number, but is 400.0"),
        ({"data": alter(z=torch.eye(400).to_sparse())}, ValueError, "data.z is sparse, but rows are read one by one"),
        ({"data": alter(edge_z=torch.eye(4000).to_sparse())}, ValueError, "data.edge_z is sparse, but rows are read"),
        ({"data": alter(train_mask=torch.ones(7).bool())}, ValueError, r"data.train_mask has the shape \[7\]"),
        ({"data": alter(train_mask=torch.zeros(400).bool())}, ValueError, "training split is empty"),
        ({"data": alter(edge_index=torch.tensor([[0, 5000], [1, 2]]))}, ValueError, r"\[0\] holds node 5000"),
        ({"data": alter(edge_index=torch.rand(2, 5))}, TypeError, "must be int32 or int64"),
        ({"data": alter(x=torch.full((400, 2), math.nan))}, ValueError, r"400 of 400 rows \(nodes 0, 1, 2, 3, 4, …"),
        ({"data": alter(y=torch.zeros(3))}, ValueError, r"data.y has the shape \[3\]"),
        ({"input_train_nodes": torch.tensor([400])}, ValueError, "input_train_nodes holds node 400"),
        ({"input_val_nodes": torch.tensor([-1])}, ValueError, "input_val_nodes holds node -1"),
        ({"input_test_nodes": torch.ones(3, dtype=torch.bool)}, ValueError, "mask of 3 entries"),
        ({"input_train_nodes": torch.rand(5)}, TypeError, "bool mask or int64"),
        ({"num_neighbors": [-7]}, ValueError, "num_neighbors holds -7"),
        ({"time_attr": "t"}, ValueError, "data has no attribute 't'; it has edge_attr, edge_index"),
        ({"weight_attr": "w"}, ValueError, "data has no attribute 'w'; it has edge_attr, edge_index"),
        ({"subgraph_type": "both"}, ValueError, "unknown subgraph_type 'both'"),
        ({"sampling": "labour"}, ValueError, "unknown sampling 'labour'; choose one of uniform, labor"),
        ({"batch_dependency": 2}, ValueError, "need sampling='labor'"),
        ({"time_window": 4}, ValueError, "time_window needs time_attr"),
        ({"sampling": "labor", "eval_loader_kwargs": {"replace": True}}, ValueError, "LABOR does not support replace"),
        ({"subgraph_type": "induced", "eval_loader_kwargs": {"disjoint": True}}, ValueError, "needs subgraph_type"),
        ({"eval_loader_kwargs": {"sampling": "labor"}}, TypeError, "unknown option sampling: it belongs to"),
        ({"sampler": "labor"}, TypeError, "sampler must yield .* 'labor'; to select neighbors, write sampling='labor'"),
        ({"eval_loader_kwargs": {"sampler": "labor"}}, TypeError, "sampler must yield indices .*, write sampling="),
        ({"data": alter(time=torch.arange(400)), "time_attr": "time", "inference": "full"}, ValueError,
         "uses all edges at once, so it cannot be combined with time_attr"),
    ],
    (LinkDataModule,): [
        (weigh(-torch.ones(400)), ValueError, "dst_weight of the negative sampling must be finite, not negative"),
        (weigh(torch.full((400,), math.nan)), ValueError, "must be finite"),
        (weigh(torch.zeros(400)), ValueError, "not zero everywhere"),
        (weigh(torch.ones(3)), ValueError, r"the shape \[400\], one entry per node, but has \[3\]"),
        ({"neg_sampling": "foo"}, ValueError, "invalid neg_sampling='foo'.*use 'binary' or 'triplet'"),
        ({"neg_sampling": {"mode": "binary", "amount": -1}}, ValueError, "needs to be positive"),
        ({"neg_sampling_ratio": -1}, ValueError, "neg_sampling_ratio must not be negative, but is -1"),
        ({"neg_sampling_ratio": "1"}, TypeError, "neg_sampling_ratio must be a number, but is '1'"),
        ({"neg_sampling_ratio": 1, "neg_sampling": "binary"}, ValueError, "not both"),
        ({"input_val_labels": [1]}, ValueError, "input_val_labels are given without input_val_edges"),
        ({"input_train_edges": EDGES, "input_train_labels": [math.nan] * 40}, ValueError, "labels holds NaN"),
        ({"input_train_edges": EDGES, "input_train_labels": [1] * 40, "neg_sampling": "triplet"}, ValueError,
         "input_train_labels cannot be used with triplets"),
        ({"input_val_edges": EDGES, "input_val_labels": [1] * 40, "eval_loader_kwargs": {"neg_sampling_ratio": 1}},
         ValueError, "neg_sampling_ratio has no effect: the evaluation edges have labels"),
        ({"link_sampler": 3}, TypeError, "link_sampler must be a PyG sampler with sample_from_edges, but is 3"),
        ({"node_sampler": 3}, TypeError, "unknown option node_sampler"),
        ({"input_train_edges": torch.tensor([[0], [400]])}, ValueError, "input_train_edges holds node 400"),
        ({"input_val_edges": torch.tensor([0, 1])}, ValueError, r"input_val_edges must have the shape \[2, n\]"),
        ({"input_val_edges": torch.rand(2, 2)}, TypeError, "input_val_edges must be an int64"),
        ({"input_test_edges": EDGES[:, :1], "input_test_labels": torch.ones(3)}, ValueError, r"has the shape \[3\]"),
        ({"input_train_edges": torch.empty(2, 0, dtype=torch.int64)}, ValueError, "training split is empty"),
    ],
    (FullGraphDataModule,): [
        ({"compres": True}, TypeError, "unknown option compres; did you mean compress"),
        ({"batch_size": 3}, TypeError, "unknown option batch_size: the whole graph is the only batch"),
        ({"input_train_nodes": [1]}, TypeError, "data's masks define the splits"),
        ({"compress": "no"}, ValueError, "compress must be True or False, but is 'no'"),
    ],
    (PersistentSamplerDataModule,): [
        ({"mode": "foo"}, ValueError, "unknown sampling mode 'foo'; choose one of fused, persistent"),
        ({"device": "foo"}, ValueError, "invalid device 'foo'"),
        ({"bulk": "3"}, ValueError, "bulk must be a whole number, but is '3'"),
        ({"quantize": "no"}, ValueError, "quantize must be True or False, but is 'no'"),
        ({"tables": {}}, TypeError, "unknown option tables: .* creates the tables itself"),
        ({"eval_loader_kwargs": {"tables": {}}}, TypeError, "unknown option tables: .* creates the tables itself"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "kwargs", "error", "message"),
    [(kind, *row) for kinds, rows in MISTAKES.items() for kind in kinds for row in rows],
)
def test_mistakes_are_told_at_once(kind, kwargs, error, message):
    with pytest.raises(error, match=message):
        build(kind, **kwargs)


def test_missing_splits_are_named():
    with pytest.raises(ValueError, match="training requires input_train_nodes"):
        build(NeighborDataModule, Data(x=torch.ones(4, 1), edge_index=torch.tensor([[0], [1]]))).train_dataloader()


def build_links(**kwargs):
    return build(LinkDataModule, **kwargs)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(NeighborDataModule, LightningNodeData), (LinkDataModule, LightningLinkData)]
)
def test_the_order_of_arguments_is_pygs(ours, theirs):
    def inputs(kind):
        return [name for name in kind.__init__.__code__.co_varnames if name == "data" or name.startswith("input_")]

    assert inputs(ours) == [name for name in inputs(theirs) if not name.endswith("_id")]
    assert keywords_of(theirs) - {"has_val", "has_test", "graph_sampler", "loader"} <= keywords_of(ours)


@pytest.mark.parametrize(
    "change",
    [{"num_neighbors": [-1, -1]}, {"replace": True}, {"disjoint": True}, {"neg_sampling": "triplet"},
     {"neg_sampling_ratio": 2.5}, {"neg_sampling": None}, {"neg_sampling": {"mode": "binary", "amount": 3}}],
)  # fmt: skip
def test_evaluation_of_links_may_sample_otherwise_as_in_pyg(change):
    data, options = small_data(), {"num_neighbors": [3, 2], "neg_sampling": "binary"}
    sampler = Fixed(data, [3, 2])
    module = LinkDataModule(
        data,
        input_val_edges=EDGES,
        link_sampler=sampler,
        neg_sampling="binary",
        batch_size=16,
        eval_loader_kwargs=change,
    )
    options.update(change)
    if "neg_sampling_ratio" in change:
        options["neg_sampling"] = NegativeSampling("binary", options.pop("neg_sampling_ratio"))
    of_sampler = {key: options[key] for key in ("num_neighbors", "replace", "disjoint") if key in options}
    theirs = LinkLoader(
        data, Fixed(data, **of_sampler), edge_label_index=EDGES, neg_sampling=options["neg_sampling"], batch_size=16
    )
    assert_same_batches(module.val_dataloader(), theirs)
    assert next(iter(module.train_dataloader())).edge_label.numel() == 32
    assert sampler.num_neighbors == [3, 2]


def test_every_training_edge_comes_once_with_fresh_negatives():
    data = small_data()
    module = LinkDataModule(data, num_neighbors=[2], neg_sampling="binary", batch_size=500, num_workers=1, seed=1)
    loader = module.train_dataloader()
    first = list(loader)
    assert sorted(torch.cat([batch.input_id for batch in first]).tolist()) == list(range(4000))
    fresh = list(loader)
    assert sorted(torch.cat([batch.input_id for batch in fresh]).tolist()) == list(range(4000))
    assert fresh[0].n_id.tolist() != first[0].n_id.tolist()
    again = LinkDataModule(data, num_neighbors=[2], neg_sampling="binary", batch_size=500, seed=1).train_dataloader()
    assert_same_batches(first + fresh, [*again, *again])


def test_a_ratio_means_binary_negatives_for_unlabelled_edges_alone():
    labels = torch.tensor([1.0, 0.0] * 20)
    module = build_links(
        input_val_edges=EDGES, input_val_labels=labels, input_test_edges=EDGES, input_pred_edges=EDGES,
        neg_sampling_ratio=1.0,
    )  # fmt: skip
    first = {name: next(iter(getattr(module, f"{name}_dataloader")())) for name in ("train", "val", "test", "predict")}
    assert first["train"].edge_label.tolist() == [1.0] * 8 + [0.0] * 8 == first["test"].edge_label.tolist()
    assert first["val"].edge_label.tolist() == labels[:8].tolist()
    assert first["predict"].get("edge_label") is None
    assert build_links(neg_sampling_ratio=0).neg_sampling is None


def test_edges_and_labels_in_any_form():
    expected = next(iter(build_links(input_val_edges=EDGES, input_val_labels=torch.ones(40), seed=1).val_dataloader()))
    for edges in (EDGES.tolist(), EDGES.numpy(), EDGES.int(), EdgeIndex(EDGES, sparse_size=(400, 400))):
        for labels in ([1.0] * 40, np.ones(40, np.float32)):
            module = build_links(input_val_edges=edges, input_val_labels=labels, seed=1)
            assert_same(next(iter(module.val_dataloader())), expected)


@pytest.mark.parametrize("kind", [*SAMPLED, FullGraphDataModule])
def test_nan_is_found_before_training(kind):
    data = small_data()
    data.x[5, 3], data.x[77] = math.nan, math.inf
    with pytest.raises(ValueError, match=r"data.x holds NaN or infinity in 2 of 400 rows \(nodes 5, 77\)"):
        build(kind, data)
    build(kind, data, check_features=False)


@pytest.mark.medium
def test_the_command_refuses_nan(tmp_path, capfd):
    data = small_data()
    data.x[5, 3] = math.nan
    del data.edge_attr, data.edge_weight
    save_folder(data, tmp_path / "graph")
    options = [item for item in NODE if not item.startswith("data.")]
    assert lgnn(tmp_path / "out", "data=custom", f"data.root={tmp_path / 'graph'}", base=options) == 2
    assert capfd.readouterr().err.startswith(
        "error: datamodule: data.x holds NaN or infinity in 1 of 400 rows (node 5)"
    )


@pytest.mark.parametrize("kind", [NeighborDataModule, FullGraphDataModule])
def test_unlabelled_nodes_may_have_nan_where_they_are_no_seeds(kind):
    data = small_data()
    data.y = data.y.float()
    data.y[~(data.train_mask | data.val_mask | data.test_mask)] = math.nan
    data.train_mask[3] = data.val_mask[3] = data.test_mask[3] = False
    data.y[3] = math.nan
    build(kind, data)
    data.test_mask[3] = True
    with pytest.raises(ValueError, match=r"data.y at data.test_mask holds NaN .* \(node 3\)"):
        build(kind, data)
    build(kind, data, check_features=False)


def test_training_in_order():
    data = small_data()
    seeds = data.train_mask.nonzero().view(-1).tolist()
    first, again = (
        torch.cat([batch.input_id for batch in build(NeighborDataModule, shuffle=False).train_dataloader()]).tolist()
        for _ in range(2)
    )
    assert first == again == seeds
    shuffled = torch.cat([batch.input_id for batch in build(NeighborDataModule, shuffle=True).train_dataloader()])
    assert sorted(shuffled.tolist()) == seeds != shuffled.tolist()


def test_samplers_of_ones_own_are_copied_for_evaluation_and_may_refuse():
    data = small_data()

    class Bare:
        fanout = 3

        def sample_from_nodes(self, inputs, key=None):
            return NeighborSampler(data, [self.fanout]).sample_from_nodes(inputs, key=key)

    module = build(NeighborDataModule, data, node_sampler=Bare(), num_neighbors=None)
    assert module.eval_graph_sampler is module.graph_sampler
    with pytest.raises(ValueError, match="eval_loader_kwargs: Bare has no attribute num_neighbors"):
        build(NeighborDataModule, data, node_sampler=Bare(), eval_loader_kwargs={"num_neighbors": [1]})
    with pytest.raises(TypeError, match="node_sampler must be a PyG sampler with sample_from_nodes, but is 3"):
        build(NeighborDataModule, data, node_sampler=3)
    with pytest.warns(UserWarning, match="num_neighbors has no effect: node_sampler brings its own"):
        build(NeighborDataModule, data, node_sampler=Bare())


def test_masks_of_several_splits_matter_only_where_they_are_used():
    data = small_data()
    one = data.train_mask
    data.train_mask = torch.stack([one] * 10, dim=1)
    with pytest.raises(ValueError, match=r"select one column, such as data.train_mask\[:, 0\]"):
        build(NeighborDataModule, data)
    module = build(NeighborDataModule, data, input_train_nodes=one)
    assert next(iter(module.train_dataloader())).train_mask.size(1) == 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("kind", [NeighborDataModule, FullGraphDataModule])
def test_features_of_another_dtype_than_the_weights_are_named(kind, dtype):
    data = small_data()
    data.x = data.x.to(dtype)
    module = NodeClassifier(GraphSAGE(12, 8, 2, 4), 4)
    (batch, *_) = build(kind, data).train_dataloader()
    with pytest.raises(
        TypeError, match=f"x is {dtype}, but the model's weights|x must be a floating tensor, but is {dtype}"
    ):
        module(batch)


@pytest.mark.parametrize("kind", SAMPLED)
def test_an_epoch_without_a_mini_batch_is_an_error(kind):
    with pytest.raises(
        ValueError, match=r"drop_last=True leaves no mini-batch: the train split has .* batch_size=5000"
    ):
        build(kind, drop_last=True, batch_size=5000).train_dataloader()


@pytest.mark.parametrize("kind", [NeighborDataModule, CollectiveDataModule])
def test_an_evaluation_that_leaves_a_process_nothing_is_an_error(kind, monkeypatch):
    data = small_data()
    data.val_mask = torch.arange(data.num_nodes) < 2
    monkeypatch.setattr(EpochPosition, "replica", lambda self: (3, 2))
    with pytest.raises(ValueError, match="the val split has 2 seeds for 3 processes"):
        build(kind, data).val_dataloader()


@pytest.mark.parametrize("kind", [NeighborDataModule, FullGraphDataModule])
@pytest.mark.parametrize("form", [list, np.asarray, lambda mask: mask.view(-1, 1)])
def test_masks_in_any_form(kind, form):
    data = small_data()
    expected = next(iter(build(kind, data, **({} if kind is FullGraphDataModule else {"seed": 1})).train_dataloader()))
    data.train_mask = form(data.train_mask)
    found = next(iter(build(kind, data, **({} if kind is FullGraphDataModule else {"seed": 1})).train_dataloader()))
    if kind is FullGraphDataModule:
        assert torch.equal(found.train_mask, expected.train_mask)
        assert data.train_mask is not found.train_mask
    else:
        assert found.input_id.tolist() == expected.input_id.tolist()


@pytest.mark.parametrize("key", ["x", "y", "edge_attr", "edge_weight"])
def test_lists_of_numbers_are_no_tensors_and_texts_are_kept(key):
    data = small_data()
    data[key] = data[key].tolist()
    with pytest.raises(TypeError, match=rf"data.{key} is a list of numbers, but must be a tensor; use torch.tensor"):
        build(NeighborDataModule, data)
    data = small_data()
    data.x = [str(node) for node in range(400)]
    batch = next(iter(build(NeighborDataModule, data).train_dataloader()))
    assert batch.x == [str(node) for node in batch.n_id.tolist()]


@pytest.mark.medium
def test_links_of_a_graph_without_edge_index():
    data = small_data()
    stored = Data(x=data.x, graph=CSCGraph.from_data(data))
    assert sorted(torch.cat([b.input_id for b in build(LinkDataModule, stored).train_dataloader()]).tolist()) == list(
        range(4000)
    )


class AllNeighbors(NeighborDataModule):
    """A system with its own sampler."""

    sampling_options = None

    def make_sampler(self, data):
        return NeighborSampler(data, [-1], seed=self.seed)


def test_a_system_with_its_own_sampler():
    data = small_data()
    module, plain = AllNeighbors(data, batch_size=64, seed=1), build(NeighborDataModule, num_neighbors=[-1], seed=1)
    plain.batch_size = 64
    for stage in ("train", "val"):
        assert module.num_seeds(stage) == int(data[f"{stage}_mask"].sum())
        loader = module.sampled_loader(stage, module.data, module.sampler(stage), **module.disk_options(stage))
        assert_same_batches(loader, plain.make_loader(stage))
    assert torch.equal(module.compressed_graph.to_edge_index(), data.edge_index)
    assert module.large_arrays()["compressed"] is module.compressed_graph
    assert module.sampling_options is None


@pytest.mark.parametrize("options", [{"num_neighbors": [2]}, {"sampling": "labor"}, {"replace": True}])
def test_a_system_with_its_own_sampler_has_no_options_of_neighbor_sampling(options):
    with pytest.raises(TypeError, match=f"unknown option {min(options)}: AllNeighbors does not sample neighbors"):
        AllNeighbors(small_data(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "phrase"),
    [
        (NeighborDataModule, {}, "fanouts [2], batch 8"),
        (LinkDataModule, {"num_neighbors": [3, 1]}, "fanouts [3, 1], batch 8"),
        (NeighborDataModule, {"inference": "full"}, "fanouts [2], batch 8, full inference"),
        (AllNeighbors, {"num_neighbors": None}, "fanouts [-1], batch 8"),
        (FullGraphDataModule, {}, "full graph"),
        (FullGraphDataModule, {"inference": "full"}, "full graph, full inference"),
    ],
)
def test_batches_are_described(kind, options, phrase):
    assert build(kind, **options).describe() == phrase


def test_dictionaries_of_the_user_stay_as_they_are():
    options = {"num_neighbors": [1], "neg_sampling": "triplet", "shuffle": False, "batch_size": 4}
    given = dict(options)
    build(LinkDataModule, eval_loader_kwargs=given).batch_size = 16
    assert given == options
