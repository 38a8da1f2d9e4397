"""DataModules with ``precompute``: a hop less, the sums beside ``x``, and what a model becomes that is trained so."""

import copy

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.nn import GINConv, SAGEConv
from torch_geometric.transforms import NormalizeFeatures

from lightning_gnn import CollectiveDataModule, LinkDataModule, NeighborDataModule, PersistentSamplerDataModule
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.nn import GAT, GCN, GraphSAGE, LinkPredictor, NodeClassifier, infer
from lightning_gnn.nn import aggregated_features as computing
from lightning_gnn.nn.first_layer import NAMED
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.full_graph import launch
from tests.nn.test_aggregated_features import reference as aggregated
from tests.nn.test_first_layer import reference


def double_data():
    data = small_data()
    data.x, data.edge_weight = data.x.double(), data.edge_weight.double() + 0.1
    loops = data.edge_index[0] == data.edge_index[1]
    data.edge_weight[loops] = 1.5
    return data


def datamodule(data=None, kind=NeighborDataModule, **kwargs):
    kwargs = {"num_neighbors": [4, 3], "batch_size": 32, "num_workers": 2, "seed": 3, **kwargs}
    return kind(double_data() if data is None else data, **kwargs)


def trainer(**kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    kwargs.setdefault("enable_checkpointing", "callbacks" in kwargs)
    return pl.Trainer(**{**quiet, "max_epochs": 2, **kwargs})


def classifier(model, **kwargs):
    return NodeClassifier(model.double(), 4, **{"lr": 0.01, **kwargs})


def stages(module):
    for stage in ("train", "val", "test", "predict"):
        yield stage, getattr(module, f"{stage}_dataloader")()


@pytest.mark.parametrize("kind", [NeighborDataModule, PersistentSamplerDataModule, CollectiveDataModule])
@pytest.mark.parametrize("name", NAMED)
def test_mini_batches_are_those_of_a_hop_less_with_the_sums_beside_x(kind, name):
    data = double_data()
    options = {"gpu_route": "cpu"} if kind is CollectiveDataModule else {}
    more = {**options, "eval_loader_kwargs": {"num_neighbors": [6, -1]}}
    fewer = {**options, "eval_loader_kwargs": {"num_neighbors": [6]}}
    found = datamodule(data, kind, precompute=name, **more)
    plain = datamodule(data, kind, num_neighbors=[4], **fewer)
    rows = aggregated(NAMED[name], data.edge_index, data.x, data.edge_weight)
    for (stage, mine), (_, theirs) in zip(stages(found), stages(plain), strict=True):
        count = 0
        for batch, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(batch.x_aggregated, rows[batch.n_id], rtol=1e-10, atol=1e-10)
            del batch.x_aggregated
            assert batch.to_dict().keys() == other.to_dict().keys()
            for key, value in other:
                same = torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value
                assert same, (stage, key)
            count += 1
        assert count
    assert "x_aggregated" not in data
    assert found.data is data
    assert found.num_neighbors == [4]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "make",
    [
        lambda: GraphSAGE(12, 8, 2, 4),
        lambda: GraphSAGE(12, 8, 3, 4, aggr="max"),
        lambda: GCN(12, 8, 2, 4, normalize=False),
        lambda: GCN(12, 4, 1),
        lambda: GraphSAGE(12, 4, 1),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_training_is_that_of_the_definition(make, workers):
    """Two epochs end at the weights to which PyG's layers, step by step, lead on the same samples."""
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    fanouts = [4, 3, 2][: model.num_layers]
    data = double_data()
    trainer().fit(
        classifier(model), datamodule(data, num_neighbors=fanouts, num_workers=workers, precompute="first_layer")
    )

    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    loader = datamodule(data, num_neighbors=fanouts[:-1] or [0], num_workers=0).train_dataloader()
    given = isinstance(plain, GCN)
    for _ in range(2):
        for batch in loader:
            batch.node = batch.n_id
            weights = (data.edge_weight, batch.edge_weight) if given else (None, None)
            logits = reference(plain, data.x, data.edge_index, weights[0], batch, weights[1])
            optimizer.zero_grad()
            F.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
            optimizer.step()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: GraphSAGE(12, 8, 2, 4), lambda: GCN(12, 8, 2, 4, normalize=False)])
