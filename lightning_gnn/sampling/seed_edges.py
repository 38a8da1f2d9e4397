"""Taking the edges that a link predictor is asked for out of the messages that it sees."""

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
    """Drop from a sample the edges that it was made for, in both directions; nodes stay, and counts follow."""
    out = copy.copy(out)
    # In a graph of one type, edges are dropped in both directions.
    if isinstance(out, SamplerOutput):
        wanted = torch.cat([torch.stack([seeds.row, seeds.col]), torch.stack([seeds.col, seeds.row])], dim=1)
        kept = _others(out.node[out.row], out.node[out.col], wanted)
        out.row, out.col, out.edge = out.row[kept], out.col[kept], None if out.edge is None else out.edge[kept]
        if out.num_sampled_edges is not None:
            out.num_sampled_edges = _kept_per_hop(kept, out.num_sampled_edges)
        return out
    # The dictionaries are copied, since the caller's sample must stay as it is.
    out.row, out.col = dict(out.row), dict(out.col)
    out.edge = None if out.edge is None else dict(out.edge)
    out.num_sampled_edges = None if out.num_sampled_edges is None else dict(out.num_sampled_edges)
    # With types, the opposite direction is an edge type of its own, if there is one.
    forward, backward = torch.stack([seeds.row, seeds.col]), torch.stack([seeds.col, seeds.row])
    dropped: dict[EdgeType, list[Tensor]] = {seeds.input_type: [forward]}
    if (back := _reverse(seeds.input_type, reverse, list(out.row))) is not None:
        dropped.setdefault(back, []).append(backward)
    # Compare global ids, as a sampled edge holds places in the sample.
    for name, pairs in dropped.items():
        if name not in out.row:
            continue
        row, col = out.row[name], out.col[name]
        kept = _others(out.node[name[0]][row], out.node[name[2]][col], torch.cat(pairs, dim=1))
        out.row[name], out.col[name] = row[kept], col[kept]
        if out.edge is not None:
            out.edge[name] = out.edge[name][kept]
        if out.num_sampled_edges is not None:
            out.num_sampled_edges[name] = _kept_per_hop(kept, out.num_sampled_edges[name])
    return out


def check_reverse(given: object, edge_types: Sequence[EdgeType] | None) -> None:
    """Check what names reverse edge types."""
    if isinstance(given, bool):
        return
    if not isinstance(given, Mapping):
        raise TypeError(f"exclude_seed_edges must be True, False or a dict of reverse edge types, but is {given!r}")
    if edge_types is None:
        raise ValueError("exclude_seed_edges names edge types, but the graph has one: give True")
    for name, reverse in given.items():
        for each in (name, reverse):
            if each is not None and each not in edge_types:
                raise ValueError(
                    f"exclude_seed_edges names {each}, but the edge types are {', '.join(map(str, edge_types))}"
                )
        if reverse is not None and (name[0], name[2]) != (reverse[2], reverse[0]):
            raise ValueError(f"exclude_seed_edges: {reverse} does not lead back where {name} comes from")


def _reverse(name: EdgeType, given: Mapping[EdgeType, EdgeType | None], known: Collection[EdgeType]) -> EdgeType | None:
    if name in given:
        return given[name]
    source, relation, target = name
    back = (target, relation.removeprefix("rev_") if relation.startswith("rev_") else f"rev_{relation}", source)
    if back in known:
        return back
    others = [other for other in known if (other[0], other[2]) == (target, source) and other != name]
    if others:
        raise ValueError(
            f"which edge type is the reverse of {name}, {others[0]} or none? Say so: exclude_seed_edges={{{name}: …}}, "
            "its own name if it is its own reverse, None if it has none"
        )
    return name if source == target else back


def _others(row: Tensor, col: Tensor, pairs: Tensor) -> Tensor:
    """Tell which edges, in ids of the graph, are none of some pairs; bool ``[m]``, where the edges are."""
    pairs = pairs.to(row.device)
    _, first = torch.unique(torch.cat([row, pairs[0]]), return_inverse=True)
    seconds, second = torch.unique(torch.cat([col, pairs[1]]), return_inverse=True)
    number = first * seconds.numel() + second
    return ~torch.isin(number[: row.numel()], number[row.numel() :])


def _kept_per_hop(kept: Tensor, counts: list[int]) -> list[int]:
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    numbers: list[int] = before[torch.tensor(list(accumulate(counts, initial=0)), device=kept.device)].diff().tolist()
    return numbers
