"""On-disk format of a partitioned graph: a folder for each part, and ``common`` with owners and seeds.

``part-00003`` stores the rows of its nodes and of the edges into them, by the ids and in the order of the whole graph.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.datamodules.node import as_ids, seeds_in
from lightning_gnn.features.arrays import (
    as_numpy,
    expect_scattered_reads,
    load_array,
    read_in_order,
    save_arrays,
    write_blocks,
)
from lightning_gnn.graph.checks import check_nodes
from lightning_gnn.graph.csc import CSCGraph, index_dtype
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.stores import StoreType, of_edges, of_nodes, stores_of
from lightning_gnn.runtime.files import check_writable, read_json, read_text, whole_file, write_whole
from lightning_gnn.runtime.manifest import seal, verify
from lightning_gnn.runtime.urls import cached_path, local_path, without_file_scheme
from lightning_gnn.sampling.neighbor import topology_of

FORMAT = 2
SPLITS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",), "pred": ("pred",)}
"""Names of the masks of each stage."""
_ROWS_PER_BLOCK = 1 << 16
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_TOPOLOGY_KEYS = ("edge_index", "adj_t", "graph", "num_nodes")
Rows: TypeAlias = dict[StoreType, dict[str, dict[str, Tensor]]]  # by type, "node" or "edge", and attribute
Rest: TypeAlias = dict[StoreType, dict[str, Any]]  # attributes without rows, by type and name


@dataclass
class TypeInfo:
    """Description of a node type or an edge type."""

    name: StoreType  # name of a node type, or triple of an edge type; None in a homogeneous graph
    count: int  # number of nodes or edges
    attributes: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """Dtype and shape of each attribute that is split by rows."""
    per_part: list[int] = field(default_factory=list)  # number of nodes or edges of each part
    largest: dict[str, int] = field(default_factory=dict)
    """Largest value of each attribute with one integer per row, such as a class."""

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of an attribute."""
        dtype = getattr(torch, self.attributes[key][0])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def shape(self, key: str) -> list[int]:
        """Return the shape of an attribute over all nodes or edges of the type."""
        return self.attributes[key][1]


def check_new_folder(folder: str | Path, name: str = "folder") -> Path:
    """Return a folder for a partition; raise an error that names it if it has files, or none can be created in it."""
    folder = local_path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; give a new folder, or remove this one")
    check_writable(folder, name)
    return folder


