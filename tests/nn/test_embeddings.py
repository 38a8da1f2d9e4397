"""Embeddings of types without features train like features that are parameters; resuming, clipping, evaluation."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from lightning_gnn import FullGraphDataModule, LinkDataModule, NeighborDataModule
from lightning_gnn.nn import (
    GraphSAGE,
    HeteroGraphSAGE,
    LinkPredictor,
    NodeClassifier,
    NodeRegressor,
    TypeEmbeddings,
)
from lightning_gnn.nn.optimizers import SplitOptimizer
from tests.batching_data import small_data
from tests.nn.quiet import trainer
from tests.sampling.test_typed import typed_data

VENUES, WIDTH = 7, 5


def make_network(data, kind=HeteroGraphSAGE, outputs=3):
    torch.manual_seed(3)
    widths = data.num_features | {"venue": WIDTH}
    return kind(data.metadata(), widths, 8, 2, outputs)


def make_table():
    return torch.randn(VENUES, WIDTH, generator=torch.Generator().manual_seed(5))


def make_embedded(data, sparse=True, **options):
    """Return a classifier whose embedding is initialized with :func:`table`."""
    embeddings = TypeEmbeddings(data, WIDTH, sparse=sparse, optimizer=options.pop("table_optimizer", None))
    with torch.no_grad():
        embeddings.tables["venue"].weight.copy_(make_table())
    return NodeClassifier(make_network(data), 3, target="paper", embeddings=embeddings, **options)


def make_batches(data, **options):
    return NeighborDataModule(data, num_neighbors=[3, 2], batch_size=40, seed=1, share_memory=False, **options)


def get_table(module):
    return module.embeddings.tables["venue"].weight.detach()


def train_parameter(tmp_path, make, clip=None, algorithm="norm"):
    """Train the same model with a parameter as features; return the model's state and that parameter."""
    data = typed_data()
    x = data["venue"].x = torch.nn.Parameter(make_table())
    module = NodeClassifier(make_network(data), 3, target="paper", optimizer=lambda parameters: make([*parameters, x]))
    options = {"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm if clip else None}
    trainer(tmp_path, max_epochs=2, **options).fit(module, datamodule=make_batches(data, sparse_grad=False))
    return module.model.state_dict(), x.detach()


def assert_same(module, expected):
    state, x = expected
    for name, value in module.model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(get_table(module), x, rtol=1e-6, atol=1e-7)
    assert not torch.equal(x, make_table())


@pytest.mark.medium
def test_dense_gradients_train_as_a_parameter_does_under_the_same_optimizer(tmp_path):
    module = make_embedded(data := typed_data(), sparse=False, lr=0.02, weight_decay=0.01)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, datamodule=make_batches(data))
    assert type(run.optimizers[0]) is Adam
    assert_same(module, train_parameter(tmp_path, partial(Adam, lr=0.02, weight_decay=0.01)))


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.3), partial(Adagrad, lr=0.05)])
def test_sparse_gradients_train_as_a_parameter_does_where_rows_without_a_gradient_stay(tmp_path, optimizer):
    module = make_embedded(data := typed_data(), optimizer=optimizer, table_optimizer=optimizer)
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=make_batches(data))
    assert_same(module, train_parameter(tmp_path, optimizer))


