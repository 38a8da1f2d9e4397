"""Memory-mapped folders of heterogeneous graphs: one folder of ``.npy`` files per node type and edge type."""

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

from lightning_gnn.datasets.topology_files import TOPOLOGY, is_cached_sorted, is_sorted, load_topology
from lightning_gnn.features.arrays import load_array, save_arrays
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.checks import check_nodes
from lightning_gnn.graph.csc import CSCGraph, check_edge_index, check_ids
from lightning_gnn.runtime.files import read_json, read_text, write_whole
from lightning_gnn.runtime.urls import cached_path, local_path

NODES, EDGES, BETWEEN, TYPES = "nodes", "edges", "__", "types.json"
_MAX_BYTES = 255  # maximum length of a file name on most file systems
_BAD_FOLDER = re.compile(r'^$|^\.|[. ]$|[/\\<>:"|?*\x00-\x1f\ud800-\udfff]')  # invalid on some operating system
_BAD_FILE = re.compile(r"^$|[/\x00\ud800-\udfff]")  # matches attribute names that are invalid file names
_SPLITS = tuple(f"{split}_{kind}" for split in ("train", "val", "test") for kind in ("mask", "idx"))


def load_hetero_folder(root: str | Path, mmap: bool = True, check: bool = True) -> HeteroData:
    """Read a heterogeneous graph from a folder of ``.npy`` files.

    Each array ``nodes/TYPE/NAME.npy`` becomes ``data[TYPE].NAME``, and ``edges/SOURCE__RELATION__TARGET/NAME.npy``
    becomes ``data[SOURCE, RELATION, TARGET].NAME``:

    - nodes: ``x.npy`` floating ``[N, F]``, or ``num_nodes.npy``, an integer, for a type without features; optionally
      ``y.npy``, ``{train,val,test}_mask.npy`` bool ``[N]`` or ``{train,val,test}_idx.npy`` int64 ``[n]``, and any other
      array with one row per node, such as ``time.npy``;
    - edges: ``edge_index.npy``, int32 or int64 ``[2, E]``, and any array with one row per edge, such as ``time.npy``.
      With a million edges or more, ``edge_index`` is sorted once and cached in the user's cache (see ``lgnn cache``)
      until the file changes; the edge type then has ``graph``, a memory-mapped :class:`~lightning_gnn.graph.CSCGraph`,
      instead of ``edge_index``. The same holds for ``indptr.npy``, ``indices.npy`` and optionally ``edge_ids.npy``.

    A file ``NAME.json`` with a list of strings becomes that list. If type names are not valid folder names, the folders
    are numbered, ``nodes/0`` and ``edges/0``, and ``types.json`` lists the types:
    ``{"nodes": [TYPE, …], "edges": [[SOURCE, RELATION, TARGET], …]}``.

    Args:
        root: The folder, or its URL.
        mmap: Memory-map the arrays; writes never reach the files.
        check: Check that ids are in range; a large topology that passed is not checked again until its files change.

    Raises:
        FileNotFoundError: The folder or a required file is missing.
        TypeError: An array has a wrong dtype.
        ValueError: A file is truncated, a shape or length is wrong, a node or edge id is out of range, a topology is
            given twice, the name of an edge folder matches no edge type or several, or ``types.json`` does not match
            the folders.
    """
    root = cached_path(root)
    nodes, edges = _list_type_folders(root)
    data = HeteroData()
    for name, folder in nodes.items():
        _read_nodes(data, name, folder, mmap, check)
    for edge_type, folder in edges.items():
        _read_edges(data, edge_type, folder, mmap, check)
    return data


def node_folder(root: str | Path, name: NodeType) -> Path:
    """Return the folder of a node type's arrays; the graph folder may lack edges."""
    root = Path(root)
    return _list_type_folders(root)[0][name] if (root / TYPES).exists() else root / NODES / name


