"""A graph with types as a folder of ``.npy`` files, a folder per type, memory-mapped."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.datasets.topology_files import TOPOLOGY, is_kept, is_sorted, load_topology
from lightning_gnn.features.arrays import load_array, save_arrays
from lightning_gnn.features.feature_file import refuse_rows
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.graph.checks import check_nodes
from lightning_gnn.graph.csc import CSCGraph, check_edge_index, check_ids
from lightning_gnn.runtime.files import read_json, read_text, write_whole

NODES, EDGES, BETWEEN, TYPES = "nodes", "edges", "__", "types.json"
_NAME_BYTES = 255  # of the name of a file, on most file systems
_ODD = re.compile(r'^$|^\.|[. ]$|[/\\<>:"|?*\x00-\x1f\ud800-\udfff]')
"""What the name of a folder cannot hold on one of the systems."""
_NO_FILE = re.compile(r"^$|[/\x00\ud800-\udfff]")  # what the name of an attribute cannot hold
_SPLITS = tuple(f"{split}_{kind}" for split in ("train", "val", "test") for kind in ("mask", "idx"))


def load_hetero_folder(root: str | Path, mmap: bool = True, check: bool = True) -> HeteroData:
    """Read a graph with types from a folder of ``.npy`` files.

    Each array ``nodes/TYPE/NAME.npy`` becomes ``data[TYPE].NAME``, and ``edges/SOURCE__RELATION__TARGET/NAME.npy``
    becomes ``data[SOURCE, RELATION, TARGET].NAME``:

    - of nodes: ``x.npy`` floating ``[N, F]``, or ``num_nodes.npy``, an integer, for a type without features; optionally
      ``y.npy``, ``{train,val,test}_mask.npy`` bool ``[N]`` or ``{train,val,test}_idx.npy`` int64 ``[n]``, and any other
      array with a row per node, such as ``time.npy``;
    - of edges: ``edge_index.npy``, int32 or int64 ``[2, E]``, and any array with a row per edge, such as ``time.npy``.
      From a million edges on it is sorted once, and kept in the user's cache (see ``lgnn cache``) until the file
      changes: ``graph`` is then the memory-mapped :class:`~lightning_gnn.graph.CSCGraph`, and there is no
      ``edge_index``. So it is with ``indptr.npy``, ``indices.npy`` and perhaps ``edge_ids.npy`` in its place.

    A file ``NAME.json`` with a list of texts becomes that list. Where the names of types cannot be those of folders,
    the folders are numbered, ``nodes/0`` and ``edges/0``, and ``types.json`` says which types these are:
    ``{"nodes": [TYPE, …], "edges": [[SOURCE, RELATION, TARGET], …]}``.

    Args:
        root: The folder.
        mmap: Leave the arrays on disk and let the system page them in; writes never reach the files.
        check: Look for ids out of range; a large topology that passed is not read again until its files change.

    Raises:
        FileNotFoundError: The folder or a file that it needs is missing.
        TypeError: An array of another dtype.
        ValueError: A truncated file, a wrong shape or length, a node or edge out of range, a topology that is given
            twice, a folder of edges whose name names no types of nodes, or could be that of several edge types, or a
            ``types.json`` that does not fit the folders.
    """
    root = Path(root)
    nodes, edges = _types(root)
    data = HeteroData()
    for name, folder in nodes.items():
        _read_nodes(data, name, folder, mmap, check)
    for kind, folder in edges.items():
        _read_edges(data, kind, folder, mmap, check)
    return data


def node_folder(root: str | Path, name: NodeType) -> Path:
    """Return where the arrays of a node type are, in a folder that may lack edges."""
    root = Path(root)
    return _types(root)[0][name] if (root / TYPES).exists() else root / NODES / name


def _types(root: Path) -> tuple[dict[NodeType, Path], dict[EdgeType, Path]]:
    """Return the folders of all node types and of all edge types."""
    # Types are folders, sorted so that their order does not depend on the file system.
    folders = [sorted(path for path in (root / name).glob("*") if path.is_dir()) for name in (NODES, EDGES)]
    if not folders[0]:
        raise FileNotFoundError(f"{root / NODES} holds no folder; expected nodes/TYPE/x.npy for each type of nodes")
    if not folders[1]:
        raise FileNotFoundError(
            f"{root / EDGES} holds no folder; expected edges/SOURCE{BETWEEN}RELATION{BETWEEN}TARGET/edge_index.npy"
        )
    # A list of types stands for names that no folder can have.
    if (root / TYPES).exists():
        return _numbered(root, *folders)
    nodes = {path.name: path for path in folders[0]}
    edges = {}
    # The name of a folder must split into two node types and a relation in exactly one way.
    for path in folders[1]:
        kinds = _kinds(path.name, list(nodes))
        if not kinds:
            known = f"types of nodes that there are: {', '.join(nodes)}"
            raise ValueError(f"{path} must be called SOURCE{BETWEEN}RELATION{BETWEEN}TARGET, with {known}")
        if len(kinds) > 1:
            several = " or ".join(map(str, kinds))
            raise ValueError(f"{path} may hold edges of {several}; number the folders, as save_hetero_folder does")
        edges[kinds[0]] = path
    return nodes, edges


def _numbered(root: Path, *folders: list[Path]) -> tuple[dict[NodeType, Path], dict[EdgeType, Path]]:
    """Return the folders of all types where these are numbered."""
    try:
        about = read_json(read_text(root / TYPES))
        nodes, edges = about[NODES], [(source, name, target) for source, name, target in about[EDGES]]
        if not _are_texts([*nodes, *(part for kind in edges for part in kind)]):
            raise ValueError("a name is not a text")
        if unknown := [kind for kind in edges if not {kind[0], kind[2]} <= {*nodes}]:
            raise ValueError(f"edges of {unknown[0]} are between types of nodes that are not listed")
    except (ValueError, KeyError, TypeError) as error:
        form = f'{{"{NODES}": [TYPE, …], "{EDGES}": [[SOURCE, RELATION, TARGET], …]}}'
        raise ValueError(f"{root / TYPES} must hold {form}: {error}") from None
    for of, types, found in zip((NODES, EDGES), (nodes, edges), folders, strict=True):
        if {path.name for path in found} != {str(number) for number in range(len(set(types)))}:
            names = ", ".join(path.name for path in found)
            wrong = f"lists {len(types)} types of {of}, but {root / of} holds the folders {names}"
            raise ValueError(f"{root / TYPES} {wrong}; expected one for each, called by its number, from 0 on")
    return (
        {name: root / NODES / str(number) for number, name in enumerate(nodes)},
        {kind: root / EDGES / str(number) for number, kind in enumerate(edges)},
    )


def _kinds(name: str, types: Sequence[NodeType]) -> list[EdgeType]:
    """Return the edge types whose folder may have a name."""
    found = []
    for source in (end for end in types if name.startswith(end + BETWEEN)):
        rest = name[len(source) + len(BETWEEN) :]
        ends = (end for end in types if rest.endswith(BETWEEN + end))
        found += [(source, rest[: len(rest) - len(BETWEEN + target)], target) for target in ends]
    return found


def type_folders(
    nodes: Sequence[NodeType], edges: Sequence[EdgeType]
) -> tuple[dict[NodeType | EdgeType, str], str | None]:
    """Return the folder of each type, and what ``types.json`` must hold, None where folders have the types' names."""
    if _are_read_back(nodes, edges):
        return _named(nodes, edges), None
    types = {NODES: [*nodes], EDGES: [*edges]}
    return {kind: f"{of}/{at}" for of, kinds in types.items() for at, kind in enumerate(kinds)}, json.dumps(types)