def test_evaluation_follows_the_same_definition(make):
    data = double_data()
    model = make()
    module = classifier(model)
    loaders = datamodule(data, precompute="first_layer")
    run = trainer()
    outputs = torch.cat(run.predict(module, loaders))
    plain = datamodule(data, num_neighbors=[4]).predict_dataloader()
    given = isinstance(model, GCN)
    wanted = []
    for batch in plain:
        batch.node = batch.n_id
        weights = (data.edge_weight, batch.edge_weight) if given else (None, None)
        wanted.append(reference(model, data.x, data.edge_index, weights[0], batch, weights[1]))
    torch.testing.assert_close(outputs, torch.cat(wanted), rtol=1e-10, atol=1e-10)
    # The mini-batches of another stage have other samples, so only all neighbours tell its score.
    every = datamodule(data, num_neighbors=[-1, -1], precompute="first_layer")
    outputs = torch.cat(run.predict(module, every))
    correct = outputs.argmax(-1) == data.y
    for stage, name, mask in (("test", "test_acc", data.test_mask), ("validate", "val_acc", data.val_mask)):
        (scores,) = getattr(run, stage)(module, every, verbose=False)
        assert scores[name] == pytest.approx(correct[mask].double().mean().item())


def test_full_inference_is_left_as_it_is():
    data = double_data()
    model = GraphSAGE(12, 8, 2, 4)
    module = classifier(model)
    loaders = datamodule(data, precompute="first_layer", inference="full")
    run = trainer(max_epochs=1)
    run.fit(module, loaders)
    (batch,) = loaders.predict_dataloader()
    assert "x_aggregated" not in batch
    graph = CompressedGraph.from_graph(CSCGraph.from_edge_index(data.edge_index, 400))
    expected = infer(model.eval(), data.x, graph)
    torch.testing.assert_close(torch.cat(run.predict(module, loaders)), expected)
    # All neighbours in each layer are what the sampled loaders give with -1.
    sampled = datamodule(data, num_neighbors=[-1, -1], precompute="first_layer")
    torch.testing.assert_close(torch.cat(run.predict(module, sampled)), expected)


def test_links_can_be_predicted_with_it():
    pl.seed_everything(0, verbose=False)
    data = double_data()
    model = GraphSAGE(12, 8, 2, 8).double()
    module = LinkPredictor(model)
    loaders = datamodule(
        data, LinkDataModule, num_neighbors=[-1, -1], precompute="first_layer", neg_sampling_ratio=1,
        input_pred_edges=data.edge_index[:, :100],
    )  # fmt: skip
    run = trainer(max_epochs=1)
    run.fit(module, loaders)
    found = torch.cat(run.predict(module, loaders))
    model.eval()
    z = model(data.x, data.edge_index)
    source, target = data.edge_index[:, :100]
    torch.testing.assert_close(found, (z[source] * z[target]).sum(-1), rtol=1e-10, atol=1e-10)


class Own(pl.LightningModule):
    """A module of the user's, with a first layer of the user's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 8), SAGEConv(8, 4)

    def training_step(self, batch, batch_idx):
        x = self.first(torch.cat([batch.x, batch.x_aggregated], dim=1)).relu()
        return F.cross_entropy(self.second(x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class OwnModel(GraphSAGE):
    pass


class Taking(torch.nn.Module):
    """A model of the user's for NodeClassifier."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 8), GINConv(torch.nn.Linear(8, 4))

    def forward(self, x, edge_index, x_aggregated):
        return self.second(self.first(x + x_aggregated).relu(), edge_index)


