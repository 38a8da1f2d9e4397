"""The gradient of several trainers is the weighted one of a single device, and so are the weights after many steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_lightning.callbacks import BaseFinetuning, StochasticWeightAveraging

from lightning_gnn.hyscale.pipeline import HybridLoader, PipelineSettings, split_seeds
from lightning_gnn.nn import GAT, GraphSAGE, NodeClassifier
from tests.hyscale.models import (
    CLASSES,
    Module,
    data_module,
    difference,
    fit,
    graph,
    hybrid,
    left_threads,
    worst_difference,
)

STRATEGIES = {
    "two equal": {"cpu_trainers": 2},
    "three": {"cpu_trainers": 3},
    "nine to one": {"cpu_trainers": 1, "devices": ["cpu"], "cpu_share": 0.9},
    "one to nine": {"cpu_trainers": 1, "devices": ["cpu"], "cpu_share": 0.1},
    "uneven": {"shares": [0.2, 0.5, 0.3], "cpu_trainers": 1, "devices": ["cpu", "cpu"]},
    "one with nothing": {"shares": [0.0, 1.0], "cpu_trainers": 2},
    "rounded to nothing": {"shares": [0.02, 0.98], "cpu_trainers": 2},
    "one alone": {"cpu_trainers": 1},
    "no prefetching": {"cpu_trainers": 2, "prefetch": 0},
    "more threads": {"cpu_trainers": 2, "threads": None, "prefetch": 1},
}


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("conv", ["sage", "gat"])
def test_with_all_neighbours_it_is_the_undivided_batch(conv, options):
    plain, ours = Module(conv=conv), Module(conv=conv)
    expected, _ = fit(plain)
    found, _ = fit(ours, hybrid(**options))
    assert worst_difference(found.gradients, expected.gradients) < 1e-12
    assert difference(list(ours.parameters()), list(plain.parameters())) < 1e-12
    assert not left_threads()


def test_after_fifty_steps_of_adam_the_weights_are_the_same():
    plain, ours = Module("adam"), Module("adam")
    expected, _ = fit(plain, max_epochs=10)
    found, _ = fit(ours, hybrid(shares=[0.7, 0.3]), max_epochs=10)
    assert len(found.gradients) == len(expected.gradients) >= 50
    assert difference(list(ours.parameters()), list(plain.parameters())) < 1e-9


def sum_over_parts(weights, fanouts, **options):
    """The gradients of the trainers' parts, one after another on one module, each weighted by its seeds."""
    module = Module(**options).double()
    optimizer = module.configure_optimizers()
    loader = data_module(fanouts=fanouts).train_dataloader()
    settings = PipelineSettings([None] * len(weights), prefetch=0)
    gradients = []
    for batch in HybridLoader(loader, lambda n, _: split_seeds(n, weights), settings):
        optimizer.zero_grad()
        for part, seeds in zip(batch.parts, batch.seeds, strict=True):
            if part is not None:
                (module.loss(part) * seeds / batch.total).backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
        optimizer.step()
    return gradients


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.1, 0.9], [0.3, 0.3, 0.4]], ids=str)
@pytest.mark.parametrize("conv", ["sage", "gat", "gcn"])
def test_with_sampling_it_is_the_weighted_sum_over_the_parts(conv, weights):
    strategy = hybrid(len(weights), shares=weights)
    found, _ = fit(Module(conv=conv), strategy, data_module(fanouts=[3, 2]), max_epochs=1)
    assert worst_difference(found.gradients, sum_over_parts(weights, [3, 2], conv=conv)) < 1e-12


def test_degrees_inside_the_mini_batch_make_a_difference_to_the_undivided_one():
    """The documented limit: GCN divides by degrees that it counts in the mini-batch, BatchNorm averages over it."""
    for options in ({"conv": "gcn"}, {"norm": True}):
        found, _ = fit(Module(**options), hybrid(), max_epochs=1)
        undivided, _ = fit(Module(**options), max_epochs=1)
        assert worst_difference(found.gradients, sum_over_parts([0.5, 0.5], [-1, -1], **options)) < 1e-12
        assert worst_difference(found.gradients, undivided.gradients) > 1e-3


