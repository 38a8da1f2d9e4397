"""Walks over the parts of a module in every step, without hashing them: torchmetrics hashes all states of a metric."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as ``module.named_modules()``."""
    seen, stack = set[int](), [("", module)]
    while stack:
        prefix, part = stack.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield prefix, part
            children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in part._modules.items()]
            stack += [(name, child) for name, child in reversed(children) if child is not None]


def map_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the same as ``dict(module.named_buffers())``."""
    names: dict[Tensor, str] = {}
    for prefix, part in named_parts(module):
        for name, buffer in part._buffers.items():
            if buffer is not None:
                names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
    return {name: buffer for buffer, name in names.items()}
