"""Exact outputs for all nodes of a graph in parts: layer by layer, each rank those of its own nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.self_loops import inverse_root
from lightning_gnn.nn.conv import GCNConv
from lightning_gnn.nn.inference import FullInference, GraphBlock, Layer, layers_of
from lightning_gnn.partitioned.folder import Part
from lightning_gnn.partitioned.remote import Remote
from lightning_gnn.partitioned.shard import holders

_MOST_EDGES = 1 << 24
"""Edges of a block at most, whatever the memory, so that its arrays stay small."""
_AT_LEAST = 1 << 20
"""Bytes that a block may always take."""


class Published:
    """Numbers of this rank's nodes that others ask for while layers are computed: their outputs, and sums of weights.

    Each part's nodes are shared out over the ranks that have it, by their ids.

    Args:
        parts: How many parts there are.
        ranks: How many ranks.
    """

    def __init__(self, parts: int, ranks: int) -> None:
        self._held = holders(parts, ranks)
        self._rows: dict[Any, tuple[list[np.ndarray], list[Tensor]]] = {}

    def owner(self, part: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the rank that computes each node, from its part, int64 ``[n]``."""
        owner = np.empty(ids.size, np.int64)
        for number, ranks in enumerate(self._held):
            where = np.flatnonzero(part == number)
            owner[where] = np.array(ranks)[ids[where] % len(ranks)]
        return owner

    def give(self, name: Any, ids: list[np.ndarray], rows: list[Tensor]) -> None:
        """Let others ask for rows of nodes, ``[n, …]`` for ascending ids ``[n]``, several of both."""
        self._rows[name] = ids, rows

    def drop(self, name: Any) -> None:
        """Keep them no longer."""
        self._rows.pop(name, None)

    def published(self, name: Any, ids: np.ndarray) -> Any:
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
    """Some nodes of a part with all their in-edges, as the layers of :mod:`lightning_gnn.nn.conv` take a graph.

    Args:
        targets: The nodes, int64 ``[n]``.
        counts: In-edges of each, int64 ``[n]``.
        source: Where they come from, int64 ``[m]``, node by node.
        weight: What each weighs, ``[m]``, or None.
    """

    def __init__(self, targets: np.ndarray, counts: np.ndarray, source: np.ndarray, weight: Tensor | None) -> None:
        self.source_ids, local = np.unique(source, return_inverse=True)
        self.target_ids, self.weight = targets, weight
        self.num_sources, self.num_targets, self.num_edges = self.source_ids.size, targets.size, source.size
        rows, columns = (torch.arange(size, dtype=torch.int32) for size in (targets.size, self.source_ids.size))
        indptr = torch.zeros(targets.size + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(counts), 0, out=indptr[1:])
        part = Chunks(
            rows, torch.tensor([0, targets.size]), indptr, torch.from_numpy(local.astype(np.int32)), columns,
            torch.tensor([0, self.source_ids.size]), None, targets.size, self.source_ids.size,
        )  # fmt: skip
        self._graph = CompressedGraph(part, part)

    def gcn_weight(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the normalisation, which came with the block."""
        assert self.weight is not None
        return self.weight.to(self._graph.device)

    def edge_order(self, values: Tensor) -> Tensor:
        """Return the weights of the block's edges."""
        assert self.weight is not None
        return self.weight.to(self._graph.device)


@dataclass(frozen=True)
class InParts(FullInference):
    """How outputs for all nodes are computed where each rank has a part of the graph.

    ``memory_limit`` bounds the rows that a block of nodes reads; the outputs of two layers of the rank's own nodes are
    held beside them.

    Args:
        remote: Reads all parts.
        published: What others ask this rank for.
        wanted: The nodes whose outputs this rank returns, int64 ``[n]``.
    """

    remote: Remote | None = None
    published: Published | None = None
    wanted: Tensor | None = None

    @classmethod
    def of(cls, settings: FullInference, **more: Any) -> InParts:
        """Return settings with what belongs to a rank.

        Raises:
            ValueError: Files are asked for.
        """
        if settings.folder is not None:
            raise ValueError(
                f"FullInference(folder={str(settings.folder)!r}) does not go with a partitioned graph, where each rank "
                "holds the outputs of its own nodes in memory; leave folder out"
            )
        return cls(**{field.name: getattr(settings, field.name) for field in fields(FullInference)}, **more)

    @torch.no_grad()
    def run(
        self, model: nn.Module, x: Any, graph: Any, edge_weight: Any = None, stop: Callable[[], None] | None = None,
        **more: Any,
    ) -> Tensor:  # fmt: skip
        """Return the outputs of the wanted nodes, those of ``model(x, graph)`` on one machine up to rounding.

        All ranks must call it, with the same model; ``x``, the graph and the weights are read from the parts.

        Raises:
            RuntimeError: A rank is gone.
            ValueError: The model does not go layer by layer, or is in training mode.
        """
        assert self.remote is not None
        assert self.published is not None
        assert self.wanted is not None
        model = getattr(model, "_orig_mod", model)
        if model.training:
            raise ValueError("outputs for all nodes are for evaluation; call model.eval() first")
        layers = layers_of(model)
        if layers is None:
            raise ValueError(
                f"inference='full' on a partitioned graph goes layer by layer, which {type(model).__name__} does not: "
                "use GCN, GraphSAGE or GAT of lightning_gnn.nn with jk=None or 'last', or inference='sampled' with "
                "num_neighbors=-1 (eval_loader_kwargs)"
            )
        for layer in layers:
            if layer.whole_norm is not None:
                raise ValueError(
                    f"{layer.whole_norm} averages over all nodes, of which no rank has the outputs: train with "
                    "norm=batch, or leave inference out"
                )
        return _Pass(self, layers, edge_weight is not None, stop or (lambda: None)).run()


class _Pass:
    """One pass over all layers."""

    def __init__(self, how: InParts, layers: Sequence[Layer], weighted: bool, stop: Callable[[], None]) -> None:
        assert how.remote is not None
        assert how.published is not None
        self.how, self.layers, self.weighted, self.stop = how, layers, weighted, stop
        self.remote, self.published = how.remote, how.published
        self.exchange, self.partition = how.remote.exchange, how.remote.partition
        parameter = next(parameter for layer in layers for parameter in layer.conv.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.sums: set[Any] = set()  # of weights, as they are published
        self.parts = list(self.remote.shard.parts.values())
        self.own = []
        for part in self.parts:
            ids = part.ids[0]
            mine = self.published.owner(np.full(ids.size, part.number), ids) == self.exchange.rank
            self.own.append(np.flatnonzero(mine))

    def run(self) -> Tensor:
        """Compute all layers; return the wanted rows of the last one."""
        before: Any = None
        for number, layer in enumerate(self.layers):
            name = ("layer", number)
            norm = self._publish_degrees(layer.conv) if isinstance(layer.conv, GCNConv) else None
            rows = [torch.empty((own.size, layer.width), dtype=self.dtype) for own in self.own]
            for place, part in enumerate(self.parts):
                for start, block in self._blocks(part, self.own[place], layer, norm):
                    out = self._outputs(layer, block, before)
                    rows[place][start : start + block.num_targets] = out.to("cpu", self.dtype)
                    self.stop()
            self.published.give(name, [part.ids[0][own] for part, own in zip(self.parts, self.own, strict=True)], rows)
            self.exchange.gather(None)  # all have this layer, so nobody reads the one before any more
            self.published.drop(before)
            before = name
        assert self.how.wanted is not None
        out = self._read(before, self.how.wanted.numpy())
        self.exchange.gather(None)
        for name in (before, *self.sums):
            self.published.drop(name)
        return out.to(self.device)

    def _outputs(self, layer: Layer, block: PartBlock, before: Any) -> Tensor:
        read = self._read(before, block.source_ids).to(self.device, self.dtype)
        block.to(self.device)
        if isinstance(layer.conv, GCNConv):
            weights = None if block.weight is None or layer.conv.normalize else block.weight
            out: Tensor = layer.conv(read, block, weights)
        else:
            out = layer.conv((read, self._read(before, block.target_ids).to(self.device, self.dtype)), block)
        for function in layer.after:
            out = function(out)
        return out

    def _read(self, name: Any, ids: np.ndarray) -> Tensor:
        """Return rows of a layer's outputs, of the features for None, or of what else is published."""
        if name is None:
            return self.remote.node_rows(0, ids, ["x"])["x"]
        owner = self.published.owner(self.partition.owner[0].numpy()[ids], ids)
        places = {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}
        answers = self.exchange.ask("published", {rank: (name, ids[where]) for rank, where in places.items()})
        width = self.layers[name[1]].width if name[0] == "layer" else 1
        out = torch.empty((ids.size, width), dtype=self.dtype)
        for rank, where in places.items():
            out[torch.from_numpy(where)] = torch.from_numpy(answers[rank]).view(self.dtype)
        return out

    def _publish_degrees(self, conv: Any) -> Any:
        """Let all ranks know the sums of the weights of the edges into each node; return their name."""
        if not conv.normalize:
            return None
        name = ("degrees", conv.add_self_loops, conv.improved)
        if name in self.sums:
            return name
        self.sums.add(name)
        sums = []
        for part, own in zip(self.parts, self.own, strict=True):
            degrees = torch.zeros((own.size, 1), dtype=self.dtype)
            for start, targets, counts, _, weight in self._edges(part, own, conv.add_self_loops, conv.improved, 1):
                row = torch.repeat_interleave(torch.arange(start, start + targets.size), torch.from_numpy(counts))
                degrees.view(-1).index_add_(0, row, weight)
            sums.append(degrees)
        self.published.give(name, [part.ids[0][own] for part, own in zip(self.parts, self.own, strict=True)], sums)
        self.exchange.gather(None)
        return name

    def _blocks(self, part: Part, own: np.ndarray, layer: Layer, norm: Any) -> Iterator[tuple[int, PartBlock]]:
        """Yield blocks of a part's nodes, with the number of the first."""
        conv = layer.conv
        loops, improved = bool(getattr(conv, "add_self_loops", False)), bool(getattr(conv, "improved", False))
        for start, targets, counts, source, weight in self._edges(part, own, loops, improved, layer.widest):
            block = PartBlock(targets, counts, source, None)
            if norm is not None:
                from_source, to_target = (
                    inverse_root(self._read(norm, ids).view(-1)) for ids in (block.source_ids, targets)
                )
                places = torch.from_numpy(np.searchsorted(block.source_ids, source))
                rows = torch.repeat_interleave(torch.arange(targets.size), torch.from_numpy(counts))
                block.weight = from_source[places] * weight * to_target[rows]
            elif self.weighted and isinstance(conv, GCNConv):
                block.weight = weight
            yield start, block

    def _edges(
        self, part: Part, own: np.ndarray, loops: bool, improved: bool, width: int
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, Tensor]]:
        """Yield the in-edges of a part's nodes, some nodes at a time, with exactly one self-loop each if asked for.

        As PyG's ``add_remaining_self_loops`` has it, one that is there keeps its weight, of several the last one.

        Yields:
            Which of ``own`` is the first; nodes ``[n]``, their in-edges ``[n]``, sources and weights ``[m]``.
        """
        graph = part.lists(0)
        indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
        weights = part.edge_rows[0]["edge_weight"] if self.weighted else None
        limit = max(self.how.limit_on(self.device), _AT_LEAST)
        row = (width + self.partition.nodes[0].shape("x")[1]) * self.dtype.itemsize
        most = int(min(_MOST_EDGES, limit // row))
        degrees = indptr[own + 1] - indptr[own]
        taken = np.cumsum(degrees + 1)
        start = 0
        while start < own.size:
            end = int(np.searchsorted(taken, (taken[start - 1] if start else 0) + most, "right"))
            end = min(max(end, start + 1), own.size)
            places, counts = own[start:end], degrees[start:end]
            targets = part.ids[0][places]
            begins = indptr[places] - (np.cumsum(counts) - counts)
            at = np.repeat(begins, counts) + np.arange(int(counts.sum()))
            source = indices[at].astype(np.int64)
            weight = torch.ones(at.size, dtype=self.dtype)
            if weights is not None:
                weight = weights[torch.from_numpy(at)].view(-1).to(self.dtype)
            if loops:
                fill = 2.0 if improved and self.weighted else 1.0
                counts, source, weight = _with_loops(targets, counts, source, weight, fill)
            yield start, targets, counts, source, weight
            start = end


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
