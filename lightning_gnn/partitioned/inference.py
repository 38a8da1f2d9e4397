"""Exact inference on a partitioned graph: layer by layer, each rank computes the outputs of its own nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.self_loops import inverse_root
from lightning_gnn.graph.csr import CSR
from lightning_gnn.nn.conv import GCNConv
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.hetero.layers import TypedConv
from lightning_gnn.nn.hetero.models import _HeteroGNN
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows
from lightning_gnn.nn.inference import FullInference, GraphBlock, Layer, layers_of
from lightning_gnn.nn.run_model import edge_arguments
from lightning_gnn.partitioned.folder import GraphPart, Partition
from lightning_gnn.partitioned.remote import Remote
from lightning_gnn.partitioned.shard import as_bytes, holders

_MAX_BLOCK_EDGES = 1 << 24  # even if more fit the memory limit
_MIN_BLOCK_BYTES = 1 << 20  # even if the memory limit is smaller


class PublishedRows:
    """Rows of this rank that other ranks read between layers; ranks with the same part divide its nodes by id."""

    def __init__(self, parts: int, ranks: int) -> None:
        self._ranks_of = holders(parts, ranks)
        self._rows: dict[Hashable, tuple[list[np.ndarray], list[Tensor]]] = {}

    def owner(self, part: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the rank that computes each node, given its part, int64 ``[n]``."""
        owner = np.empty(ids.size, np.int64)
        for number, ranks in enumerate(self._ranks_of):
            indices = np.flatnonzero(part == number)
            owner[indices] = np.array(ranks)[ids[indices] % len(ranks)]
        return owner

    def publish(self, name: Hashable, ids: list[np.ndarray], rows: list[Tensor]) -> None:
        """Make rows ``[n, …]`` of nodes with ascending ids ``[n]`` readable by other ranks; one pair per part."""
        self._rows[name] = ids, rows

    def drop(self, name: Hashable) -> None:
        """Remove published rows."""
        self._rows.pop(name, None)

    def read(self, name: Sequence[Hashable], ids: np.ndarray) -> np.ndarray:
        """Return the published rows of nodes as bytes, ``[n, …]``; the RPC handler."""
        ids_by_part, rows = self._rows[tuple(name)]  # a remote call has a list
        out = rows[0].new_empty((ids.size, *rows[0].shape[1:]))
        for part_ids, values in zip(ids_by_part, rows, strict=True):
            if part_ids.size:
                indices = np.minimum(np.searchsorted(part_ids, ids), part_ids.size - 1)
                hits = np.flatnonzero(part_ids[indices] == ids)
                out[torch.from_numpy(hits)] = values[torch.from_numpy(indices[hits])]
        return as_bytes(out)


class PartBlock(GraphBlock):
    """A block of nodes of a part with all their in-edges, in the form that :mod:`lightning_gnn.nn.conv` accepts."""

    def __init__(self, targets: np.ndarray, counts: np.ndarray, source: np.ndarray, weight: Tensor | None) -> None:
        self.source_ids, local = np.unique(source, return_inverse=True)
        self.target_ids, self.weight = targets, weight
        self.num_sources, self.num_targets, self.num_edges = self.source_ids.size, targets.size, source.size
        indptr = torch.zeros(targets.size + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(counts), 0, out=indptr[1:])
        rows = CSR(indptr, torch.from_numpy(local.astype(np.int32)), self.source_ids.size)
        self._graph = CompressedGraph(rows)

    def gcn_weight(self, *args: object, **kwargs: object) -> Tensor:
        """Return the normalized edge weights given to the block."""
        assert self.weight is not None
        return self.weight.to(self._graph.device)

    edge_order = gcn_weight


@dataclass(frozen=True)
class PartitionedInference(FullInference):
    """Exact inference on a partitioned graph; ``memory_limit`` bounds the reads of a block."""

    remote: Remote | None = None
    published: PublishedRows | None = None  # rows of this rank for other ranks
    wanted: Mapping[NodeType | None, Tensor] | None = None
    """Nodes whose outputs this rank returns, int64 ``[n]``, by node type (None in a homogeneous graph)."""

    @classmethod
    def of(cls, settings: FullInference, **more: Any) -> PartitionedInference:
        """Extend settings by the objects of a rank."""
        if settings.folder is not None:
            option = f"FullInference(folder={str(settings.folder)!r}) does not work with a partitioned graph"
            raise ValueError(f"{option}, where each rank holds its nodes' outputs in memory; leave folder out")
        return cls(**{field.name: getattr(settings, field.name) for field in fields(FullInference)}, **more)

    def run(self, model: nn.Module, batch: Any, embeddings: TypeEmbeddings | None = None) -> Any:
        """Return the wanted rows of the model's outputs, up to rounding. All ranks must call this."""
        if isinstance(batch, HeteroData):
            return _HeteroPass(self, model, embeddings).run()
        return _HomogeneousPass(self, model, "edge_weight" in edge_arguments(model, batch)).run()[None]


