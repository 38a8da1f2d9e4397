"""Lazy ``e_id`` of a mini-batch: saves a random read per sampled edge, which few models need.

A mini-batch stores positions in CSC order instead, in a subclass of PyG's store. The subclass supports access to single
attributes, moving, pinning and copying; any other operation looks up ``e_id`` and turns it back into PyG's class.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, SupportsIndex

from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage
from torch_geometric.data.view import KeysView

from lightning_gnn.runtime.any_batch import map_tensors

_MOVES = {f"BaseData.{name}.<locals>.<lambda>" for name in ("to", "cpu", "cuda", "pin_memory", "contiguous", "detach")}
"""Functions that PyG's ``Data`` applies to all tensors and that can be postponed."""
_thread_state = threading.local()


class LazyEdgeIds:
    """Edge ids that are looked up on demand from positions in CSC order, int64 ``[m]``."""

    def __init__(
        self, positions: Tensor, look_up: Callable[[Tensor], Tensor], moves: tuple[Callable[[Tensor], Tensor], ...] = ()
    ) -> None:
        # look_up maps positions to positions in the user's edge_index, int64 [m]; moves are applied to these
        self.positions, self._look_up, self._moves = positions, look_up, moves
        self._ids: Tensor | None = None

    def then(self, move: Callable[[Tensor], Tensor]) -> LazyEdgeIds:
        """Return the same edges with another function to apply to the ids."""
        return LazyEdgeIds(self.positions, self._look_up, (*self._moves, move))

    def ids(self) -> Tensor:
        """Return the positions in the user's ``edge_index``."""
        if self._ids is None:
            ids = self._look_up(self.positions)
            for move in self._moves:
                ids = move(ids)
            self._ids = ids
        return self._ids


@contextmanager
def deferred(wanted: bool = True) -> Iterator[None]:
    """Make this thread's samplers return :class:`LazyEdgeIds` instead of ids that need a lookup."""
    _thread_state.is_deferred, before = wanted, getattr(_thread_state, "is_deferred", False)
    try:
        yield
    finally:
        _thread_state.is_deferred = before


def has_lazy_e_id() -> bool:
    """Return whether this thread's samplers return :class:`LazyEdgeIds`."""
    return getattr(_thread_state, "is_deferred", False)


def attach_lazy_e_id(store: BaseStorage, edges: LazyEdgeIds) -> None:
    """Add a lazy ``e_id`` to a PyG store."""
    deferred_class = _DEFERRED_CLASSES.get(type(store))
    if deferred_class is None:  # a user-defined store
        store.e_id = edges.ids()
        return
    store._mapping["e_id"] = None  # placeholder that fixes the order of attributes
    _change_class(store, deferred_class, edges)


def apply_now(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function that does not move tensors to all tensors of a batch; lazy ids by their positions."""
    return map_tensors(batch, function, lambda graph: _apply_to_graph(graph, function))


def _apply_to_graph(batch: BaseData, function: Callable[[Tensor], Tensor]) -> BaseData:
    for store in batch.stores:
        if type(store) in _DEFERRED_CLASSES.values():
            edges: LazyEdgeIds = vars(store)["_edges"]
            edges.positions = function(edges.positions)
            store._apply_to_others(function)
        else:
            store.apply(function)
    return batch


class _DeferredStore:
    """Methods of a store whose ``e_id`` has not been looked up."""

    _plain: ClassVar[type]

    @property
    def _mapping(self) -> Any:
        return self._resolve()._mapping

    @_mapping.setter
    def _mapping(self, mapping: dict[str, Any]) -> None:
        vars(self)["_mapping"] = mapping

    def _resolve(self) -> BaseStorage:
        """Look up ``e_id``, and turn the store into PyG's class."""
        ids = vars(self)["_edges"].ids()
        _change_class(self, self._plain)
        self["e_id"] = ids
        return self

    @contextmanager
    def _as_plain(self, back: bool = True) -> Iterator[None]:
        """Use PyG's class in the block (without ``back``: and after it), without ``e_id``; errors restore the store."""
        edges, deferred_class = vars(self)["_edges"], type(self)
        _change_class(self, self._plain)
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if back or not succeeded:
                _change_class(self, deferred_class, edges)

    def __getitem__(self, key: str) -> Any:
        return self._resolve()[key] if key == "e_id" else vars(self)["_mapping"][key]

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
        is_pyg = getattr(function, "__module__", "") == "torch_geometric.data.data"
        if args or not is_pyg or function.__qualname__ not in _MOVES:
            return self._resolve().apply(function, *args)
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
        return copy.deepcopy(self._resolve(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._resolve().__reduce_ex__(protocol)


def _change_class(store: object, kind: type, edges: LazyEdgeIds | None = None) -> None:
    """Change the class of a store; ``setattr`` of PyG would store the class as an attribute."""
    object.__setattr__(store, "__class__", kind)
    vars(store).pop("_edges", None)
    if edges is not None:
        vars(store)["_edges"] = edges


def _create_deferred_class(plain: type) -> type:
    """Create a subclass with the methods of :class:`_DeferredStore`; ``__class__`` assignment needs a single base."""
    own = {name: value for name, value in vars(_DeferredStore).items() if name not in ("__dict__", "__weakref__")}
    return type(f"Deferred{plain.__name__}", (plain,), {**own, "_plain": plain})


_DEFERRED_CLASSES = {plain: _create_deferred_class(plain) for plain in (GlobalStorage, EdgeStorage)}
