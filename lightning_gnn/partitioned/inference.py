"""Exact outputs for all nodes of a graph in parts: layer by layer, each rank those of its own nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
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
from lightning_gnn.partitioned.folder import GraphPart, Partition
from lightning_gnn.partitioned.remote import Remote
from lightning_gnn.partitioned.shard import holders

_MOST_EDGES = 1 << 24  # edges of a block at most, whatever the memory, so that its arrays stay small
_AT_LEAST = 1 << 20  # bytes that a block may always take


class Published:
    """This rank's numbers that others ask for between layers; ranks with the same part share its nodes by id."""

    def __init__(self, parts: int, ranks: int) -> None:
        self._held = holders(parts, ranks)
        self._rows: dict[Hashable, tuple[list[np.ndarray], list[Tensor]]] = {}

    def owner(self, part: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the rank that computes each node, from its part, int64 ``[n]``."""
        owner = np.empty(ids.size, np.int64)
        for number, ranks in enumerate(self._held):
            where = np.flatnonzero(part == number)
            owner[where] = np.array(ranks)[ids[where] % len(ranks)]
        return owner

    def give(self, name: Hashable, ids: list[np.ndarray], rows: list[Tensor]) -> None:
        """Let others ask for rows of nodes, ``[n, …]`` for ascending ids ``[n]``, several of both."""
        self._rows[name] = ids, rows

    def drop(self, name: Hashable) -> None:
        """Keep them no longer."""
        self._rows.pop(name, None)

    def published(self, name: Hashable, ids: np.ndarray) -> np.ndarray:
        """Answer with the rows of some nodes, numbers ``[n, …]``."""
        known, rows = self._rows[name]
        out = rows[0].new_empty((ids.size, *rows[0].shape[1:]))
        for of, values in zip(known, rows, strict=True):
            if of.size:
                places = np.minimum(np.searchsorted(of, ids), of.size - 1)
                hit = np.flatnonzero(of[places] == ids)
                out[torch.from_numpy(hit)] = values[torch.from_numpy(places[hit])]
        return out.view(torch.uint8).numpy() if out.numel() else np.empty((ids.size, 0), np.uint8)


class PartBlock(GraphBlock):
    """Some nodes of a part with all their in-edges, node by node, as :mod:`lightning_gnn.nn.conv` takes a graph."""

    def __init__(self, targets: np.ndarray, counts: np.ndarray, source: np.ndarray, weight: Tensor | None) -> None:
        self.source_ids, local = np.unique(source, return_inverse=True)
        self.target_ids, self.weight = targets, weight
        self.num_sources, self.num_targets, self.num_edges = self.source_ids.size, targets.size, source.size
        indptr = torch.zeros(targets.size + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(counts), 0, out=indptr[1:])
        rows = CSR(indptr, torch.from_numpy(local.astype(np.int32)), self.source_ids.size)
        self._graph = CompressedGraph(rows)

    def gcn_weight(self, *args: object, **kwargs: object) -> Tensor:
        """Return the normalization, which came with the block."""
        assert self.weight is not None
        return self.weight.to(self._graph.device)

    edge_order = gcn_weight


@dataclass(frozen=True)
class InParts(FullInference):
    """How outputs for all nodes are computed where each rank has a part; ``memory_limit`` bounds a block's reads."""

    remote: Remote | None = None
    published: Published | None = None  # what others ask this rank for
    wanted: Mapping[NodeType | None, Tensor] | None = None
    """The nodes of each type whose outputs this rank returns, int64 ``[n]``; the type is None where there is one."""

    @classmethod
    def of(cls, settings: FullInference, **more: Any) -> InParts:
        """Return settings with what belongs to a rank."""
        if settings.folder is not None:
            given = f"FullInference(folder={str(settings.folder)!r}) does not go with a partitioned graph"
            raise ValueError(f"{given}, where each rank holds its nodes' outputs in memory; leave folder out")
        return cls(**{field.name: getattr(settings, field.name) for field in fields(FullInference)}, **more)

    def run(
        self, model: nn.Module, x: object, graph: object, edge_weight: object = None,
        stop: Callable[[], None] | None = None, **more: object,
    ) -> Tensor:  # fmt: skip
        """Return the wanted nodes' outputs, those of ``model(x, graph)`` up to rounding; all ranks must call it."""
        return _PlainPass(self, model, stop, edge_weight is not None).run()[None]

    def run_types(
        self, model: nn.Module, embeddings: TypeEmbeddings | None = None, stop: Callable[[], None] | None = None
    ) -> dict[NodeType, Tensor]:
        """Do so on a graph with types: return the outputs of the wanted nodes by type."""
        return _TypedPass(self, model, stop, embeddings).run()


def check_model(model: nn.Module, partition: Partition, embeddings: TypeEmbeddings | None = None) -> None:
    """Say before a run what a model cannot do on a graph in parts."""
    if partition.typed:
        typed_model(model, partition, embeddings)
    else:
        plain_layers(model, partition)


def plain_layers(model: nn.Module, partition: Partition) -> list[Layer]:
    """Return the layers of a model of graphs without types."""
    if "x" not in partition.nodes[0].attributes:
        raise ValueError("inference='full' needs features x, and the partitioned graph has none")
    model = getattr(model, "_orig_mod", model)
    layers = layers_of(model)
    if layers is None:
        raise _not_by_layers(model, "GCN, GraphSAGE or GAT of lightning_gnn.nn with jk=None or 'last'")
    for layer in layers:
        if layer.whole_norm is not None:
            fix = "train with norm=batch, or leave inference out"
            raise ValueError(f"{layer.whole_norm} averages over all nodes, of which no rank has the outputs: {fix}")
    return layers


def typed_model(model: nn.Module, partition: Partition, embeddings: TypeEmbeddings | None = None) -> _HeteroGNN:
    """Return a model of graphs with types, whose layers run one after another."""
    model = getattr(model, "_orig_mod", model)
    lazy = any(nn.parameter.is_lazy(parameter) for parameter in model.parameters())
    if not isinstance(model, _HeteroGNN) or type(model).forward is not _HeteroGNN.forward or lazy:
        raise _not_by_layers(model, "HeteroGraphSAGE, RGCN, RGAT or HGT of lightning_gnn.nn")
    tables = {} if embeddings is None else {name: table.num_embeddings for name, table in embeddings.tables.items()}
    for edge_type in {kind: None for kinds in model.layers for kind in kinds}:
        if edge_type not in partition.number:
            raise ValueError(f"the partitioned graph has no edges of {edge_type}, which the model reads")
    for name in model.node_types:
        if name not in partition.number:
            continue
        kind = partition.nodes[partition.number[name]]
        if ("x" in kind.attributes) == (name in tables):
            wrong = "features x and embeddings; leave one of them out"
            wrong = wrong if name in tables else "no features x: give some, or embeddings that are trained"
            raise ValueError(f"nodes of {name!r} have {wrong}")
        if tables.get(name, kind.count) != kind.count:
            raise ValueError(f"there are {kind.count} nodes of {name!r}, but embeddings of {tables[name]}")
    return model


def _not_by_layers(model: nn.Module, others: str) -> ValueError:
    return ValueError(
        f"inference='full' on a partitioned graph goes layer by layer, which {type(model).__name__} does not: use "
        f"{others}, or inference='sampled' with num_neighbors=-1 (eval_loader_kwargs)"
    )


class _Pass:
    """One pass over all layers; derived classes say what the layers are and how a block of one is computed."""

    widths: Sequence[int]  # columns of what each layer returns
    widest: Sequence[int]  # columns of the widest tensor on the way there
    reached: Sequence[Mapping[int, Sequence[int]]]
    """The numbers of the node types that each layer computes, with those of the edge types that lead to them."""
    weighted = False  # whether edges have weights

    def __init__(self, how: InParts, model: nn.Module, stop: Callable[[], None] | None) -> None:
        assert how.remote is not None
        assert how.published is not None
        if model.training:
            raise ValueError("outputs for all nodes are for evaluation; call model.eval() first")
        self.how, self.stop = how, stop or (lambda: None)
        self.remote, self.published = how.remote, how.published
        self.exchange, self.partition = how.remote.exchange, how.remote.partition
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.parts = list(self.remote.shard.parts.values())
        self.own: list[list[np.ndarray]] = []  # by type and part, which of its nodes are this rank's to compute
        for kind in range(len(self.partition.nodes)):
            self.own.append([])
            for part in self.parts:
                ids = part.ids[kind]
                mine = self.published.owner(np.full(ids.size, part.number), ids) == self.exchange.rank
                self.own[kind].append(np.flatnonzero(mine))

    @torch.no_grad()
    def run(self) -> dict[NodeType | None, Tensor]:
        """Compute all layers; return the wanted rows of the last one, of the types that it computes."""
        for number, reached in enumerate(self.reached):
            self._prepare(number)
            for target, kinds in reached.items():
                rows = [torch.empty((own.size, self.widths[number]), dtype=self.dtype) for own in self.own[target]]
                for place, part in enumerate(self.parts):
                    for start, out in self._blocks(number, target, kinds, part, self.own[target][place]):
                        rows[place][start : start + out.size(0)] = out.to("cpu", self.dtype)
                        self.stop()
                self._publish(("layer", number, target), target, rows)
            self.exchange.gather(None)  # all have this layer, so the one before is not read any more
            self._drop(number - 1)
        assert self.how.wanted is not None
        last, found = len(self.reached) - 1, {}
        for name, wanted in self.how.wanted.items():
            target = self.partition.number.get(name, 0)
            if target in self.reached[last]:
                found[name] = self._read(last, target, wanted.numpy())
        self.exchange.gather(None)
        self._drop(last)
        return found

    def _prepare(self, number: int) -> None:
        """Let all ranks know what they need for a layer beside the outputs of the one before."""

    def _features(self, kind: int, ids: np.ndarray) -> Tensor:
        """Return features of nodes of a type."""
        return self.remote.node_rows(kind, ids, ["x"])["x"]

    def _blocks(
        self, number: int, target: int, kinds: Sequence[int], part: GraphPart, own: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the outputs of a layer for a part's nodes of a type, and the number of the first."""
        raise NotImplementedError

    def _publish(self, name: Hashable, kind: int, rows: list[Tensor]) -> None:
        ids = [part.ids[kind][own] for part, own in zip(self.parts, self.own[kind], strict=True)]
        self.published.give(name, ids, rows)

    def _drop(self, number: int) -> None:
        for target in self.reached[number] if number >= 0 else ():
            self.published.drop(("layer", number, target))

    def _read(self, number: int, kind: int, ids: np.ndarray) -> Tensor:
        """Return rows of a layer's outputs, or for -1 of the features."""
        if number < 0:
            return self._features(kind, ids).to(self.device, self.dtype)
        return self._ask(("layer", number, kind), kind, ids, self.widths[number]).to(self.device)

    def _ask(self, name: Hashable, kind: int, ids: np.ndarray, width: int) -> Tensor:
        """Return rows ``[n, width]`` of what is published."""
        owner = self.published.owner(self.partition.owner[kind].numpy()[ids], ids)
        places = {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}
        answers = self.exchange.ask("published", {rank: (name, ids[where]) for rank, where in places.items()})
        out = torch.empty((ids.size, width), dtype=self.dtype)
        for rank, where in places.items():
            out[torch.from_numpy(where)] = torch.from_numpy(answers[rank]).view(self.dtype)
        return out

    def _edges(
        self, target: int, kinds: Sequence[int], part: GraphPart, own: np.ndarray, width: int,
        loops: bool = False, improved: bool = False,
    ) -> Iterator[tuple[int, np.ndarray, list[tuple[np.ndarray, np.ndarray, Tensor]]]]:  # fmt: skip
        """Yield in-edges of a part's nodes, some at a time; on request with one self-loop each, as PyG defines them."""
        lists = [(graph.indptr.numpy(), graph.indices.numpy()) for graph in map(part.lists, kinds)]
        weights = part.edge_rows[0]["edge_weight"] if self.weighted else None
        limit = max(self.how.limit_on(self.device), _AT_LEAST)
        most = int(min(_MOST_EDGES, limit // (width * self.dtype.itemsize)))
        degrees = [indptr[own + 1] - indptr[own] for indptr, _ in lists]
        taken = np.cumsum(sum(degrees, np.ones(own.size, np.int64)))
        start = 0
        while start < own.size:
            end = int(np.searchsorted(taken, (taken[start - 1] if start else 0) + most, "right"))
            end = min(max(end, start + 1), own.size)
            places = own[start:end]
            targets, found = part.ids[target][places], []
            for (indptr, indices), degree in zip(lists, degrees, strict=True):
                counts = degree[start:end]
                begins = indptr[places] - (np.cumsum(counts) - counts)
                at = np.repeat(begins, counts) + np.arange(int(counts.sum()))
                source = indices[at].astype(np.int64)
                weight = torch.ones(at.size, dtype=self.dtype)
                if weights is not None:
                    weight = weights[torch.from_numpy(at)].view(-1).to(self.dtype)
                if loops:
                    fill = 2.0 if improved and self.weighted else 1.0
                    counts, source, weight = _with_loops(targets, counts, source, weight, fill)
                found.append((counts, source, weight))
            yield start, targets, found
            start = end


class _PlainPass(_Pass):
    """One over a graph without types."""

    def __init__(self, how: InParts, model: nn.Module, stop: Callable[[], None] | None, weighted: bool) -> None:
        super().__init__(how, model, stop)
        self.weighted = weighted
        self.layers = plain_layers(model, self.partition)
        self.widths, self.widest = ([getattr(layer, key) for layer in self.layers] for key in ("width", "widest"))
        self.reached = [{0: [0]}] * len(self.layers)
        self.sums: set[Hashable] = set()  # of weights, as they are published

    def run(self) -> dict[NodeType | None, Tensor]:
        out = super().run()
        for name in self.sums:
            self.published.drop(name)
        return out

    def _sums_for(self, conv: nn.Module) -> tuple[str, bool, bool] | None:
        """Return the name of the sums of weights that a layer divides by, None where it does not."""
        if not isinstance(conv, GCNConv) or not conv.normalize:
            return None
        return "sums", conv.add_self_loops, conv.improved

    def _prepare(self, number: int) -> None:
        name = self._sums_for(self.layers[number].conv)
        if name is None or name in self.sums:
            return
        self.sums.add(name)
        _, loops, improved = name
        sums = []
        for part, own in zip(self.parts, self.own[0], strict=True):
            degrees = torch.zeros((own.size, 1), dtype=self.dtype)
            for start, targets, ((counts, _, weight),) in self._edges(0, [0], part, own, 1, loops, improved):
                row = torch.repeat_interleave(torch.arange(start, start + targets.size), torch.from_numpy(counts))
                degrees.view(-1).index_add_(0, row, weight)
            sums.append(degrees)
        self._publish(name, 0, sums)
        self.exchange.gather(None)

    def _blocks(
        self, number: int, target: int, kinds: Sequence[int], part: GraphPart, own: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        layer = self.layers[number]
        conv: Any = layer.conv
        norm = self._sums_for(conv)
        loops, improved = bool(getattr(conv, "add_self_loops", False)), bool(getattr(conv, "improved", False))
        width = layer.widest + self.partition.nodes[0].shape("x")[1]
        for start, targets, ((counts, source, weight),) in self._edges(0, kinds, part, own, width, loops, improved):
            block = PartBlock(targets, counts, source, None)
            if norm is not None:
                from_source, to_target = (
                    inverse_root(self._ask(norm, 0, ids, 1).view(-1)) for ids in (block.source_ids, targets)
                )
                places = torch.from_numpy(np.searchsorted(block.source_ids, source))
                rows = torch.repeat_interleave(torch.arange(targets.size), torch.from_numpy(counts))
                block.weight = from_source[places] * weight * to_target[rows]
            elif self.weighted and isinstance(conv, GCNConv):
                block.weight = weight
            yield start, self._outputs(layer, block, number)

    def _outputs(self, layer: Layer, block: PartBlock, number: int) -> Tensor:
        read = self._read(number - 1, 0, block.source_ids)
        block.to(self.device)
        if isinstance(layer.conv, GCNConv):
            weights = None if block.weight is None or layer.conv.normalize else block.weight
            out: Tensor = layer.conv(read, block, weights)
        else:
            out = layer.conv((read, self._read(number - 1, 0, block.target_ids)), block)
        for function in layer.after:
            out = function(out)
        return out


class _TypedPass(_Pass):
    """One over a graph with types, a type of targets after the other."""

    def __init__(
        self, how: InParts, model: nn.Module, stop: Callable[[], None] | None, embeddings: TypeEmbeddings | None
    ) -> None:
        super().__init__(how, model, stop)
        self.model = typed_model(model, self.partition, embeddings)
        self.tables: Mapping[NodeType, Any] = {} if embeddings is None else dict(embeddings.tables.items())
        number = self.partition.number
        self.names = [kind.name for kind in self.partition.nodes]
        self.widths, self.widest, self.reached = [], [], []
        for conv, read in zip(self.model.convs, self.model.layers, strict=True):
            one: Any = next(iter(conv.convs.values())) if isinstance(conv, TypedConv) else conv
            heads = one.heads if hasattr(one, "concat") else 1
            self.widest.append(one.out_channels * heads)
            self.widths.append(one.out_channels * (heads if getattr(one, "concat", False) else 1))
            types = {name: [number[kind] for kind in read if kind[2] == name] for name in self.model.node_types}
            self.reached.append({
                number[name]: kinds for name, kinds in types.items() if kinds or (self.model.every and name in number)
            })  # fmt: skip
        needed = {number[name] for name in how.wanted or ()}  # types, by the layers above or the user
        for at, reached in reversed([*enumerate(self.reached)]):
            self.reached[at] = {target: kinds for target, kinds in reached.items() if target in needed}
            needed |= {self.partition.ends(kind)[0] for kinds in self.reached[at].values() for kind in kinds}
        self.num_features = max(
            self.tables[name].embedding_dim if name in self.tables else self.partition.nodes[number[name]].shape("x")[1]
            for name in self.model.node_types if name in number
        )  # fmt: skip

    def run(self) -> dict[NodeType | None, Tensor]:
        return self.model.after(super().run())

    def _features(self, kind: int, ids: np.ndarray) -> Tensor:
        if self.names[kind] not in self.tables:
            return super()._features(kind, ids)
        weight: Tensor = self.tables[self.names[kind]].weight
        return weight[torch.from_numpy(ids).to(weight.device)]

    def _blocks(
        self, number: int, target: int, kinds: Sequence[int], part: GraphPart, own: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        width = self.widest[number] + (self.num_features if number == 0 else self.widths[number - 1])
        for start, targets, lists in self._edges(target, kinds, part, own, width):
            read = {target: [targets]}
            for kind, (_, source, _) in zip(kinds, lists, strict=True):
                read.setdefault(self.partition.ends(kind)[0], []).append(source)
            ids = {kind: np.unique(np.concatenate(found)) for kind, found in read.items()}
            ids[target] = np.concatenate([targets, np.setdiff1d(ids[target], targets)])  # targets go first
            edges = {}
            for kind, (counts, source, _) in zip(kinds, lists, strict=True):
                row = _places(ids[self.partition.ends(kind)[0]], source)
                column = np.repeat(np.arange(targets.size), counts)
                edges[self.partition.edges[kind].name] = torch.from_numpy(np.stack([row, column])).to(self.device)
            order = [name for name in self.model.node_types if self.partition.number.get(name) in ids]
            x = {name: self._read(number - 1, at, ids[at]) for name in order for at in [self.partition.number[name]]}
            x = self.model.before(x) if number == 0 else x
            counts_of = {name: rows.size(0) for name, rows in x.items()}
            reads = LayerInput(counts_of, {self.names[target]: targets.size}, edges)
            (out,) = self.model.layer(number, TypedRows.of(x, counts_of), reads).tables
            yield start, out


def _places(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return where each of ``wanted`` is among ``ids``, int64 ``[n]``."""
    order = np.argsort(ids)
    return order[np.searchsorted(ids, wanted, sorter=order)]


def _with_loops(
    targets: np.ndarray, counts: np.ndarray, source: np.ndarray, weight: Tensor, fill: float
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return in-edges whose self-loops are replaced by one per node, behind its others."""
    row = np.repeat(np.arange(targets.size), counts)
    loop = source == targets[row]
    own = weight.new_full((targets.size,), fill)
    where = np.flatnonzero(loop)
    last = where[np.append(row[where][1:] != row[where][:-1], True)] if where.size else where
    own[torch.from_numpy(row[last])] = weight[torch.from_numpy(last)]
    order = np.argsort(np.concatenate([row[~loop], np.arange(targets.size)]), kind="stable")
    new = np.bincount(row[~loop], minlength=targets.size) + 1
    both = torch.cat([weight[torch.from_numpy(~loop)], own])
    return new, np.concatenate([source[~loop], targets])[order], both[torch.from_numpy(order)]
