"""Going on with another number of ranks: where an epoch stands counts in seeds, and an uneven last step is weighed."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_gnn.loading.seed_order import ElasticOrder


class Elastic(pl.Callback):
    """Keeps track of an epoch's steps on any number of ranks, and gives the ranks of an uneven one their weights."""

    def __init__(self) -> None:
        self.order: ElasticOrder | None = None
        self._before: dict[str, Any] | None = None

    def begin(self, trainer: pl.Trainer | None, num_seeds: int, batch_size: int, **options: Any) -> ElasticOrder:
        """Return the order of the epoch that begins, or goes on."""
        history: list[tuple[int, int]] = []
        before = None
        if trainer is not None:
            before, self._before = self._before, None  # of the first epoch that a resumed run goes through
        if before is not None and before["steps"] and trainer is not None and before["epoch"] == trainer.current_epoch:
            if before["num_seeds"] != num_seeds:
                had = f"the run that is resumed has {before['num_seeds']} training seeds"
                raise ValueError(f"{had}, but there are {num_seeds}: an epoch that has begun goes on with the same")
            history = [(steps, seeds) for steps, seeds in before["history"]]
            history.append((before["steps"] - sum(steps for steps, _ in history), before["seeds_per_step"]))
        self.order = ElasticOrder(num_seeds, batch_size, history, **options)
        return self.order

    def check(self, first: int) -> None:
        """Raise a RuntimeError unless the epoch goes on where this has counted."""
        if self.order is not None and first != self.order.steps_before:
            known = f"the epoch goes on with step {first}, but {self.order.steps_before} steps of it are known"
            raise RuntimeError(f"{known}: the checkpoint is not from a run with elastic=True")

    def state(self, trainer: pl.Trainer | None) -> dict[str, Any]:
        """Return what a resumed run of any number of ranks needs."""
        order = self.order
        if order is None or trainer is None:
            return {}
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return {
            "steps": progress.processed,  # of this epoch; "completed" lacks one whose end this is
            "epoch": order.epoch, "history": order.history, "num_seeds": len(order.dataset),  # type: ignore[arg-type]
            "seeds_per_step": order.batch_size * order.num_replicas,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on where a run of any number of ranks has stopped."""
        self._before = state or None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Multiply the gradients of this rank by its weight: the strategy takes the mean over the ranks."""
        if self.order is not None and (weight := self.order.weight(trainer.fit_loop.epoch_loop.batch_idx)) != 1:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
