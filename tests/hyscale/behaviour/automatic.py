"""Automatic optimisation: optimizers, gradients that are edited on the way, and losses of many shapes."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gnn import NeighborDataModule
from tests.hyscale.behaviour.task import CLASSES, Task, graph, of_split, scenario, weights


@scenario
def plain_training(run):
    return run.fit(Task(), max_epochs=3)


class With(Task):
    """Trained by an optimizer that a function makes."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


@scenario
def adam(run):
    return run.fit(With(lambda module: torch.optim.Adam(module.parameters(), 0.05)))


@scenario
def two_groups_of_parameters(run):
    def make(module):
        first, second = module.net.convs
        groups = [{"params": first.parameters(), "lr": 0.3, "weight_decay": 0.1}, {"params": second.parameters()}]
        return torch.optim.AdamW(groups, lr=0.02)

    return run.fit(With(make))


@scenario
def momentum_and_no_bias(run):
    def make(module):
        named = [parameter for name, parameter in module.named_parameters() if "bias" not in name]
        return torch.optim.SGD(named, 0.1, momentum=0.9, nesterov=True)

    return run.fit(With(make))


@scenario
def lbfgs(run):
    calls = []

    class Counting(With):
        def training_step(self, batch, batch_idx):
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    make = lambda module: torch.optim.LBFGS(module.parameters(), 0.5, max_iter=4)  # noqa: E731
    out = run.fit(Counting(make))
    assert len(calls) > 6
    return {**out, "calls": calls}


@scenario
def lbfgs_with_a_line_search(run):
    make = lambda module: torch.optim.LBFGS(module.parameters(), 9.0, 4, line_search_fn="strong_wolfe")  # noqa: E731
    return run.fit(With(make))


@scenario
def gradients_are_accumulated(run):
    return run.fit(Task(), accumulate_grad_batches=2)


@scenario
def gradients_are_accumulated_by_a_schedule(run):
    return run.fit(Task(), max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})])


@scenario
def gradients_are_clipped_by_norm(run):
    return run.fit(Task(), gradient_clip_val=0.05)


@scenario
def gradients_are_clipped_by_value(run):
    return run.fit(Task(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


@scenario
def accumulated_gradients_are_clipped(run):
    return run.fit(Task(), gradient_clip_val=0.05, accumulate_grad_batches=2)


@scenario
def the_module_clips_its_layers_apart(run):
    class Apart(Task):
        norms = ()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            for layer in self.net.convs:
                norm = nn.utils.clip_grad_norm_(layer.parameters(), gradient_clip_val)
                self.norms = (*self.norms, float(norm))

    module = Apart()
    return {**run.fit(module, gradient_clip_val=0.04), "norms": module.norms}


@scenario
def the_module_clips_by_its_own_schedule(run):
    class Falling(Task):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, 0.1 / (1 + self.current_epoch), "norm")

    return run.fit(Falling())


@scenario
def gradients_are_edited_before_the_step(run):
    class Centred(Task):
        def on_before_optimizer_step(self, optimizer):
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))

    return run.fit(Centred())


