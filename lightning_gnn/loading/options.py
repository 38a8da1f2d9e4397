"""Keywords of PyG's and torch's loaders: supported ones, ones without effect, and unsupported ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch_geometric.loader import LinkLoader, NodeLoader

from lightning_gnn.runtime.messages import closest, keywords_of, true_or_false, whole_number

WITHOUT_EFFECT = {
    "custom_cls": "it is for remote feature stores, not for graphs in memory",
    "filter_per_worker": "features are gathered by the threads that sample",
    "in_order": "mini-batches are always in order",
    "is_sorted": "the order of the edges is detected",
    "multiprocessing_context": "workers are threads, not processes",
    "persistent_workers": "threads start instantly",
    "pin_memory_device": "only one type of accelerator is in use",
    "share_memory": "threads already share the graph",
    "timeout": "errors of a thread are raised immediately",
}
"""Keywords that are accepted without effect, with the reason. None of them changes a mini-batch of PyG's either."""

_UNSUPPORTED: dict[str, tuple[Callable[[object], bool], str]] = {
    # name: (whether a value is harmless, why other values are not supported)
    "collate_fn": (
        lambda value: value is None or isinstance(getattr(value, "__self__", None), DataLoader),  # Lightning's copies
        "the sampler creates mini-batches, as in PyG's loaders; use transform= to modify them",
    ),
    "dataset": (lambda value: value is None or isinstance(value, range), "use input_nodes= or edge_label_index="),
    "worker_init_fn": (
        lambda value: value is None or "pl_worker_init_function" in repr(value),  # Lightning's, which seeds processes
        "workers are threads of this process; run its code before training",
    ),
    "directed": (lambda value: value is True, "it is deprecated in PyG; use subgraph_type='induced'"),
    "sample_direction": (lambda value: value == "forward", "only 'forward' is supported"),
}

_MINIMUM = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1}
_SAMPLER_OPTIONS = (
    "num_neighbors", "replace", "disjoint", "backend", "subgraph_type", "time_attr", "temporal_strategy", "time_window",
    "weight_attr", "layer_dependency", "batch_dependency", "semantics", "exclude_seed_edges",
)  # fmt: skip
_PYG_LOADERS = {"node": NodeLoader, "link": LinkLoader}


def validate_options(
    kwargs: Mapping[str, Any], kind: str, known: Collection[str] = (), never: Collection[str] = ()
) -> dict[str, Any]:
    """Return the keywords that have an effect, numbers as ``int``; raise an error for unsupported or unknown ones."""
    allowed = {*keywords_of(_PYG_LOADERS[kind]), *known}
    options: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in WITHOUT_EFFECT:
            continue
        if name in _UNSUPPORTED:
            is_harmless, reason = _UNSUPPORTED[name]
            if not is_harmless(value):
                shown = f"={value!r}" if isinstance(value, (str, bool, int, float)) else ""
                raise ValueError(f"{name}{shown}: {reason}")
            continue
        if name not in allowed:
            raise TypeError(_unknown_option_message(name, allowed, never))
        options[name] = _validate(name, value)
    return options


def _validate(name: str, value: object) -> object:
    """Return the value of a keyword in the form that loaders expect, or raise an error."""
    if value is None and name in ("prefetch_factor", "shuffle", "transform", "transform_sampler_output"):
        return None
    if name in _MINIMUM:
        return whole_number(value, name, _MINIMUM[name])
    if name in ("shuffle", "drop_last", "pin_memory", "thread_safe", "sparse_grad", "sums_ahead"):
        return true_or_false(value, name)
    if name in ("transform", "transform_sampler_output") and not callable(value):
        raise TypeError(f"{name} must be a function of one argument, but is {value!r}")
    is_iterable = not isinstance(value, str) and bool({"__iter__", "__getitem__"} & {*dir(value)})
    if name in ("sampler", "batch_sampler") and value is not None and not is_iterable:
        is_rule = name == "sampler" and isinstance(value, str)
        instead = f"; to select neighbors, write sampling={value!r}" if is_rule else ""
        raise TypeError(f"{name} must yield indices into the seeds, like torch's samplers, but is {value!r}{instead}")
    has_type = isinstance(value, tuple | list) and len(value) and isinstance(value[0], tuple | str)
    is_numeric = name in ("edge_label_index", "edge_label") and not (value is None or has_type)
    return torch.as_tensor(value) if is_numeric else value


def _unknown_option_message(name: str, allowed: Collection[str], never: Collection[str]) -> str:
    if name in (*_SAMPLER_OPTIONS, "sampling"):  # not suggested: it is too similar to neg_sampling
        return f"unknown option {name}: it belongs to the sampler, as in NeighborSampler(data, …, {name}=…)"
    if name in ("neg_sampling", "neg_sampling_ratio"):
        return f"unknown option {name}: mini-batches of seed nodes have no negative edges; use LinkDataModule"
    suggestions = {*allowed, *WITHOUT_EFFECT, *_SAMPLER_OPTIONS} - {*_UNSUPPORTED, *never}
    return f"unknown option {name}{closest(name, suggestions)}"
