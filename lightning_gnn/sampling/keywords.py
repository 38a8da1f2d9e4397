"""What the DataModules take beside their own arguments: options of the loaders, and of the samplers for evaluation."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from lightning_gnn.graph.options import checked_options, keywords_of, true_or_false
from lightning_gnn.sampling.loader import ThreadedLinkLoader, ThreadedNodeLoader

_LOADERS = {"node": ThreadedNodeLoader, "link": ThreadedLinkLoader}
_SAMPLER_OPTIONS = ("num_neighbors", "replace", "disjoint")
_SET_HERE = {
    "data", "node_sampler", "link_sampler", "input_nodes", "input_id", "edge_label_index", "edge_label", "seed", "rank",
    "loader_id", "first_batch", "epoch", "loader_kwargs",
}  # fmt: skip


def training_keywords(owner: type, kind: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a training loader.

    Args:
        owner: The DataModule's class.
        kind: ``"node"`` or ``"link"``.
        kwargs: What the user gave beside the arguments of the class.

    Raises:
        TypeError: An option that nobody knows.
        ValueError: An option that cannot work here.
    """
    kwargs = dict(kwargs)
    loader = kwargs.pop("loader", "neighbor")
    if loader not in ("neighbor", "link_neighbor", "custom"):
        raise ValueError(f"loader={loader!r} is not supported here; FullGraphDataModule trains on the full graph")
    options = _loader_options(owner, kind, kwargs, keywords_of(owner))
    if options.get("shuffle") and ("sampler" in options or "batch_sampler" in options):
        raise ValueError("shuffle=True and a sampler of your own exclude each other; leave shuffle out")
    return options


def evaluation_keywords(
    owner: type, kind: str, eval_loader_kwargs: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the evaluation loaders take instead, and what their sampler takes instead.

    Args:
        owner: The DataModule's class.
        kind: ``"node"`` or ``"link"``.
        eval_loader_kwargs: What the user gave.

    Raises:
        TypeError: An option that nobody knows, or no dictionary.
        ValueError: An option that cannot work here.
    """
    if not isinstance(eval_loader_kwargs, (Mapping, type(None))):
        raise TypeError(f"eval_loader_kwargs must be a dictionary, but is {eval_loader_kwargs!r}")
    given = dict(eval_loader_kwargs or {})
    overrides = {name: given.pop(name) for name in _SAMPLER_OPTIONS if name in given}
    try:
        if "seed" in given:
            raise ValueError("seed is the DataModule's: from it each loader draws a stream of its own")
        options = _loader_options(owner, kind, given)
        if options.pop("shuffle", False):
            raise ValueError("shuffle=True is not supported: evaluation goes in order, so that its outputs line up")
        for name in ("replace", "disjoint"):
            true_or_false(overrides.get(name, False), name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"eval_loader_kwargs: {error}") from None
    return options, overrides


def with_overrides(sampler: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the sampler for evaluation: itself, or as in PyG a copy with some attributes set.

    Raises:
        ValueError: It has no such attribute.
    """
    if not overrides:
        return sampler
    other = copy.copy(sampler)
    for name, value in overrides.items():
        if not hasattr(sampler, name):
            raise ValueError(f"eval_loader_kwargs: {type(sampler).__name__} has no {name} that could be set")
        setattr(other, name, value)
    return other


def check_sampler(sampler: Any, kind: str, **options: Any) -> None:
    """Check a sampler of the user's own, and say which arguments have no effect beside it.

    Args:
        sampler: The sampler.
        kind: ``"node"`` or ``"link"``.
        **options: Arguments for a sampler that is not made; those that are None or False were not given.

    Raises:
        TypeError: It cannot sample.
    """
    method = f"sample_from_{'nodes' if kind == 'node' else 'edges'}"
    if not callable(getattr(sampler, method, None)):
        raise TypeError(f"{kind}_sampler must be a PyG sampler with {method}, but is {sampler!r}")
    if ignored := [name for name, value in options.items() if value is not None and value is not False]:
        rank_zero_warn(f"{kind}_sampler comes with settings of its own: without effect beside it: {', '.join(ignored)}")


def _loader_options(owner: type, kind: str, kwargs: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    if found := sorted(_SET_HERE & set(kwargs)):
        raise TypeError(f"there is no option {found[0]}: {owner.__name__} sets it for its loaders")
    if kwargs.get("generator") is not None:
        raise ValueError("generator is not supported: the order follows seed=, so that an interrupted run can resume")
    options = checked_options(kwargs, kind, {*keywords_of(_LOADERS[kind]), *also}, _SET_HERE - {*also})
    options.pop("generator", None)
    if options.get("batch_sampler") is not None:
        for name in ("sampler", "drop_last"):
            if options.get(name):
                raise ValueError(f"batch_sampler and {name} exclude each other; leave {name} out")
    return options