def test_the_neighbours_of_a_seed_do_not_depend_on_its_trainer():
    def neighbours(batch):
        edges = batch.n_id[batch.edge_index[:, : batch.num_sampled_edges[0]]].t().tolist()
        return {
            seed: [source for source, target in edges if target == seed]
            for seed in batch.n_id[: batch.batch_size].tolist()
        }

    whole = list(data_module(fanouts=[2, 2]).train_dataloader())
    settings = PipelineSettings([None] * 3, threads=(2, 2))
    parts = list(
        HybridLoader(data_module(fanouts=[2, 2]).train_dataloader(), lambda n, _: split_seeds(n, [1, 5, 2]), settings)
    )
    assert len(whole) == len(parts)
    for expected, found in zip(whole, parts, strict=True):
        together = {}
        for part in filter(None, found.parts):
            together.update(neighbours(part))
        assert together == neighbours(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"limit_train_batches": 3},
        {"overfit_batches": 2},
        {"val_check_interval": 2},
        {"precision": "64-true"},
        {"inference_mode": False},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
def test_options_of_the_trainer(options):
    data = graph(dtype=torch.float32) if "precision" in options else graph()
    plain, ours = Module("adam"), Module("adam")
    # Lightning does not convert batches of PyG to its precision; the strategy does.
    same = {name: value for name, value in options.items() if name != "precision"}
    expected, _ = fit(plain, data=data_module(data=data.clone().apply(_double)), **same)
    found, _ = fit(ours, hybrid(), data=data_module(data=data), double="precision" not in options, **options)
    assert worst_difference(found.gradients, expected.gradients) < 1e-10
    assert difference(list(ours.parameters()), list(plain.parameters())) < 1e-10
    assert not left_threads()


def _double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def test_in_float32_and_in_mixed_precision():
    data = graph(dtype=torch.float32)
    expected, _ = fit(Module(), data=data_module(data=data), double=False)
    found, _ = fit(Module(), hybrid(), data=data_module(data=data), double=False)
    assert worst_difference(found.gradients, expected.gradients) < 1e-5
    mixed, _ = fit(Module(), data=data_module(data=data), double=False, precision="bf16-mixed")
    found, _ = fit(Module(), hybrid(), data=data_module(data=data), double=False, precision="bf16-mixed")
    assert worst_difference(mixed.gradients, expected.gradients) > 1e-5  # the reference itself is in bfloat16
    assert worst_difference(found.gradients, mixed.gradients) < 0.1


@given(st.integers(0, 200), st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(sum))
def test_seeds_are_cut_once_each_in_order_and_by_weight(num_seeds, weights):
    ranges = split_seeds(num_seeds, weights)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == num_seeds
    for (start, stop), weight in zip(ranges, weights, strict=True):
        assert stop >= start
        assert abs(stop - start - num_seeds * weight / sum(weights)) <= 1 + 1e-9


def test_a_last_batch_smaller_than_the_trainers():
    data = graph()
    data.train_mask = torch.arange(120) < 42  # batches of 20, 20 and 2
    expected, _ = fit(Module(), data=data_module(data=data))
    found, _ = fit(Module(), hybrid(3), data=data_module(data=data))
    assert worst_difference(found.gradients, expected.gradients) < 1e-12


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_features_that_travel_in_fewer_bits_are_nearly_the_same(dtype):
    expected, _ = fit(Module(), max_epochs=1)
    strategy = hybrid(0, devices=["cpu", "cpu"], transfer_dtype=dtype)
    found, _ = fit(Module(), strategy, max_epochs=1)
    assert 0 < worst_difference(found.gradients[:1], expected.gradients[:1]) < 0.05


@pytest.mark.parametrize("model", [GraphSAGE, GAT])
def test_the_package_s_own_module_and_models(model):
    def module():
        torch.manual_seed(1)
        return NodeClassifier(model(6, 8, 2, CLASSES), CLASSES)

    plain, ours = module(), module()
    expected, reference = fit(plain)
    found, run = fit(ours, hybrid(shares=[0.6, 0.4]))
    assert worst_difference(found.gradients, expected.gradients) < 1e-9
    for name in ("train_loss", "train_acc", "val_acc"):
        assert float(run.callback_metrics[name]) == pytest.approx(float(reference.callback_metrics[name]), rel=1e-6)


@pytest.mark.parametrize("averaging", [True, False], ids=["weight averaging", "finetuning"])
def test_callbacks_that_change_the_weights_or_freeze_them(averaging):
    class Freeze(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net.first)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group(module.net.first, optimizer, lr=0.05)

    def run(strategy):
        module = Module()
        callback = StochasticWeightAveraging(0.01, swa_epoch_start=2) if averaging else Freeze()
        if not averaging:
            module.configure_optimizers = lambda: torch.optim.SGD(
                filter(lambda p: p.requires_grad, module.parameters()), 0.05
            )
        fit(module, strategy, callbacks=[callback], max_epochs=4)
        return list(module.parameters())

    assert difference(run(hybrid()), run("auto")) < 1e-11
