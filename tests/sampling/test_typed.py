"""Heterogeneous graphs, times, weights and LABOR, from user data to mini-batches and through Lightning."""

import itertools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import HeteroData
from torch_geometric.loader import NodeLoader as PyGNodeLoader
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType

from lightning_gnn import (
    CSCGraph,
    FeatureTable,
    LinkDataModule,
    NeighborDataModule,
    NeighborSampler,
    PersistentSamplerDataModule,
    sample_neighbors,
)
from lightning_gnn.hyscale.accelerator_sampling import can_sample_on
from lightning_gnn.loading import BatchTask, LinkLoader, NodeLoader
from lightning_gnn.nn import FullInference, HeteroGraphSAGE, LinkPredictor, NodeClassifier
from tests.batch_checks import check
from tests.batching_data import small_data

CITES, WRITES, REVERSE = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author")
SIZES = {"paper": 300, "author": 120, "venue": 7}


def typed_data(seed=0):
    """Papers and authors with features, venues without, paper times, citation weights."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for name, count in SIZES.items():
        data[name].num_nodes = count
    data["paper"].x = torch.randn(300, 6, generator=generator)
    data["author"].x = torch.randn(120, 4, generator=generator)
    data["paper"].y = torch.randint(3, (300,), generator=generator)
    data["paper"].train_mask = torch.rand(300, generator=generator) < 0.5
    data["paper"].val_mask = ~data["paper"].train_mask
    data["paper"].time = torch.randint(1000, (300,), generator=generator)
    written = torch.stack(
        [torch.randint(120, (900,), generator=generator), torch.randint(300, (900,), generator=generator)]
    )
    data[CITES].edge_index = torch.randint(300, (2, 2500), generator=generator)
    data[CITES].edge_attr = torch.arange(2500)
    data[CITES].weight = torch.rand(2500, generator=generator)
    data[WRITES].edge_index = written
    data[REVERSE].edge_index = written.flip(0)
    data["paper", "in", "venue"].edge_index = torch.stack(
        [torch.arange(300), torch.randint(7, (300,), generator=generator)]
    )
    data["venue", "rev_in", "paper"].edge_index = data["paper", "in", "venue"].edge_index.flip(0)
    return data


def collect_contents(batch):
    """Return all contents of a mini-batch for comparison."""
    out = {}
    for store in batch.stores:
        for key, value in store.items():
            out[store._key, key] = value.tolist() if isinstance(value, torch.Tensor) else value
    return out


def test_induced_and_bidirectional_subgraphs():
    data = typed_data()
    del data["venue"], data["paper", "in", "venue"], data["venue", "rev_in", "paper"]
    inputs = NodeSamplerInput(None, torch.arange(20), None, "paper")
    sampler = NeighborSampler(data, [2, 2], subgraph_type="induced", weight_attr="weight", seed=0)
    out = sampler.sample_from_nodes(inputs, key=3)
    for name in data.edge_types:
        row, col = data[name].edge_index
        inside = torch.isin(row, out.node[name[0]]) & torch.isin(col, out.node[name[2]])
        assert out.edge[name].sort().values.tolist() == inside.nonzero().view(-1).tolist()
        assert torch.equal(out.node[name[0]][out.row[name]], row[out.edge[name]])
    plain = NeighborSampler(data, [2, 2], seed=0)
    both = NeighborSampler(data, [2, 2], subgraph_type="bidirectional", seed=0)
    directed, undirected = (each.sample_from_nodes(inputs, key=3) for each in (plain, both))
    forward = set(zip(directed.row[WRITES].tolist(), directed.col[WRITES].tolist(), strict=True))
    backward = set(zip(directed.col[REVERSE].tolist(), directed.row[REVERSE].tolist(), strict=True))
    assert set(zip(undirected.row[WRITES].tolist(), undirected.col[WRITES].tolist(), strict=True)) == forward | backward


class Typed(pl.LightningModule):
    """A heterogeneous model written as in PyG's documentation."""

    def __init__(self, data):
        super().__init__()

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), 3)

            def forward(self, x, edge_index):
                return self.two(self.one(x, edge_index).relu(), edge_index)

        self.net = to_hetero(Net(), data.metadata())
        self.seen = []

    def forward(self, batch):
        x = {name: batch[name].x if "x" in batch[name] else torch.ones(batch[name].num_nodes, 2) for name in SIZES}
        return self.net(x, batch.edge_index_dict)["paper"]

    def training_step(self, batch, _):
        size = batch["paper"].batch_size
        self.seen.append(batch["paper"].n_id[:size])
        return torch.nn.functional.cross_entropy(self(batch)[:size], batch["paper"].y[:size])

    def validation_step(self, batch, _):
        self.log("val_loss", self.training_step(batch, _), batch_size=batch["paper"].batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_no_batch_sees_the_future(strategy):
    data = typed_data()
    options = {"time_attr": "time", "temporal_strategy": strategy, "num_neighbors": [5, 5], "batch_size": 32}
    seed_time = data["paper"].time[data["paper"].train_mask] - 100
    for more in ({}, {"input_train_time": seed_time}, {"time_window": 200.0}):
        for batch in NeighborDataModule(data, **options, **more).train_dataloader():
            check(batch, data)
            part = batch["paper"]
            own = part.time[: part.batch_size] - (100 if "input_train_time" in more else 0)
            # Paper ids are the sources of edges; the time of each seed is its own.
            found, limit = part.time[part.batch_size :], own[part.batch[part.batch_size :]]
            assert bool((found <= limit).all())
            if "time_window" in more:
                assert bool((found > limit - 200).all())
            if "input_train_time" in more:
                assert torch.equal(part.seed_time, own)


def test_times_of_edges():
    data = typed_data()
    data["paper"].pop("time")
    data[CITES].when = torch.rand(2500)
    now = torch.full((int(data["paper"].train_mask.sum()),), 0.5)
    module = NeighborDataModule(data, num_neighbors=[5, 5], batch_size=32, time_attr="when", input_train_time=now)
    for batch in module.train_dataloader():
        assert bool((batch[CITES].when <= 0.5).all())
        assert batch[WRITES].edge_index.numel()  # types without times are static
    with pytest.raises(ValueError, match="seeds of 'paper' have no times: give input_time"):
        next(iter(module.val_dataloader()))


def test_labor_through_the_datamodule():
    data = small_data()
    sizes = {}
    for sampling, more in (("uniform", {}), ("labor", {}), ("labor", {"layer_dependency": True})):
        module = NeighborDataModule(data, num_neighbors=[4, 4], batch_size=60, sampling=sampling, seed=2, **more)
        sizes[sampling, len(more)] = sum(batch.num_nodes for batch in module.train_dataloader())
    assert sizes["labor", 1] < sizes["labor", 0] < sizes["uniform", 0]


def test_batches_that_depend_on_each_other_have_more_nodes_in_common():
    data = small_data(num_edges=20_000)
    shared = {}
    for often in (1, 16):
        module = NeighborDataModule(
            data, num_neighbors=[3], batch_size=40, sampling="labor", batch_dependency=often, shuffle=False, seed=2
        )
        batches = [set(batch.n_id[batch.batch_size :].tolist()) for batch in module.train_dataloader()]
        shared[often] = sum(len(a & b) for a, b in itertools.pairwise(batches))
    assert shared[16] > 1.2 * shared[1]
    loader = PyGNodeLoader(data, NeighborSampler(data, [3], sampling="labor", batch_dependency=2), batch_size=40)
    with pytest.raises(ValueError, match="batch_dependency needs numbered mini-batches"):
        next(iter(loader))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([CITES, WRITES, REVERSE]), st.booleans())
