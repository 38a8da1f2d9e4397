"""Losses that are no means over the seeds: weighted by what ``training_step`` returns, or else warned about."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from lightning_gnn.nn import GraphSAGE, NodeClassifier
from tests.hyscale.models import CLASSES, Module, data_module, difference, fit, hybrid, left_threads, worst_difference

CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 0.4], dtype=torch.float64)


class Weighted(Module):
    """Its loss is one of several kinds; with ``returned``, what it weighs is too."""

    def __init__(self, kind, returned=True, own_backward=False, **options):
        super().__init__(**options)
        self.kind, self.returned = kind, returned
        if own_backward:
            self.__class__ = OwnBackward

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        y = batch.y[: batch.batch_size]
        weight = CLASS_WEIGHTS.to(out.dtype)
        if self.kind == "class weights":
            loss, own = F.cross_entropy(out, y, weight=weight), weight[y].sum()
        elif self.kind == "ignored":
            loss, own = F.cross_entropy(out, y, ignore_index=0), int((y != 0).sum())
        elif self.kind == "labelled":
            labelled = y > 1
            loss, own = F.cross_entropy(out[labelled], y[labelled]), float(labelled.sum())
        elif self.kind == "sum":
            loss, own = 0.01 * F.cross_entropy(out, y, reduction="sum"), "sum"
        else:
            loss, own = F.cross_entropy(out, y), batch.batch_size
        return {"loss": loss, "weight": own} if self.returned else loss


class OwnBackward(Weighted):
    """Has trainers wait for one another before the backward pass."""

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)


KINDS = ("class weights", "ignored", "labelled", "sum", "mean")
OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_returned_make_it_the_undivided_batch(kind, options):
    plain = Weighted(kind, optimizer="adam")
    expected, _ = fit(plain, **options)
    for strategy in (hybrid(1), hybrid(2), hybrid(shares=[0.2, 0.5, 0.3], cpu_trainers=3)):
        ours = Weighted(kind, optimizer="adam")
        found, _ = fit(ours, strategy, **options)
        assert worst_difference(found.gradients, expected.gradients) < 1e-10
        assert difference(list(ours.parameters()), list(plain.parameters())) < 1e-10
    assert not left_threads()


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_where_trainers_wait_before_the_backward_pass(kind):
    expected, _ = fit(Weighted(kind, own_backward=True), accumulate_grad_batches=2)
    found, _ = fit(Weighted(kind, own_backward=True), hybrid(shares=[0.3, 0.7]), accumulate_grad_batches=2)
    assert worst_difference(found.gradients, expected.gradients) < 1e-10


def test_outputs_hold_the_weighted_loss_and_the_sum_of_the_weights():
    def outputs(strategy):
        module, held = Weighted("class weights"), []
        module.on_train_batch_end = lambda outputs, batch, index: held.append(
            (float(outputs["loss"]), float(outputs["weight"]))
        )
        fit(module, strategy, max_epochs=1)
        return torch.tensor(held, dtype=torch.float64)

    torch.testing.assert_close(outputs(hybrid(3)), outputs("auto"), rtol=1e-10, atol=1e-10)


class Ignoring(Module):
    """Of some batches, or some trainers' parts, all labels are ignored; the mean is written by hand: 0 / 0."""

    def __init__(self, kept, by_hand, **options):
        super().__init__(**options)
        self.kept, self.by_hand = kept, by_hand

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        y = torch.where(self.kept(batch, batch_idx), batch.y[: batch.batch_size], -100)
        count = (y != -100).sum()
        loss = F.cross_entropy(out, y, reduction="sum") / count if self.by_hand else F.cross_entropy(out, y)
        return {"loss": loss, "weight": count}


class IgnoringOwnBackward(Ignoring):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize("kind", [Ignoring, IgnoringOwnBackward])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_trainer_whose_weight_is_zero_adds_nothing_not_even_a_nan(by_hand, kind):
    first = torch.cat([batch.input_id[:7] for batch in data_module().train_dataloader()])

    def kept(batch, batch_idx):
        return torch.isin(batch.input_id[: batch.batch_size], first)

    expected, _ = fit(kind(kept, by_hand), max_epochs=1)
    found, _ = fit(kind(kept, by_hand), hybrid(2), max_epochs=1)
    assert worst_difference(found.gradients, expected.gradients) < 1e-10


