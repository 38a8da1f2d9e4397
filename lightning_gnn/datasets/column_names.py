"""Recognizes the column names of edge and node tables."""

import re
from collections.abc import Sequence

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}  # values of the column "split"
MASKS = tuple(f"{split}_mask" for split in SPLITS)
NODE_COLUMNS = ("id", "label", "split", "time", *MASKS)  # recognized node columns, case-insensitive
_ENDPOINT_NAMES = (
    ("source", "target"), ("src", "dst"), ("from", "to"), ("head", "tail"), ("subject", "object"), ("start", "end"),
    ("h", "t"),
)  # fmt: skip
_RELATION_NAMES = {"relation", "predicate", "rel", "relationtype", "edgetype", "r"}
_ID_NAME = re.compile(r"id$|key$|^(?:node|name|entity|uri|index)$")


def find_columns(columns: Sequence[str]) -> list[str] | None:
    """Return the source, target and optional relation columns, or None if the names do not identify them."""
    for known in (lambda name: name.strip().lower(), _strip_affixes):
        names = {known(name): name for name in reversed(columns)}
        for ends in _ENDPOINT_NAMES:
            if {*ends} <= {*names}:
                relations = sorted(_RELATION_NAMES & {*names} - ({"r"} if ends != ("h", "t") else set()))
                return [names[word] for word in (*ends, *relations[:1])]
    return None


def is_endpoint_name(name: str) -> bool:
    """Return whether a name on its own denotes an edge endpoint."""
    return any(name.lower() in ends for ends in _ENDPOINT_NAMES[:2])


def is_id_name(name: str) -> bool:
    """Return whether a column name suggests ids, such as ``node_id``, ``movieId`` and ``key``."""
    return _ID_NAME.search(name.lower()) is not None


def names_columns(cells: Sequence[str], edges: bool) -> bool:
    """Return whether the cells of a row name recognized edge or node columns."""
    return find_columns(cells) is not None if edges else any(cell.strip().lower() in NODE_COLUMNS for cell in cells)


def _strip_affixes(name: str) -> str:
    """Return a name without punctuation, ``node`` and ``id``, such as ``start`` for ``:START_ID``."""
    return re.sub(r"(?:node)?(?:id)?$", "", re.sub(r"[\W_]+", "", name.lower()))
