"""With the exact outputs of all layers as history, clusters give the outputs of the whole graph."""

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lgnn_gas import ClusterDataModule, ClusterSampler
from pytorch_lightning.callbacks import ModelCheckpoint
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN as PyGGCN

from lightning_gnn.nn import GAT, GCN, GIN, GraphSAGE, NodeClassifier, run_model

RANDOM = torch.Generator().manual_seed(0)
DATA = Data(
    x=torch.randn(120, 12, generator=RANDOM),
    y=torch.randint(4, (120,), generator=RANDOM),
    edge_index=torch.randint(120, (2, 600), generator=RANDOM),
    edge_weight=torch.rand(600, generator=RANDOM),
    train_mask=torch.rand(120, generator=RANDOM) < 0.5,
)
DATA.val_mask = ~DATA.train_mask
DATA.edge_index[1, :10] = DATA.edge_index[0, :10]  # self-loops
MODELS = {
    "gcn": lambda: GCN(12, 8, 3, 4),
    "gcn, no loops": lambda: GCN(12, 8, 3, 4, add_self_loops=False),
    "gcn, improved": lambda: GCN(12, 8, 3, 4, improved=True),
    "gcn, not normalized": lambda: GCN(12, 8, 3, 4, normalize=False),
    "gcn, norm": lambda: GCN(12, 8, 3, 4, norm="layer_norm", norm_kwargs={"mode": "node"}, act_first=True),
    "sage": lambda: GraphSAGE(12, 8, 3, 4),
    "sage, maximum": lambda: GraphSAGE(12, 8, 2, 4, aggr="max", jk="last"),
    "gin": lambda: GIN(12, 8, 2, 4),
    "gat": lambda: GAT(12, 8, 3, 4, heads=2),
}


def build(data=DATA, **options):
    return ClusterDataModule(data, **{"parts": 8, "batch_size": 2, "seed": 1, **options})


def run_whole(model, data=DATA):
    """Return the outputs of the whole graph."""
    weight = {"edge_weight": data.edge_weight} if model.supports_edge_weight else {}
    return model(data.x.float(), data.edge_index, **weight)


def record(model, data, history):
    """Run a model on the whole graph, and write the outputs of its layers to a history."""
    outputs = []
    hook = model.dropout.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    out = run_whole(model, data)
    hook.remove()
    for layer, rows in enumerate(outputs[: model.num_layers - 1]):
        history.push(layer, torch.arange(data.num_nodes), rows)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_those_of_the_whole_graph(name):
    model, datamodule = MODELS[name]().eval(), build()
    whole = record(model, DATA, datamodule.history)
    for batch in datamodule.train_dataloader():
        own = batch.n_id[: batch.num_sampled_nodes[0]]
        torch.testing.assert_close(run_model(model, batch), whole[own])


def test_edge_features_and_features_in_16_bits():
    data = DATA.clone()
    data.edge_attr = torch.randn(600, 3, generator=torch.Generator().manual_seed(1))
    model, datamodule = GAT(12, 8, 2, 4, edge_dim=3).eval(), build(data, feature_dtype="bfloat16")
    data.x = data.x.bfloat16().float()
    hidden = []
    hook = model.dropout.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    whole = model(data.x, data.edge_index, edge_attr=data.edge_attr)
    hook.remove()
    datamodule.history.push(0, torch.arange(120), hidden[0])
    for batch in datamodule.train_dataloader():
        assert batch.x.dtype == torch.bfloat16
        torch.testing.assert_close(run_model(model, batch), whole[batch.n_id[: batch.num_sampled_nodes[0]]])


def test_one_mini_batch_of_all_clusters_is_the_whole_graph_also_in_its_gradients():
    datamodule, model = build(batch_size=8), GCN(12, 8, 3, 4)
    (batch,) = datamodule.train_dataloader()
    out, whole = run_model(model, batch), run_whole(model)[batch.n_id]
    torch.testing.assert_close(out, whole)
    ours, expected = (torch.autograd.grad(rows.square().sum(), [*model.parameters()]) for rows in (out, whole))
    torch.testing.assert_close(ours, expected)


@st.composite
def graphs(draw):
    """Draw (num_nodes, edge_index), with isolated nodes, self-loops and duplicate edges."""
    num_nodes = draw(st.integers(1, 20))
    end = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(end, end), max_size=60))
    return num_nodes, torch.tensor(edges, dtype=torch.int64).view(-1, 2).T


@given(graphs(), st.data())
@settings(max_examples=40, deadline=None)
def test_each_training_node_is_a_seed_once_and_has_all_its_edges(graph, draw):
    num_nodes, edge_index = graph
    seeds = torch.tensor(sorted(draw.draw(st.sets(st.integers(0, num_nodes - 1), min_size=1))))
    parts, method = draw.draw(st.integers(1, num_nodes)), draw.draw(st.sampled_from(["ldg", "random"]))
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    sampler = ClusterSampler(data, seeds, parts, method)
    nodes = [sampler.nodes(torch.tensor([number])) for number in range(sampler.num_clusters)]
    assert torch.cat(nodes).sort().values.tolist() == list(range(num_nodes))
    datamodule = ClusterDataModule(data, seeds, parts=parts, method=method, batch_size=2, seed=0, check_features=False)
    found = []
    for batch in datamodule.train_dataloader():
        assert batch.batch_size > 0
        found.append(batch.n_id[: batch.batch_size])
        own = torch.isin(edge_index[1], batch.n_id[: batch.num_sampled_nodes[0]])
        assert batch.e_id.sort().values.tolist() == own.nonzero().view(-1).tolist()
        assert torch.equal(seeds[batch.input_id], found[-1])
    assert torch.cat(found).sort().values.tolist() == seeds.tolist()


