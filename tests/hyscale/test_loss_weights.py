"""Losses that are not means over the seeds: weighted by what ``training_step`` returns, or warned about."""

import functools
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F

from lightning_gnn.nn import GraphSAGE, NodeClassifier
from tests.campaigns import cases_of
from tests.full_graph.launch import run
from tests.hyscale.training import Plain, copy_state, fit, make_hybrid
from tests.patience import NEVER

CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)


class Weighted(Plain):
    """Computes one of several kinds of loss; with ``returned``, also returns its weight."""

    def __init__(self, kind, returned=True):
        super().__init__()
        self.kind, self.returned = kind, returned

    def training_step(self, batch, batch_idx):
        out, y = self.scores(batch), batch.y[: batch.batch_size]
        weight = CLASS_WEIGHTS.to(out.dtype)
        if self.kind == "class weights":
            loss, own = F.cross_entropy(out, y, weight=weight), weight[y].sum()
        elif self.kind == "ignored":
            loss, own = F.cross_entropy(out, y, ignore_index=0), int((y != 0).sum())
        elif self.kind == "labelled":
            mask = y > 1
            loss, own = F.cross_entropy(out[mask], y[mask]), float(mask.sum())
        elif self.kind == "sum":
            loss, own = 0.01 * F.cross_entropy(out, y, reduction="sum"), "sum"
        else:
            loss, own = F.cross_entropy(out, y), batch.batch_size
        return {"loss": loss, "weight": own} if self.returned else loss


KINDS = ("class weights", "ignored", "labelled", "sum", "mean")
OPTIONS = {"plain": {}, "accumulated": {"accumulate_grad_batches": 2}, "clipped": {"gradient_clip_val": 0.1}}
BY_NAME = {f"{kind}, {name}": (kind, options) for kind in KINDS for name, options in OPTIONS.items()}


class Ignoring(Plain):
    """Ignores all labels of some ranks; the mean may be written as sum / count, which is 0 / 0 there."""

    def __init__(self, has_label, divides):
        super().__init__()
        self.has_label, self.divides = has_label, divides

    def training_step(self, batch, batch_idx):
        y = torch.where(self.has_label(batch, batch_idx), batch.y[: batch.batch_size], -100)
        count, out = (y != -100).sum(), self.scores(batch)
        loss = F.cross_entropy(out, y, reduction="sum") / count if self.divides else F.cross_entropy(out, y)
        return {"loss": loss, "weight": count}


def not_of_the_second(batch, batch_idx):
    return torch.full((batch.batch_size,), batch_idx != 1)


class OnOneRank(Ignoring):
    """In every second step, only the first rank has labels."""

    def __init__(self, divides):
        super().__init__(self.first_alone, divides)

    def first_alone(self, batch, batch_idx):
        alone = self._trainer.world_size == 1
        first = torch.arange(batch.batch_size) < round(0.3 * batch.batch_size)  # the share of the first rank
        mask = first if alone else torch.full((batch.batch_size,), self._trainer.global_rank == 0)
        return mask if batch_idx % 2 else torch.full_like(mask, True)


IGNORING = {
    f"{name}, {options}": (make, options)
    for name, make in {
        "none on one rank": functools.partial(OnOneRank, False),
        "0 / 0 on one rank": functools.partial(OnOneRank, True),
        "none at all": functools.partial(Ignoring, not_of_the_second, False),
    }.items()
    for options in ("plain", "accumulated")
}


class Means(Plain):
    """Losses are means over the seeds, among other computations that are not."""

    def loss(self, batch):
        out, y = self.scores(batch), batch.y[: batch.batch_size]
        with torch.no_grad():
            F.cross_entropy(out, y, reduction="sum", weight=CLASS_WEIGHTS)
        F.cross_entropy(out, y, reduction="sum")  # does not reach the loss
        one_hot = F.one_hot(y, 3).to(out.dtype)
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


class Sum(Plain):
    def loss(self, batch):
        return F.cross_entropy(self.scores(batch), batch.y[: batch.batch_size], reduction="sum")


class Manual(Weighted):
    def __init__(self):
        super().__init__("class weights", returned=False)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


