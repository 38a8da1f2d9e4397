"""The ``torch.library`` namespace of the package: one operator per hot path, one implementation per device."""

import torch

library = torch.library.Library("lightning_gnn", "DEF")
