"""Messages for users: argument checks and plain-text tables."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

OF_NEWER_TORCH = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""Start of the warning that torch 2.13 issues whenever Lightning 2.6 combines loaders."""


def whole_number(value: object, name: str, least: int | None = None) -> int:
    """Return an integer as ``int``; raise a ValueError for another value, or one less than ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, but is {value!r}")
    if least is not None and value < least:
        rule = "must not be negative" if least == 0 else f"must be at least {least}"
        raise ValueError(f"{name} {rule}, but is {value}")
    return int(value)


def true_or_false(value: object, name: str) -> bool:
    """Return a bool; raise a ValueError for anything else, since ``"no"`` and ``"false"`` would be truthy."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, but is {value!r}")
    return value


def keywords_of(cls: type) -> set[str]:
    """Return the parameter names of the ``__init__`` of a class and its bases."""
    inits = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    parameters = [parameter for init in inits for parameter in list(inspect.signature(init).parameters.values())[1:]]
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named.union(*(_unpack_keywords(init) for init in inits))


def _unpack_keywords(init: Any) -> set[str]:
    """Return the keywords of the TypedDict in ``**options: Unpack[TypedDict]``, or an empty set."""
    for parameter in inspect.signature(init).parameters.values():
        match = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if parameter.kind == parameter.VAR_KEYWORD and match is not None:
            return {*init.__globals__[match[1]].__annotations__}
    return set()


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean …?"`` with the most similar name, or an empty string."""
    return "".join(f"; did you mean {other}?" for other in difflib.get_close_matches(name, names, n=1))


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that one, and so on, as tracebacks show them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows of cells as lines with right-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def memory_bytes(value: object, name: str) -> int:
    """Parse a number of bytes, an integer or a string with a unit: ``"80GB"``, ``"512 MiB"``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{name} must be a number of bytes, such as 4000000000, '4GB' or '512MiB', but is {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def shown(nbytes: float) -> str:
    """Format a number of bytes: ``"39.0 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