def test_no_edge_to_predict_is_among_the_messages(seed, name, disjoint):
    data = typed_data()
    sampler = NeighborSampler(data, [8, 8], disjoint=disjoint, exclude_seed_edges=True, seed=0)
    chosen = torch.randperm(data[name].edge_index.size(1), generator=torch.Generator().manual_seed(seed))[:40]
    row, col = data[name].edge_index[:, chosen]
    out = sampler.sample_from_edges(EdgeSamplerInput(None, row, col, input_type=name), key=seed)
    asked = set(zip(row.tolist(), col.tolist(), strict=True))
    reverse = CITES if name == CITES else REVERSE if name == WRITES else WRITES
    for edge_type, forbidden in ((name, asked), (reverse, {(b, a) for a, b in asked})):
        found = set(
            zip(
                out.node[edge_type[0]][out.row[edge_type]].tolist(),
                out.node[edge_type[2]][out.col[edge_type]].tolist(),
                strict=True,
            )
        )
        assert not found & forbidden
    for edge_type in data.edge_types:
        assert sum(out.num_sampled_edges[edge_type]) == out.row[edge_type].numel() == out.edge[edge_type].numel()


def test_edges_of_one_type_are_taken_out_of_the_messages_too():
    data = small_data()
    module = LinkDataModule(data, num_neighbors=[-1], batch_size=64, neg_sampling_ratio=1, exclude_seed_edges=True)
    for batch in module.train_dataloader():
        asked = batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]]
        asked = set(map(tuple, torch.cat([asked, asked.flip(0)], dim=1).t().tolist()))
        assert not asked & set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))
        assert sum(batch.num_sampled_edges) == batch.num_edges