@scenario
def a_callback_edits_gradients_before_the_step(run):
    class Signs(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            for parameter in module.parameters():
                parameter.grad.sign_()

    return run.fit(Task(lr=0.01), callbacks=[Signs()])


@scenario
def gradients_are_read_after_the_backward_pass(run):
    class Norms(Task):
        norms = ()

        def on_after_backward(self):
            self.norms = (*self.norms, *(float(parameter.grad.norm()) for parameter in self.parameters()))

    module = Norms()
    out = run.fit(module)
    assert len(module.norms) == 6 * len(list(module.parameters()))
    return {**out, "norms": module.norms}


@scenario
def gradients_are_replaced_after_the_backward_pass(run):
    class Replaced(Task):
        def on_after_backward(self):
            for parameter in self.parameters():
                parameter.grad = parameter.grad / (parameter.grad.norm() + 1)

    return run.fit(Replaced())


@scenario
def gradients_without_a_bias(run):
    class Without(Task):
        def on_after_backward(self):
            self.net.convs[0].lin_l.bias.grad = None

    return run.fit(Without())


@scenario
def hooks_on_parameters(run):
    class Hooked(Task):
        def __init__(self):
            super().__init__()
            for parameter in self.net.convs[0].parameters():
                parameter.register_hook(lambda gradient: gradient * 0.25)

    return run.fit(Hooked())


@scenario
def hooks_on_parameters_which_are_not_linear(run):
    module = Task()
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return run.fit(module)


@scenario
def hooks_after_a_parameter_has_its_gradient(run):
    module, count = Task(), []

    def halve(parameter):
        count.append(1)
        parameter.grad.mul_(0.5)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return {**run.fit(module), "count": len(count)}


@scenario
def hooks_on_modules(run):
    module, shapes = Task(), []
    module.net.convs[1].register_forward_hook(lambda layer, given, out: out * 1.5)
    module.net.convs[0].register_forward_pre_hook(lambda layer, given: shapes.append(given[0].shape[1]))
    module.net.convs[0].register_full_backward_hook(lambda *_: None)
    return {**run.fit(module), "widths": shapes}


@scenario
def frozen_parameters(run):
    module = Task()
    module.net.convs[0].requires_grad_(False)
    before = module.net.convs[0].lin_l.weight.clone()
    out = run.fit(module)
    assert torch.equal(before, module.net.convs[0].lin_l.weight)
    return out


@scenario
def parameters_thaw_in_mid_training(run):
    class Thawing(Task):
        def __init__(self):
            super().__init__()
            self.net.convs[0].requires_grad_(False)

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net.convs[0].requires_grad_(True)

    return run.fit(Thawing(), max_epochs=3)


@scenario
def parameters_freeze_in_mid_training(run):
    class Freezing(Task):
        def on_train_epoch_start(self):
            self.net.convs[1].requires_grad_(self.current_epoch != 1)

    return run.fit(Freezing(), max_epochs=3)


@scenario
def parameters_are_added_in_mid_training(run):
    class Growing(Task):
        def __init__(self):
            super().__init__()
            self.extra = None

        def forward(self, batch):
            out = super().forward(batch)
            return out if self.extra is None else out + self.extra(batch.x)

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.extra = nn.Linear(4, CLASSES).double()
                nn.init.constant_(self.extra.weight, 0.1)
                nn.init.zeros_(self.extra.bias)
                self.optimizers().add_param_group({"params": self.extra.parameters()})

    module = Growing()
    out = run.fit(module, max_epochs=3)
    assert float(module.extra.bias.detach().abs().sum()) > 0
    return out


@scenario
def a_backbone_thaws(run):
    class Backbone(Task):
        def __init__(self):
            super().__init__()
            self.backbone = self.net.convs[0]

        def configure_optimizers(self):
            wanted = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return torch.optim.SGD(wanted, self.lr)

    callback = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, verbose=False)
    return run.fit(Backbone(), max_epochs=4, callbacks=[callback])


@scenario
def parameters_that_are_never_used(run):
    class Unused(With):
        def __init__(self, make):
            super().__init__(make)
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    module = Unused(lambda module: torch.optim.SGD(module.parameters(), 0.1, weight_decay=0.5))
    out = run.fit(module)
    assert module.unused.grad is None
    assert bool((module.unused == 1).all())  # weight decay too passes over what has no gradient
    return out


@scenario
def parameters_that_are_used_in_some_steps(run):
    class Now(Task):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

        def forward(self, batch):
            out = super().forward(batch)
            return out * self.scale if self.global_step % 2 else out

    return run.fit(Now())


@scenario
def tied_weights(run):
    class Tied(Task):
        def __init__(self):
            super().__init__()
            self.again = self.net.convs[1].lin_l

    return run.fit(Tied())


@scenario
def parametrised_weights(run):
    module = Task()
    nn.utils.parametrizations.weight_norm(module.net.convs[0].lin_l)
    nn.utils.parametrizations.orthogonal(module.net.convs[1].lin_r)
    return run.fit(module)


@scenario
def spectral_normalisation(run):
    module = Task()
    nn.utils.parametrizations.spectral_norm(module.net.convs[0].lin_l)
    out = run.fit(module)
    return {**out, "buffers": torch.cat([buffer.flatten() for buffer in module.buffers()])}


@scenario
def a_penalty_on_parameters(run):
    class Penalised(Task):
        def loss(self, batch, split="train"):
            return super().loss(batch, split) + 0.1 * sum(p.square().sum() for p in self.parameters())

    return run.fit(Penalised())


@scenario
def a_gradient_through_a_gradient(run):
    class Smooth(Task):
        def training_step(self, batch, batch_idx):
            batch.x.requires_grad_(True)
            out = of_split(self(batch), batch, "train")
            slope = torch.autograd.grad(out.sum(), batch.x, create_graph=True)[0]
            loss = F.cross_entropy(out, of_split(batch.y, batch, "train"))
            weight = sum(p.square().sum() for p in self.parameters())
            return loss + 0.0 * slope.sum() + 0.01 * weight

    return run.fit(Smooth())