def test_users_modules_say_which_aggregation():
    trainer().fit(Own().double(), datamodule(precompute="mean"))
    trainer().fit(classifier(Taking()), datamodule(precompute="sum"))
    trainer().fit(classifier(GraphSAGE(12, 8, 2, 4)), datamodule(precompute="mean"))
    trainer().fit(classifier(OwnModel(12, 8, 2, 4)), datamodule(precompute="first_layer"))


class OwnForward(NodeClassifier):
    def forward(self, batch):
        return self.model(batch.x, batch.edge_index)


class OwnModelForward(GraphSAGE):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)


class Silent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


@pytest.mark.parametrize(
    ("make", "precompute", "message"),
    [
        (lambda: Own(), "first_layer", "Own is a module of your own"),
        (lambda: OwnForward(GraphSAGE(12, 8, 2, 4), 4), "first_layer", "OwnForward is a module of your own"),
        (lambda: NodeClassifier(GraphSAGE(12, 8, 2, 4), 4), "gcn", "precompute='gcn' is a GCN-normalised sum"),
        (lambda: NodeClassifier(GCN(12, 4, 1), 4), "sum", "needs the GCN-normalised sum"),
        (lambda: NodeClassifier(GCN(12, 8, 2, 4), 4), "first_layer", "degrees in the mini-batch"),
        (lambda: NodeClassifier(GCN(12, 8, 2, 4), 4), "gcn", "degrees in the mini-batch"),
        (lambda: NodeClassifier(GAT(12, 8, 2, 4), 4), "first_layer", "attention"),
        (lambda: NodeClassifier(GAT(12, 8, 2, 4), 4), "mean", "attention"),
        (lambda: NodeClassifier(GraphSAGE(12, 8, 2, 4, input_dropout=0.2), 4), "first_layer", "input_dropout"),
        (lambda: NodeClassifier(Silent(), 4), "first_layer", "takes no precomputed first layer"),
        (lambda: NodeClassifier(OwnModelForward(12, 8, 2, 4), 4), "first_layer", "forward takes no x_aggregated"),
        (lambda: NodeClassifier(Silent(), 4), "mean", "Silent.forward takes no x_aggregated"),
    ],
)
def test_models_that_cannot_take_it_are_refused_before_training(make, precompute, message):
    with pytest.raises(ValueError, match=message):
        trainer().fit(make().double(), datamodule(precompute=precompute))


def test_options_that_cannot_work_are_refused():
    data = double_data()
    with pytest.raises(ValueError, match=r"precompute='median' is unknown.*'first_layer', 'mean'"):
        datamodule(precompute="median")
    with pytest.raises(ValueError, match="there is no Trainer yet"):
        datamodule(precompute="first_layer").train_dataloader()
    sampler = NeighborSampler(data, [5, 5])
    assert datamodule(num_neighbors=None, node_sampler=sampler, precompute="mean").num_neighbors == [5]
    assert sampler.num_neighbors == [5, 5]

    class Other:
        def sample_from_nodes(self, inputs):
            raise AssertionError

    with pytest.raises(ValueError, match="Other would not"):
        datamodule(num_neighbors=None, node_sampler=Other(), precompute="mean")
    data.x_aggregated = data.x
    with pytest.raises(ValueError, match="rename it"):
        datamodule(data, precompute="mean")
    data = double_data()
    data.x.requires_grad_()
    with pytest.raises(ValueError, match=r"data\.x is trained"):
        datamodule(data, precompute="mean").train_dataloader()
    data = double_data()
    del data.x
    data.num_nodes = 400
    with pytest.raises(ValueError, match=r"needs features of the nodes, data\.x"):
        datamodule(data, precompute="mean").train_dataloader()


