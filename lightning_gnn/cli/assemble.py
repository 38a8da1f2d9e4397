"""From a composed configuration to data, DataModule, LightningModule and Trainer."""

from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate, to_absolute_path
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType

from lightning_gnn.cli.command_line import check_writable
from lightning_gnn.cli.predictions import check_format
from lightning_gnn.cli.saved_run import KeepConfig
from lightning_gnn.cli.splits import fill_splits, split_links
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.graph.hetero import edges_of
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.hetero.models import BACK
from lightning_gnn.partitioned import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.report.console import console

MODES = ("train", "test", "predict")
_NOT_OF_THE_MODULE = ("name", "metric", "mode", "split", "time", "embeddings")
"""Keys of a task that are no arguments of its LightningModule."""


def check_config(cfg: DictConfig) -> None:
    """Refuse what cannot work before anything is loaded."""
    if cfg.mode not in MODES:
        raise ValueError(f"mode={cfg.mode!r} is unknown; use one of {', '.join(MODES)}")
    if missing := OmegaConf.missing_keys(cfg):
        raise ValueError("; ".join(f"{key} is missing; give {key}=VALUE" for key in sorted(missing)))
    if cfg.task.name not in TASKS:
        raise ValueError(f"task.name={cfg.task.name!r} is unknown; use one of {', '.join(TASKS)}")
    check_format(cfg.predictions)
    if cfg.ckpt_path is None and cfg.mode != "train":
        raise ValueError(f"mode={cfg.mode} needs a checkpoint; give ckpt_path=PATH")
    if cfg.ckpt_path is not None and not (path := Path(to_absolute_path(str(cfg.ckpt_path)))).is_file():
        inside = [*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")]
        found = sorted(inside, key=lambda file: file.name != "best.ckpt")
        hint = f"a folder; give a file, such as {found[0]}" if found else "there is no such file"
        raise FileNotFoundError(f"ckpt_path={cfg.ckpt_path}: {hint}")
    _partitioned(cfg)
    fanouts = OmegaConf.select(cfg, "datamodule.num_neighbors")
    depth = OmegaConf.select(cfg, "model.num_layers")
    if OmegaConf.is_list(fanouts) and depth is not None and len(fanouts) != depth:
        listed = ",".join(str(fanout) for fanout in fanouts)
        raise ValueError(
            f"model.num_layers={depth}, but datamodule.num_neighbors=[{listed}] has {len(fanouts)} fanouts; "
            "give one fanout per layer"
        )
    check_writable(cfg.output_dir, "output_dir")


def build_data(cfg: DictConfig) -> Data | HeteroData:
    """Read or draw the graph; a relative ``root`` counts from where the command was typed."""
    node = cfg.data.copy()
    if node.get("root") is not None:
        node.root = to_absolute_path(node.root)
    if "labels" in node and node.labels is None:
        node.labels = {"node": "classes", "multilabel": "several"}.get(cfg.task.name, "numbers")
    data: Data | HeteroData = build(node, "data")
    for store in data.node_stores:
        name = store._key
        if store.get("x") is None and (name is None or cfg.task.get("embeddings") is None):
            of = "" if name is None else f" of {name!r}"
            fix = "" if name is None else "; task.embeddings=64 trains some"
            raise ValueError(f"data: the graph has no node features x{of}, which the models need{fix}")
    return data


def build_node_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Build what predicts classes, labels or numbers of nodes."""
    target = _target(cfg, data)
    if not _partitioned(cfg) and (note := fill_splits(data if target is None else data[target])):
        rank_zero_only(console().print)(note, soft_wrap=True, highlight=False, markup=False)
    num_outputs = _count_outputs(cfg.task.name, data if target is None else data[target])
    datamodule = _on_parts(cfg) if _partitioned(cfg) else build(cfg.datamodule, "datamodule", data=data)
    if isinstance(datamodule, LinkDataModule):
        raise ValueError(
            "datamodule=link (persistent_link) makes batches of edges; use datamodule=neighbor or full, or task=link"
        )
    sizes = {} if cfg.task.name == "regression" else {"num_classes": num_outputs}
    return datamodule, _module(cfg, data, num_outputs, target=target, **sizes)


def _partitioned(cfg: DictConfig) -> bool:
    """Whether the graph comes in parts."""
    parts = str(cfg.datamodule.get("_target_")).endswith(("PartitionedDataModule", "PartitionedLinkDataModule"))
    if parts != str(cfg.data.get("_target_")).endswith("whole.outline"):
        raise ValueError(
            "datamodule=partitioned trains on the graph of datamodule.root, and no other: give data=partitioned"
            if parts
            else "data=partitioned is the graph of datamodule=partitioned, and of no other"
        )
    return parts


def _on_parts(cfg: DictConfig, **given: Any) -> PartitionedDataModule | PartitionedLinkDataModule:
    node = cfg.datamodule.copy()
    node.root = to_absolute_path(node.root)
    datamodule: PartitionedDataModule | PartitionedLinkDataModule = build(node, "datamodule", **given)
    return datamodule


def _check_links(cfg: DictConfig) -> None:
    """Refuse a DataModule that makes no mini-batches of edges."""
    if not str(cfg.datamodule._target_).endswith("LinkDataModule"):
        raise ValueError(
            f"task={cfg.task.name} trains on mini-batches of edges; use datamodule=link, persistent_link, "
            "collective_link or partitioned_link"
        )


def build_link_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Hide some edges from the graph, and build what predicts them."""
    _check_links(cfg)
    if _partitioned(cfg):  # which were hidden when it was partitioned
        datamodule = _on_parts(cfg)
        return datamodule, _module(cfg, data, cfg.model.hidden_channels, target=_kept_type(cfg, datamodule))
    kind = link_type(cfg, data)
    train, *evaluation = split_links(data, kind, **cfg.task.split)
    given: dict[str, Any] = {"input_train_edges": _labeled(train, kind)[0]}
    for name, part in zip(("val", "test"), evaluation, strict=True):
        given[f"input_{name}_edges"], given[f"input_{name}_labels"] = _labeled(part, kind)
    for key in ("edge_label", "edge_label_index"):
        del (train if kind is None else train[kind])[key]  # the loader attaches those of each batch
    datamodule = build(cfg.datamodule, "datamodule", data=train, **given)
    return datamodule, _module(cfg, data, cfg.model.hidden_channels, target=kind)


def _labeled(split: Data | HeteroData, kind: EdgeType | None) -> tuple[Tensor | tuple[EdgeType, Tensor], Tensor]:
    """Return labeled edges as DataModules take them, and their labels."""
    part = split if kind is None else split[kind]
    edges = part.edge_label_index
    return edges if kind is None else (kind, edges), part.edge_label


def _kept_type(cfg: DictConfig, datamodule: PartitionedDataModule | PartitionedLinkDataModule) -> EdgeType | None:
    """Return the type of the edges that a folder was partitioned to predict."""
    kind: EdgeType | None = datamodule.partition.link_type
    chosen = cfg.task.get("target")
    if chosen is not None and (kind is None or chosen not in ("__".join(kind), list(kind))):
        raise ValueError(
            f"task.target={chosen}, but the folder was partitioned to predict {'__'.join(kind or ('its edges',))}: "
            f"leave it out, or partition again (lgnn partition task={cfg.task.name} task.target=…)"
        )
    return kind


def link_type(cfg: DictConfig, data: Data | HeteroData) -> EdgeType | None:
    """Return the type of the edges that ``task=link`` predicts; None for a homogeneous graph."""
    if not isinstance(data, HeteroData):
        if (target := cfg.task.get("target")) is not None:
            raise ValueError(f"task.target={target}, but the graph has no types; leave it out")
        return None
    return _chosen_type(cfg, [kind for kind in data.edge_types if not kind[1].startswith("rev_")] or data.edge_types)


def _chosen_type(cfg: DictConfig, kinds: list[EdgeType]) -> EdgeType:
    target = cfg.task.get("target")
    found = [kind for kind in kinds if target is None or target in ("__".join(kind), list(kind))]
    if len(found) != 1:
        names = ", ".join("__".join(kind) for kind in kinds)
        what = f"may be {' or '.join(map(_listed, found))}" if found and target is not None else "is not one type"
        raise ValueError(
            f"task.target={target} {what} of the edges that can be predicted; give one of {names}, or the list of its "
            f"names, as {_listed(('source', 'relation', 'target'))}"
        )
    return found[0]


def build_recommend_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Hide the last edges in time, and build what predicts them from what came before each."""
    if not isinstance(data, HeteroData):
        raise ValueError(
            "task=recommend predicts edges with times of a heterogeneous graph, and this one is homogeneous; use "
            "task=link, or convert tables by type (lgnn convert source.user__rates__item=FILE …)"
        )
    _check_links(cfg)
    given: dict[str, Any] = {"time_attr": cfg.task.time}
    if _partitioned(cfg):  # whose last edges were chosen when it was partitioned
        datamodule = _on_parts(cfg, **given)
        kind = _kept_type(cfg, datamodule)
    else:
        kind, splits = split_in_time(cfg, data)
        for stage, (edges, time) in splits.items():
            given[f"input_{stage}_edges"], given[f"input_{stage}_time"] = (kind, edges), time
        datamodule = build(cfg.datamodule, "datamodule", data=data, **given)
    return datamodule, _module(cfg, data, cfg.model.hidden_channels, target=kind)


def split_in_time(cfg: DictConfig, data: HeteroData) -> tuple[EdgeType, dict[str, tuple[Tensor, Tensor]]]:
    """Return the type of the edges that ``task=recommend`` predicts and, by stage, these and what times they see."""
    kind = _recommended(cfg, data)
    edges, time = edges_of(data, kind), data[kind][cfg.task.time]
    order = torch.argsort(time, stable=True)
    shares = [cfg.task.split[f"num_{stage}"] for stage in ("train", "val", "test")]
    counts = [max(round(order.numel() * share), share > 0) for share in shares]  # of few edges, one at least
    if min(counts) < 1 or sum(counts) > order.numel():
        raise ValueError(f"task.split must leave edges to each of train, val and test, of {order.numel()} in all")
    parts = zip(("train", "val", "test"), torch.split(order[-sum(counts) :], counts), strict=True)
    # A moment earlier: an edge must not see itself.
    return kind, {stage: (edges[:, part], _before(time[part])) for stage, part in parts}


def _before(time: Tensor) -> Tensor:
    """Return the last moment before each time."""
    return torch.nextafter(time, time.new_tensor(-torch.inf)) if time.is_floating_point() else time - 1


def _recommended(cfg: DictConfig, data: HeteroData) -> EdgeType:
    """Return the type of the edges that are predicted."""
    timed = [kind for kind in data.edge_types if cfg.task.time in data[kind] and not kind[1].startswith("rev_")]
    if not timed:
        found = {key for store in data.edge_stores for key, value in store.items() if isinstance(value, Tensor)}
        others = sorted(found - {"edge_index"})
        of = f", but {', '.join(others)}, of which task.time=NAME may be the time" if others else ""
        raise ValueError(
            f"task=recommend goes by the times of edges, and no type of edges has the attribute {cfg.task.time!r}{of}; "
            "task=link needs no times"
        )
    return _chosen_type(cfg, timed)


def _listed(kind: EdgeType) -> str:
    return f"[{','.join(kind)}]"


def build_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Build what ``task.name`` asks for."""
    datamodule, module = TASKS[cfg.task.name](cfg, data)
    if type(module).__module__.startswith("lightning_gnn."):  # a user's own may log whatever it likes
        given = (getattr(module, "metric_name", None), *getattr(module, "metric_names", ()), "loss")
        logged = [name for name in given if name is not None]
        if cfg.mode == "train" and cfg.task.metric not in logged:
            raise ValueError(
                f"task.metric={cfg.task.metric} is none of what is logged ({', '.join(logged)}); "
                f"add it by 'task.metrics=[{cfg.task.metric}]'"
            )
    return datamodule, module


def build_trainer(cfg: DictConfig) -> pl.Trainer:
    """Build loggers, callbacks and the Trainer."""
    callbacks = [build(node, f"callbacks.{name}") for name, node in (cfg.get("callbacks") or {}).items()]
    loggers = [build(node, f"logger.{name}") for name, node in (cfg.get("logger") or {}).items()]
    arguments = {
        "logger": loggers or False,
        "callbacks": [*callbacks, KeepConfig(cfg)],
        "default_root_dir": cfg.output_dir,
    }
    if "enable_checkpointing" not in cfg.trainer:
        arguments["enable_checkpointing"] = any(isinstance(item, Checkpoint) for item in callbacks)
    trainer: pl.Trainer = build(cfg.trainer, "trainer", **arguments)
    return trainer


def build(node: DictConfig, name: str, **kwargs: Any) -> Any:
    """Build an object from ``_target_`` and its arguments; what is null and not taken by its class is left out.

    Hydra makes a partial of the configured arguments only: it would copy tensors that pass through it.
    """
    try:
        if lost := [key for key in kwargs if node.get(key) is not None]:
            raise ValueError(f"{name}.{lost[0]}={node[lost[0]]} has no effect, the command sets it; leave it out")
        partial = instantiate(node, _partial_=True, _convert_="all")
        given = partial.keywords | kwargs
        parameters = signature(partial.func).parameters
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {key: value for key, value in given.items() if value is not None or key in parameters}
        return partial.func(*partial.args, **given)
    except (ArithmeticError, AssertionError, AttributeError, LookupError) as error:
        target = str(node.get("_target_")).rpartition(".")[2]
        raise ValueError(f"{name}: {target} cannot be built so: {type(error).__name__}: {error}") from error
    except Exception as error:
        error.__notes__ = [*getattr(error, "__notes__", []), name]  # type: ignore[attr-defined]
        raise


def _module(cfg: DictConfig, data: Data | HeteroData, out_channels: int, **kwargs: Any) -> pl.LightningModule:
    sizes = {"in_channels": data.num_features, "out_channels": out_channels}
    if isinstance(data, HeteroData) != ("metadata" in cfg.model):
        name = str(cfg.model._target_).rpartition(".")[2]
        raise ValueError(
            f"model: {name} is for graphs without types, but this one has {', '.join(data.node_types)}; use "
            "model=rgcn, hetero_sage, rgat or hgt"
            if isinstance(data, HeteroData)
            else f"model: {name} is for graphs with types; use model=sage, gcn, gin or gat"
        )
    if isinstance(data, HeteroData):
        sizes["metadata"] = data.metadata()
        if any(store.get("x") is None for store in data.node_stores):
            kwargs["embeddings"] = embeddings = TypeEmbeddings(data, cfg.task.embeddings)
            sizes["in_channels"] = data.num_features | embeddings.num_features
    given = {name: cfg.model.get(name) for name in sizes}
    model = build(cfg.model, "model", **{name: size for name, size in sizes.items() if given[name] is None})
    ends = [target] if isinstance(target := kwargs.get("target"), str) else [target[0], target[2]] if target else []
    reached = {kind[2] for kind in model.layers[-1]} if getattr(model, "every", True) is False else {*ends}
    for name in {*ends} - reached:
        raise ValueError(f"model: {type(model).__name__} has no output for {name!r}, which no edges reach; {BACK}")
    left_out = [*_NOT_OF_THE_MODULE, *(["target"] if "target" in kwargs else [])]
    settings = OmegaConf.masked_copy(cfg.task, [key for key in cfg.task if key not in left_out])
    module: pl.LightningModule = build(settings, "task", model=model, **kwargs)
    return module


def _target(cfg: DictConfig, data: Data | HeteroData) -> str | None:
    """Return the type of nodes that is predicted."""
    target = cfg.task.get("target")
    if not isinstance(data, HeteroData):
        if target is not None:
            raise ValueError(f"task.target={target}, but the graph has no types; leave it out")
        return None
    labeled = [name for name in data.node_types if data[name].get("y") is not None]
    if target is None and len(labeled) == 1:
        target = labeled[0]
    if labeled and target not in labeled:
        raise ValueError(f"task.target={target} is not a node type with labels; give one of {', '.join(labeled)}")
    if not labeled:
        _labels(data)  # says what is missing
    return str(target)


def _count_outputs(task: str, store: Data | HeteroData | BaseStorage) -> int:
    """Return how many outputs a model needs for the labels of nodes."""
    y = _labels(store)
    columns = y.size(1) if y.dim() > 1 else 1
    fits, wanted = {
        "node": (columns == 1 and not y.is_floating_point(), "one integer class per node"),
        "multilabel": (y.dim() == 2 and columns > 0, "0 or 1 for each label of each node, [N, L]"),
        "regression": (y.dim() in (1, 2) and y.is_floating_point(), "numbers, floating [N] or [N, T]"),
    }[task]
    if not fits:
        raise ValueError(
            f"data: y must hold {wanted}, but is {y.dtype} {list(y.shape)}; for one class per node use task=node, for "
            "several labels per node task=multilabel, for numbers task=regression"
        )
    if task != "node":
        return columns
    count = int(y.max()) + 1
    if count > max(_CLASSES, y.numel()):
        raise ValueError(
            f"data: y holds {count - 1}, but classes are numbered from 0, and a model has an output for each: number "
            "them, y = torch.unique(y, return_inverse=True)[1], or use task=regression"
        )
    return count


def _labels(store: Data | HeteroData | BaseStorage) -> Tensor:
    y: Tensor | None = None if isinstance(store, HeteroData) else store.get("y")
    if y is None:
        raise ValueError("data: the graph has no labels y; use one with labels, or task=link")
    return y


_CLASSES = 1 << 16  # classes from which on there are hardly more than nodes
TASKS = {
    **dict.fromkeys(("node", "multilabel", "regression"), build_node_task),
    "link": build_link_task,
    "recommend": build_recommend_task,
}
