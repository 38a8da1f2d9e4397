"""Sums of a model's first layer, computed by the threads that prepare its mini-batches.

The sums of features over edges read no parameters, so they can be computed ahead of the training step. A mini-batch
without them shows which sums a model reads; later mini-batches of the same loader have them. The operator takes them
only in place of the same sums of the same rows, so that results do not change.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.ops.aggregate_update import numba
from lightning_gnn.ops.aggregate_update.edge_order import kept, prepared, target_edges
from lightning_gnn.ops.aggregate_update.reference import Update


class Norm(NamedTuple):
    """Weights of the edges, as in PyG's ``gcn_norm``."""

    loop_weight: float
    add_self_loops: bool
    dtype: torch.dtype


class _Form(NamedTuple):
    """The sums that a first layer reads."""

    hops: int  # number of hops whose edges it reads
    norm: Norm | None  # None for edges without weights
    mean: bool
    beside: bool  # whether the targets' own rows stand beside the sums


class SumsAhead:
    """The form of the sums of a loader's mini-batches; unknown until a model has read one."""

    def __init__(self) -> None:
        self.form: _Form | None = None

    def prepare(self, batch: Any) -> None:
        """Compute the sums of a homogeneous mini-batch on a CPU; record how to recognize its features and edges."""
        if not isinstance(batch, Data):
            return
        x, edge_index, nodes, edges = (
            batch.get(key) for key in ("x", "edge_index", "num_sampled_nodes", "num_sampled_edges")
        )
        if not nodes or not edges or not _is_plain(x) or not _is_plain(edge_index):
            return
        if x.dim() != 2 or not x.is_floating_point() or x.requires_grad or not x.is_contiguous():
            return
        layouts = list(zip(accumulate(nodes), accumulate(edges), strict=False))  # nodes have one hop more
        ready = _Ready(self, x, x._version, edge_index._version, layouts)
        if self.form is not None:
            ready.compute(edge_index, self.form)
        prepared[edge_index] = ready


@dataclass
class _Ready:
    """A mini-batch, and the sums of its first layer if their form is known."""

    owner: SumsAhead
    x: Tensor
    x_version: int
    edge_version: int
    layouts: list[tuple[int, int]]  # targets and edges of a layer by its number of hops, from 1 on
    form: _Form | None = None
    edges: list[Tensor] | None = None  # sorted by target
    sums: Tensor | None = None

    def compute(self, edge_index: Tensor, form: _Form) -> None:
        """Sort the edges of the first layer, and sum the rows of x along them."""
        if form.hops <= len(self.layouts):
            num_targets, num_edges = self.layouts[form.hops - 1]
            self.edges = _sort(edge_index[:, :num_edges], self.x.size(0), num_targets, form.norm)
            self.form, self.sums = form, numba.sum_beside(self.x, self.edges, form.mean, form.beside)

    def reads(self, x: Tensor) -> bool:
        """Return whether rows are the first ones of the mini-batch's, as they were."""
        same = x.data_ptr() == self.x.data_ptr() and x.dtype == self.x.dtype and x.stride() == self.x.stride()
        return same and x.size(1) == self.x.size(1) and self.x._version == self.x_version and not x.requires_grad


class _EdgesOfBatch(list[Tensor]):
    """Sorted edges of a layer of a prepared mini-batch."""

    def __init__(self, edges: list[Tensor], ready: _Ready, hops: int, norm: Norm | None) -> None:
        super().__init__(edges)
        self.ready, self.hops, self.norm = ready, hops, norm


def sort_edges(x: Tensor, edge_index: Tensor, num_targets: int, norm: Norm | None = None) -> list[Tensor]:
    """Sort the edges of a layer by target, and weight them by ``norm``; :func:`find_sums` recognizes the result."""
    ready, layout = _find(x, edge_index), (num_targets, edge_index.size(1))
    if ready is None or layout not in ready.layouts:
        return _sort(edge_index, x.size(0), num_targets, norm)
    hops, edges, form = ready.layouts.index(layout) + 1, ready.edges, ready.form
    if form is None or edges is None or (form.hops, form.norm) != (hops, norm):
        edges = _sort(edge_index, x.size(0), num_targets, norm)
    return _EdgesOfBatch(edges, ready, hops, norm)


def _find(x: Tensor, edge_index: Tensor) -> _Ready | None:
    """Return the prepared mini-batch that holds these features and edges, unchanged."""
    if torch.compiler.is_compiling() or not _is_plain(edge_index):
        return None
    ready: _Ready | None = prepared.get(edge_index)
    return ready if ready is not None and edge_index._version == ready.edge_version and ready.reads(x) else None


def _sort(edge_index: Tensor, num_sources: int, num_targets: int, norm: Norm | None) -> list[Tensor]:
    """Sort edges, once for all layers on the same tensor on a device."""
    if norm is None:
        return target_edges(edge_index, num_sources, num_targets)
    order: Any = torch.ops.lightning_gnn
    arguments = edge_index, num_sources, num_targets, None, *norm
    return kept(edge_index, ("gcn", num_sources, num_targets, *norm), lambda: order.gcn_edges(*arguments))


def with_all_rows(part: list[Tensor], edges: list[Tensor]) -> list[Tensor]:
    """Return ``part``, which has all rows of ``edges``, with what is known of these."""
    known = isinstance(edges, _EdgesOfBatch) and part[0].numel() == edges[0].numel()
    return _EdgesOfBatch(part, edges.ready, edges.hops, edges.norm) if known else part  # type: ignore[attr-defined]


def find_sums(call: Update, beside: bool) -> Tensor | None:
    """Return the aggregated rows of a call of the operator if they are known, else note that it reads them."""
    if not isinstance(call.edges, _EdgesOfBatch) or not call.aggregate_first or not call.edges.ready.reads(call.x):
        return None
    ready, form = call.edges.ready, _Form(call.edges.hops, call.edges.norm, call.mean, beside)
    if ready.form == form:
        return ready.sums
    ready.owner.form = form
    return None


def _is_plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return type(tensor) is Tensor and tensor.is_cpu and not tensor.is_inference()