@pytest.mark.medium
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sparse_gradients_are_clipped_as_dense_ones(tmp_path, algorithm):
    optimizer = partial(SGD, lr=0.5)
    clip = 0.05 if algorithm == "norm" else 0.002
    module = make_embedded(data := typed_data(), optimizer=optimizer, table_optimizer=optimizer)
    options = {"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm}
    trainer(tmp_path, max_epochs=2, **options).fit(module, datamodule=make_batches(data))
    clipped, free = train_parameter(tmp_path, optimizer, clip, algorithm), train_parameter(tmp_path, optimizer)
    assert_same(module, clipped)
    assert not torch.allclose(clipped[1], free[1], atol=1e-3)


@pytest.mark.medium
def test_adam_and_sparse_adam_step_as_two_optimizers_by_hand(tmp_path):
    module = make_embedded(data := typed_data(), lr=0.02, weight_decay=0.01)
    other = copy.deepcopy(module)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, datamodule=make_batches(data))
    assert isinstance(run.optimizers[0], SplitOptimizer)

    dense = Adam(other.model.parameters(), lr=0.02, weight_decay=0.01)
    sparse = SparseAdam(other.embeddings.parameters(), lr=0.02)
    loader = make_batches(data).train_dataloader()
    for _ in range(2):
        for batch in loader:
            x = batch.x_dict | {"venue": other.embeddings.tables["venue"](batch["venue"].n_id)}
            rows = other.model(x, batch.edge_index_dict)["paper"][: batch["paper"].batch_size]
            F.cross_entropy(rows, batch["paper"].y[: len(rows)]).backward()
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()
    assert_same(module, (other.model.state_dict(), get_table(other)))


@pytest.mark.medium
@pytest.mark.campaign
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, sparse, accumulate):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def fit(folder, ckpt_path=None, **options):
        module = make_embedded(data := typed_data(), sparse=sparse, lr=0.02, scheduler=scheduler)
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        options = {"enable_checkpointing": True, "callbacks": [keep], "accumulate_grad_batches": accumulate, **options}
        run = trainer(tmp_path, max_epochs=3, **options)
        run.fit(module, datamodule=make_batches(data), ckpt_path=ckpt_path, weights_only=True)
        return module, run

    whole, run = fit(tmp_path / "whole")
    steps = run.global_step
    for step in (1, steps // 2, steps - 1):
        again, resumed = fit(tmp_path / f"from{step}", tmp_path / f"whole/step={step}.ckpt")
        assert resumed.global_step == steps
        for name, value in whole.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name
        first, second = (one.optimizers[0].state_dict() for one in (run, resumed))
        assert [group["lr"] for group in first["param_groups"]] == [group["lr"] for group in second["param_groups"]]
        for number, state in first["state"].items():
            for name, value in state.items():
                other = second["state"][number][name]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (number, name)


@pytest.mark.medium
def test_a_checkpoint_brings_the_table(tmp_path):
    module = make_embedded(data := typed_data())
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, datamodule=make_batches(data))
    run.save_checkpoint(tmp_path / "some.ckpt")
    again = NodeClassifier.load_from_checkpoint(
        tmp_path / "some.ckpt", model=make_network(data), embeddings=TypeEmbeddings(data, WIDTH), weights_only=True
    )
    assert torch.equal(get_table(again), get_table(module))


def test_full_inference_reads_all_rows(tmp_path):
    module = make_embedded(data := typed_data())
    given = copy.copy(data)
    given["venue"].x = make_table()
    with torch.no_grad():
        expected = module.model.eval()(given.x_dict, given.edge_index_dict)["paper"]
    datamodule = make_batches(data, inference="full", input_pred_nodes=("paper", torch.arange(300)))
    (rows,) = trainer(tmp_path, max_epochs=2).predict(module, datamodule)
    torch.testing.assert_close(rows, expected)
    (found,) = trainer(tmp_path, max_epochs=2).validate(module, datamodule, verbose=False)
    mask = data["paper"].val_mask
    assert found["val_acc"] == pytest.approx((expected[mask].argmax(1) == data["paper"].y[mask]).float().mean().item())


