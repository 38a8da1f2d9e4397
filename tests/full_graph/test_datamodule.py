import signal

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import Precision
from torch_geometric.data import Data
from torch_geometric.nn import models as pyg

from lightning_gnn.callbacks import StopOnSignal
from lightning_gnn.datamodules.full_batch import FullBatch
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn import GAT, GCN, FullInference, GraphSAGE, LinkPredictor, NodeClassifier, inference
from tests.batching_data import small_data


def trainer(**kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**{**quiet, "enable_checkpointing": False, "max_epochs": 3, **kwargs})


def make_module(model=GraphSAGE, seed=0, **kwargs):
    pl.seed_everything(seed, verbose=False)
    return NodeClassifier(model(12, 16, 2, 4, **kwargs), num_classes=4, lr=0.01)


def test_the_graph_is_the_batch():
    data = small_data()
    edge_index = data.edge_index
    whole = FullGraphDataModule(data)
    for loader in (whole.train_dataloader(), whole.val_dataloader(), whole.test_dataloader()):
        (batch,) = loader
        assert batch.edge_index is whole.graph
        assert batch.x is data.x
        assert batch.num_edges == edge_index.size(1)
        assert batch.num_nodes == 400
        assert "runner" not in batch
    assert torch.equal(whole.graph.to_edge_index(), edge_index)
    assert data.edge_index is edge_index  # the user's data is not changed


@pytest.mark.parametrize("compress", [True, False])
def test_a_stored_topology_becomes_an_edge_index(compress):
    data = small_data()
    edge_index = data.edge_index
    stored = Data(x=data.x, y=data.y, train_mask=data.train_mask, graph=CSCGraph.from_edge_index(edge_index, 400))
    (batch,) = FullGraphDataModule(stored, compress=compress).train_dataloader()
    given = batch.edge_index.to_edge_index() if compress else batch.edge_index
    assert torch.equal(given, edge_index)
    assert "graph" not in batch
    assert "graph" in stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kwargs"), [(GCN, {}), (GraphSAGE, {"aggr": "max"}), (GAT, {"heads": 2, "act": "elu"})]
)
def test_training_equals_training_on_the_edge_index(model, kwargs):
    scores, weights = [], []
    for compress in (True, False):
        trained = make_module(model, **kwargs).double()
        data = small_data()
        data.x, data.edge_weight = data.x.double(), data.edge_weight.double()
        whole = FullGraphDataModule(data, compress=compress)
        run = trainer(max_epochs=5, num_sanity_val_steps=2)  # the sanity check runs in inference mode
        run.fit(trained, whole)
        scores.append(run.test(trained, whole, verbose=False)[0])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trained.parameters()]))
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-8, atol=1e-10)


def test_a_model_of_pygs_own_needs_the_tensor():
    own = NodeClassifier(pyg.GIN(12, 16, 2, 4), num_classes=4)
    with pytest.raises(TypeError, match=r"convs\.0 .*GINConv.*datamodule\.compress=false"):
        trainer().fit(own, FullGraphDataModule(small_data()))
    trainer().fit(own, FullGraphDataModule(small_data(), compress=False))


@pytest.mark.parametrize(("limit", "moved"), [(0, {"y", "val_mask"}), (1e9, {"y", "val_mask", "x", "edge_index"})])
def test_what_does_not_fit_a_device_stays_in_host_memory(limit, moved):
    batch = FullGraphDataModule(small_data(), inference=FullInference(memory_limit=limit)).data
    assert batch.to("meta") is batch
    for key in ("y", "val_mask", "x", "edge_index"):
        assert (batch[key].device.type == "meta") == (key in moved)


@pytest.mark.parametrize("compress", [True, False])
def test_the_users_graph_stays_where_it_is(compress):
    data = small_data()
    data.train_mask = data.train_mask.tolist()
    before = data.to_dict()
    (batch,) = FullGraphDataModule(data, compress=compress).train_dataloader()
    batch.to("meta")
    assert batch.x.device.type == "meta"
    assert {key: id(value) for key, value in data.to_dict().items()} == {
        key: id(value) for key, value in before.items()
    }


class TwoDevices:
    world_size = 2
    lightning_module = None
    precision_plugin = Precision()
    callbacks = (StopOnSignal(),)

    def __init__(self, name):
        self.strategy = type("Strategy", (), {"strategy_name": name})()


def test_several_devices_need_the_strategy_that_shares_the_graph():
    whole = FullGraphDataModule(small_data())
    whole.trainer = TwoDevices("ddp")
    with pytest.raises(ValueError, match=r"2 devices.*strategy=ascend_hybrid"):
        whole.setup("fit")
    whole.trainer = TwoDevices("ascend_hybrid")
    whole.setup("fit")
    tensors = FullGraphDataModule(small_data(), compress=False)
    tensors.trainer = TwoDevices("ascend_hybrid")
    with pytest.raises(ValueError, match="leave compress=True"):
        tensors.setup("fit")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train_mask", None, "no train_mask"),
        ("train_mask", torch.zeros(400, dtype=torch.bool), "training split is empty"),
        ("val_mask", torch.zeros(3, dtype=torch.bool), r"data.val_mask has the shape \[3\]"),
        ("edge_index", torch.tensor([[0], [400]]), r"edge_index\[1\] holds node 400"),
        ("x", torch.full((400, 1), float("inf")), r"data.x holds NaN or infinity in 400 of 400 rows \(nodes 0, 1"),
    ],
)
def test_bad_input_is_named(key, value, message):
    data = small_data()
    data[key] = value
    with pytest.raises(ValueError, match=message):
        FullGraphDataModule(data)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inference": "sampled"}, "needs a DataModule that samples"),
        ({"inference": "exact"}, "inference='exact' is unknown"),
        ({"inference": "full", "compress": False}, "leave compress=True"),
    ],
)
def test_bad_options_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FullGraphDataModule(small_data(), **kwargs)