def _list_type_folders(root: Path) -> tuple[dict[NodeType, Path], dict[EdgeType, Path]]:
    """Return the folders of all node types and of all edge types."""
    # Each type is a folder; sorting makes their order independent of the file system.
    folders = [sorted(path for path in (root / name).glob("*") if path.is_dir()) for name in (NODES, EDGES)]
    if not folders[0]:
        raise FileNotFoundError(f"{root / NODES} holds no folder; expected nodes/TYPE/x.npy for each node type")
    if not folders[1]:
        raise FileNotFoundError(
            f"{root / EDGES} holds no folder; expected edges/SOURCE{BETWEEN}RELATION{BETWEEN}TARGET/edge_index.npy"
        )
    # types.json lists the types if their names are not valid folder names.
    if (root / TYPES).exists():
        return _read_numbered_types(root, *folders)
    nodes = {path.name: path for path in folders[0]}
    edges = {}
    # A folder name must split into two node types and a relation in exactly one way.
    for path in folders[1]:
        candidates = _parse_edge_types(path.name, list(nodes))
        if not candidates:
            known = f"the node types {', '.join(nodes)}"
            raise ValueError(f"{path} must be called SOURCE{BETWEEN}RELATION{BETWEEN}TARGET, with {known}")
        if len(candidates) > 1:
            several = " or ".join(map(str, candidates))
            raise ValueError(f"{path} may hold edges of {several}; number the folders, as save_hetero_folder does")
        edges[candidates[0]] = path
    return nodes, edges


def _read_numbered_types(root: Path, *folders: list[Path]) -> tuple[dict[NodeType, Path], dict[EdgeType, Path]]:
    """Return the folders of all types if the folders are numbered."""
    try:
        about = read_json(read_text(root / TYPES))
        nodes, edges = about[NODES], [(source, name, target) for source, name, target in about[EDGES]]
        if not _is_string_list([*nodes, *(name for edge_type in edges for name in edge_type)]):
            raise ValueError("a type name is not a string")
        if unknown := [edge_type for edge_type in edges if not {edge_type[0], edge_type[2]} <= {*nodes}]:
            raise ValueError(f"edge type {unknown[0]} has node types that are not listed")
    except (ValueError, KeyError, TypeError) as error:
        form = f'{{"{NODES}": [TYPE, …], "{EDGES}": [[SOURCE, RELATION, TARGET], …]}}'
        raise ValueError(f"{root / TYPES} must hold {form}: {error}") from None
    for group, types, paths in zip((NODES, EDGES), (nodes, edges), folders, strict=True):
        if {path.name for path in paths} != {str(number) for number in range(len(set(types)))}:
            names = ", ".join(path.name for path in paths)
            problem = f"lists {len(types)} types under {group!r}, but {root / group} holds the folders {names}"
            raise ValueError(f"{root / TYPES} {problem}; expected one folder per type, numbered from 0")
    return (
        {name: root / NODES / str(number) for number, name in enumerate(nodes)},
        {edge_type: root / EDGES / str(number) for number, edge_type in enumerate(edges)},
    )


def _parse_edge_types(name: str, types: Sequence[NodeType]) -> list[EdgeType]:
    """Return the edge types that a folder name can stand for."""
    edge_types = []
    for source in (end for end in types if name.startswith(end + BETWEEN)):
        rest = name[len(source) + len(BETWEEN) :]
        ends = (end for end in types if rest.endswith(BETWEEN + end))
        edge_types += [(source, rest[: len(rest) - len(BETWEEN + target)], target) for target in ends]
    return edge_types


def type_folders(
    nodes: Sequence[NodeType], edges: Sequence[EdgeType]
) -> tuple[dict[NodeType | EdgeType, str], str | None]:
    """Return the folder of each type and the text of ``types.json`` (None: folders are named after the types)."""
    if _are_unambiguous(nodes, edges):
        return _name_folders(nodes, edges), None
    types = {NODES: [*nodes], EDGES: [*edges]}
    return {key: f"{group}/{i}" for group, kinds in types.items() for i, key in enumerate(kinds)}, json.dumps(types)


