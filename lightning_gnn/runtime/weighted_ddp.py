"""What strategies share whose ranks have unequal parts: gradients are sums weighted by these, not plain means."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_gnn.runtime.devices import match_device
from lightning_gnn.runtime.ranks import WatchedRanks


class WeightedDDPStrategy(WatchedRanks, DDPStrategy):
    """Lightning's DDP without its wrapper: the strategies on top of it weight and reduce the gradients themselves.

    A rank that is alone needs no process group.
    """

    @property
    def _alone(self) -> bool:
        return self.world_size == 1

    @property
    def _module(self) -> pl.LightningModule:
        """The module of the run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Let all ranks go through the same order, of which each has its part."""
        return {"num_replicas": 1, "rank": 0}

    @override
    def setup_environment(self) -> None:
        """Make the device the current one, that of mixed precision too, and find the other ranks."""
        match_device(self.precision_plugin, self.root_device)
        super().setup_environment()

    def _join(self, silence: float) -> None:
        """Connect the ranks; one without a sign of life for so many seconds counts as lost."""
        assert self._timeout is not None
        self._process_group_backend = self._get_process_group_backend()
        mixed = any(device.type == "cpu" for device in self.parallel_devices or [])
        options = {"device_id": self.root_device} if self.root_device.type == "cuda" and not mixed else {}
        self.join_ranks(self._process_group_backend, silence, self._timeout, **options)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Move the model to the device, make it the same on all ranks, and set up the optimizers."""
        if self._alone:
            Strategy.setup(self, trainer)  # DDP's would ask for a process group
        else:
            super().setup(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model  # DDP's wrapper would average the gradients of unequal shares evenly

    def _trained(self) -> list[Tensor]:
        """Return the parameters that have a size: the module's, then those that only optimizers know."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        held = (parameter for group in groups for parameter in group["params"])
        found = dict.fromkeys([*self._module.parameters(), *held])
        return [parameter for parameter in found if not is_lazy(parameter)]