def test_links_of_a_type_that_is_not_among_the_messages():
    data = typed_data()
    edges = data[WRITES].edge_index
    del data[WRITES], data[REVERSE]
    module = LinkDataModule(data, (WRITES, edges), num_neighbors=[3], neg_sampling="binary", batch_size=50)
    batch = next(iter(module.train_dataloader()))
    row, col = batch[WRITES].edge_label_index[:, batch[WRITES].edge_label == 1]
    ends = torch.stack([batch["author"].n_id[row], batch["paper"].n_id[col]])
    assert torch.equal(ends, edges[:, batch[WRITES].input_id])
    with pytest.raises(ValueError, match=r"no such edge type: .*; give the edges too"):
        LinkDataModule(data, WRITES, num_neighbors=[3])


def make_wrong_data():
    data = typed_data()
    data["paper"].bad, data["author"].float_time = data["paper"].time.float(), torch.rand(120)
    data["paper"].bad[4] = torch.nan
    data["paper"].float_time = 1_700_000_000_000_000_000 + torch.arange(300)
    data[CITES].bad_weight = torch.ones(2500)
    data[CITES].bad_weight[2] = -1
    return data


def make_first_batch(kind, **kwargs):
    """Make a sampler, a DataModule or a loader, and its first mini-batch."""
    data = make_wrong_data()
    if kind is NodeLoader:
        return kind(data, NeighborSampler(data, [2]), input_nodes="paper", tables={"x": FeatureTable(data["paper"].x)})
    if kind is LinkDataModule:
        data["author"].time = torch.randint(1000, (120,))
        kwargs["input_train_edges"] = (WRITES, data[WRITES].edge_index)
    made = kind(data, **{"num_neighbors": [2], **kwargs})
    return made if kind is NeighborSampler else next(iter(made.train_dataloader()))


@pytest.mark.parametrize(
    ("kind", "kwargs", "error", "message"),
    [
        *((NeighborDataModule, *row) for row in (
            ({"input_train_nodes": torch.arange(3)}, TypeError, r"requires input_train_nodes=\(type, nodes\)"),
            ({"input_train_nodes": ("editor", [1])}, ValueError, "no such node type: 'editor'"),
            ({"input_train_nodes": ("venue", torch.tensor([7]))}, ValueError, "holds node 7, but the graph has 7 node"),
            ({"time_attr": "when"}, ValueError, "no node type and no edge type has the times 'when'"),
            ({"weight_attr": "when"}, ValueError, "no edge type has the weights 'when'"),
            ({"time_attr": "time", "weight_attr": "weight"}, ValueError, "weighted temporal sampling is not"),
            ({"time_attr": "bad"}, ValueError, "'bad' of paper: times of nodes hold NaN, at 4"),
            ({"weight_attr": "bad_weight"}, ValueError, "that of edge 2 is -1"),
            ({"input_train_time": torch.arange(3)}, ValueError, "input_train_time requires edges with times"),
            ({"time_attr": "time", "input_train_time": torch.arange(3)}, ValueError, "there are .* seeds"),
            ({"num_neighbors": {CITES: [1]}}, ValueError, "no fanouts for"),
            ({"time_attr": "time", "subgraph_type": "induced"}, ValueError, "disjoint=True .*needs subgraph_type"),
        )),
        *((NeighborSampler, *row) for row in (
            ({"exclude_seed_edges": "no"}, TypeError, "must be True, False or a dict of reverse edge types, but is 'n"),
            ({"exclude_seed_edges": {WRITES: ("paper", "rev-writes", "author")}}, ValueError,
             "has .*rev-writes.*, but the edge types are"),
            ({"exclude_seed_edges": {WRITES: CITES}}, ValueError, "is not a reverse of"),
            ({"time_attr": "float_time"}, ValueError,
             "'float_time' of paper: times of nodes are integers that float64 cannot"),
        )),
        (NodeLoader, {}, ValueError, "the keys of tables must be .type, attribute. in a hetero"),
        (LinkDataModule, {"time_attr": "time", "neg_sampling": "binary"}, ValueError,
         r"negative edges need times .* give edge_label_time \(input_train_time\)"),
    ],
)  # fmt: skip
def test_mistakes_are_named(kind, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_first_batch(kind, **kwargs)


def test_what_is_not_there_is_named():
    data = typed_data()
    data["paper", "of", "nowhere"].edge_index = torch.tensor([[0], [0]])
    with pytest.raises(ValueError, match="unknown node type 'nowhere'"):
        NeighborSampler(data, [2])
    data = typed_data()
    for name in SIZES:
        data[name].pop("x", None)
    with pytest.raises(ValueError, match="no node type has an x"):
        NeighborDataModule(data, num_neighbors=[2], feature_dtype="bfloat16")
    data["paper"].x = np.ones((300, 4), np.float32)
    module = NeighborDataModule(data, num_neighbors=[2], feature_dtype="bfloat16", batch_size=8)
    assert next(iter(module.train_dataloader()))["paper"].x.dtype == torch.bfloat16
    datamodule = NeighborDataModule(data, num_neighbors=[2], inference=FullInference(memory_limit=0))
    with pytest.raises(ValueError, match="heterogeneous graphs run in memory; omit folder and memory_limit"):
        datamodule.val_dataloader()
    with pytest.raises(ValueError, match="too large for int64"):
        CSCGraph.from_edge_index(torch.tensor([[0], [0]])).with_time(torch.tensor([2**63], dtype=torch.uint64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude_seed_edges": True}, "inference='full' uses .* exclude_seed_edges"),
        ({"time_attr": "time"}, "inference='full' uses .* time_attr"),
    ],
)
def test_edges_that_are_hidden_stay_hidden_whoever_makes_the_sampler(options, message):
    data = small_data()
    data.time = torch.arange(400)
    with pytest.raises(ValueError, match=message):
        LinkDataModule(data, num_neighbors=[2, 2], **options, inference="full")
    sampler = NeighborSampler(data, [2, 2], **options)
    with pytest.raises(ValueError, match=message):
        LinkDataModule(data, link_sampler=sampler, inference="full")
    if "exclude_seed_edges" not in options:
        assert not can_sample_on(NodeLoader(data, sampler), torch.device("cpu"))


def test_what_asks_for_nothing_is_taken_everywhere():
    kwargs = {"subgraph_type": SubgraphType.directional, "layer_dependency": False, "batch_dependency": 1}
    PersistentSamplerDataModule(small_data(), num_neighbors=[2], temporal_strategy="uniform", **kwargs)
    assert can_sample_on(NodeLoader(small_data(), NeighborSampler(small_data(), [2])), torch.device("cpu"))


def test_parts_of_a_mini_batch_keep_its_number():
    data = small_data(num_edges=20_000)
    sampler = NeighborSampler(data, [3], sampling="labor", batch_dependency=32, disjoint=True)
    edges = torch.randint(400, (2, 64))
    loader = LinkLoader(data, sampler, edge_label_index=edges, batch_size=32)
    picks = []
    for number in (0, 1):
        out = loader.pipeline.sample(BatchTask(0, number, list(range(32, 64)), 32, 1)).out
        picks.append(set(out.edge.ids().tolist()))
    assert len(picks[0] & picks[1]) > 0.8 * len(picks[0])


def test_endless_windows():
    graph = CSCGraph.from_edge_index(torch.tensor([[1, 2, 3], [0, 0, 0]]), 4)
    largest = 2**63 - 1
    graph = graph.with_time(torch.tensor([-(2**63), 0, largest]))
    for now, window in ((largest, torch.inf), (torch.inf, None), (largest, np.float64(torch.inf))):
        seed_time = torch.tensor([now])
        out = sample_neighbors(graph, torch.tensor([0]), [-1], seed_time=seed_time, time_window=window)
        assert out.edge.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["node", "link"])
