"""``e_id`` of a mini-batch, looked up when it is read: a random read for each sampled edge that few models need.

A mini-batch holds positions in CSC order instead, in a store that answers for single attributes, and becomes PyG's own
store, with ``e_id`` in it, as soon as anything else is done with it but moving, pinning or copying.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, SupportsIndex

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage
from torch_geometric.data.view import KeysView

_MOVES = {f"BaseData.{name}.<locals>.<lambda>" for name in ("to", "cpu", "cuda", "pin_memory", "contiguous", "detach")}
"""What PyG's ``Data`` applies to all tensors and may as well be applied later."""
_asked = threading.local()


class LazyEdgeIds:
    """Edges by their positions in CSC order, int64 ``[m]``."""

    def __init__(
        self, positions: Tensor, look_up: Callable[[Tensor], Tensor], moves: tuple[Callable[[Tensor], Tensor], ...] = ()
    ) -> None:
        # look_up: from positions to places in the user's edge_index, int64 [m]; moves: what is done with these
        self.positions, self._look_up, self._moves = positions, look_up, moves
        self._ids: Tensor | None = None

    def then(self, move: Callable[[Tensor], Tensor]) -> LazyEdgeIds:
        """Return the same edges, whose places are moved once more."""
        return LazyEdgeIds(self.positions, self._look_up, (*self._moves, move))

    def ids(self) -> Tensor:
        """Return the places in the user's ``edge_index``."""
        if self._ids is None:
            ids = self._look_up(self.positions)
            for move in self._moves:
                ids = move(ids)
            self._ids = ids
        return self._ids


@contextmanager
def deferred(wanted: bool = True) -> Iterator[None]:
    """Let this thread's samplers return :class:`LazyEdgeIds` in the place of ids that would have to be looked up."""
    _asked.yes, before = wanted, getattr(_asked, "yes", False)
    try:
        yield
    finally:
        _asked.yes = before


def has_lazy_e_id() -> bool:
    """Whether this thread wants edges by position."""
    return getattr(_asked, "yes", False)


def attach_lazy_e_id(store: BaseStorage, edges: LazyEdgeIds) -> None:
    """Give a store of PyG's an ``e_id`` that is looked up when it is read."""
    kind = _KINDS.get(type(store))
    if kind is None:  # of the user's own
        store.e_id = edges.ids()
        return
    store._mapping["e_id"] = None  # its place among the others
    _become(store, kind, edges)


def apply_now(batch: Data | HeteroData, function: Callable[[Tensor], Tensor]) -> Data | HeteroData:
    """Apply a function to all tensors that a batch holds, positions in the place of ids; it moves none of them."""
    for store in batch.stores:
        if type(store) in _KINDS.values():
            edges: LazyEdgeIds = vars(store)["_edges"]
            edges.positions = function(edges.positions)
            store._apply_to_others(function)
        else:
            store.apply(function)
    return batch


class _Deferred:
    """What a store does as long as ``e_id`` is not there."""

    _plain: ClassVar[type]

    @property
    def _mapping(self) -> Any:
        return self._resolved()._mapping

    @_mapping.setter
    def _mapping(self, mapping: dict[str, Any]) -> None:
        vars(self)["_mapping"] = mapping

    def _resolved(self) -> BaseStorage:
        """Become PyG's store."""
        ids = vars(self)["_edges"].ids()
        _become(self, self._plain)
        self["e_id"] = ids
        return self

    @contextmanager
    def _as_plain(self, back: bool = True) -> Iterator[None]:
        """Be PyG's store for a while, or from now on, without ``e_id``; what fails in between leaves it as it was."""
        edges, kind = vars(self)["_edges"], type(self)
        _become(self, self._plain)
        done = False
        try:
            yield
            done = True
        finally:
            if back or not done:
                _become(self, kind, edges)

    def __getitem__(self, key: str) -> Any:
        return self._resolved()[key] if key == "e_id" else vars(self)["_mapping"][key]

    def get(self, key: str, value: object = None) -> object:
        return self[key] if key in vars(self)["_mapping"] else value

    def __setitem__(self, key: str, value: object) -> None:
        with self._as_plain(key != "e_id"):
            self[key] = value

    def __delitem__(self, key: str) -> None:
        with self._as_plain(key != "e_id"):
            del self[key]

    def __len__(self) -> int:
        return len(vars(self)["_mapping"])

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self)["_mapping"])

    def keys(self, *args: str) -> KeysView:
        return KeysView(vars(self)["_mapping"], *args)

    def items(self, *args: str) -> Iterator[tuple[str, Any]]:
        return ((key, self[key]) for key in list(self.keys(*args)))

    def apply(self, function: Callable[[Any], Any], *args: str) -> BaseStorage:
        named = getattr(function, "__module__", "") == "torch_geometric.data.data"
        if args or not named or function.__qualname__ not in _MOVES:
            return self._resolved().apply(function, *args)
        edges = vars(self)["_edges"].then(function)
        self._apply_to_others(function)
        vars(self)["_edges"] = edges
        return self

    def _apply_to_others(self, function: Callable[[Any], Any]) -> Any:
        with self._as_plain():
            self.apply(function, *(key for key in self if key != "e_id"))
        return self

    def __copy__(self) -> Any:
        out = type(self).__new__(type(self))
        vars(out).update({key: value for key, value in vars(self).items() if key != "_cached_attr"})
        vars(out)["_mapping"] = copy.copy(vars(self)["_mapping"])
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseStorage:
        return copy.deepcopy(self._resolved(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._resolved().__reduce_ex__(protocol)


def _become(store: object, kind: type, edges: LazyEdgeIds | None = None) -> None:
    """Change the class of a store; PyG's own way to set attributes would keep it among them."""
    object.__setattr__(store, "__class__", kind)
    vars(store).pop("_edges", None)
    if edges is not None:
        vars(store)["_edges"] = edges


def _kind(plain: type) -> type:
    """Return a subclass with all of :class:`_Deferred`; objects can change to one that has a single base, and back."""
    own = {name: value for name, value in vars(_Deferred).items() if name not in ("__dict__", "__weakref__")}
    return type(f"Deferred{plain.__name__}", (plain,), {**own, "_plain": plain})


_KINDS = {plain: _kind(plain) for plain in (GlobalStorage, EdgeStorage)}