def write_partition(
    data: Data | HeteroData,
    folder: str | Path,
    assignment: Mapping[NodeType | None, Tensor],
    parts: int,
    method: str = "given",
    progress: Callable[[str], None] = lambda message: None,
    links: Mapping[str, Tensor] | None = None,
    link_type: EdgeType | None = None,
) -> None:
    """Write a partitioned graph to a folder, given the part of each node by node type."""
    folder = check_new_folder(folder)
    graph = topology_of(data)
    is_hetero = isinstance(graph, HeteroCSCGraph)
    sizes: dict[NodeType | None, int] = graph.sizes if is_hetero else {None: graph.num_nodes}
    relations: dict[EdgeType | None, CSCGraph] = graph.relations if is_hetero else {None: graph}
    number = {name: index for index, name in enumerate(sizes)}
    owners = []
    for name, size in sizes.items():
        owner = assignment[name].numpy().astype(np.int64)
        if owner.shape != (size,) or (size and not 0 <= owner.min() <= owner.max() < parts):
            of = "" if name is None else f" of {name!r}"
            raise ValueError(f"the assignment must give a part below {parts} to each of the {size} nodes{of}")
        owners.append(owner.astype(np.int16 if parts > 128 else np.int8))
    rows, rest = rows_of(data)
    types = {
        "nodes": [_describe(name, size, rows.get(name, {}).get("node", {})) for name, size in sizes.items()],
        "edges": [
            _describe(name, graph.num_edges, rows.get(name, {}).get("edge", {})) for name, graph in relations.items()
        ],
    }
    identity = uuid.uuid4().hex
    try:
        for part in range(parts):
            progress(f"part {part + 1} of {parts}")
            own = [np.flatnonzero(owner == part) for owner in owners]
            root = folder / f"part-{part:05d}"
            for index, (name, ids) in enumerate(zip(sizes, own, strict=True)):
                types["nodes"][index].per_part.append(ids.size)
                save_arrays(root, {f"node{index}.ids": ids})
                _write_rows(root, f"node{index}", rows.get(name, {}).get("node", {}), ids)
            for index, (name, relation) in enumerate(relations.items()):
                targets = own[0 if name is None else number[name[2]]]
                count = _write_lists(root, index, relation, targets, rows.get(name, {}).get("edge", {}))
                types["edges"][index].per_part.append(count)
            write_whole(root / "part.json", json.dumps({"format": FORMAT, "id": identity, "part": part}))
            seal(root, f"part {part} of {parts}")
        common = folder / "common"
        save_arrays(common, {f"node{index}.part": owner for index, owner in enumerate(owners)})
        seeds: dict[str, list[Any]] = {}
        listed: list[str] = []
        for name, store in stores_of(data):
            for stage in SPLITS:
                if not isinstance(name, tuple) and (chosen := seeds_of(store, stage)) is not None:
                    seeds.setdefault(stage, []).append(name)
                    save_arrays(common, {f"{stage}.{number[name]}": chosen})
                    if not seeds_in(store, stage)[0].endswith("_mask"):
                        listed.append(stage)
        save_arrays(common, {f"links.{name}": values for name, values in (links or {}).items()})
        with whole_file(common / "rest.pt") as file:
            torch.save(rest, file)
        torch.load(common / "rest.pt", weights_only=True)  # fails now rather than when the folder is opened
        stores = [name for name, _ in stores_of(data)]
        about = {
            "stores": stores,
            "format": FORMAT, "id": identity, "parts": parts, "method": method, "typed": is_hetero, "seeds": seeds,
            "listed": listed, "links": list(links or {}), "link_type": link_type,
            **{key: [asdict(info) for info in infos] for key, infos in types.items()},
        }  # fmt: skip
        write_whole(common / "partition.json", json.dumps(about))
        seal(common, f"{parts} parts")
    except BaseException:
        for path in folder.glob("*"):  # an incomplete folder would be refused later
            shutil.rmtree(path, ignore_errors=True)
        raise


def rows_of(data: Data | HeteroData) -> tuple[Rows, Rest]:
    """Split the attributes of a graph into those with a row per node or edge, and the rest."""
    rows: Rows = {}
    rest: Rest = {}
    # Attributes with rows are split by part; the rest is stored once for all parts.
    for name, store in stores_of(data):
        for key in store:
            value = store[key]
            where = f"data.{key}" if name is None else f"data[{name!r}].{key}"
            if key in _TOPOLOGY_KEYS:
                continue
            kind = "node" if of_nodes(store, key) else "edge" if of_edges(store, key) else None
            if kind is None:
                rest.setdefault(name, {})[key] = value
                continue
            # Parts are read by row, so attributes must be dense tensors with nodes or edges in the first dimension.
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                value = torch.from_numpy(value)
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
                fix = "only numbers can be split; convert dates by astype('datetime64[s]').astype('int64')"
                raise TypeError(f"{where} has a row per {kind}, but is {type(value).__name__}{of}: {fix}")
            # The gradients of a trained attribute would have to be exchanged between ranks.
            if value.requires_grad:
                raise TypeError(f"{where} is trained, but a partitioned graph is read-only; make it part of the model")
            if data.__cat_dim__(key, value, store) != 0:
                raise TypeError(f"{where} does not have its {kind}s in the first dimension; transpose it")
            rows.setdefault(name, {}).setdefault(kind, {})[key] = value
    # Attributes of the whole graph belong to no type.
    if isinstance(data, HeteroData):
        rest[None] = dict(data._global_store)
    return rows, rest


def _describe(name: StoreType, count: int, rows: Mapping[str, Tensor]) -> TypeInfo:
    attributes = {key: (str(value.dtype).rpartition(".")[2], list(value.shape)) for key, value in rows.items()}
    vectors = {key: value for key, value in rows.items() if value.dim() == 1 and value.numel()}
    integers = {key: value for key, value in vectors.items() if value.dtype in _INTEGER_DTYPES}
    return TypeInfo(name, count, attributes, largest={key: int(value.max()) for key, value in integers.items()})