def test_full_inference_is_the_model_on_the_whole_graph(kind, tmp_path):
    data = typed_data()
    data["venue"].x = torch.randn(SIZES["venue"], 4)
    data["paper"].test_mask = data["paper"].val_mask
    widths = {name: data[name].num_features for name in data.node_types}
    torch.manual_seed(0)
    model = HeteroGraphSAGE(data.metadata(), widths, 8, 2, 3)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with torch.no_grad():
        rows = model(data.x_dict, data.edge_index_dict)
    if kind == "node":
        datamodule = NeighborDataModule(data, num_neighbors=[2, 2], batch_size=64, inference="full")
        module = NodeClassifier(model, 3, target="paper")
        (found,) = trainer.test(module, datamodule, verbose=False)
        mask = data["paper"].test_mask
        want = torch.nn.functional.cross_entropy(rows["paper"][mask], data["paper"].y[mask])
        torch.testing.assert_close(found["test_loss"], want.item(), rtol=1e-5, atol=1e-6)
        (logits,) = trainer.predict(module, datamodule)
        torch.testing.assert_close(logits, rows["paper"])
        trainer.fit(module, datamodule)
    else:
        edges, labels = data[WRITES].edge_index[:, :40], torch.arange(40) % 2
        datamodule = LinkDataModule(
            data, (WRITES, edges), input_pred_edges=(WRITES, edges), input_test_edges=(WRITES, edges),
            input_test_labels=labels, num_neighbors=[2, 2], batch_size=64, inference="full", neg_sampling="binary",
        )  # fmt: skip
        module = LinkPredictor(model, target=WRITES)
        (scores,) = trainer.predict(module, datamodule)
        torch.testing.assert_close(scores, (rows["author"][edges[0]] * rows["paper"][edges[1]]).sum(1))
        assert trainer.test(module, datamodule, verbose=False)[0]["test_loss"] > 0
    assert "val_mask" in data["paper"]
    assert "pred_nodes" not in data["paper"]