class Killed(BaseException):
    """Simulates the end of the process."""


class Kill(pl.Callback):
    """Raises :class:`Killed` after some steps of the whole training."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            raise Killed


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def train(datamodule, seed=0, ckpt_path=None, model=None, **options):
    torch.manual_seed(seed)
    module = NodeClassifier(model or GraphSAGE(12, 8, 3, 4, dropout=0.2), 4)
    trainer = pl.Trainer(**QUIET, **{"max_steps": 11, "enable_checkpointing": "callbacks" in options, **options})
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    return module


def assert_equal(first, second):
    """Compare weights and histories bit for bit."""
    (module, datamodule), (other, its_datamodule) = first, second
    assert all(map(torch.equal, module.state_dict().values(), other.state_dict().values()))
    ours, others = datamodule.history.tables, its_datamodule.history.tables
    assert ours.keys() == others.keys() == {0, 1}
    assert all(torch.equal(ours[layer], others[layer]) for layer in ours)


def test_the_number_of_workers_changes_nothing():
    first, second = build(), build(num_workers=2)
    assert_equal((train(first), first), (train(second), second))


@pytest.mark.parametrize("method", ["ldg", "random"])
def test_killed_and_resumed_training_gives_the_same_weights(method, tmp_path):
    """Other random seeds of the resumed processes neither change the order nor the clusters."""
    options = {"method": method, "seed": None}
    torch.manual_seed(0)
    whole = build(**options)
    expected = train(whole)
    checkpoint = None
    for number, step in enumerate((3, 4, 7)):  # four steps are an epoch, and a kill can meet the same checkpoint twice
        torch.manual_seed(number)
        last = ModelCheckpoint(tmp_path, "last", every_n_train_steps=2, enable_version_counter=False)
        with pytest.raises(Killed):
            train(build(**options), number, checkpoint, callbacks=[last, Kill(step)])
        checkpoint = tmp_path / "last.ckpt"
    torch.manual_seed(7)
    resumed = build(**options)
    assert_equal((expected, whole), (train(resumed, 7, checkpoint), resumed))


def test_a_checkpoint_of_another_graph_is_refused():
    smaller = DATA.subgraph(torch.arange(100))
    with pytest.raises(ValueError, match="clusters are those of 120 nodes, but the graph has 100"):
        build(smaller).load_state_dict(build().state_dict())


def test_the_history_holds_the_latest_outputs_and_evaluation_does_not_write():
    datamodule, model = build(), GraphSAGE(12, 8, 2, 4)
    batch = next(iter(datamodule.train_dataloader()))
    run_model(model.eval(), batch)
    assert not datamodule.history.tables
    run_model(model.train(), batch)
    before = datamodule.history.tables[0].clone()
    own = batch.n_id[: batch.num_sampled_nodes[0]]
    assert before[own].any()
    others = torch.ones(120, dtype=torch.bool)
    others[own] = False
    assert not before[others].any()
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    run_model(model.eval(), batch)
    assert torch.equal(datamodule.history.tables[0], before)


def test_evaluation_is_exact_and_the_users_graph_stays_as_it_is():
    datamodule, model = build(), GCN(12, 8, 3, 4)
    module = train(datamodule, model=model)
    (rows,) = pl.Trainer(**QUIET, enable_checkpointing=False).predict(module, datamodule)
    assert "runner" not in DATA
    rows = rows if isinstance(rows, torch.Tensor) else rows[0]
    with torch.no_grad():
        expected = run_whole(model.eval())
    torch.testing.assert_close(rows, expected if rows.is_floating_point() else expected.argmax(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_neighbors": [3]}, "unknown option num_neighbors"),
        ({"node_sampler": object()}, "unknown option node_sampler"),
        ({"inference": "sampled"}, "use inference='full'"),
        ({"inference": None}, "use inference='full'"),
        ({"parts": 0}, "parts=0 must be a whole number from 1 to 120"),
        ({"method": "best"}, "method='best' is unknown"),
        ({"input_train_nodes": torch.empty(0).long()}, "the training split is empty"),
        ({"input_train_nodes": torch.tensor([120])}, "input_train_nodes"),
        ({"data": Data(x=DATA.x, edge_index=DATA.edge_index)}, "training requires input_train_nodes"),
        ({"data": DATA.to_heterogeneous()}, "need a homogeneous graph"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        build(**options)


def test_models_without_layers_one_by_one_are_refused():
    with pytest.raises(TypeError, match="GCN, GraphSAGE, GIN and GAT"):
        train(build(), model=PyGGCN(12, 8, 2, 4))
    with pytest.raises(ValueError, match="jk='cat' combines"):
        train(build(), model=GCN(12, 8, 2, 4, jk="cat"))
    datamodule = build()
    train(datamodule)
    with pytest.raises(ValueError, match="layer 0 has 6 outputs, but its history has 8"):
        train(datamodule, model=GraphSAGE(12, 6, 3, 4))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    datamodule = build()
    datamodule.trainer = pl.Trainer(**QUIET)
    with pytest.raises(ValueError, match="2 processes, whose histories would differ"):
        datamodule.setup("fit")
