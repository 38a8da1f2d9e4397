"""Neighbor sampling on a GPU, homogeneous or heterogeneous, with times and weights."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.library import triton_obstacle
from lightning_gnn.ops.sample.relation import PickOptions, Relation, TimeWindow, stage_key

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler
    from lightning_gnn.triton_kernels.sample_relations import RelationSample, TritonRelationSampler

_samplers: MutableMapping[Tensor, dict[torch.device | None, TritonNeighborSampler]] = WeakIdKeyDictionary()
_relation_samplers: MutableMapping[object, dict[torch.device, TritonRelationSampler]] = WeakKeyDictionary()


def triton_sampler(
    indptr: Tensor, indices: Tensor, device: torch.device | None = None, **options: Any
) -> TritonNeighborSampler:
    """Return the sampler of a graph on a GPU or in pinned memory, cached with the graph unless it has ``options``."""
    _check_triton()
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    if options:
        return TritonNeighborSampler(indptr, indices, device=device, **options)
    by_device = _samplers.setdefault(indices, {})
    if device not in by_device:
        # Detached, because a cached reference to its own weak key would keep the entry alive.
        by_device[device] = TritonNeighborSampler(indptr.detach(), indices.detach(), device=device)
    return by_device[device]


def _check_triton() -> None:
    if (obstacle := triton_obstacle()) is not None:
        raise ValueError(f"the graph cannot be sampled on a GPU: {obstacle}")


def most_batches(sampler: TritonNeighborSampler) -> int:
    """Return the maximum number of mini-batches per launch."""
    from lightning_gnn.triton_kernels import sample_bulk as kernels

    return int(kernels.most_batches(sampler))


def begin_samples(
    sampler: TritonNeighborSampler,
    seeds: Tensor,  # seeds of all mini-batches, one after another, on the device, not checked
    sizes: Sequence[int],  # number of seeds of each mini-batch
    fanouts: Sequence[int],
    keys: Sequence[int],
    replace: bool,
    disjoint: bool,  # one tree per seed; only for a single mini-batch
    share: float,
    first_tree: int = 0,  # position of the first seed in the whole mini-batch; used if disjoint
) -> Any:
    """Launch the sampling of mini-batches, in parallel if there are several, and return without waiting."""
    from lightning_gnn.triton_kernels.sample_bulk import joined

    if len(sizes) > 1:
        return sampler.begin(joined(sampler, seeds, sizes, fanouts, keys, replace), share)
    return sampler.begin(sampler.batch(seeds, fanouts, keys[0], replace, disjoint, first_tree), share)


def relation_sampler(
    graph: object, num_nodes: Sequence[int], device: torch.device, **options: int
) -> TritonRelationSampler:
    """Return the sampler of a graph, cached with its scratch memory for the graph's lifetime; options renew it."""
    from lightning_gnn.triton_kernels.sample_relations import TritonRelationSampler

    by_device = _relation_samplers.setdefault(graph, {})
    if device not in by_device or options:
        by_device[device] = TritonRelationSampler(num_nodes, device, **options)
    return by_device[device]


def sample_relations_triton(
    graph: object,
    relations: Sequence[Relation],
    num_nodes: Sequence[int],
    seeds: Sequence[Tensor],
    starts: Sequence[int],
    key: int,
    rule: PickOptions,
    times: TimeWindow | None,
) -> RelationSample:
    """Sample one mini-batch of relations sorted by name."""
    _check_triton()
    # Triton is imported on use, because it is optional on machines without a GPU.
    from lightning_gnn.triton_kernels.sample import device_of
    from lightning_gnn.triton_kernels.sample_relations import Picking

    # The relations determine the device, or in a graph without relations, the seeds.
    on_device = [relation.indptr for relation in relations if relation.indptr.device.type != "cpu"]
    first = on_device[0] if on_device else relations[0].indices if relations else seeds[0]
    sampler = relation_sampler(graph, num_nodes, device_of(first))
    # Keys are derived on the CPU, exactly as the other backends do.
    hops = max((len(relation.fanouts) for relation in relations), default=0)
    keys = [
        [stage_key(key, hop, number, relation.source, rule.labor) for number, relation in enumerate(relations)]
        for hop in range(hops)
    ]
    # Convert times and LABOR's parameters to the types of the kernel.
    until, after = (None if limit is None else torch.from_numpy(limit) for limit in times or (None, None))
    labor = None if rule.labor is None else (rule.labor.batch_dependency, rule.labor.batch)
    picking = Picking(rule.replace, rule.disjoint, rule.first_tree, rule.last, labor, until, after)
    return sampler.sample(relations, seeds, starts, keys, picking)
