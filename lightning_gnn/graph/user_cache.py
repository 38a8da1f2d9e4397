"""Files that can be made again: where they lie, and how to tell that they still fit."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1 << 24


def cache_folder(kind: str, given: str | Path | None = None) -> Path:
    """Return the folder for one kind of file; it may not exist yet.

    Args:
        kind: Name of a subfolder.
        given: What the user chose instead of ``$LIGHTNING_GNN_CACHE``, which stands before ``$XDG_CACHE_HOME`` and
            ``~/.cache`` (there with a subfolder ``lightning-gnn``).
    """
    if given is None:
        given = os.environ.get("LIGHTNING_GNN_CACHE")
    if given is None:
        given = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-gnn"
    return Path(given).expanduser() / kind


def checksum(*parts: Any) -> str:
    """Return 32 hexadecimal digits that change with the content of any part.

    Args:
        *parts: Tensors, which are read block by block, so that a memory-mapped one never comes in whole; None; or
            anything else, by its ``repr``.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if not isinstance(part, Tensor):
            digest.update(f"{part!r};".encode())
            continue
        digest.update(f"{part.dtype} {list(part.shape)};".encode())
        values = part.detach().reshape(-1)
        step = max(1, _BLOCK // values.element_size())
        for start in range(0, values.numel(), step):
            digest.update(values[start : start + step].cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