@pytest.mark.parametrize("thread_safe", [False, True])
def test_transforms_must_leave_the_features_alone(thread_safe):
    def in_place(batch):
        batch.x += 1
        return batch

    def added(batch):
        batch.more = batch.x.sum()
        return batch

    for transform in (NormalizeFeatures(), in_place):
        loader = datamodule(precompute="mean", transform=transform, thread_safe=thread_safe).train_dataloader()
        with pytest.raises(ValueError, match="the transform changes x"):
            next(iter(loader))
    loader = datamodule(precompute="mean", transform=added, thread_safe=thread_safe).train_dataloader()
    batch = next(iter(loader))
    assert batch.more == batch.x.sum()


def test_changed_features_are_aggregated_anew_and_unchanged_ones_once(monkeypatch):
    calls = []
    monkeypatch.setattr(computing, "_aggregate", lambda *args, run=computing._aggregate: (calls.append(1), run(*args)))
    data = double_data()
    loaders = datamodule(data, precompute="mean")
    for _ in stages(loaders):
        pass
    assert len(calls) == 1
    data.x.mul_(2)
    batch = next(iter(loaders.train_dataloader()))
    assert len(calls) == 2
    torch.testing.assert_close(batch.x_aggregated, aggregated(NAMED["mean"], data.edge_index, data.x)[batch.n_id])
    data.x = data.x + 1
    batch = next(iter(loaders.train_dataloader()))
    assert len(calls) == 3
    torch.testing.assert_close(batch.x_aggregated, aggregated(NAMED["mean"], data.edge_index, data.x)[batch.n_id])
    trainer(max_epochs=1).fit(classifier(GCN(12, 4, 1)), datamodule(data, precompute="first_layer"))
    assert len(calls) == 4


class History(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def test_resuming_is_bit_exact_and_says_where_the_definition_is_another(tmp_path):
    def run(precompute="first_layer", **kwargs):
        pl.seed_everything(5, verbose=False)
        module = classifier(GraphSAGE(12, 8, 2, 4, dropout=0.5))
        saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        history = History()
        trainer(callbacks=[saver, history]).fit(module, datamodule(precompute=precompute), **kwargs)
        return module, history.losses

    whole, losses = run()
    for step in (2, 4, 8):
        resumed, again = run(ckpt_path=tmp_path / f"step={step}.ckpt")
        assert again == losses[step:]
        for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)
    with pytest.warns(UserWarning, match="trained with precompute='first_layer', but this run has precompute=None"):
        run(None, ckpt_path=tmp_path / "step=4.ckpt")


def train_on_rank(rank, folder):
    """Train on two ranks; return the weights, and whether the aggregated features are pages of one file."""
    import os

    from tests.runtime.test_shared_arrays import mappings

    os.environ["LIGHTNING_GNN_CACHE"] = folder
    found = []
    for kept_from in (computing.KEPT_FROM, 0):
        computing.KEPT_FROM = kept_from
        pl.seed_everything(1, verbose=False)
        data = small_data(40_000, 80_000)
        loaders = datamodule(data, precompute="first_layer", batch_size=8000)
        module = NodeClassifier(GraphSAGE(12, 8, 2, 4), 4)
        trainer(devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0).fit(module, loaders)
        rows = loaders.batch_data.x_aggregated
        mapped = [name for name, size in mappings(rows).items() if size > rows.nbytes // 2]
        found.append((mapped, [parameter.detach().numpy() for parameter in module.parameters()]))
    return found


@pytest.mark.slow
def test_ranks_of_a_machine_use_one_copy(tmp_path):
    first, second = launch.run(train_on_rank, 2, str(tmp_path))
    for memory, file in (first, second):
        assert "memfd:lightning_gnn" in memory[0][0]
        assert file[0][0].startswith(str(tmp_path / "first_layer"))
        for a, b, c in zip(memory[1], file[1], first[0][1], strict=True):
            assert (a == b).all()
            assert (a == c).all()
    assert len(list((tmp_path / "first_layer").iterdir())) == 1