@pytest.mark.parametrize("kind", [Ignoring, IgnoringOwnBackward])
def test_where_all_weights_are_zero_gradients_and_loss_are_zero(kind):
    def kept(batch, batch_idx):
        return torch.full((batch.batch_size,), batch_idx != 1)

    losses = []
    plain, ours = kind(kept, False, optimizer="adam"), kind(kept, False, optimizer="adam")
    expected, _ = fit(plain)  # of cross_entropy, gradients are zero there too
    ours.on_train_batch_end = lambda outputs, batch, index: losses.append(float(outputs["loss"]))
    found, _ = fit(ours, hybrid(3))
    assert all(not gradient.any() for gradient in found.gradients[1])
    assert losses[1] == 0.0
    assert worst_difference(found.gradients, expected.gradients) < 1e-10
    assert difference(list(ours.parameters()), list(plain.parameters())) < 1e-10


class Bad(Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "weight": self.weight}


@pytest.mark.parametrize(
    ("weight", "error", "said"),
    [
        (-1, ValueError, "not negative, but is -1"),
        (float("nan"), ValueError, "finite"),
        (torch.tensor(float("inf")), ValueError, "finite"),
        (torch.ones(2), ValueError, r"one number, but has the shape \[2\]"),
        ("mean", TypeError, "'mean'"),
        ([1.0], TypeError, "list"),
    ],
    ids=str,
)
def test_weights_that_make_no_sense_are_refused(weight, error, said):
    with pytest.raises(error, match=said):
        fit(Bad(weight), hybrid(), max_epochs=1)
    assert not left_threads()


def test_trainers_that_differ_in_what_they_return_are_refused():
    class Some(Module):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return {"loss": loss, "weight": 1.0} if batch.batch_size > 10 else loss

    with pytest.raises(ValueError, match=r"always or never.* 1 returned a number, 0 'sum' and 1 none"):
        fit(Some(), hybrid(shares=[0.8, 0.2]), max_epochs=1)


def about_losses(module, strategy, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, strategy, **options)
    return [str(warning.message) for warning in caught if "no mean over" in str(warning.message)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("class weights", "class weights"),
        ("ignored", "ignore_index=0"),
        ("labelled", "labels of"),
        ("plain sum", "reduction='sum'"),
    ],
)
def test_without_a_weight_such_a_loss_is_warned_about_once(kind, said):
    class Sum(Module):
        def loss(self, batch):
            out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
            return F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum")

    def module(**options):
        return Sum() if kind == "plain sum" else Weighted(kind, returned=False, **options)

    (found,) = about_losses(module(), hybrid(3))
    assert said in found
    assert "'weight': weight" in found
    assert not about_losses(module(), hybrid(1))
    assert not about_losses(module(), "auto")


class Means(Module):
    """Means over the seeds, with much around them that is none."""

    def loss(self, batch):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        y = batch.y[: batch.batch_size]
        with torch.no_grad():
            F.cross_entropy(out, y, reduction="sum", weight=CLASS_WEIGHTS)
        F.cross_entropy(out, y, reduction="sum")  # reaches nothing
        one_hot = F.one_hot(y, CLASSES).to(out.dtype)
        penalty = sum(F.mse_loss(p, torch.zeros_like(p), reduction="sum") for p in self.parameters())
        return (
            F.cross_entropy(out, y, label_smoothing=0.1)
            + F.cross_entropy(out, y, weight=torch.ones_like(CLASS_WEIGHTS))
            + F.cross_entropy(out, y, reduction="sum") / batch.batch_size
            + F.cross_entropy(out, y, weight=CLASS_WEIGHTS, reduction="none").mean()
            + F.binary_cross_entropy_with_logits(out, one_hot, pos_weight=CLASS_WEIGHTS)
            + F.mse_loss(out, one_hot)
            + F.kl_div(out.log_softmax(-1), one_hot, reduction="batchmean")
            + 0.01 * penalty
            + penalty
        )


def test_means_are_not_warned_about_nor_losses_with_a_weight():
    expected, _ = fit(Means(), max_epochs=1)
    found, _ = fit(Means(), hybrid(), max_epochs=1)
    assert worst_difference(found.gradients, expected.gradients) < 1e-10  # they are means indeed
    assert not about_losses(Means(), hybrid(), max_epochs=1)
    for kind in KINDS:
        assert not about_losses(Weighted(kind), hybrid(), max_epochs=1)
    model = GraphSAGE(6, 8, 2, CLASSES)
    assert not about_losses(NodeClassifier(model, CLASSES), hybrid(), max_epochs=1)


def test_manual_optimisation_is_weighted_by_seeds_and_warned_about():
    class Manual(Weighted):
        def __init__(self):
            super().__init__("class weights", returned=False)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    assert len(about_losses(Manual(), hybrid(), max_epochs=1)) == 1
