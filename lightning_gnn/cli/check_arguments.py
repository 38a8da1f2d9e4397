"""Arguments of configured objects, held against the signatures of their classes before anything is built."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.runtime.messages import closest

_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def check_arguments(
    node: DictConfig, name: str, typed: Collection[str] = (), experiment: str | None = None, filled: Sequence[str] = ()
) -> None:
    """Refuse arguments that a class does not take, and values that are of no type it takes.

    Only plain values and lists of them are judged, and only by annotations that are understood. What is null without
    having been typed asks for nothing, and :func:`without_null` leaves it out.
    """
    try:
        target = get_object(node._target_)
        parameters = inspect.signature(target).parameters
    except Exception:
        return  # building it says what is wrong
    given = OmegaConf.to_container(node, resolve=True)
    assert isinstance(given, dict)
    names = [str(key) for key in given if not str(key).startswith("_")]
    more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not more or (isinstance(target, type) and issubclass(target, FullGraphDataModule)):  # it refuses all of them
        asked = [key for key in names if given[key] is not None or more or f"{name}.{key}" in typed]
        unknown = [key for key in asked if key not in parameters]
        if unknown:
            listed = ", ".join(f"{key}={shown(given[key])}{closest(key, parameters, aside=True)}" for key in unknown)
            others = [key for key in unknown if f"{name}.{key}" not in typed]
            by = f", which experiment={experiment} sets" if experiment and others == unknown else ""
            advice = f": give {' '.join(f'~{name}.{key}' for key in others)}" if others else ""
            raise ValueError(f"{name}: {target.__name__} does not take {listed}{by}; leave it out{advice}")
    hints = _hints(target)
    for key in names:
        value = given[key]
        if isinstance(value, dict) and "_target_" in value:
            check_arguments(node[key], f"{name}.{key}", typed, experiment)
        elif key in hints and not fits(value, hints[key]) and not (key in filled and value is None):
            raise ValueError(f"{name}.{key}={shown(value)} must be {_described(hints[key])}")


def without_null(target: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments but those that are None and that a class does not take; Hydra's ``~key`` cannot remove them."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return dict(given)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {key: value for key, value in given.items() if value is not None or key in parameters}


def fits(value: Any, hint: Any) -> bool:
    """Say whether a plain value, or a list of them, can be of a type; True where that cannot be judged."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if hint in _PLAIN:
        if isinstance(value, bool) or hint is bool:
            return hint is bool and isinstance(value, bool)
        return isinstance(value, (int, float) if hint is float else hint)
    if kind is Callable or kind is Any or not isinstance(kind, type):
        return kind is not Callable
    if isinstance(value, list) and kind is not object:
        parts = get_args(hint)
        same = len(parts) == 1 or parts[1:] == (...,)
        return _holds(kind) and (not same or all(fits(item, parts[0]) for item in value))
    if isinstance(value, dict) or kind is object:
        return True
    return not (_holds(kind) or issubclass(dict, kind))


def _holds(kind: type) -> bool:
    return issubclass(kind, (list, tuple, set)) or (issubclass(list, kind))


def _hints(target: Any) -> dict[str, Any]:
    """Return the annotated parameters, also those that pass through ``**kwargs`` to a class above."""
    if not isinstance(target, type):
        return _annotated(target)
    found: dict[str, Any] = {}
    for kind in target.__mro__[:-1]:
        if "__init__" in vars(kind):
            function = vars(kind)["__init__"]
            found = _annotated(function) | found
            kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                break
    return found


def _annotated(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except Exception:
        return {}


def _described(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(_described(part) for part in get_args(hint)))
    if kind is Literal:
        return " or ".join(repr(item) for item in get_args(hint))
    if kind is Callable:
        return "an object, as {_target_: …}"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a mapping"
    if isinstance(kind, type) and _holds(kind):
        parts = [part for part in get_args(hint) if part is not ...]
        return "a list" + (f" of {_PLAIN[parts[0]].partition(' ')[2]}s" if parts and parts[0] in (int, float) else "")
    return _PLAIN.get(hint, f"a {getattr(kind, '__name__', hint)}")


def shown(value: Any) -> str:
    """Return a value as one would type it, with quotes around text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value).replace(" ", "") if isinstance(value, list) else repr(value)
