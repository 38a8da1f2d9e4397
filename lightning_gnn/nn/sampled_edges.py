"""Checks whether layers may be trimmed by the counts per hop, since a transform may have rewired a mini-batch.

Trimming is exact if, for every relation, the targets of a hop's edges were found in the previous hop, their sources by
the current hop, and the requested rows are those of the seeds. On the CPU each batch is checked (under 1 % of a step).
On a device, tensors are recognized by identity and version: outputs of our samplers, and tensors that :func:`moved`
found in order. Writes through ``.data`` do not change it, so transforms must replace such tensors on a device.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data, HeteroData

from lightning_gnn.ops.aggregate_update.edge_order import mark_sorted

_SEEDS = ("src_index", "dst_pos_index", "dst_neg_index")  # seed attributes of link prediction with triplets
_verified: Any = WeakTensorKeyDictionary()  # device tensor in order -> (version, spans) when it was checked


class _Span(NamedTuple):
    """Node ids that must be in ``[low, high)``: those at ``[row, start:stop]``, or all for row None."""

    row: int | None
    start: int
    stop: int
    low: int
    high: int


_Checks = list[tuple[Tensor, tuple[_Span, ...]]]


def in_sampled_order(batch: Data | HeteroData, num_rows: Mapping[Any, int] | None = None) -> bool:
    """Return whether trimming leaves the seeds' outputs unchanged; node types have ``num_rows`` feature rows."""
    checks = _list_checks(batch, num_rows)
    if checks is None:
        return False
    unknown = [check for check in checks if (state := _get_state(*check)) is None or _verified.get(check[0]) != state]
    if not _are_satisfied(unknown):
        return False
    _record(unknown)
    for edges, hops in _hop_edges(batch) if unknown else ():
        if not edges.is_cpu and _ascends(edges, hops):
            mark_sorted(edges, hops)
    return True


def remember(batch: Any, ascends: Sequence[bool] | None = None) -> None:
    """Record that a mini-batch is in order, for a sampler that has just created it on a device.

    Each hop of our samplers is sorted by target; ``ascends`` says it of the edges that are not directly theirs.
    """
    if not (checks := _list_checks(batch)):
        return
    _record(checks)
    edges = _hop_edges(batch)
    for (part, hops), is_sorted in zip(edges, [True] * len(edges) if ascends is None else ascends, strict=True):
        if is_sorted:
            mark_sorted(part, hops)


def moved(batch: Any, move: Callable[[Any], Any]) -> Any:
    """Return ``move(batch)``, recorded as in order if the edges of ``batch`` on the CPU are."""
    checks = _list_checks(batch) if isinstance(batch, Data | HeteroData) else None
    if checks is None or not all(tensor.is_cpu for tensor, _ in checks) or not _are_satisfied(checks):
        return move(batch)
    ascends = [_ascends(*edges) for edges in _hop_edges(batch)]
    with torch.inference_mode(False):  # inference tensors have no version
        batch = move(batch)
    remember(batch, ascends)
    return batch


_Hops = list[tuple[int, int]] | None  # None where hops lead to consecutive targets, so that no hop stands alone


def _hop_edges(batch: Any) -> list[tuple[Tensor, _Hops]]:
    """Return the edges of each relation, and the ranges of those that may ascend."""
    found: list[tuple[Tensor, _Hops]] = []
    for store in batch.edge_stores if isinstance(batch, HeteroData) else [batch._store]:
        if isinstance(edges := store.get("edge_index"), Tensor):
            stops = accumulate(int(count) for count in store["num_sampled_edges"])
            found.append((edges, [*pairwise([0, *stops])] if store.get("every_hop") else None))
    return found


def _ascends(edge_index: Tensor, hops: _Hops) -> bool:
    target = edge_index[1]
    rises = target[1:] >= target[:-1]
    parts = [rises] if hops is None else [rises[start : max(stop - 1, start)] for start, stop in hops]
    return bool(torch.stack([part.all() for part in parts]).all())


def _list_checks(batch: Any, num_rows: Mapping[Any, int] | None = None) -> _Checks | None:
    """Return the required ranges of node ids for exact trimming, or None if the counts rule it out."""
    # Count the nodes of each type up to each hop; the seeds are hop 0.
    stores = batch.node_stores if isinstance(batch, HeteroData) else [batch._store]
    nodes_by_hop: dict[Any, list[int]] = {}
    for store in stores:
        if (counts := store.get("num_sampled_nodes")) is None:
            return None
        nodes_by_hop[store._key] = [*accumulate(int(count) for count in counts)]
        if num_rows is not None and nodes_by_hop[store._key][-1] > num_rows[store._key]:
            return None
    # The endpoints of labeled edges must be seeds, whose rows all layers compute.
    checks: _Checks = []
    for store in batch.edge_stores if isinstance(batch, HeteroData) else stores:
        source, _, target = store._key or (None, None, None)
        if isinstance(label := store.get("edge_label_index"), Tensor):
            ends = ((0, nodes_by_hop[source][0]), (1, nodes_by_hop[target][0]))
            checks.append((label, tuple(_Span(row, 0, label.size(-1), 0, high) for row, high in ends)))
        if not isinstance(edges := store.get("edge_index"), Tensor):
            continue
        if (counts := store.get("num_sampled_edges")) is None:
            return None
        # The edges of a hop lead to its targets from sources that are found by the next hop at the latest.
        stops, spans = [0, *accumulate(int(count) for count in counts)], []
        targets, sources = [0, *nodes_by_hop[target]], nodes_by_hop[source]
        if stops[-1] != edges.size(1) or len(targets) < len(stops) or len(sources) < len(stops):
            return None
        for hop, (start, stop) in enumerate(pairwise(stops)):
            spans.append(_Span(0, start, stop, 0, sources[hop + 1]))
            low = 0 if store.get("every_hop") else targets[hop]  # a node is a target in every hop from its first on
            spans.append(_Span(1, start, stop, low, targets[hop + 1]))
        checks.append((edges, tuple(spans)))
    # Attributes that list seeds must be within the seeds as well.
    for store in stores:
        seeds = nodes_by_hop[store._key][0]
        if int(store.get("batch_size") or 0) > seeds:
            return None
        seed_ids = [value for name in _SEEDS if isinstance(value := store.get(name), Tensor)]
        checks += [(value, (_Span(None, 0, value.numel(), 0, seeds),)) for value in seed_ids]
    return checks


def _are_satisfied(checks: _Checks) -> bool:
    ends: dict[torch.device, list[Tensor]] = {}
    limits: dict[torch.device, list[_Span]] = {}
    for tensor, spans in checks:
        for span in spans:
            ids = tensor if span.row is None else tensor[span.row, span.start : span.stop]
            if ids.numel():
                ends.setdefault(tensor.device, []).extend(torch.aminmax(ids))
                limits.setdefault(tensor.device, []).append(span)
    for device, values in ends.items():
        numbers = torch.stack(values).tolist()
        for span, low, high in zip(limits[device], numbers[::2], numbers[1::2], strict=True):
            if low < span.low or high >= span.high:
                return False
    return True


def _record(checks: _Checks) -> None:
    for tensor, spans in checks:
        if (state := _get_state(tensor, spans)) is not None:
            _verified[tensor] = state


def _get_state(tensor: Tensor, spans: tuple[_Span, ...]) -> Any:
    """Return the state that identifies an unchanged device tensor; None on the CPU and for inference tensors."""
    return None if tensor.is_cpu or tensor.is_inference() else (tensor._version, spans)
