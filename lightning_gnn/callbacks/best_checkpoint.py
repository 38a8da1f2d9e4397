"""A checkpoint callback for runs that are resumed in another directory."""

from pathlib import Path
from typing import Any

from lightning_gnn.runtime.checkpoint_io import use_safe_files
from lightning_gnn.runtime.lightning import ModelCheckpoint, pl


class BestCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that retains its best score when a run is resumed in another directory.

    Lightning resets the score, so a resumed run could end with a worse checkpoint than an uninterrupted one. Takes the
    same arguments. Checkpoints are written by :class:`~lightning_gnn.runtime.checkpoint_io.SafeCheckpointIO`.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Enable atomic checkpoints."""
        use_safe_files(trainer)
        super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score if the best checkpoint's file still exists."""
        if Path(state_dict["best_model_path"]).is_file():
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
