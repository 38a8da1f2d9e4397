"""The ``torch.library`` namespace of the package: one operator per hot path, one implementation per device."""

import torch

from lightning_gnn.ascend_ops import build
from lightning_gnn.runtime.store import kept_folder

library = torch.library.Library("lightning_gnn", "DEF")
build.use_store(kept_folder)  # that package knows nothing of this one