WARNED = {
    "class weights": (functools.partial(Weighted, "class weights", False), "class weights"),
    "ignored": (functools.partial(Weighted, "ignored", False), "ignore_index=0"),
    "labelled": (functools.partial(Weighted, "labelled", False), "labels for"),
    "plain sum": (Sum, "reduction='sum'"),
    "manual": (Manual, "class weights"),
}
SILENT = {
    "means": Means,
    "the package's own": lambda: NodeClassifier(GraphSAGE(6, 8, 1, 3).double(), 3),
    **{kind: functools.partial(Weighted, kind) for kind in KINDS},
}


def train_state(make, options, strategy="auto"):
    module = make()
    fit(module, strategy, **OPTIONS[options])
    return copy_state(module)


def collect_loss_warnings(module, strategy):
    with warnings.catch_warnings(record=True) as caught:
        fit(module, strategy, epochs=1, filters=False)
    return [str(warning.message) for warning in caught if "not a mean over" in str(warning.message)]


def train_rank(rank, num_ranks, names):
    weights = {}
    for name in names:
        kind, options = BY_NAME[name]
        module = Weighted(kind)
        fit(module, make_hybrid(num_ranks), **options)
        weights[name] = copy_state(module)
    if num_ranks > 2:
        return weights, {}, {}
    for name, (make, options) in IGNORING.items():
        weights[name] = train_state(make, options, make_hybrid(num_ranks))
    warned = {name: collect_loss_warnings(make(), make_hybrid(num_ranks)) for name, (make, _) in WARNED.items()}
    warned |= {f"not {name}": collect_loss_warnings(make(), make_hybrid(num_ranks)) for name, make in SILENT.items()}
    means = train_state(Means, "plain", make_hybrid(num_ranks))
    return weights, warned, means


@functools.cache
def run_ranks(session, num_ranks=2):
    names = [case["name"] for case in cases_of(session, test_weights_that_are_returned_make_it_the_undivided_batch)]
    return run(train_rank, num_ranks, num_ranks, names)


def compare(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("name", BY_NAME)
def test_weights_that_are_returned_make_it_the_undivided_batch(name, request):
    kind, options = BY_NAME[name]
    module = Weighted(kind)
    fit(module, **options)
    for num_ranks in (2, 3):
        for weights, *_ in run_ranks(request.session, num_ranks):
            compare(weights[name], copy_state(module))


@pytest.mark.slow
@pytest.mark.parametrize("name", IGNORING)
def test_a_rank_whose_weight_is_zero_adds_nothing_not_even_a_nan(name, request):
    make, options = IGNORING[name]
    expected = train_state(make, options)  # cross_entropy without labels also has zero gradients
    for weights, *_ in run_ranks(request.session):
        compare(weights[name], expected)


@pytest.mark.medium
@pytest.mark.parametrize("name", WARNED)
def test_without_a_weight_such_a_loss_is_warned_about_once(name, request):
    make, said = WARNED[name]
    messages = [message for _, warned, _ in run_ranks(request.session) for message in warned[name]]
    assert 1 <= len(messages) <= 2  # by each rank that sees it
    assert all(said in message and "'weight': weight" in message for message in messages)
    assert not collect_loss_warnings(make(), make_hybrid(1))


class Bad(Plain):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "weight": self.weight}


class Some(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "weight": 1.0} if self.global_rank else loss


BAD = [
    (Bad, (-1,), "ValueError", "not negative, but is -1"),
    (Bad, (float("nan"),), "ValueError", "finite"),
    (Bad, (torch.tensor(float("inf")),), "ValueError", "finite"),
    (Bad, (torch.ones(2),), "ValueError", "one number, but has the shape [2]"),
    (Bad, ("mean",), "TypeError", "'mean'"),
    (Bad, ([1.0],), "TypeError", "list"),
    (Some, (), "ValueError", "of an iteration 1 returned a number, 0 returned 'sum' and 1 returned no weight"),
]


def collect_refusals(rank):
    errors = []
    for make, args, *_ in BAD:
        try:
            fit(make(*args), make_hybrid(2, stall_timeout=NEVER), epochs=1)
        except Exception as error:
            errors.append((type(error).__name__, str(error), traceback.format_exc()))
    return errors


@pytest.mark.slow
def test_weights_that_make_no_sense_are_refused():
    for errors in run(collect_refusals, 2):
        for (*_, error, said), found in zip(BAD, errors, strict=True):
            assert found[0] == error, found[2]
            assert said in found[1]
