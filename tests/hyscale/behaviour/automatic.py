"""Automatic optimization: optimizers, gradients that hooks modify, and different kinds of losses."""

import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import nn

from tests.hyscale.behaviour.task import CLASSES, Task, scenario


@scenario
def plain_training(run):
    return run.fit(Task(), max_epochs=3)


class WithOptimizer(Task):
    """Trains with the optimizer that ``make`` returns."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


@scenario
def lbfgs_with_a_line_search(run):
    make = lambda module: torch.optim.LBFGS(module.parameters(), 9.0, 4, line_search_fn="strong_wolfe")  # noqa: E731
    return run.fit(WithOptimizer(make))


@scenario
def gradients_are_accumulated_by_a_schedule(run):
    return run.fit(Task(), max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})])


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
def parameters_that_are_never_used(run):
    class Unused(WithOptimizer):
        def __init__(self, make):
            super().__init__(make)
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    module = Unused(lambda module: torch.optim.SGD(module.parameters(), 0.1, weight_decay=0.5))
    out = run.fit(module)
    assert module.unused.grad is None
    assert bool((module.unused == 1).all())  # weight decay also skips parameters without a gradient
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


def make_returning(make, **options):
    class Returning(Task):
        def training_step(self, batch, batch_idx):
            return make(self, batch, batch_idx)

    return Returning(**options)


@scenario
def a_step_without_a_loss_is_skipped(run):
    return run.fit(make_returning(lambda module, batch, batch_idx: None if batch_idx == 1 else module.loss(batch)))


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
def batch_normalization(run):
    class Normed(Task):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, batch):
            return self.net(self.norm(batch.x), batch.edge_index)

    module = Normed()
    return {**run.fit(module), "running": torch.cat([module.norm.running_mean, module.norm.running_var])}


def train_embeddings(run, make, sparse):
    """Train with one embedding vector per node; each step needs only a few of them."""

    class Embedded(WithOptimizer):
        def __init__(self):
            super().__init__(make)
            self.vectors = nn.Embedding(60, CLASSES, sparse=sparse, dtype=torch.float64)

        def forward(self, batch):
            nodes = batch.n_id if "n_id" in batch else torch.arange(60)
            return super().forward(batch) + self.vectors(nodes)

    return run.fit(Embedded())


@scenario
def vectors_of_nodes_with_sparse_gradients(run):
    return train_embeddings(run, lambda module: torch.optim.SGD(module.parameters(), 0.1), sparse=True)
