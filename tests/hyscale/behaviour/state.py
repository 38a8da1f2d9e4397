"""State of the module's own: attributes, counters, buffers, averages of weights, networks in unusual places."""

import copy

import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.hyscale.behaviour.task import CLASSES, FEATURES, Task, of_split, scenario, weights


@scenario
def attributes_of_submodules_set_in_hooks(run):
    class Switched(Task):
        def __init__(self):
            super().__init__()
            self.gate = nn.Module()
            self.gate.scale = 1.0

        def on_train_epoch_start(self):
            self.gate.scale = 1.0 + self.current_epoch

        def on_train_batch_start(self, batch, batch_idx):
            self.gate.shift = 0.1 * batch_idx

        def forward(self, batch):
            return super().forward(batch) * self.gate.scale + self.gate.shift

    module = Switched()
    return {**run.fit(module, limit_val_batches=0), "scale": module.gate.scale, "shift": module.gate.shift}


@scenario
def dropout_is_switched_off_in_a_hook(run):
    class Dropping(Task):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def on_train_start(self):
            self.dropout.p = 0.0

        def forward(self, batch):
            return self.dropout(super().forward(batch))

    module = Dropping()
    return {**run.fit(module), "rate": module.dropout.p}


@scenario
def a_submodule_is_replaced_in_a_hook(run):
    class Replacing(Task):
        def __init__(self):
            super().__init__()
            self.last = nn.Identity()

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.last = nn.Tanh()

        def forward(self, batch):
            return self.last(super().forward(batch))

    module = Replacing()
    return {**run.fit(module), "last": type(module.last).__name__}


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
def a_counter_that_the_loss_depends_on(run):
    class Warming(Task):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            self.seen += 1
            return self.loss(batch) * (self.seen / 6)

    module = Warming()
    return {**run.fit(module), "seen": float(module.seen)}


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
def a_histogram_of_labels_that_is_reduced(run):
    class Counting(Task):
        def __init__(self):
            super().__init__()
            self.register_buffer("labels", torch.zeros(CLASSES, dtype=torch.int64))

        def training_step(self, batch, batch_idx):
            counts = of_split(batch.y, batch, "train").bincount(minlength=CLASSES)
            self.labels += self.trainer.strategy.reduce(counts, reduce_op="sum")
            return super().training_step(batch, batch_idx)

    module = Counting()
    out = run.fit(module)
    assert int(module.labels.sum()) >= 2 * 27
    return {**out, "labels": module.labels.tolist()}


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


@scenario
def weights_decay_by_hand(run):
    class Decaying(Task):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.9)
            return super().training_step(batch, batch_idx)

    return run.fit(Decaying())


@scenario
def weights_are_projected_after_the_step(run):
    class Projected(Task):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.3, 0.3)

    module = Projected()
    out = run.fit(module)
    assert float(out["weights"].abs().max()) <= 0.3
    return out


@scenario
def weights_are_averaged_by_the_module(run):
    class Averaged(Task):
        def __init__(self):
            super().__init__()
            self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.average.update_parameters(self.net)

        def validation_step(self, batch, batch_idx):
            out = self.average(batch.x, batch.edge_index)
            self.tell("average", of_split(out, batch, "val").mean(), batch, "val")

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), self.lr)

    return run.fit(Averaged())


@scenario
def a_bound_method_kept_from_the_beginning(run):
    class Bound(Task):
        def __init__(self):
            super().__init__()
            self.call = self.net.forward

        def forward(self, batch):
            return self.call(batch.x, batch.edge_index)

    before = weights(Task())
    out = run.fit(Bound())
    assert float((out["weights"] - before).abs().max()) > 0.01
    return out


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
def networks_in_a_list(run):
    class Listed(Task):
        def __init__(self):
            super().__init__()
            self.others = [nn.Linear(FEATURES, CLASSES).double() for _ in range(2)]

        def forward(self, batch):
            return super().forward(batch) + sum(other(batch.x) for other in self.others)

        def configure_optimizers(self):
            return torch.optim.SGD([*self.parameters(), *(p for net in self.others for p in net.parameters())], self.lr)

    module = Listed()
    return {**run.fit(module), "held": torch.cat([weights(net) for net in module.others])}


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
def a_network_made_by_setup(run):
    class Late(Task):
        def setup(self, stage):
            self.stage = stage
            torch.manual_seed(2)
            self.last = nn.Linear(CLASSES, CLASSES).double()

        def forward(self, batch):
            return self.last(super().forward(batch))

    module = Late()
    return {**run.fit(module), "stage": module.stage}


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
def a_lazy_layer(run):
    class Lazy(Task):
        def __init__(self):
            super().__init__()
            self.last = nn.LazyLinear(CLASSES, dtype=torch.float64)
            torch.manual_seed(4)
            self.last(torch.zeros(1, CLASSES, dtype=torch.float64))

        def forward(self, batch):
            return self.last(super().forward(batch))

    return run.fit(Lazy())


@scenario
def a_callback_counts_and_keeps_state(run):
    class Counter(pl.Callback):
        def __init__(self):
            self.batches, self.weights = 0, []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.batches += 1
            self.weights.append(weights(module).norm())

    callback = Counter()
    return {
        **run.fit(Task(), callbacks=[callback]),
        "batches": callback.batches,
        "norms": torch.stack(callback.weights),
    }


@scenario
def the_parameters_of_the_trainer_are_read_by_the_module(run):
    seen = []

    class Reading(Task):
        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            seen.append(
                (
                    trainer.current_epoch,
                    trainer.global_step,
                    trainer.num_training_batches,
                    trainer.is_last_batch,
                    trainer.training,
                    self.training,
                    str(self.device),
                    str(self.dtype),
                    torch.is_grad_enabled(),
                )
            )
            return super().training_step(batch, batch_idx)

    return {**run.fit(Reading()), "seen": seen}


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
