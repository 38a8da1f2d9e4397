"""A best-so-far checkpoint that a resumed run does not forget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, which keeps its best score when a run is resumed in another directory.

    Lightning starts anew there, so that a resumed run could end with a worse checkpoint than an uninterrupted one.
    Takes the same arguments.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best score as long as the file that reached it is still there."""
        if Path(state_dict["best_model_path"]).is_file():
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
