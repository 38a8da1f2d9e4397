"""Resume with another number of ranks: progress is counted in seeds, and an uneven last step is weighted."""

from typing import Any

from torch import Tensor

from lightning_gnn.loading.seed_order import ElasticOrder
from lightning_gnn.runtime.lightning import pl


class Elastic(pl.Callback):
    """Tracks the steps of an epoch on changing numbers of ranks, and weights the ranks of an uneven last step."""

    def __init__(self) -> None:
        self.order: ElasticOrder | None = None
        self._restored: dict[str, Any] | None = None

    def begin(self, trainer: pl.Trainer | None, num_seeds: int, batch_size: int, **options: Any) -> ElasticOrder:
        """Return the seed order of an epoch that starts or resumes."""
        history: list[tuple[int, int]] = []
        state = None
        if trainer is not None:
            state, self._restored = self._restored, None  # applies only to the first epoch after resuming
        if state is not None and state["steps"] and trainer is not None and state["epoch"] == trainer.current_epoch:
            if state["num_seeds"] != num_seeds:
                saved = f"the checkpoint is from within an epoch of {state['num_seeds']} training seeds"
                raise ValueError(f"{saved}, but there are {num_seeds}: resume with the same seeds")
            history = [(steps, seeds) for steps, seeds in state["history"]]
            history.append((state["steps"] - sum(steps for steps, _ in history), state["seeds_per_step"]))
        self.order = ElasticOrder(num_seeds, batch_size, history, **options)
        return self.order

    def check(self, first: int) -> None:
        """Raise a RuntimeError unless the epoch resumes at the step that this state describes."""
        if self.order is not None and first != self.order.steps_before:
            mismatch = f"the epoch resumes at step {first}, but {self.order.steps_before} steps of it are recorded"
            raise RuntimeError(f"{mismatch}: the checkpoint is not from a run with elastic=True")

    def state(self, trainer: pl.Trainer | None) -> dict[str, Any]:
        """Return the state from which a run with any number of ranks can resume."""
        order = self.order
        if order is None or trainer is None:
            return {}
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return {
            "steps": progress.processed,  # of this epoch; "completed" does not count a step that is just ending
            "epoch": order.epoch, "history": order.history, "num_seeds": len(order.dataset),  # type: ignore[arg-type]
            "seeds_per_step": order.batch_size * order.num_replicas,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of an interrupted run."""
        self._restored = state or None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Scale this rank's gradients by its weight, since the strategy averages over ranks."""
        if self.order is not None and (weight := self.order.weight(trainer.fit_loop.epoch_loop.batch_idx)) != 1:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
