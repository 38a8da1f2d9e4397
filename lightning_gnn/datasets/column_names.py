"""What the columns of tables of edges and nodes are called: one normalized name for each that is known."""

import re
from collections.abc import Sequence

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}  # what a column split may say
MASKS = tuple(f"{split}_mask" for split in SPLITS)
OF_NODES = ("id", "label", "split", "time", *MASKS)  # columns of nodes that are known by their names, in any case
_ENDS = (
    ("source", "target"), ("src", "dst"), ("from", "to"), ("head", "tail"), ("subject", "object"), ("start", "end"),
    ("h", "t"),
)  # fmt: skip
_RELATIONS = {"relation", "predicate", "rel", "relationtype", "edgetype", "r"}
_ID = re.compile(r"id$|key$|^(?:node|name|entity|uri|index)$")


def edge_columns(columns: Sequence[str]) -> list[str] | None:
    """Return the columns that are source, target and, if there is one, relation; None: they are not named."""
    for known in (lambda name: name.strip().lower(), _short):
        names = {known(name): name for name in reversed(columns)}
        for ends in _ENDS:
            if {*ends} <= {*names}:
                relations = sorted(_RELATIONS & {*names} - ({"r"} if ends != ("h", "t") else set()))
                return [names[word] for word in (*ends, *relations[:1])]
    return None


def is_end(name: str) -> bool:
    """Say whether a name alone is that of an end of edges."""
    return any(name.lower() in ends for ends in _ENDS[:2])


def is_id(name: str) -> bool:
    """Say whether a column may hold ids by its name, such as ``node_id``, ``movieId`` and ``key``."""
    return _ID.search(name.lower()) is not None


def are_known(cells: Sequence[str], edges: bool) -> bool:
    """Say whether the cells of a row name known columns of edges or of nodes."""
    return edge_columns(cells) is not None if edges else any(cell.strip().lower() in OF_NODES for cell in cells)


def _short(name: str) -> str:
    """Return a name without what is written around it, such as ``:START_ID``, ``FromNodeId`` and ``source id``."""
    return re.sub(r"(?:node)?(?:id)?$", "", re.sub(r"[\W_]+", "", name.lower()))