def test_mistakes_are_named():
    data = typed_data()
    module = make_embedded(data)
    batch = next(iter(make_batches(data).train_dataloader()))
    for change, message in (
        (lambda b: setattr(b["venue"], "x", torch.ones(7, WIDTH)), "'venue' have both features x and embeddings"),
        (lambda b: setattr(b["venue"], "n_id", torch.tensor([9])), "the batch has node 9 of 'venue', but"),
        (lambda b: b["author"].pop("x"), r"nodes of 'author' have no features x: .*NodeClassifier\(…, embeddings="),
    ):
        changed = copy.copy(batch)
        change(changed)
        with pytest.raises(ValueError, match=message):
            module.training_step(changed, 0)
    whole = copy.copy(data)
    whole["venue"].num_nodes = 8
    with pytest.raises(ValueError, match="the batch has 8 nodes of 'venue', but embeddings have 7 rows"):
        module(whole)
    with pytest.raises(ValueError, match="all node types have features x; remove the embeddings"):
        TypeEmbeddings({})
    with pytest.raises(ValueError, match="num_features must be at least 1 for 'venue', got 0"):
        TypeEmbeddings(data, 0)
    with pytest.raises(ValueError, match=r"the number of 'a' nodes is unknown: set data\['a'\].num_nodes"):
        TypeEmbeddings({"a": None})
    with pytest.raises(TypeError, match="embeddings must be TypeEmbeddings, got Embedding"):
        NodeClassifier(make_network(data), 3, target="paper", embeddings=torch.nn.Embedding(3, 3))


def test_a_mini_batch_without_ids_is_refused_even_if_it_has_as_many_nodes_as_the_table():
    data = typed_data()
    embeddings = TypeEmbeddings(data, WIDTH)
    batch = next(iter(make_batches(data).train_dataloader()))
    batch["venue"].num_nodes = VENUES
    del batch["venue"].n_id
    with pytest.raises(ValueError, match="the mini-batch lacks n_id of 'venue'"):
        embeddings(batch)


def test_a_split_optimizer_is_one_to_schedulers_copies_and_checkpoints():
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))

    def make():
        return SplitOptimizer(SGD([first], lr=0.1, momentum=0.9), Adagrad([second], lr=1.0))

    optimizer = make()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.05, 0.5]
    for parameter in (first, second):
        parameter.grad = torch.ones(3)
    assert optimizer.step(lambda: 7) == 7
    assert first.tolist() == pytest.approx([0.95] * 3)
    assert second.tolist() == pytest.approx([0.5] * 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert set(state["state"]) == {0, 1}

    other = make()
    other.load_state_dict(state)
    assert other.parts[0].state[first]["momentum_buffer"].tolist() == [1.0] * 3
    assert other.parts[1].param_groups[0] is other.param_groups[1]
    twin = copy.deepcopy(other)
    twin.param_groups[0]["lr"] = 9.0
    assert twin.parts[0].param_groups[0]["lr"] == 9.0
    assert other.param_groups[0]["lr"] == 0.05
    with pytest.raises(ValueError, match="add parameters to one of the optimizers"):
        other.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        SplitOptimizer(SGD([first], lr=0.1), SGD([first], lr=0.1))


@pytest.mark.parametrize("kind", ["link", "node", "full", "regression"])
def test_a_homogeneous_graph_without_features_trains_those_that_the_error_names(kind, tmp_path):
    data = small_data()
    del data.x
    if kind == "regression":
        data.y = torch.rand(data.num_nodes)
    model = GraphSAGE(64, 8, 1, 4 if kind in ("node", "full") else 1)
    make_module = {"link": LinkPredictor, "regression": NodeRegressor}.get(kind, partial(NodeClassifier, num_classes=4))
    module = make_module(model)

    def train():
        if kind == "full":
            datamodule = FullGraphDataModule(data)
        elif kind == "link":
            edges = {"input_train_edges": data.edge_index[:, :50], "neg_sampling": "binary"}
            datamodule = LinkDataModule(data, num_neighbors=[2], batch_size=25, **edges)
        else:
            datamodule = NeighborDataModule(data, num_neighbors=[2], batch_size=128)
        trainer(tmp_path).fit(module, datamodule)

    with pytest.raises(ValueError, match=r"no 'x', .*add features, or .*the LightningModule") as caught:
        train()
    (line,) = re.findall(r"data.x = .*64\)\)", str(caught.value))
    exec(line, {"torch": torch, "data": data, "module": module})  # as written in the message
    before = data.x.detach().clone()
    train()
    assert (before != data.x).any()
    assert "x" in module.state_dict()