def _name_folders(nodes: Sequence[NodeType], edges: Sequence[EdgeType]) -> dict[NodeType | EdgeType, str]:
    """Return the folder of each type, named after the type."""
    return {**{name: f"{NODES}/{name}" for name in nodes}, **{kind: f"{EDGES}/{BETWEEN.join(kind)}" for kind in edges}}


def _are_unambiguous(nodes: Sequence[NodeType], edges: Sequence[EdgeType]) -> bool:
    """Return whether folders named after the types are valid and unambiguous on every operating system."""
    folders = _name_folders(nodes, edges).values()
    distinct = {normalize("NFC", folder).casefold() for folder in folders}
    return (
        len(distinct) == len(folders)
        and not any(_BAD_FOLDER.search(name.partition("/")[2]) or len(name.encode()) > _MAX_BYTES for name in folders)
        and all(_parse_edge_types(BETWEEN.join(kind), nodes) == [kind] for kind in edges)
    )


def save_hetero_folder(data: HeteroData, root: str | Path) -> Path:
    """Write a heterogeneous graph to a folder that :func:`load_hetero_folder` reads, and return the folder.

    Node and edge attributes must be tensors or lists of strings; a :class:`CSCGraph` in the attribute ``graph`` is
    written in CSC order, as is ``adj_t``, whose values are stored as an edge attribute.

    Raises:
        FileExistsError: The folder holds a graph already.
        OSError: The disk is full or not writable.
        TypeError, ValueError: A folder cannot store an attribute or its name, or edges refer to unknown node types.
    """
    # Check everything before the first file is written.
    root = local_path(root)
    data = with_adj_t_values(data)
    if any((root / name).exists() for name in (NODES, EDGES, TYPES)):
        raise FileExistsError(f"{root} holds a graph already; choose an empty folder")
    nodes, edges = data.node_types, data.edge_types
    if unknown := [kind for kind in edges if kind[0] not in nodes or kind[2] not in nodes]:
        raise ValueError(f"data has edges of {unknown[0]}, but its node types are {nodes}")
    # Types whose names are not valid folder names are numbered and listed in types.json.
    folder_of, types_json = type_folders(nodes, edges)
    folders: dict[str, dict[str, Tensor | None]] = {}
    texts: dict[str, str] = {}
    # Split the attributes into arrays and texts.
    for store in (*data.node_stores, *data.edge_stores):
        arrays: dict[str, Tensor | None] = {}
        folder = folder_of[store._key]
        for name, value in store.items():
            if _BAD_FILE.search(name) or len(name.encode()) > _MAX_BYTES - len(".json"):
                raise ValueError(f"data[{store._key!r}] has {name!r}, which is not a valid file name; rename it")
            if _is_string_list(value):
                texts[f"{folder}/{name}.json"] = json.dumps(value, ensure_ascii=False)
                continue
            # A topology that is sorted already is written in CSC order.
            if name == "adj_t" and value is not None:
                if "edge_index" in store or "graph" in store:
                    continue
                value = CSCGraph.from_adj_t(value, data[store._key[0]].num_nodes)
            if name in ("graph", "adj_t") and isinstance(value, CSCGraph):
                arrays |= _get_topology_arrays(store, value)
                continue
            if name == "num_nodes":
                value = torch.tensor(value)
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                raise TypeError(f"data[{store._key!r}].{name} is not a dense tensor; a folder cannot store it")
            arrays[name] = value.detach().cpu()
        folders[folder] = arrays
    # Attributes of the whole graph would be lost silently.
    if own := [key for key, value in data._global_store.items() if value is not None]:
        raise ValueError(f"a folder cannot store data.{own[0]}; remove it from data first")
    # Write the arrays first: the folder becomes readable with the list of types.
    for folder, arrays in folders.items():
        (root / folder).mkdir(parents=True)
        save_arrays(root / folder, arrays)
    for path, text in texts.items():
        write_whole(root / path, text)
    if types_json is not None:
        write_whole(root / TYPES, types_json)
    return root