def _named(nodes: Sequence[NodeType], edges: Sequence[EdgeType]) -> dict[NodeType | EdgeType, str]:
    """Return the folder of each type, called by its name."""
    return {**{name: f"{NODES}/{name}" for name in nodes}, **{kind: f"{EDGES}/{BETWEEN.join(kind)}" for kind in edges}}


def _are_read_back(nodes: Sequence[NodeType], edges: Sequence[EdgeType]) -> bool:
    """Say whether folders that are called by the names of types name these types alone, on any system."""
    folders = _named(nodes, edges).values()
    distinct = {normalize("NFC", folder).casefold() for folder in folders}
    return (
        len(distinct) == len(folders)
        and not any(_ODD.search(folder.partition("/")[2]) or len(folder.encode()) > _NAME_BYTES for folder in folders)
        and all(_kinds(BETWEEN.join(kind), nodes) == [kind] for kind in edges)
    )


def save_hetero_folder(data: HeteroData, root: str | Path) -> Path:
    """Write a graph with types as a folder that :func:`load_hetero_folder` reads; return the folder.

    Attributes of nodes and edges must be tensors, or lists of texts; the ``graph`` of a type, a :class:`CSCGraph`, is
    written in CSC order.

    Raises:
        FileExistsError: The folder holds a graph already.
        OSError: The disk has no room for it, or cannot be written to.
        TypeError, ValueError: An attribute or its name that a folder has no place for, or edges of unknown nodes.
    """
    # Check everything before the first file is written.
    root = Path(root)
    if any((root / name).exists() for name in (NODES, EDGES, TYPES)):
        raise FileExistsError(f"{root} holds a graph already; choose an empty folder")
    nodes, edges = data.node_types, data.edge_types
    if unknown := [kind for kind in edges if kind[0] not in nodes or kind[2] not in nodes]:
        raise ValueError(f"data has edges of {unknown[0]}, but the types of nodes are {nodes}")
    # Types whose names are no names of folders are numbered and listed in a file.
    folder_of, listed = type_folders(nodes, edges)
    folders: dict[str, dict[str, Tensor | None]] = {}
    texts: dict[str, str] = {}
    # Sort attributes into arrays and texts.
    for store in (*data.node_stores, *data.edge_stores):
        arrays: dict[str, Tensor | None] = {}
        folder = folder_of[store._key]
        for name, value in store.items():
            if _NO_FILE.search(name) or len(name.encode()) > _NAME_BYTES - len(".json"):
                raise ValueError(f"data[{store._key!r}] has {name!r}, which cannot be the name of a file; rename it")
            if _are_texts(value):
                texts[f"{folder}/{name}.json"] = json.dumps(value, ensure_ascii=False)
                continue
            # A topology that is sorted already is written in CSC order.
            if name == "graph" and isinstance(value, CSCGraph):
                arrays |= _sorted_arrays(store, value)
                continue
            if name == "num_nodes":
                value = torch.tensor(value)
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                raise TypeError(f"data[{store._key!r}].{name} is no dense tensor; a folder has no place for it")
            arrays[name] = value.detach().cpu()
        folders[folder] = arrays
    # Attributes of the whole graph would be lost silently.
    if own := [key for key, value in data._global_store.items() if value is not None]:
        raise ValueError(f"a folder has no place for data.{own[0]}; remove it from data first")
    # Write the arrays before the list of types, which makes the folder readable.
    for folder, arrays in folders.items():
        (root / folder).mkdir(parents=True)
        save_arrays(root / folder, arrays)
    for path, text in texts.items():
        write_whole(root / path, text)
    if listed is not None:
        write_whole(root / TYPES, listed)
    return root


