"""State of the module's own: attributes, counters, buffers, averages of weights, networks in unusual places."""

import copy

import torch
from torch import nn

from tests.hyscale.behaviour.task import CLASSES, FEATURES, Task, of_split, scenario, weights


@scenario
def counters_of_steps(run):
    class Counting(Task):
        def __init__(self):
            super().__init__()
            self.steps = 0
            self.by_epoch = {}
            self.net.calls = 0
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def training_step(self, batch, batch_idx):
            self.steps += 1
            self.net.calls += 1
            self.seen += 1
            self.by_epoch.setdefault(self.current_epoch, []).append(batch_idx)
            return super().training_step(batch, batch_idx)

    module = Counting()
    out = run.fit(module)
    assert module.steps == 6
    return {**out, "counts": (module.steps, module.net.calls, int(module.seen)), "by epoch": module.by_epoch}


@scenario
def a_histogram_of_labels(run):
    class Counting(Task):
        def __init__(self):
            super().__init__()
            self.register_buffer("labels", torch.zeros(CLASSES, dtype=torch.int64))

        def training_step(self, batch, batch_idx):
            self.labels += of_split(batch.y, batch, "train").bincount(minlength=CLASSES)
            return super().training_step(batch, batch_idx)

    module = Counting()
    return {**run.fit(module), "labels": module.labels.tolist()}


@scenario
def a_history_of_embeddings(run):
    """Rows of a buffer by the nodes' ids, as GNNAutoScale keeps them."""

    class History(Task):
        def __init__(self):
            super().__init__()
            self.register_buffer("history", torch.zeros(60, CLASSES, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            out = of_split(self(batch), batch, "train")
            ids = batch.n_id if "n_id" in batch else torch.arange(60)
            self.history[of_split(ids, batch, "train")] = out.detach()
            return super().training_step(batch, batch_idx)

    module = History()
    out = run.fit(module)
    assert int(module.history.any(1).sum()) > 5
    return {**out, "history": module.history}


@scenario
def a_target_network_follows(run):
    class Following(Task):
        def __init__(self):
            super().__init__()
            self.target = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                    slow.lerp_(fast, 0.3)
                goal = self.target(batch.x, batch.edge_index)
            gap = of_split(self(batch) - goal, batch, "train").square().mean()
            return self.loss(batch) + gap

    return run.fit(Following())


class Holder:
    """No module, but it has one."""

    def __init__(self):
        self.net = nn.Linear(FEATURES, CLASSES).double()


class Held(Task):
    """A part of the network is in a plain object."""

    def __init__(self):
        super().__init__()
        self.holder = Holder()

    def forward(self, batch):
        return super().forward(batch) + self.holder.net(batch.x)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.holder.net.parameters()], self.lr)


@scenario
def a_network_in_a_plain_object(run):
    module = Held()
    before = module.holder.net.weight.detach().clone()
    out = run.fit(module)
    assert float((module.holder.net.weight - before).abs().max()) > 0.01
    return {**out, "held": weights(module.holder.net)}


@scenario
def a_network_made_by_configure_model(run):
    class Late(Task):
        def __init__(self):
            super().__init__()
            self.last = None

        def configure_model(self):
            if self.last is None:
                torch.manual_seed(2)
                self.last = nn.Linear(CLASSES, CLASSES).double()

        def forward(self, batch):
            return self.last(super().forward(batch))

    return run.fit(Late())


@scenario
def random_weights_are_the_same_on_all_ranks(run):
    class Unlike(Task):
        """Draws its weights from a generator that nobody seeded alike."""

        def on_fit_start(self):
            everywhere = self.all_gather(weights(self.net))
            self.alike = bool((everywhere == weights(self.net)).all())

    module = Unlike()
    with torch.no_grad():
        module.net.convs[0].lin_l.weight.add_(module.global_rank)
    run.fit(module)
    return {"alike": module.alike}


@scenario
def what_hooks_draw_at_random_is_alike(run):
    class Noisy(Task):
        alike = ()

        def on_train_epoch_start(self):
            self.compare(torch.rand(3))

        def on_train_batch_start(self, batch, batch_idx):
            self.compare(torch.randn(3))

        def compare(self, drawn):
            self.alike = (*self.alike, bool((self.all_gather(drawn) == drawn).all()))

    module = Noisy()
    run.fit(module)
    return {"alike": module.alike}


@scenario
def names_that_are_logged_in_some_steps(run):
    class Sometimes(Task):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            y = of_split(batch.y, batch, "train")
            if batch_idx == 1:
                self.tell("now", loss, batch, "train", on_step=False, on_epoch=True)
            for kind in range(CLASSES):
                count = float((y == kind).sum())
                self.log(f"of_kind_{kind}", count, reduce_fx="sum", on_step=False, on_epoch=True)
            return loss

    return run.fit(Sometimes())
