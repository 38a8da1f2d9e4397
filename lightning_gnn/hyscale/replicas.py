"""Copies of a LightningModule, one per trainer, kept equal to the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_gnn.hyscale.outputs import prepare_replica

_OWN = {
    "_parameters",
    "_buffers",
    "_modules",
    "_trainer",
    "_fabric",
    "_metric_attributes",
    "_current_fx_name",
    "_param_requires_grad_state",
    "_device",
    "_dtype",
    "training",
    "log",
}
"""Attributes that each copy has for itself."""


class Replicas:
    """The trainers' copies of a module.

    Parameters share the memory of the original's where they lie on the same device; other attributes that hold no
    module are the original's own objects, so a side effect of ``training_step`` happens once per trainer.

    Args:
        main: The original.
        devices: Where each copy lives.

    Raises:
        TypeError: An attribute cannot be copied; it is named.
        ValueError: Parameters have no shape yet.
    """

    def __init__(self, main: pl.LightningModule, devices: Sequence[torch.device]) -> None:
        self.main = main
        self.devices = list(devices)
        self.modules: list[Any] = [_copied(main, device) for device in devices]
        self._parameters = [list(module.parameters()) for module in self.modules]
        self._buffers = [_Buffers(main, module) for module in self.modules]
        self._submodules = [list(module.modules()) for module in self.modules]
        self._attributes: set[str] = set()

    def __len__(self) -> int:
        return len(self.modules)

    def push(self, active: Sequence[int]) -> None:
        """Bring parameters, buffers, flags and attributes of the original to some copies."""
        parameters, submodules = list(self.main.parameters()), list(self.main.modules())
        for replica in active:
            _push_parameters(parameters, self._parameters[replica])
            self._buffers[replica].push()
            for ours, theirs in zip(submodules, self._submodules[replica], strict=True):
                theirs.training = ours.training
            attributes = self.modules[replica].__dict__
            for name, value in self._plain(self.main):
                attributes[name] = value

    def pull(self, active: Sequence[int], weights: Sequence[float]) -> None:
        """Take over what a step has changed.

        Buffers of floating numbers become the weighted mean of the copies' (as running statistics), others those of the
        first copy; plain attributes likewise.
        """
        for name in self._buffers[active[0]].names:
            entries = [self._buffers[replica] for replica in active]
            if not any(entry.changed(name) for entry in entries):
                continue
            target, values = entries[0].original(name), [entry.own(name) for entry in entries]
            with torch.no_grad():
                if target.is_floating_point():
                    before = target.clone()
                    for value, weight in zip(values, weights, strict=True):
                        target.add_(value.to(target.device) - before, alpha=weight)
                else:
                    target.copy_(values[0])
        for name, value in self._plain(self.modules[active[0]]):
            if self.main.__dict__.get(name, self) is not value:
                self.main.__dict__[name] = value

    def push_parameters(self, active: Sequence[int]) -> None:
        """Bring only the parameters to some copies, after a step of manual optimisation."""
        parameters = list(self.main.parameters())
        for replica in active:
            _push_parameters(parameters, self._parameters[replica])

    def take_gradients(self, active: Sequence[int]) -> list[Tensor | None]:
        """Add up the gradients of some copies, in their order, and take them away there."""
        parameters = list(self.main.parameters())
        total: list[Tensor | None] = [None] * len(parameters)
        for replica in active:
            theirs = [parameter.grad for parameter in self._parameters[replica]]
            for parameter in self._parameters[replica]:
                parameter.grad = None
            _add_into(total, _moved(theirs, parameters))
        return total

    def counterpart(self, replica: int) -> dict[int, nn.Parameter]:
        """Return the parameters of a copy by the ``id`` of the original's."""
        return {
            id(ours): theirs for ours, theirs in zip(self.main.parameters(), self._parameters[replica], strict=True)
        }

    def _plain(self, module: nn.Module) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in module.__dict__.items()
            if name not in _OWN and not name.startswith("_") and name not in _MANUAL and not _holds_modules(value)
        ]


_MANUAL = {
    "optimizers",
    "lr_schedulers",
    "manual_backward",
    "toggle_optimizer",
    "untoggle_optimizer",
    "toggled_optimizer",
    "clip_gradients",
    "log_dict",
}


