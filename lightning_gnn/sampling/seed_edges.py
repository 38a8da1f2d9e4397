"""Excludes the seed edges of link prediction from message passing."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, SamplerOutput
from torch_geometric.typing import EdgeType


def without_seed_edges(
    out: SamplerOutput | HeteroSamplerOutput, seeds: EdgeSamplerInput, reverse: Mapping[EdgeType, EdgeType | None]
) -> SamplerOutput | HeteroSamplerOutput:
    """Remove the seed edges from a sample in both directions; nodes stay, and edge counts are updated."""
    out = copy.copy(out)
    # In a homogeneous graph, remove the edges in both directions.
    if isinstance(out, SamplerOutput):
        seed_pairs = torch.cat([torch.stack([seeds.row, seeds.col]), torch.stack([seeds.col, seeds.row])], dim=1)
        mask = _find_other_edges(out.node[out.row], out.node[out.col], seed_pairs)
        out.row, out.col, out.edge = out.row[mask], out.col[mask], None if out.edge is None else out.edge[mask]
        if out.num_sampled_edges is not None:
            out.num_sampled_edges = _count_per_hop(mask, out.num_sampled_edges)
        return out
    # Copy the dictionaries, since the caller's sample must not change.
    out.row, out.col = dict(out.row), dict(out.col)
    out.edge = None if out.edge is None else dict(out.edge)
    out.num_sampled_edges = None if out.num_sampled_edges is None else dict(out.num_sampled_edges)
    # In a heterogeneous graph, the reverse direction is a separate edge type, if it exists.
    forward, backward = torch.stack([seeds.row, seeds.col]), torch.stack([seeds.col, seeds.row])
    dropped: dict[EdgeType, list[Tensor]] = {seeds.input_type: [forward]}
    if (back := _flip(seeds.input_type, reverse, list(out.row))) is not None:
        dropped.setdefault(back, []).append(backward)
    # Compare global ids, since sampled edges hold positions in the sample.
    for name, pairs in dropped.items():
        if name not in out.row:
            continue
        row, col = out.row[name], out.col[name]
        mask = _find_other_edges(out.node[name[0]][row], out.node[name[2]][col], torch.cat(pairs, dim=1))
        out.row[name], out.col[name] = row[mask], col[mask]
        if out.edge is not None:
            out.edge[name] = out.edge[name][mask]
        if out.num_sampled_edges is not None:
            out.num_sampled_edges[name] = _count_per_hop(mask, out.num_sampled_edges[name])
    return out


def check_reverse(option: object, edge_types: Sequence[EdgeType] | None) -> None:
    """Check the option ``exclude_seed_edges``."""
    if isinstance(option, bool):
        return
    if not isinstance(option, Mapping):
        raise TypeError(f"exclude_seed_edges must be True, False or a dict of reverse edge types, but is {option!r}")
    if edge_types is None:
        raise ValueError("exclude_seed_edges gives edge types, but the graph is homogeneous: give True")
    for name, reverse in option.items():
        for each in (name, reverse):
            if each is not None and each not in edge_types:
                raise ValueError(
                    f"exclude_seed_edges has {each}, but the edge types are {', '.join(map(str, edge_types))}"
                )
        if reverse is not None and (name[0], name[2]) != (reverse[2], reverse[0]):
            raise ValueError(f"exclude_seed_edges: {reverse} is not a reverse of {name}: its endpoints differ")


def _flip(name: EdgeType, given: Mapping[EdgeType, EdgeType | None], known: Collection[EdgeType]) -> EdgeType | None:
    if name in given:
        return given[name]
    source, relation, target = name
    back = (target, relation.removeprefix("rev_") if relation.startswith("rev_") else f"rev_{relation}", source)
    if back in known:
        return back
    others = [other for other in known if (other[0], other[2]) == (target, source) and other != name]
    if others:
        raise ValueError(
            f"the reverse of {name} is ambiguous, {others[0]} or none: give exclude_seed_edges={{{name}: …}}, "
            "the type itself if it is its own reverse, None if it has none"
        )
    return name if source == target else back


def _find_other_edges(row: Tensor, col: Tensor, pairs: Tensor) -> Tensor:
    """Return a mask of the edges (graph ids) that are not among ``pairs``: bool ``[m]``, on the edges' device."""
    pairs = pairs.to(row.device)
    _, first = torch.unique(torch.cat([row, pairs[0]]), return_inverse=True)
    seconds, second = torch.unique(torch.cat([col, pairs[1]]), return_inverse=True)
    number = first * seconds.numel() + second
    return ~torch.isin(number[: row.numel()], number[row.numel() :])


def _count_per_hop(mask: Tensor, counts: list[int]) -> list[int]:
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    numbers: list[int] = before[torch.tensor(list(accumulate(counts, initial=0)), device=mask.device)].diff().tolist()
    return numbers
