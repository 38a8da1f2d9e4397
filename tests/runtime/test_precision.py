"""A Trainer's precision converts the features of PyG batches, as it converts tensors."""

import copy
import functools
import itertools
import pickle
import re
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data import HeteroData

from lightning_gnn import NeighborDataModule, nn
from lightning_gnn.nn import GCN, RGCN, GraphSAGE, LinkPredictor, NodeClassifier, NodeRegressor
from lightning_gnn.runtime.precision import convert_batches, converted
from tests.faults.chains import DATA, DATA_MODULES
from tests.refusals import refuses

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
WIDTH = DATA.num_features
SGD = functools.partial(torch.optim.SGD, lr=0.05)
MODELS = ("GCN", "GraphSAGE", "GIN", "GAT")
TYPED_MODELS = ("RGCN", "HeteroGraphSAGE", "RGAT", "HGT")
SIZES = {"num_neighbors": [3, 2], "batch_size": 10, "seed": 3}


def draw_typed_graph():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(40, 6), torch.randn(30, 6)
    data["a"].y, data["a"].train_mask = torch.randint(3, (40,)), torch.arange(40) < 30
    data["a", "to", "b"].edge_index = torch.stack([torch.randint(40, (90,)), torch.randint(30, (90,))])
    data["b", "from", "a"].edge_index = data["a", "to", "b"].edge_index.flip(0)
    return data


def trainer(precision, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(max_epochs=1, precision=precision, accelerator="cpu", **quiet, **options)


class ManualPrecision(pl.LightningModule):
    """Computes the same as a module, on batches that it converts itself."""

    def __init__(self, module, dtype):
        super().__init__()
        self.inner = module.to(dtype)
        self.inner.log = lambda *args, **kwargs: None
        self.dtype_of_inputs = dtype

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return converted(batch, self.dtype_of_inputs)

    def training_step(self, batch, batch_idx):
        return self.inner.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.inner.configure_optimizers()


def assert_equals_manual_precision(make_module, make_data, precision):
    found = []
    for is_manual in (False, True):
        torch.manual_seed(0)
        module, data = make_module(), make_data()
        if is_manual:
            trainer("32-true", limit_val_batches=0).fit(ManualPrecision(module, DTYPES[precision]), data)
        else:
            trainer(precision).fit(module, data)
        found.append([value.detach() for value in module.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == DTYPES[precision]
        tolerance = 1e-12 if one.dtype == torch.float64 else 2e-2
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "precision"),
    [
        *zip(DATA_MODULES, itertools.cycle(MODELS), itertools.repeat("64-true"), strict=False),
        *(("neighbor", model, "64-true") for model in MODELS[1:]),
        ("neighbor", "GCN", "bf16-true"),
        ("link", "GIN", "16-true"),
        ("full", "GCN", "16-true"),
    ],
)
def test_each_data_module_trains_each_model_as_by_hand(data, model, precision):
    def make():
        built = getattr(nn, model)(WIDTH, 8, 2, 4)
        if "link" in data:
            return LinkPredictor(built, optimizer=SGD)
        return NodeClassifier(built, num_classes=4, optimizer=SGD)

    assert_equals_manual_precision(make, DATA_MODULES[data], precision)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("model", "precision"),
    [*((model, "64-true") for model in TYPED_MODELS), ("RGCN", "bf16-true"), ("HeteroGraphSAGE", "16-true")],
)
def test_models_of_heterogeneous_graphs_train_as_by_hand(model, precision):
    torch.manual_seed(0)
    data = draw_typed_graph()

    def make():
        network = getattr(nn, model)(data.metadata(), 6, 8, 2, 4)
        return NodeClassifier(network, num_classes=4, optimizer=SGD, target="a")

    assert_equals_manual_precision(make, lambda: NeighborDataModule(data, "a", **SIZES), precision)


def record_batches(kind):

    class Module(kind):
        def training_step(self, batch, batch_idx):
            self.seen = [*getattr(self, "seen", []), batch]
            return super().training_step(batch, batch_idx)

    return Module


@pytest.mark.medium
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("strategy", ["auto", "hyscale", "ascend_hybrid"])
def test_each_strategy_converts(strategy, precision):
    if strategy == "hyscale" and precision == "16-true":
        pytest.skip("refused: CPUs do not train in it")
    data = DATA_MODULES["full" if strategy == "ascend_hybrid" else "neighbor"]()
    module = record_batches(NodeClassifier)(GCN(WIDTH, 8, 2, 4), num_classes=4, optimizer=SGD)
    trainer(precision, strategy=strategy, devices=1).fit(module, data)
    assert {batch.x.dtype for batch in module.seen} == {DTYPES[precision]}


def test_floating_labels_are_converted_and_integers_are_not():
    data = copy.copy(DATA)
    data.y = torch.randn(data.num_nodes)
    module = record_batches(NodeRegressor)(GraphSAGE(WIDTH, 8, 2, 1))
    trainer("64-true").fit(module, NeighborDataModule(data, **SIZES))
    for batch in module.seen:
        assert batch.x.dtype == batch.y.dtype == batch.edge_weight.dtype == torch.float64
        assert batch.n_id.dtype == batch.edge_index.dtype == batch.e_id.dtype == torch.int64
        assert torch.equal(batch.x, data.x[batch.n_id].double())
        assert batch.train_mask.dtype == torch.bool


