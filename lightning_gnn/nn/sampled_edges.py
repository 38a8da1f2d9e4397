"""Whether layers may be trimmed by the numbers of sampled nodes and edges: a transform may have rewired a mini-batch.

Trimming is exact if, for every relation, the edges of a hop lead to nodes found in the hop before, come from nodes
found by then, and the rows in question are those of the seeds. The CPU checks it in each batch (under 1 % of a step).
On a device a tensor is known by identity and version: one of our samplers, or one in order when :func:`moved` copied
it. Versions do not count writes through ``.data``: a transform that does that on a device must replace the tensor.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data, HeteroData

_SEEDS = ("src_index", "dst_pos_index", "dst_neg_index")  # attributes that name seeds of link prediction, in triplets
_known: Any = WeakTensorKeyDictionary()  # tensors on devices that were in order, their version then, and the order


class _Span(NamedTuple):
    """Node ids of a tensor that must lie in ``[low, high)``: those at ``[row, start:stop]``, or all for row None."""

    row: int | None
    start: int
    stop: int
    low: int
    high: int


_Claims = list[tuple[Tensor, tuple[_Span, ...]]]


def in_sampled_order(batch: Data | HeteroData, num_rows: Mapping[Any, int] | None = None) -> bool:
    """Say whether trimming leaves the seeds' rows as they are, if nodes have ``num_rows`` features by type."""
    claims = _claims(batch, num_rows)
    if claims is None:
        return False
    unknown = [claim for claim in claims if (state := _state(*claim)) is None or _known.get(claim[0]) != state]
    if not _hold(unknown):
        return False
    _remember(unknown)
    return True


def remember(batch: Any) -> None:
    """Take a mini-batch that a sampler of this package has just made on a device for what it is."""
    _remember(_claims(batch) or [])


def moved(batch: Any, move: Callable[[Any], Any]) -> Any:
    """Return ``move(batch)``, and remember that its edges are in order if those of ``batch`` on the CPU are."""
    claims = _claims(batch) if isinstance(batch, Data | HeteroData) else None
    if claims is None or not all(tensor.is_cpu for tensor, _ in claims) or not _hold(claims):
        return move(batch)
    with torch.inference_mode(False):  # whose tensors have no version
        batch = move(batch)
    remember(batch)
    return batch


def _claims(batch: Any, num_rows: Mapping[Any, int] | None = None) -> _Claims | None:
    """Return where node ids must lie for trimming to be exact; None if the numbers alone say that it is not."""
    # Count the nodes of each type up to each hop, the seeds as hop 0.
    stores = batch.node_stores if isinstance(batch, HeteroData) else [batch._store]
    found: dict[Any, list[int]] = {}
    for store in stores:
        if (counts := store.get("num_sampled_nodes")) is None:
            return None
        found[store._key] = [*accumulate(int(count) for count in counts)]
        if num_rows is not None and found[store._key][-1] > num_rows[store._key]:
            return None
    # The ends of labeled edges must be seeds, whose rows all layers compute.
    claims: _Claims = []
    for store in batch.edge_stores if isinstance(batch, HeteroData) else stores:
        source, _, target = store._key or (None, None, None)
        if isinstance(label := store.get("edge_label_index"), Tensor):
            ends = ((0, found[source][0]), (1, found[target][0]))
            claims.append((label, tuple(_Span(row, 0, label.size(-1), 0, high) for row, high in ends)))
        if not isinstance(edges := store.get("edge_index"), Tensor):
            continue
        if (counts := store.get("num_sampled_edges")) is None:
            return None
        # The edges of a hop lead to its targets from sources that the next hop has found at the latest.
        stops, spans = [0, *accumulate(int(count) for count in counts)], []
        targets, sources = [0, *found[target]], found[source]
        if stops[-1] != edges.size(1) or len(targets) < len(stops) or len(sources) < len(stops):
            return None
        for hop, (start, stop) in enumerate(pairwise(stops)):
            spans.append(_Span(0, start, stop, 0, sources[hop + 1]))
            spans.append(_Span(1, start, stop, targets[hop], targets[hop + 1]))
        claims.append((edges, tuple(spans)))
    # What names seeds must lie among them as well.
    for store in stores:
        seeds = found[store._key][0]
        if int(store.get("batch_size") or 0) > seeds:
            return None
        named = [value for name in _SEEDS if isinstance(value := store.get(name), Tensor)]
        claims += [(value, (_Span(None, 0, value.numel(), 0, seeds),)) for value in named]
    return claims


def _hold(claims: _Claims) -> bool:
    ends: dict[torch.device, list[Tensor]] = {}
    limits: dict[torch.device, list[_Span]] = {}
    for tensor, spans in claims:
        for span in spans:
            part = tensor if span.row is None else tensor[span.row, span.start : span.stop]
            if part.numel():
                ends.setdefault(tensor.device, []).extend((part.min(), part.max()))
                limits.setdefault(tensor.device, []).append(span)
    for device, values in ends.items():
        numbers = torch.stack(values).tolist()
        for span, low, high in zip(limits[device], numbers[::2], numbers[1::2], strict=True):
            if low < span.low or high >= span.high:
                return False
    return True


def _remember(claims: _Claims) -> None:
    for tensor, spans in claims:
        if (state := _state(tensor, spans)) is not None:
            _known[tensor] = state


def _state(tensor: Tensor, spans: tuple[_Span, ...]) -> Any:
    """Return what identifies an unchanged tensor on a device; None where nothing does, or reading it is cheap."""
    return None if tensor.is_cpu or tensor.is_inference() else (tensor._version, spans)