def check_model(model: nn.Module, partition: Partition, embeddings: TypeEmbeddings | None = None) -> None:
    """Raise a ValueError before a run if a model does not support exact inference on a partitioned graph."""
    if partition.is_hetero:
        check_hetero_model(model, partition, embeddings)
    else:
        homogeneous_layers(model, partition)


def homogeneous_layers(model: nn.Module, partition: Partition) -> list[Layer]:
    """Return the layers of a model of homogeneous graphs; raise a ValueError if it cannot run by layers."""
    if "x" not in partition.nodes[0].attributes:
        raise ValueError("inference='full' needs features x, but the partitioned graph has none")
    model = getattr(model, "_orig_mod", model)
    layers = layers_of(model)
    if layers is None:
        raise _unsupported_error(model, "GCN, GraphSAGE or GAT of lightning_gnn.nn with jk=None or 'last'")
    for layer in layers:
        if layer.whole_norm is not None:
            fix = "train with norm=batch, or leave inference out"
            raise ValueError(f"{layer.whole_norm} averages over all nodes, but no rank has all outputs: {fix}")
    return layers


def check_hetero_model(model: nn.Module, partition: Partition, embeddings: TypeEmbeddings | None = None) -> _HeteroGNN:
    """Return an uncompiled model of heterogeneous graphs; raise a ValueError if it cannot run by layers."""
    model = getattr(model, "_orig_mod", model)
    is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in model.parameters())
    if not isinstance(model, _HeteroGNN) or type(model).forward is not _HeteroGNN.forward or is_lazy:
        raise _unsupported_error(model, "HeteroGraphSAGE, RGCN, RGAT or HGT of lightning_gnn.nn")
    tables = {} if embeddings is None else {name: table.num_embeddings for name, table in embeddings.tables.items()}
    for edge_type in {name: None for names in model.layers for name in names}:
        if edge_type not in partition.number:
            raise ValueError(f"the partitioned graph has no edges of {edge_type}, which the model reads")
    for name in model.node_types:
        if name not in partition.number:
            continue
        info = partition.nodes[partition.number[name]]
        if ("x" in info.attributes) == (name in tables):
            problem = "features x and embeddings; leave one of them out"
            problem = problem if name in tables else "no features x: give some, or embeddings that are trained"
            raise ValueError(f"nodes of {name!r} have {problem}")
        if tables.get(name, info.count) != info.count:
            raise ValueError(f"the graph has {info.count} nodes of {name!r}, but embeddings of {tables[name]}")
    return model


def _unsupported_error(model: nn.Module, supported: str) -> ValueError:
    return ValueError(
        f"inference='full' on a partitioned graph runs layer by layer, which {type(model).__name__} does not support: "
        f"use {supported}, or inference='sampled' with num_neighbors=-1 (eval_loader_kwargs)"
    )


