"""The keywords of PyG's loaders and of torch's: which work here, which change nothing, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader
from torch_geometric.loader import LinkLoader, NodeLoader

from lightning_gnn.loading.batch import Batch, Positions
from lightning_gnn.runtime.messages import closest, keywords_of, removed, true_or_false, whole_number
from lightning_gnn.sampling.neighbor import Output

WITHOUT_EFFECT = {
    "custom_cls": "it is for remote feature stores, not for graphs in memory",
    "filter_per_worker": "features are joined where the neighbors are sampled",
    "in_order": "mini-batches always come in order",
    "is_sorted": "the order of the edges is looked at",
    "multiprocessing_context": "there are no worker processes",
    "persistent_workers": "threads take no time to start",
    "pin_memory_device": "there is one kind of accelerator",
    "share_memory": "threads share the graph already",
    "timeout": "a thread cannot be lost; its errors are raised at once",
}
"""Keywords that are taken and change nothing, with the reason: none of them changes a mini-batch of PyG's either."""

_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    # name: whether a value asks for nothing, and why others cannot work
    "collate_fn": (
        lambda value: value is None or isinstance(getattr(value, "__self__", None), DataLoader),  # Lightning's copies
        "a mini-batch is made by the sampler, in PyG's loaders too; change it by transform=",
    ),
    "dataset": (lambda value: value is None or isinstance(value, range), "the seeds are given otherwise"),
    "worker_init_fn": (
        lambda value: value is None or "pl_worker_init_function" in repr(value),  # seeds the processes, for Lightning
        "workers are threads of this process; do beforehand what it does",
    ),
    "directed": (lambda value: value is True, "it is PyG's former name for subgraph_type='induced'; give that"),
    "sample_direction": (lambda value: value == "forward", "only 'forward' is supported"),
}


class LoaderOptions(TypedDict, total=False):
    """The keywords that DataModules hand on to their sampler and loaders, for tools that read signatures."""

    sampler: Any  # a name or a sampler; LightningCLI gives a class_path
    shuffle: bool | None
    drop_last: bool
    batch_sampler: Iterable[Positions]
    prefetch_factor: int | None
    pin_memory: bool
    transform: Callable[[Batch], Batch] | None
    transform_sampler_output: Callable[[Output], Output] | None
    thread_safe: bool
    sparse_grad: bool
    subgraph_type: str
    time_attr: str | None
    temporal_strategy: str
    time_window: float | None
    weight_attr: str | None
    layer_dependency: bool
    batch_dependency: int


_LEAST = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1}
_SAMPLERS = (
    "num_neighbors", "replace", "disjoint", "backend", "subgraph_type", "time_attr", "temporal_strategy", "time_window",
    "weight_attr", "layer_dependency", "batch_dependency", "exclude_seed_edges",
)  # fmt: skip
_PYG_LOADERS = {"node": NodeLoader, "link": LinkLoader}


def checked_options(
    kwargs: Mapping[str, Any], kind: str, known: Collection[str] = (), never: Collection[str] = ()
) -> dict[str, Any]:
    """Return the keywords that have an effect, numbers as ``int``; refuse those that ask for what is not done."""
    taken = {*keywords_of(_PYG_LOADERS[kind]), *known}
    options: dict[str, Any] = {}
    for name, value in kwargs.items():
        gone = removed(f"datamodule.{name}")
        # Saved configurations hold None or False where an option of earlier releases was not used.
        if name in WITHOUT_EFFECT or (gone is not None and (value is None or value is False)):
            continue
        if gone is not None:
            raise ValueError(f"{name}={value!r}{gone.removeprefix(f'datamodule.{name}')}")
        if name in _REFUSED:
            asks_nothing, why = _REFUSED[name]
            if not asks_nothing(value):
                shown = f"={value!r}" if isinstance(value, (str, bool, int, float)) else ""
                raise ValueError(f"{name}{shown}: {why}")
            continue
        if name not in taken:
            raise TypeError(_unknown(name, taken, never))
        options[name] = _checked(name, value)
    return options


def _checked(name: str, value: object) -> object:
    """Return the value of a keyword as loaders take it, or say what is wrong with it."""
    if value is None and name in ("prefetch_factor", "shuffle", "transform", "transform_sampler_output"):
        return None
    if name in _LEAST:
        return whole_number(value, name, _LEAST[name])
    if name in ("shuffle", "drop_last", "pin_memory", "thread_safe", "sparse_grad"):
        return true_or_false(value, name)
    if name in ("transform", "transform_sampler_output") and not callable(value):
        raise TypeError(f"{name} must be a function of one argument, but is {value!r}")
    positions = not isinstance(value, str) and bool({"__iter__", "__getitem__"} & {*dir(value)})
    if name in ("sampler", "batch_sampler") and value is not None and not positions:
        raise TypeError(f"{name} must give positions among the seeds, as torch's samplers do, but is {value!r}")
    typed = isinstance(value, tuple | list) and len(value) and isinstance(value[0], tuple | str)
    numbers = name in ("edge_label_index", "edge_label") and not (value is None or typed)
    return torch.as_tensor(value) if numbers else value


def _unknown(name: str, taken: Collection[str], never: Collection[str]) -> str:
    if name in _SAMPLERS:
        return f"there is no option {name} here: it belongs to the sampler, as in NeighborSampler(data, …, {name}=…)"
    if name in ("neg_sampling", "neg_sampling_ratio"):
        return f"there is no option {name} here: mini-batches of nodes have no negative edges; use LinkDataModule"
    return f"there is no option {name}{closest(name, {*taken, *WITHOUT_EFFECT, *_SAMPLERS} - {*_REFUSED, *never})}"