class _Buffers:
    """Knows which buffers of a copy, or of the original, were written since they were last equal."""

    def __init__(self, main: nn.Module, replica: nn.Module) -> None:
        self._ours, self._theirs = _buffer_places(main), _buffer_places(replica)
        self.names = list(self._ours)
        self._seen: dict[str, tuple[Any, Any]] = {}

    def original(self, name: str) -> Tensor:
        module, key = self._ours[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def own(self, name: str) -> Tensor:
        module, key = self._theirs[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def push(self) -> None:
        for name in self.names:
            ours, theirs = self.original(name), self.own(name)
            if not _is_small(name, ours) and self._seen.get(name) == (_version(ours), _version(theirs)):
                continue
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                module, key = self._theirs[name]
                module._buffers[key] = theirs = ours.detach().clone().to(theirs.device)
            else:
                with torch.no_grad():
                    theirs.copy_(ours)
            self._seen[name] = (_version(ours), _version(theirs))

    def changed(self, name: str) -> bool:
        own = self.own(name)
        return _is_small(name, own) or self._seen[name][1] != _version(own)


def _buffer_places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    return {
        f"{prefix}.{key}": (child, key)
        for prefix, child in module.named_modules()
        if not isinstance(child, Metric)
        for key, buffer in child._buffers.items()
        if buffer is not None
    }


def _is_small(name: str, buffer: Tensor) -> bool:
    """Whether to copy it each time. Torch does not count what batch normalisation writes into its statistics."""
    return buffer.numel() <= 4096 or name.rpartition(".")[2] in ("running_mean", "running_var")


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), -1 if tensor.is_inference() else tensor._version


def _push_parameters(ours: Sequence[nn.Parameter], theirs: Sequence[nn.Parameter]) -> None:
    apart: list[tuple[nn.Parameter, nn.Parameter]] = []
    for parameter, copied in zip(ours, theirs, strict=True):
        copied.requires_grad = parameter.requires_grad
        if parameter.device != copied.device:
            apart.append((parameter, copied))
        elif not copied.is_set_to(parameter):
            copied.data = parameter.data
            if not copied.is_set_to(parameter):  # tensors of a backend written in Python do not share
                apart.append((parameter, copied))
    if apart:
        moved = _moved([parameter.detach() for parameter, _ in apart], [copied for _, copied in apart])
        with torch.no_grad():
            for value, (_, copied) in zip(moved, apart, strict=True):
                copied.copy_(value)  # type: ignore[arg-type]


def _moved(tensors: Sequence[Tensor | None], targets: Sequence[Tensor]) -> list[Tensor | None]:
    """Bring tensors to the devices of others, those of one device and dtype together in one copy."""
    out = list(tensors)
    groups: dict[Any, list[int]] = {}
    for place, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        if tensor is None or tensor.device == target.device:
            continue
        if tensor.layout != torch.strided:
            out[place] = tensor.to(target.device)
        else:
            groups.setdefault((tensor.device, tensor.dtype, target.device), []).append(place)
    for (_, _, device), places in groups.items():
        parts = [tensor for place in places if (tensor := tensors[place]) is not None]
        flat = torch.cat([part.reshape(-1) for part in parts]).to(device)
        for place, part, values in zip(places, parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
            out[place] = values.view(part.shape)
    return out


def _add_into(total: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    for place, value in enumerate(more):
        if value is None:
            continue
        before = total[place]
        # Not in place: torch lets the gradients of two parameters share their memory.
        total[place] = value if before is None else before + value


def _holds_modules(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (nn.Module, nn.Parameter)):
        return True
    if depth > 3 or isinstance(value, (str, bytes, Tensor)):
        return False
    if isinstance(value, dict):
        return any(_holds_modules(part, depth + 1) for part in value.values())
    return isinstance(value, (list, tuple, set)) and any(_holds_modules(part, depth + 1) for part in value)


def _shared(main: pl.LightningModule) -> dict[int, Any]:
    """Return, in the form of deepcopy's memo, what copies have in common with the original."""
    memo: dict[int, Any] = {}
    trainer = main._trainer
    for value in (trainer, getattr(trainer, "datamodule", None), getattr(trainer, "strategy", None)):
        if value is not None:
            memo[id(value)] = value
    own_modules = {id(module) for module in main.modules()}
    for module in main.modules():
        for name, value in module.__dict__.items():
            if "_hooks" in name and isinstance(value, dict):
                for hook in value.values():
                    if id(getattr(hook, "__self__", None)) not in own_modules:
                        memo[id(hook)] = hook
            elif name not in _OWN and not isinstance(module, Metric) and not _holds_modules(value):
                memo[id(value)] = value
    return memo


def _copied(main: pl.LightningModule, device: torch.device) -> pl.LightningModule:
    for name, parameter in (*main.named_parameters(), *main.named_buffers()):
        if is_lazy(parameter):
            raise ValueError(
                f"'{name}' has no shape yet (a lazy layer): hyscale cannot copy it; pass one batch through the model "
                f"before the fit, or give the layer its number of input channels"
            )
    try:
        replica = copy.deepcopy(main, _shared(main))
    except Exception as error:
        where = _culprit(main, lambda value: copy.deepcopy(value, _shared(main)))
        raise TypeError(
            f"hyscale needs a copy of the LightningModule for each trainer, but {where} cannot be copied "
            f"({type(error).__name__}: {error}); keep it outside of the modules that training needs, or give it a "
            f"__deepcopy__ that returns the object itself"
        ) from error
    prepare_replica(replica)
    if main._trainer is not None:
        replica.trainer = main._trainer
    replica._metric_attributes = None
    replica.to(device)
    for ours, theirs in zip(main.parameters(), replica.parameters(), strict=True):
        if ours.device == theirs.device:
            theirs.data = ours.data
    return replica


def _culprit(main: nn.Module, attempt: Callable[[Any], Any]) -> str:
    """Find the attribute that does not let itself be copied, as deep inside as possible."""
    for prefix, module in reversed(list(main.named_modules())):
        for name, value in list(module.__dict__.items()):
            if name in ("_modules", "_trainer"):
                continue
            places = value.items() if isinstance(value, dict) and name.startswith("_") else [(name, value)]
            for key, part in places:
                try:
                    attempt(part)
                except Exception:
                    return f"the attribute '{f'{prefix}.' if prefix else ''}{key}' ({type(part).__name__})"
    return f"a part of {type(main).__name__}"