def returning(make, **options):
    class Returning(Task):
        def training_step(self, batch, batch_idx):
            return make(self, batch, batch_idx)

    return Returning(**options)


@scenario
def a_dictionary_with_more_than_the_loss(run):
    class Outputs(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seen.append((sorted(outputs), tuple(outputs["rows"].shape[1:]), float(outputs["constant"])))
            assert not outputs["rows"].requires_grad

    def make(module, batch, batch_idx):
        out = module(batch)
        loss = F.cross_entropy(of_split(out, batch, "train"), of_split(batch.y, batch, "train"))
        return {"loss": loss, "rows": out.detach(), "constant": torch.tensor(2.5)}

    callback = Outputs()
    return {**run.fit(returning(make), callbacks=[callback]), "seen": callback.seen}


@scenario
def a_step_without_a_loss_is_skipped(run):
    return run.fit(returning(lambda module, batch, batch_idx: None if batch_idx == 1 else module.loss(batch)))


@scenario
def class_weights(run):
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def make(module, batch, batch_idx):
        y = of_split(batch.y, batch, "train")
        loss = F.cross_entropy(of_split(module(batch), batch, "train"), y, weight=weight)
        return {"loss": loss, "weight": weight[y].sum()}

    return run.fit(returning(make))


@scenario
def labels_that_are_ignored(run):
    def make(module, batch, batch_idx):
        y = of_split(batch.y, batch, "train").clone()
        y[y == 1] = -100
        loss = F.cross_entropy(of_split(module(batch), batch, "train"), y, reduction="sum")
        count = (y >= 0).sum()
        return {"loss": loss / count.clamp_min(1), "weight": count}

    return run.fit(returning(make))


@scenario
def losses_that_are_summed(run):
    def make(module, batch, batch_idx):
        out, y = of_split(module(batch), batch, "train"), of_split(batch.y, batch, "train")
        return {"loss": F.cross_entropy(out, y, reduction="sum"), "weight": "sum"}

    return run.fit(returning(make, lr=0.01), accumulate_grad_batches=2)


@scenario
def weights_with_clipping_and_accumulation(run):
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def make(module, batch, batch_idx):
        y = of_split(batch.y, batch, "train")
        loss = F.cross_entropy(of_split(module(batch), batch, "train"), y, weight=weight)
        return {"loss": loss, "weight": weight[y].sum()}

    return run.fit(returning(make), accumulate_grad_batches=3, gradient_clip_val=0.02)


@scenario(full=False)
def a_mean_of_nothing_on_one_rank(run):
    """The first half of each mini-batch has no label: where it is alone, the loss is NaN, and its weight 0."""
    data = graph()
    nodes = data.train_mask.nonzero().flatten()
    data.y[nodes[torch.arange(len(nodes)) % 10 < 6]] = 2
    options = {"num_neighbors": [-1, -1], "batch_size": 10, "shuffle": False}

    def make(module, batch, batch_idx):
        y = of_split(batch.y, batch, "train")
        loss = F.cross_entropy(of_split(module(batch), batch, "train"), y, ignore_index=2)
        return {"loss": loss, "weight": (y != 2).sum()}

    out = run.fit(returning(make), NeighborDataModule(data, **options), limit_val_batches=0)
    assert not bool(out["weights"].isnan().any())
    return out


@scenario
def a_loss_that_is_no_mean(run):
    def make(module, batch, batch_idx):
        return F.cross_entropy(
            of_split(module(batch), batch, "train"),
            of_split(batch.y, batch, "train"),
            weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64),
        )

    return run.fit(returning(make))


@scenario
def a_loss_without_a_graph_is_refused(run):
    module = returning(lambda module, batch, batch_idx: module.loss(batch).detach())
    try:
        run.fit(module)
    except RuntimeError as error:
        return {"error": "does not require grad" in str(error)}
    raise AssertionError("a detached loss trained nothing, and nobody said so")


@scenario
def activations_are_computed_again(run):
    class Checkpointed(Task):
        def forward(self, batch):
            return checkpoint(super().forward, batch, use_reentrant=False)

    return run.fit(Checkpointed())