def seeds_of(store: BaseStorage, stage: str) -> Tensor | None:
    """Return a stage's seeds as ids, int64 ``[n]``; None without seeds, or with several splits."""
    name, nodes = seeds_in(store, stage)
    if nodes is None or (np.ndim(nodes) == 2 and np.shape(nodes)[1] > 1):
        return None
    return as_ids(check_nodes(nodes, store.num_nodes, name))


def _write_rows(root: Path, prefix: str, rows: Mapping[str, Tensor], ids: np.ndarray) -> None:
    for key, value in rows.items():

        def blocks(value: Tensor = value) -> Iterator[np.ndarray]:
            for start in range(0, ids.size, _ROWS_PER_BLOCK):
                index = torch.from_numpy(ids[start : start + _ROWS_PER_BLOCK]).to(value.device)
                yield as_numpy(value[index].detach().cpu())

        dtype = as_numpy(torch.empty(0, dtype=value.dtype)).dtype
        with read_in_order(value):
            write_blocks(root / _file_name(prefix, key), dtype, (ids.size, *value.shape[1:]), blocks())


def _write_lists(root: Path, index: int, graph: CSCGraph, targets: np.ndarray, rows: Mapping[str, Tensor]) -> int:
    """Write the in-edges of nodes; return their number."""
    begins, ends = graph.indptr.numpy()[:-1][targets], graph.indptr.numpy()[1:][targets]
    indptr = np.zeros(targets.size + 1, np.int64)
    np.cumsum(ends - begins, out=indptr[1:])
    count = int(indptr[-1])
    edges = np.repeat(begins - indptr[:-1], ends - begins) + np.arange(count)
    ids = edges if graph.edge_ids is None else graph.edge_ids.numpy()[edges].astype(np.int64)
    save_arrays(root, {
        f"edge{index}.indptr": indptr,
        f"edge{index}.indices": graph.indices.numpy()[edges],
        f"edge{index}.ids": ids.astype(index_dtype(graph.num_edges)),
    })  # fmt: skip
    _write_rows(root, f"edge{index}", rows, ids)
    return count


def _file_name(prefix: str, key: str) -> str:
    return f"{prefix}.{quote(key, safe='')}.rows.npy"


class Partition:
    """A partitioned graph with its common files open; parts are opened by :meth:`open`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = without_file_scheme(folder).rstrip("/")
        self.common = common = cached_path(f"{self.folder}/common")
        if not common.is_dir():
            raise FileNotFoundError(f"{self.folder} is not a partitioned graph; make one with lgnn partition")
        _verify(common, "every machine needs it: copy it again")
        about = read_json(read_text(common / "partition.json", 1 << 26))
        if about.get("format") != FORMAT:
            written = f"{self.folder} was written in format {about.get('format')}"
            raise ValueError(f"{written}, but this release reads format {FORMAT}; partition the graph again")
        self.id: str = about["id"]
        self.parts: int = about["parts"]
        self.method: str = about["method"]
        self.is_hetero: bool = about["typed"]
        self.seeds: dict[str, list[Any]] = about["seeds"]
        self.listed: list[str] = about.get("listed", [])  # stages whose seeds are an ordered list, not a mask
        self.link_names: list[str] = about.get("links", [])
        self.link_type: EdgeType | None = _as_name(about.get("link_type"))
        self.stores = list(map(_as_name, about["stores"]))  # names of the types in the order of the graph
        self.nodes, self.edges = (
            [TypeInfo(**{**info, "name": _as_name(info["name"])}) for info in about[key]] for key in ("nodes", "edges")
        )
        self.owner = [load_array(common / f"node{index}.part.npy") for index in range(len(self.nodes))]
        self.rest: Rest = torch.load(common / "rest.pt", weights_only=True)

    @cached_property
    def number(self) -> dict[StoreType, int]:
        """Indices of the node types and of the edge types, by name."""
        return {info.name: index for infos in (self.nodes, self.edges) for index, info in enumerate(infos)}

    def ends(self, edge_type: int) -> tuple[int, int]:
        """Return the indices of the source and target node types of an edge type."""
        name = self.edges[edge_type].name
        return (0, 0) if name is None else (self.number[name[0]], self.number[name[2]])

    def split(self, stage: str) -> tuple[NodeType | None, Tensor] | None:
        """Return the node type of a stage's seeds and their mask or ids; None without seeds or with several types."""
        names = self.seeds.get(stage, [])
        if len(names) != 1:
            return None
        name = _as_name(names[0])
        number = self.number.get(name, 0)
        ids = load_array(self.common / f"{stage}.{number}.npy", mmap=False)
        if stage in self.listed:
            return name, ids
        mask = torch.zeros(self.nodes[number].count, dtype=torch.bool)
        mask[ids] = True
        return name, mask

    def links(self, name: str) -> Tensor | None:
        """Return a saved array of the edges to predict: edges, int64 ``[2, n]``, labels or times; None if missing."""
        return load_array(self.common / f"links.{name}.npy") if name in self.link_names else None

    def first_edges(self, edge_type: int) -> np.ndarray:
        """Return the offset of each part's edges among all edges of a type, ordered by part, int64 ``[parts + 1]``."""
        return np.cumsum([0, *self.edges[edge_type].per_part])

    def open(self, part: int) -> GraphPart:
        """Verify and open one part."""
        root = cached_path(f"{self.folder}/part-{part:05d}")
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not on this machine, whose rank needs it; copy it here")
        _verify(root, "copy it again, or partition the graph again")
        about = read_json(read_text(root / "part.json"))
        if about != {"format": FORMAT, "id": self.id, "part": part}:
            if about.get("id") == self.id:
                raise ValueError(f"{root} holds part {about.get('part')}; copy part {part} here")
            foreign = f"{root} is part {about.get('part')} of the partition {about.get('id')}"
            fix = "copy all parts from the same partition"
            raise ValueError(f"{foreign}, but common belongs to {self.id}: {fix}")
        return GraphPart(self, part, root)