def _get_topology_arrays(store: BaseStorage, graph: CSCGraph) -> dict[str, Tensor | None]:
    if "edge_index" in store:
        raise ValueError(f"data[{store._key!r}] has both graph and edge_index; remove one of them")
    if graph.time is not None or graph.weight is not None:
        raise ValueError(
            f"data[{store._key!r}].graph has times or weights, which are not saved: store them as edge attributes"
        )
    return {name: getattr(graph, name) for name in TOPOLOGY}


def _read_nodes(data: HeteroData, name: str, folder: Path, mmap: bool, check: bool) -> None:
    store = data[name]
    arrays = _load_arrays(folder, mmap)
    if "num_nodes" in arrays:
        store.num_nodes = int(arrays.pop("num_nodes"))
    elif "x" not in arrays:
        raise FileNotFoundError(f"{folder} has neither x.npy nor num_nodes.npy, which holds the number of nodes")
    if "x" in arrays:
        try:
            store.x = FeatureTable(arrays.pop("x")).values
        except (TypeError, ValueError) as error:
            raise type(error)(f"{folder / 'x.npy'}: {error}") from None
    count = store.num_nodes
    if "x" in store and store.x.size(0) != count:
        raise ValueError(f"{folder / 'x.npy'} has {store.x.size(0)} rows, but num_nodes.npy holds {count}")
    for key, value in arrays.items():
        if key in _SPLITS:
            value = check_nodes(value, count, str(folder / f"{key}.npy")) if check else value
        elif value.dim() == 0 or value.size(0) != count:
            raise ValueError(f"{folder / key}.npy has the shape {list(value.shape)}, but {name!r} has {count} nodes")
        store[key] = value
    _read_string_lists(store, folder)


def _read_edges(data: HeteroData, edge_type: EdgeType, folder: Path, mmap: bool, check: bool) -> None:
    # The edges are in one of two forms: sorted by target, or an `edge_index`.
    arrays, store = _load_arrays(folder, mmap), data[edge_type]
    num_sources, num_targets = (data[end].num_nodes for end in (edge_type[0], edge_type[2]))
    edge_index = arrays.get("edge_index")
    if edge_index is None and not is_sorted(folder):
        raise FileNotFoundError(f"{folder / 'edge_index.npy'} does not exist")
    if is_sorted(folder) or is_cached_sorted(edge_index):
        size_note = f"there are {num_sources} nodes of {edge_type[0]!r} and {num_targets} of {edge_type[2]!r}"
        store.graph = load_topology(folder, num_targets, mmap, check, size_note, num_sources)
        num_edges = store.graph.num_edges
    else:
        # Errors name the file.
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
    # Every other array is an attribute with one row per edge.
    for key, value in arrays.items():
        if key == "edge_index" or (is_sorted(folder) and key in TOPOLOGY):
            continue
        if value.dim() == 0 or value.size(0) != num_edges:
            raise ValueError(f"{folder / key}.npy has the shape {list(value.shape)}, but there are {num_edges} edges")
        store[key] = value
    _read_string_lists(store, folder)


def _read_string_lists(store: BaseStorage, folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        try:
            value = read_json(read_text(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not _is_string_list(value):
            raise ValueError(f"{path} does not hold a list of strings")
        store[path.stem] = value


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _load_arrays(folder: Path, mmap: bool) -> dict[str, Tensor]:
    return {path.stem: load_array(path, mmap) for path in sorted(folder.glob("*.npy"))}


def is_hetero_folder(root: str | Path) -> bool:
    """Return whether a folder holds a heterogeneous graph."""
    return (Path(root) / NODES).is_dir()