@pytest.mark.parametrize("inference", ["sampled", "full"])
def test_features_of_64_bits_train_in_64_bits(inference):
    data = copy.copy(DATA)
    data.x = data.x.double()
    module = NodeClassifier(GCN(WIDTH, 8, 2, 4), num_classes=4, optimizer=SGD)
    made = NeighborDataModule(data, inference=inference, **SIZES)
    trainer("64-true").fit(module, made)
    assert {value.dtype for value in module.parameters()} == {torch.float64}


@pytest.mark.parametrize("typed", [False, True])
def test_features_of_64_bits_in_32_bits_are_refused_with_what_to_do(typed):
    torch.manual_seed(0)
    data = draw_typed_graph() if typed else copy.copy(DATA)
    for store in data.node_stores:
        store.x = store.x.double()
    model = RGCN(data.metadata(), 6, 8, 2, 4) if typed else GCN(WIDTH, 8, 2, 4)
    module = NodeClassifier(model, num_classes=4, optimizer=SGD, target="a" if typed else None)
    made = NeighborDataModule(data, "a" if typed else None, **SIZES)
    with pytest.raises(TypeError, match=r"x.* is torch.float64, .*use x.to\(torch.float32\) or .*precision='64-true'"):
        trainer("32-true").fit(module, made)


def test_a_trainer_that_converts_can_be_pickled_and_one_of_32_bits_is_left_alone():
    run, other = trainer("64-true"), trainer("32-true")
    for one in (run, run, other):
        convert_batches(one)
    plugin = pickle.loads(pickle.dumps(run.precision_plugin))
    assert plugin.convert_input({"a": DATA})["a"].x.dtype == torch.float64
    assert DATA.x.dtype == torch.float32
    assert "convert_input" not in vars(other.precision_plugin)


@pytest.mark.parametrize(
    ("precision", "optimizer", "warns"),
    [
        ("16-true", None, "eps=1e-08 of Adam is 0: .*'16-mixed'.* or 'bf16-mixed', or an optimizer with eps=1e-4"),
        ("16-true", functools.partial(torch.optim.RMSprop, eps=2e-8), "eps=2e-08 of RMSprop"),
        ("16-true", functools.partial(torch.optim.Adam, eps=1e-4), None),
        ("16-true", SGD, None),
        ("bf16-true", None, None),
        ("32-true", None, None),
    ],
)
def test_an_epsilon_that_is_zero_in_float16_is_warned_of_once(precision, optimizer, warns):
    module = NodeClassifier(GCN(WIDTH, 8, 2, 5), num_classes=5, optimizer=optimizer)
    datamodule = NeighborDataModule(DATA, **SIZES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(precision, limit_train_batches=1, limit_val_batches=0)
        run.fit(module, datamodule)
        run.fit_loop.max_epochs = 2
        run.fit(module, datamodule)
    found = [str(each.message) for each in caught if "the parameters are float16" in str(each.message)]
    assert len(found) == (0 if warns is None else 2)  # once for each fit
    assert all(re.search(warns, message) for message in found)
    if warns is None and precision == "16-true":
        assert all(bool(value.isfinite().all()) for value in module.parameters())


class PlainModule(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 5).half()

    def training_step(self, batch, batch_idx):
        return self.layer(batch.x.half()).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_a_half_module_of_one_s_own_is_warned_of():
    with pytest.warns(UserWarning, match="eps=1e-08 of Adam is 0"):
        trainer("32-true", limit_train_batches=1).fit(PlainModule(), NeighborDataModule(DATA, **SIZES))


@pytest.mark.parametrize(
    ("default", "found", "advice"),
    [
        (
            torch.float64,
            torch.float32,
            r"weights are torch.float64: use x.to\(torch.float64\) or .*'64-true'.* or torch.set",
        ),
        (torch.float32, torch.float64, r"weights are torch.float32: use x.to\(torch.float32\) or .*'64-true'\)$"),
        (torch.float32, torch.int64, r"weights are torch.float32: use x.to\(torch.float32\)$"),
        (torch.bfloat16, torch.float32, r"weights are torch.bfloat16: use x.to\(torch.bfloat16\) or .*'bf16-true'"),
    ],
)
def test_features_of_another_dtype_end_with_advice_that_works(default, found, advice):
    data = copy.copy(DATA)
    data.x = DATA.x.to(found)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        module = NodeClassifier(GraphSAGE(WIDTH, 8, 2, 5), num_classes=5)
        datamodule = NeighborDataModule(data, **SIZES)
        refuses(TypeError, advice, trainer("32-true", limit_train_batches=1).fit, module, datamodule)
        data.x = data.x.to(default)
        quick = {"limit_train_batches": 1, "limit_val_batches": 0}
        trainer("32-true", **quick).fit(module, NeighborDataModule(data, **SIZES))
        if "64-true" in advice:
            data.x = DATA.x.to(found)
            trainer("64-true", **quick).fit(module, NeighborDataModule(data, **SIZES))
    finally:
        torch.set_default_dtype(before)