def _sorted_arrays(store: BaseStorage, graph: CSCGraph) -> dict[str, Tensor | None]:
    if "edge_index" in store:
        raise ValueError(f"data[{store._key!r}] has both graph and edge_index; remove one of them")
    if graph.time is not None or graph.weight is not None:
        raise ValueError(
            f"data[{store._key!r}].graph has times or weights, which are not saved: give them as attributes of edges"
        )
    return {name: getattr(graph, name) for name in TOPOLOGY}


def _read_nodes(data: HeteroData, name: str, folder: Path, mmap: bool, check: bool) -> None:
    store = data[name]
    arrays = _arrays(folder, mmap)
    refuse_rows(folder)
    if "num_nodes" in arrays:
        store.num_nodes = int(arrays.pop("num_nodes"))
    elif "x" not in arrays:
        raise FileNotFoundError(f"{folder} has neither x.npy nor num_nodes.npy, which says how many nodes there are")
    if "x" in arrays:
        try:
            store.x = FeatureTable(arrays.pop("x")).values
        except (TypeError, ValueError) as error:
            raise type(error)(f"{folder / 'x.npy'}: {error}") from None
    count = store.num_nodes
    if "x" in store and store.x.size(0) != count:
        raise ValueError(f"{folder / 'x.npy'} has {store.x.size(0)} rows, but num_nodes.npy says {count}")
    for key, value in arrays.items():
        if key in _SPLITS:
            value = check_nodes(value, count, str(folder / f"{key}.npy")) if check else value
        elif value.dim() == 0 or value.size(0) != count:
            raise ValueError(f"{folder / key}.npy has the shape {list(value.shape)}, but {name!r} has {count} nodes")
        store[key] = value
    _read_texts(store, folder)


def _read_edges(data: HeteroData, kind: EdgeType, folder: Path, mmap: bool, check: bool) -> None:
    # The edges are in one of two forms: sorted by target, or an `edge_index`.
    arrays, store = _arrays(folder, mmap), data[kind]
    num_sources, num_targets = (data[end].num_nodes for end in (kind[0], kind[2]))
    edge_index = arrays.get("edge_index")
    if edge_index is None and not is_sorted(folder):
        raise FileNotFoundError(f"{folder / 'edge_index.npy'} does not exist")
    if is_sorted(folder) or is_kept(edge_index):
        counted = f"there are {num_sources} nodes of {kind[0]!r} and {num_targets} of {kind[2]!r}"
        store.graph = load_topology(folder, num_targets, mmap, check, counted, num_sources)
        num_edges = store.graph.num_edges
    else:
        # Errors name the file in which the mistake lies.
        assert edge_index is not None
        try:
            check_edge_index(edge_index)
            for side, count in enumerate((num_sources, num_targets)):
                if check:
                    check_ids(edge_index[side], count, f"edge_index[{side}]")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{folder / 'edge_index.npy'}: {error}") from None
        store.edge_index = edge_index.to(torch.int64)
        num_edges = edge_index.size(1)
    # Every other array is an attribute with a row for each edge.
    for key, value in arrays.items():
        if key == "edge_index" or (is_sorted(folder) and key in TOPOLOGY):
            continue
        if value.dim() == 0 or value.size(0) != num_edges:
            raise ValueError(f"{folder / key}.npy has the shape {list(value.shape)}, but there are {num_edges} edges")
        store[key] = value
    _read_texts(store, folder)


def _read_texts(store: BaseStorage, folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        try:
            value = read_json(read_text(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not _are_texts(value):
            raise ValueError(f"{path} holds no list of texts")
        store[path.stem] = value


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _arrays(folder: Path, mmap: bool) -> dict[str, Tensor]:
    return {path.stem: load_array(path, mmap) for path in sorted(folder.glob("*.npy"))}


def is_hetero_folder(root: str | Path) -> bool:
    """Say whether a folder holds a graph with types."""
    return (Path(root) / NODES).is_dir()
