"""What is made once of weights that come again unchanged: a graph's constant weights, but not attention.

Weights are known by their storage, which is held weakly, and by its version: every change in place counts it up, except
one through ``.data``, which autograd does not see either. What is made of them is kept as long as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.multiprocessing import reductions

Made = TypeVar("Made")

StorageWeakRef: Any = reductions.StorageWeakRef
_known: dict[int, tuple[Any, int, dict[Hashable, Any]]] = {}
"""By address of a storage: a weak reference to it, its version, and what is made of it."""
_lock = threading.RLock()


def come_again(weight: Tensor | None) -> bool:
    """Say whether there are no weights, or whether these were seen before, are unchanged and want no gradient.

    Args:
        weight: One number per edge, and head; None for none.
    """
    if weight is None:
        return True
    if weight.requires_grad or weight.is_inference():
        return False
    with _lock:
        made, view = _made_of(weight), _view(weight)
        seen = view in made
        made[view] = True
        return seen


def made_once(weight: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what ``make`` makes of weights, made on the first call for this key and kept as long as the weights.

    Args:
        key: What else it is made of.
        make: Makes it; must not hold the weights.
    """
    if weight.is_inference():
        return make()
    with _lock:
        made, full = _made_of(weight), (key, _view(weight))
        if full not in made:
            made[full] = make()
        known: Made = made[full]
        return known


def _view(weight: Tensor) -> Hashable:
    return weight.storage_offset(), tuple(weight.shape), weight.stride(), weight.dtype


def _made_of(weight: Tensor) -> dict[Hashable, Any]:
    storage = weight.untyped_storage()
    owner, version, made = _known.get(storage._cdata, (None, 0, {}))
    # The address of a storage that is gone may be another's; what was made of an older version serves nobody.
    if owner is None or owner.expired() or version != weight._version:
        for address in [address for address, (known, _, _) in _known.items() if known.expired()]:
            del _known[address]
        made = {}
        _known[storage._cdata] = StorageWeakRef(storage), weight._version, made
    return made