class _LayerwisePass:
    """One pass over all layers of a model; node and edge types are given by their indices in the partition."""

    widths: Sequence[int]  # output columns of each layer
    widest: Sequence[int]  # columns of the widest intermediate tensor of each layer
    reached: Sequence[Mapping[int, Sequence[int]]]  # node types that each layer computes, with the edge types into them
    weighted = False  # whether edges have weights

    def __init__(self, settings: PartitionedInference, model: nn.Module) -> None:
        assert settings.remote is not None
        assert settings.published is not None
        if model.training:
            raise ValueError("exact inference is for evaluation; call model.eval() first")
        self.settings, self.remote, self.published = settings, settings.remote, settings.published
        self.exchange, self.partition = settings.remote.exchange, settings.remote.partition
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.parts = list(self.remote.shard.parts.values())
        self.own: list[list[np.ndarray]] = []  # by node type and part, the indices of the nodes this rank computes
        for node_type in range(len(self.partition.nodes)):
            self.own.append([])
            for part in self.parts:
                ids = part.ids[node_type]
                is_own = self.published.owner(np.full(ids.size, part.number), ids) == self.exchange.rank
                self.own[node_type].append(np.flatnonzero(is_own))

    @torch.no_grad()
    def run(self) -> dict[NodeType | None, Tensor]:
        """Compute all layers; return the wanted rows of the last one by the node types that it computes."""
        for number, reached in enumerate(self.reached):
            self._prepare(number)
            for target, edge_types in reached.items():
                rows = [torch.empty((own.size, self.widths[number]), dtype=self.dtype) for own in self.own[target]]
                for index, part in enumerate(self.parts):
                    for start, out in self._blocks(number, target, edge_types, part, self.own[target][index]):
                        rows[index][start : start + out.size(0)] = out.to("cpu", self.dtype)
                self._publish(("layer", number, target), target, rows)
            self.exchange.all_gather(None)  # barrier: no rank reads the previous layer from here on
            self._drop(number - 1)
        assert self.settings.wanted is not None
        last, outputs = len(self.reached) - 1, {}
        for name, wanted in self.settings.wanted.items():
            target = self.partition.number.get(name, 0)
            if target in self.reached[last]:
                outputs[name] = self._read(last, target, wanted.numpy())
        self.exchange.all_gather(None)  # barrier: no rank reads the last layer from here on
        self._drop(last)
        return outputs

    def _prepare(self, number: int) -> None:
        """Publish the rows that a layer needs in addition to the outputs of the previous one."""

    def _features(self, node_type: int, ids: np.ndarray) -> Tensor:
        return self.remote.node_rows(node_type, ids, ["x"])["x"]

    def _blocks(
        self, number: int, target: int, edge_types: Sequence[int], part: GraphPart, own: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the offset and the outputs of each block of a part's ``own`` nodes of the type ``target``."""
        raise NotImplementedError

    def _publish(self, name: Hashable, node_type: int, rows: list[Tensor]) -> None:
        ids = [part.ids[node_type][own] for part, own in zip(self.parts, self.own[node_type], strict=True)]
        self.published.publish(name, ids, rows)

    def _drop(self, number: int) -> None:
        for target in self.reached[number] if number >= 0 else ():
            self.published.drop(("layer", number, target))

    def _read(self, number: int, node_type: int, ids: np.ndarray) -> Tensor:
        """Return rows of the outputs of layer ``number``, or of the features for -1."""
        if number < 0:
            return self._features(node_type, ids).to(self.device, self.dtype)
        return self._read_published(("layer", number, node_type), node_type, ids, self.widths[number]).to(self.device)

    def _read_published(self, name: Hashable, node_type: int, ids: np.ndarray, width: int) -> Tensor:
        """Return published rows ``[n, width]`` of nodes from the ranks that computed them."""
        owner = self.published.owner(self.partition.owner[node_type].numpy()[ids], ids)
        indices_of = {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}
        requests = {rank: (name, ids[indices]) for rank, indices in indices_of.items()}
        responses = self.exchange.call("published_rows", requests)
        out = torch.empty((ids.size, width), dtype=self.dtype)
        for rank, indices in indices_of.items():
            as_bytes(out)[indices] = responses[rank]
        return out

    def _edges(
        self, target: int, edge_types: Sequence[int], part: GraphPart, own: np.ndarray, width: int,
        loops: bool = False, improved: bool = False,
    ) -> Iterator[tuple[int, np.ndarray, list[tuple[np.ndarray, np.ndarray, Tensor]]]]:  # fmt: skip
        """Yield offset and ids of blocks of nodes, and in-degrees, sources and weights of their edges by edge type."""
        lists = [(graph.indptr.numpy(), graph.indices.numpy()) for graph in map(part.lists, edge_types)]
        weights = part.edge_rows[0]["edge_weight"] if self.weighted else None
        limit = max(self.settings.limit_on(self.device), _MIN_BLOCK_BYTES)
        max_edges = int(min(_MAX_BLOCK_EDGES, limit // (width * self.dtype.itemsize)))
        degrees = [indptr[own + 1] - indptr[own] for indptr, _ in lists]
        # Count the node itself too: its row is read, and it may get a self-loop.
        cumulative = np.cumsum(sum(degrees, np.ones(own.size, np.int64)))
        start = 0
        while start < own.size:
            end = int(np.searchsorted(cumulative, (cumulative[start - 1] if start else 0) + max_edges, "right"))
            end = min(max(end, start + 1), own.size)
            indices = own[start:end]
            targets, edges = part.ids[target][indices], []
            for (indptr, sources), degree in zip(lists, degrees, strict=True):
                counts = degree[start:end]
                begins = indptr[indices] - (np.cumsum(counts) - counts)
                position = np.repeat(begins, counts) + np.arange(int(counts.sum()))
                source = sources[position].astype(np.int64)
                weight = torch.ones(position.size, dtype=self.dtype)
                if weights is not None:
                    weight = weights[torch.from_numpy(position)].view(-1).to(self.dtype)
                if loops:
                    fill = 2.0 if improved and self.weighted else 1.0
                    counts, source, weight = _replace_loops(targets, counts, source, weight, fill)
                edges.append((counts, source, weight))
            yield start, targets, edges
            start = end


class _HomogeneousPass(_LayerwisePass):
    """A pass over a homogeneous graph."""

    def __init__(self, settings: PartitionedInference, model: nn.Module, weighted: bool) -> None:
        super().__init__(settings, model)
        self.weighted = weighted
        self.layers = homogeneous_layers(model, self.partition)
        self.widths, self.widest = ([getattr(layer, key) for layer in self.layers] for key in ("width", "widest"))
        self.reached = [{0: [0]}] * len(self.layers)
        self.published_degrees: set[Hashable] = set()

    def run(self) -> dict[NodeType | None, Tensor]:
        out = super().run()
        for name in self.published_degrees:
            self.published.drop(name)
        return out

    def _degrees_for(self, conv: nn.Module) -> tuple[str, bool, bool] | None:
        """Return the name of the weighted degrees that normalize a layer; None without normalization."""
        if not isinstance(conv, GCNConv) or not conv.normalize:
            return None
        return "sums", conv.add_self_loops, conv.improved

    def _prepare(self, number: int) -> None:
        name = self._degrees_for(self.layers[number].conv)
        if name is None or name in self.published_degrees:
            return
        self.published_degrees.add(name)
        _, loops, improved = name
        degrees_by_part = []
        for part, own in zip(self.parts, self.own[0], strict=True):
            degrees = torch.zeros((own.size, 1), dtype=self.dtype)
            for start, targets, ((counts, _, weight),) in self._edges(0, [0], part, own, 1, loops, improved):
                row = torch.repeat_interleave(torch.arange(start, start + targets.size), torch.from_numpy(counts))
                degrees.view(-1).index_add_(0, row, weight)
            degrees_by_part.append(degrees)
        self._publish(name, 0, degrees_by_part)
        self.exchange.all_gather(None)  # barrier: the degrees of all ranks are readable

    def _blocks(
        self, number: int, target: int, edge_types: Sequence[int], part: GraphPart, own: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        layer = self.layers[number]
        conv: Any = layer.conv
        norm = self._degrees_for(conv)
        loops, improved = bool(getattr(conv, "add_self_loops", False)), bool(getattr(conv, "improved", False))
        width = layer.widest + self.partition.nodes[0].shape("x")[1]
        blocks = self._edges(0, edge_types, part, own, width, loops, improved)
        for start, targets, ((counts, source, weight),) in blocks:
            block = PartBlock(targets, counts, source, None)
            if norm is not None:
                from_source, to_target = (
                    inverse_root(self._read_published(norm, 0, ids, 1).view(-1)) for ids in (block.source_ids, targets)
                )
                cols = torch.from_numpy(np.searchsorted(block.source_ids, source))
                rows = torch.repeat_interleave(torch.arange(targets.size), torch.from_numpy(counts))
                block.weight = from_source[cols] * weight * to_target[rows]
            elif self.weighted and isinstance(conv, GCNConv):
                block.weight = weight
            yield start, self._compute(layer, block, number)

    def _compute(self, layer: Layer, block: PartBlock, number: int) -> Tensor:
        x = self._read(number - 1, 0, block.source_ids)
        block.to(self.device)
        if isinstance(layer.conv, GCNConv):
            weights = None if block.weight is None or layer.conv.normalize else block.weight
            out: Tensor = layer.conv(x, block, weights)
        else:
            out = layer.conv((x, self._read(number - 1, 0, block.target_ids)), block)
        return layer.after(out)


class _HeteroPass(_LayerwisePass):
    """A pass over a heterogeneous graph, by target node type."""

    def __init__(self, settings: PartitionedInference, model: nn.Module, embeddings: TypeEmbeddings | None) -> None:
        super().__init__(settings, model)
        self.model = check_hetero_model(model, self.partition, embeddings)
        self.tables: Mapping[NodeType, Any] = {} if embeddings is None else dict(embeddings.tables.items())
        number = self.partition.number
        self.names = [info.name for info in self.partition.nodes]
        self.widths, self.widest, self.reached = [], [], []
        for conv, edge_types in zip(self.model.convs, self.model.layers, strict=True):
            one: Any = next(iter(conv.convs.values())) if isinstance(conv, TypedConv) else conv
            heads = one.heads if hasattr(one, "concat") else 1
            self.widest.append(one.out_channels * heads)
            self.widths.append(one.out_channels * (heads if getattr(one, "concat", False) else 1))
            into = {name: [number[key] for key in edge_types if key[2] == name] for name in self.model.node_types}
            self.reached.append({
                number[name]: keys for name, keys in into.items() if keys or (self.model.every and name in number)
            })  # fmt: skip
        # Keep only the node types that the user or a later layer needs.
        needed = {number[name] for name in settings.wanted or ()}
        for index, reached in reversed([*enumerate(self.reached)]):
            self.reached[index] = {target: keys for target, keys in reached.items() if target in needed}
            needed |= {self.partition.ends(key)[0] for keys in self.reached[index].values() for key in keys}
        self.num_features = max(
            self.tables[name].embedding_dim if name in self.tables else self.partition.nodes[number[name]].shape("x")[1]
            for name in self.model.node_types if name in number
        )  # fmt: skip

    def run(self) -> dict[NodeType | None, Tensor]:
        return self.model.after(super().run())

    def _features(self, node_type: int, ids: np.ndarray) -> Tensor:
        if self.names[node_type] not in self.tables:
            return super()._features(node_type, ids)
        weight: Tensor = self.tables[self.names[node_type]].weight
        return weight[torch.from_numpy(ids).to(weight.device)]

    def _blocks(
        self, number: int, target: int, edge_types: Sequence[int], part: GraphPart, own: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        width = self.widest[number] + (self.num_features if number == 0 else self.widths[number - 1])
        for start, targets, lists in self._edges(target, edge_types, part, own, width):
            # Collect the distinct nodes of each type; the targets come first among their type.
            nodes = {target: [targets]}
            for edge_type, (_, source, _) in zip(edge_types, lists, strict=True):
                nodes.setdefault(self.partition.ends(edge_type)[0], []).append(source)
            ids = {node_type: np.unique(np.concatenate(arrays)) for node_type, arrays in nodes.items()}
            ids[target] = np.concatenate([targets, np.setdiff1d(ids[target], targets)])
            edges = {}
            for edge_type, (counts, source, _) in zip(edge_types, lists, strict=True):
                row = _indices_in(ids[self.partition.ends(edge_type)[0]], source)
                column = np.repeat(np.arange(targets.size), counts)
                edges[self.partition.edges[edge_type].name] = torch.from_numpy(np.stack([row, column])).to(self.device)
            names = [name for name in self.model.node_types if self.partition.number.get(name) in ids]
            types = {name: self.partition.number[name] for name in names}
            x = {name: self._read(number - 1, node_type, ids[node_type]) for name, node_type in types.items()}
            x = self.model.before(x) if number == 0 else x
            num_rows = {name: rows.size(0) for name, rows in x.items()}
            layer_input = LayerInput(num_rows, {self.names[target]: targets.size}, edges)
            (out,) = self.model.layer(number, TypedRows.of(x, num_rows), layer_input).tables
            yield start, out


def _indices_in(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of each of ``wanted`` in ``ids``, int64 ``[n]``."""
    order = np.argsort(ids)
    return order[np.searchsorted(ids, wanted, sorter=order)]


def _replace_loops(
    targets: np.ndarray, counts: np.ndarray, source: np.ndarray, weight: Tensor, fill: float
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Replace self-loops by one per node after its other edges, weighted as in PyG by its last one or ``fill``."""
    row = np.repeat(np.arange(targets.size), counts)
    is_loop = source == targets[row]
    loop_weight = weight.new_full((targets.size,), fill)
    loops = np.flatnonzero(is_loop)
    last = loops[np.append(row[loops][1:] != row[loops][:-1], True)] if loops.size else loops
    loop_weight[torch.from_numpy(row[last])] = weight[torch.from_numpy(last)]
    order = np.argsort(np.concatenate([row[~is_loop], np.arange(targets.size)]), kind="stable")
    new_counts = np.bincount(row[~is_loop], minlength=targets.size) + 1
    new_weight = torch.cat([weight[torch.from_numpy(~is_loop)], loop_weight])
    return new_counts, np.concatenate([source[~is_loop], targets])[order], new_weight[torch.from_numpy(order)]