@scenario
def activations_are_computed_again_with_the_same_dropout(run):
    class Masked(Task):
        """Keeps the masks that it drew: a checkpointed layer draws each of them twice."""

        def __init__(self):
            super().__init__()
            self.drawn = []

        def forward(self, batch):
            return checkpoint(self.dropped, batch, use_reentrant=False)

        def dropped(self, batch):
            x = F.dropout(batch.x, 0.5, self.training)
            if self.training:
                self.drawn.append(x.detach() == 0)
            return self.net(x, batch.edge_index)

    module = Masked()
    out = run.fit(module, limit_val_batches=0)
    masks = list(zip(module.drawn[::2], module.drawn[1::2], strict=True))
    assert len({mask.sum().item() for mask, _ in masks}) > 1
    return {"steps": out["steps"], "again": [torch.equal(one, other) for one, other in masks]}


@scenario
def the_module_overrides_the_step(run):
    class Stepping(Task):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 4)
            optimizer.step(closure=optimizer_closure)

    return run.fit(Stepping())


@scenario
def the_module_steps_every_second_time(run):
    class Second(Task):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % 2 == 0:
                optimizer.zero_grad(set_to_none=False)

    return run.fit(Second())


@scenario
def the_module_overrides_the_backward_pass(run):
    class Backward(Task):
        calls = 0

        def backward(self, loss):
            self.calls += 1
            (loss * 0.5).backward(retain_graph=True)
            (loss * 0.5).backward()

    module = Backward()
    return {**run.fit(module), "calls": module.calls}


@scenario
def an_optimizer_with_a_closure_of_its_own(run):
    class Twice(torch.optim.SGD):
        """Steps along the mean of two gradients, as sharpness-aware methods do."""

        def step(self, closure=None):
            loss = closure()
            first = [p.grad.clone() for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for group in self.param_groups:
                    for p, gradient in zip(group["params"], first, strict=True):
                        p.add_(gradient, alpha=0.05)
            closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for p, gradient in zip(group["params"], first, strict=True):
                        p.sub_(gradient, alpha=0.05)
            super().step()
            return loss

    return run.fit(With(lambda module: Twice(module.parameters(), 0.2)))


@scenario
def no_optimizer(run):
    before = weights(Task())
    out = run.fit(With(lambda module: None))
    assert torch.equal(before, out["weights"])
    return out


@scenario(tolerance=1e-5)
def single_precision(run):
    class Single(Task):
        def __init__(self):
            super().__init__()
            self.float()

        def forward(self, batch):
            return self.net(batch.x.float(), batch.edge_index)

    return run.fit(Single())


@scenario(tolerance=0.05)
def mixed_precision(run):
    class Mixed(Task):
        def __init__(self):
            super().__init__()
            self.float()
            self.dtypes = set()

        def forward(self, batch):
            out = self.net(batch.x.float(), batch.edge_index)
            self.dtypes.add(str((out @ out.new_ones(CLASSES, 1)).dtype))
            return out

    module = Mixed()
    return {**run.fit(module, precision="bf16-mixed"), "dtypes": sorted(module.dtypes)}


@scenario
def double_precision_by_the_trainer(run):
    class Double(Task):
        def __init__(self):
            super().__init__()
            self.float()

    return run.fit(Double(), precision="64-true")


@scenario
def anomalies_are_detected(run):
    return run.fit(Task(), detect_anomaly=True)


@scenario
def deterministic_training(run):
    try:
        return run.fit(Task(), deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@scenario
def batch_normalisation(run):
    class Normed(Task):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, batch):
            return self.net(self.norm(batch.x), batch.edge_index)

    module = Normed()
    return {**run.fit(module), "running": torch.cat([module.norm.running_mean, module.norm.running_var])}


@scenario
def layer_normalisation(run):
    class Normed(Task):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4).double()

        def forward(self, batch):
            return self.net(self.norm(batch.x), batch.edge_index)

    return run.fit(Normed())


def embedded(run, make, sparse):
    """Train with one vector per node, of which a step needs a few."""

    class Embedded(With):
        def __init__(self):
            super().__init__(make)
            self.vectors = nn.Embedding(60, CLASSES, sparse=sparse, dtype=torch.float64)

        def forward(self, batch):
            nodes = batch.n_id if "n_id" in batch else torch.arange(60)
            return super().forward(batch) + self.vectors(nodes)

    return run.fit(Embedded())


@scenario
def vectors_of_nodes(run):
    return embedded(run, lambda module: torch.optim.Adagrad(module.parameters(), 0.1), sparse=False)


@scenario
def vectors_of_nodes_with_sparse_gradients(run):
    return embedded(run, lambda module: torch.optim.SGD(module.parameters(), 0.1), sparse=True)