def _as_name(name: str | list[str] | None) -> Any:
    """Convert the name of a type from JSON, which has no tuples."""
    return tuple(name) if isinstance(name, list) else name


def _verify(root: Path, fix: str) -> None:
    try:
        verify(root)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{root} is damaged ({error}); {fix}") from None


class GraphPart:
    """One part of a graph, memory-mapped."""

    def __init__(self, partition: Partition, number: int, root: Path) -> None:
        self.number = number
        self._partition, self._root = partition, root
        self.ids = [load_array(root / f"node{index}.ids.npy").numpy() for index in range(len(partition.nodes))]

    @cached_property
    def node_rows(self) -> list[dict[str, Tensor]]:
        """Attributes of the part's nodes, by node type."""
        return self._load_rows("node", self._partition.nodes)

    @cached_property
    def edge_rows(self) -> list[dict[str, Tensor]]:
        """Attributes of the edges into the part's nodes, by edge type, in the order of :meth:`lists`."""
        return self._load_rows("edge", self._partition.edges)

    @cached_property
    def edge_ids(self) -> list[Tensor]:
        """Positions of these edges in the user's ``edge_index``, by edge type."""
        return [load_array(self._root / f"edge{index}.ids.npy") for index in range(len(self._partition.edges))]

    def lists(self, edge_type: int) -> CSCGraph:
        """Return the in-edges of the part's nodes, without ``edge_ids``."""
        source, _ = self._partition.ends(edge_type)
        indptr, indices = (load_array(self._root / f"edge{edge_type}.{name}.npy") for name in ("indptr", "indices"))
        return CSCGraph(indptr, indices, source_count=self._partition.nodes[source].count)

    def local_indices(self, node_type: int, nodes: np.ndarray) -> np.ndarray:
        """Return the indices of nodes within the part, int64 ``[n]``."""
        ids = self.ids[node_type]
        indices = np.searchsorted(ids, nodes)
        if nodes.size and (not ids.size or (ids[np.minimum(indices, ids.size - 1)] != nodes).any()):
            raise IndexError(f"part {self.number} does not have some of the requested nodes")
        return indices

    def _load_rows(self, prefix: str, infos: list[TypeInfo]) -> list[dict[str, Tensor]]:
        return [
            {
                key: expect_scattered_reads(load_array(self._root / _file_name(f"{prefix}{index}", key)))
                for key in info.attributes
            }
            for index, info in enumerate(infos)
        ]