def make_sampled(inference="full", **kwargs):
    options = {"num_neighbors": [4, 4], "batch_size": 32, "num_workers": 0, "inference": inference, **kwargs}
    return NeighborDataModule(small_data(), **options)


@pytest.mark.medium
def test_sampled_training_with_exact_evaluation():
    data, trained = make_sampled(), make_module(dropout=0.3)
    trainer(num_sanity_val_steps=1).fit(trained, data)
    (val,), (test,) = data.val_dataloader(), data.test_dataloader()
    assert val is test
    assert isinstance(val, FullBatch)
    assert len(list(data.train_dataloader())) > 1
    run = trainer()
    scores = run.validate(trained, data, verbose=False)[0] | run.test(trained, data, verbose=False)[0]
    whole = small_data()
    logits = trained.eval().model(whole.x, whole.edge_index)
    for split in ("val", "test"):
        mask = whole[f"{split}_mask"]
        losses = torch.nn.functional.cross_entropy(logits[mask], whole.y[mask])
        assert scores[f"{split}_loss"] == pytest.approx(losses.item(), rel=1e-5)
        accuracy = (logits[mask].argmax(-1) == whole.y[mask]).float().mean().item()
        assert scores[f"{split}_acc"] == pytest.approx(accuracy, rel=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize(
    "nodes", [None, torch.tensor([7, 3, 3, 399]), torch.arange(400) % 3 == 0], ids=["all", "ids", "mask"]
)
@pytest.mark.parametrize("limit", ["auto", 0])
def test_predictions_line_up_with_those_of_sampled_batches(tmp_path, nodes, limit):
    trained = make_module()
    full = FullInference(folder=tmp_path, memory_limit=limit)
    rows = [
        torch.cat(trainer().predict(trained, make_sampled(inference, input_pred_nodes=nodes, num_neighbors=[-1, -1])))
        for inference in ("sampled", full)
    ]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
    assert len(rows[1]) == (400 if nodes is None else 4 if len(nodes) == 4 else 134)


@pytest.mark.medium
def test_a_full_graph_may_be_evaluated_from_files(tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "MIN_BLOCK_VERTICES", 50)
    whole = FullGraphDataModule(small_data(), inference=FullInference(folder=tmp_path, memory_limit=0, progress=False))
    trained = make_module(GAT, heads=2)
    trainer(max_epochs=1).fit(trained, whole)
    score = trainer().test(trained, whole, verbose=False)[0]
    assert list(tmp_path.glob("*.npy"))
    assert score == pytest.approx(
        trainer().test(trained, FullGraphDataModule(small_data()), verbose=False)[0], rel=1e-5
    )


@pytest.mark.medium
def test_a_signal_interrupts_a_long_prediction_between_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "MIN_BLOCK_VERTICES", 50)
    options = FullInference(folder=tmp_path, memory_limit=0, progress=False)
    trained = make_module()
    whole = FullGraphDataModule(small_data(), inference=options)
    stop = StopOnSignal()

    def signal_at_third_block(layer, args):
        blocks.append(args[1])
        if len(blocks) == 3:
            signal.raise_signal(signal.SIGINT)

    blocks = []
    handle = trained.model.convs[1].register_forward_pre_hook(signal_at_third_block)
    with pytest.raises(SystemExit):
        trainer(callbacks=[stop]).predict(trained, whole)
    handle.remove()
    assert len(blocks) == 3
    rows = torch.cat(trainer().predict(trained, whole))
    data = small_data()
    torch.testing.assert_close(rows, trained.eval().model(data.x, data.edge_index), rtol=1e-4, atol=1e-5)


def make_links(inference, **kwargs):
    data = small_data()
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(400, (2, 90), generator=generator)
    labels = torch.arange(90) % 2
    options = {
        "input_train_edges": data.edge_index[:, :200], "input_val_edges": edges, "input_val_labels": labels,
        "input_test_edges": edges[:, ::2], "input_test_labels": labels[::2], "input_pred_edges": edges[:, :7],
        "num_neighbors": [-1, -1], "neg_sampling": "binary", "batch_size": 32,
    }  # fmt: skip
    return LinkDataModule(data, inference=inference, **{**options, **kwargs})


@pytest.mark.medium
def test_links_by_exact_inference():
    pl.seed_everything(0, verbose=False)
    predictor = LinkPredictor(GraphSAGE(12, 16, 2, 8))
    trainer(max_epochs=1).fit(predictor, make_links("full"))
    scores = [trainer().test(predictor, make_links(inference), verbose=False)[0] for inference in ("full", "sampled")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    rows = [torch.cat(trainer().predict(predictor, make_links(inference))) for inference in ("full", "sampled")]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="does not sample negative edges; use input_val_edges with pos"):
        make_links("full", input_val_labels=None).val_dataloader()
