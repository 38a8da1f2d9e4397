"""Build the data, DataModule, LightningModule and Trainer of a composed configuration."""

from inspect import Parameter, signature
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType

from lightning_gnn.cli.command_line import absolute, raise_user_errors
from lightning_gnn.cli.predictions import check_format
from lightning_gnn.cli.saved_run import KeepConfig
from lightning_gnn.cli.splits import fill_splits, split_links
from lightning_gnn.cli.targets import is_a, target_of
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.graph.hetero import edges_of
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.hetero.models import BACK
from lightning_gnn.partitioned import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.partitioned.whole import outline
from lightning_gnn.report.console import console
from lightning_gnn.runtime.files import check_writable
from lightning_gnn.runtime.lightning import Checkpoint, check_package, of_package, pl, rank_zero_only
from lightning_gnn.runtime.urls import cached_path, is_url, local_path, without_file_scheme

MODES = ("train", "test", "predict")
_NON_MODULE_KEYS = ("name", "metric", "mode", "split", "time", "embeddings")
"""Task keys that are not arguments of its LightningModule."""


def check_config(cfg: DictConfig) -> None:
    """Validate a configuration before anything is loaded; raise an error that names the key and the remedy."""
    if cfg.mode not in MODES:
        raise ValueError(f"mode={cfg.mode!r} is unknown; use one of {', '.join(MODES)}")
    if missing := OmegaConf.missing_keys(cfg):
        raise ValueError("; ".join(f"{key} is missing; give {key}=VALUE" for key in sorted(missing)))
    if cfg.task.name not in TASKS:
        raise ValueError(f"task.name={cfg.task.name!r} is unknown; use one of {', '.join(TASKS)}")
    check_format(cfg.predictions)
    if cfg.ckpt_path is None and cfg.mode != "train":
        raise ValueError(f"mode={cfg.mode} needs a checkpoint; give ckpt_path=PATH")
    if cfg.ckpt_path is not None and not (path := cached_path(absolute(str(cfg.ckpt_path)))).is_file():
        inside = [*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")]
        checkpoints = sorted(inside, key=lambda file: file.name != "best.ckpt")
        hint = f"a folder; give a file, such as {checkpoints[0]}" if checkpoints else "no such file"
        raise FileNotFoundError(f"ckpt_path={cfg.ckpt_path}: {hint}")
    _is_partitioned(cfg)
    fanouts = OmegaConf.select(cfg, "datamodule.num_neighbors")
    depth = OmegaConf.select(cfg, "model.num_layers")
    if OmegaConf.is_list(fanouts) and depth is not None and len(fanouts) != depth:
        listed = ",".join(str(fanout) for fanout in fanouts)
        raise ValueError(
            f"model.num_layers={depth}, but datamodule.num_neighbors=[{listed}] has {len(fanouts)} fanouts; "
            "give one fanout per layer"
        )
    # Each place where the run will write, before anything is loaded.
    check_writable(cfg.output_dir, "output_dir")
    for group, key in (("callbacks", "dirpath"), ("logger", "save_dir")):
        for name, item in (cfg.get(group) or {}).items():
            folder = item.get(key) if OmegaConf.is_dict(item) else None
            if folder is not None and not is_url(str(folder)):
                check_writable(local_path(str(folder)), f"{group}.{name}.{key}")


def memory_options(cfg: DictConfig) -> list[str]:
    """Return settings that lower the memory of a run, with their effect, those of most effect first."""
    node, found = cfg.datamodule, []
    if (size := node.get("batch_size")) is not None and size > 1:
        found.append(f"datamodule.batch_size={size // 2}")
    if "num_workers" in node and node.num_workers != 0:
        found.append("datamodule.num_workers=0")
    if "memory" in node and node.memory is None:
        found.append("datamodule.memory=1GB (with data.root=FOLDER; reads features from disk)")
    if cfg.torch_threads is None or cfg.torch_threads > 1:
        found.append("torch_threads=1")
    if cfg.data.get("num_nodes") is not None:
        found.append(f"data.num_nodes={cfg.data.num_nodes // 2}")
    return found


def build_data(cfg: DictConfig) -> Data | HeteroData:
    """Load or generate the graph; a relative ``root`` is resolved against the directory the command was started in."""
    node = cfg.data.copy()
    if node.get("root") is not None:
        node.root = absolute(node.root)
    if "labels" in node and node.labels is None:
        node.labels = {"node": "classes", "multilabel": "several"}.get(cfg.task.name, "numbers")
    data: Data | HeteroData = build(node, "data")
    for store in data.node_stores:
        name = store._key
        if store.get("x") is None and (name is None or cfg.task.get("embeddings") is None):
            of = "" if name is None else f" of {name!r}"
            fix = "; task.embeddings=64 trains an embedding for each node"
            if name is None:
                fix = "; lgnn convert … random_features=64 writes random ones"
            raise ValueError(f"data: the graph has no node features x{of}, which the models need{fix}")
    return data


def build_node_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Build the DataModule and LightningModule that predict classes, labels or numbers of nodes."""
    target = _target(cfg, data)
    if not _is_partitioned(cfg) and (note := fill_splits(data if target is None else data[target])):
        rank_zero_only(console().print)(note, soft_wrap=True, highlight=False, markup=False)
    num_outputs = _count_outputs(cfg.task.name, data if target is None else data[target])
    datamodule = _build_partitioned(cfg) if _is_partitioned(cfg) else build(cfg.datamodule, "datamodule", data=data)
    if isinstance(datamodule, LinkDataModule):
        raise ValueError(
            "datamodule=link (persistent_link) makes batches of edges; use datamodule=neighbor or full, or task=link"
        )
    sizes = {} if cfg.task.name == "regression" else {"num_classes": num_outputs}
    return datamodule, _build_module(cfg, data, num_outputs, target=target, **sizes)


def _is_partitioned(cfg: DictConfig) -> bool:
    """Return whether the graph is partitioned; raise a ValueError if ``data`` and ``datamodule`` disagree."""
    partitioned = is_a(cfg.datamodule, PartitionedDataModule, PartitionedLinkDataModule)
    if partitioned != (target_of(cfg.data) is outline):
        raise ValueError(
            "datamodule=partitioned trains only on the graph in datamodule.root: give data=partitioned"
            if partitioned
            else "data=partitioned works only with datamodule=partitioned: give both, or another data="
        )
    return partitioned


def _build_partitioned(cfg: DictConfig, **arguments: Any) -> PartitionedDataModule | PartitionedLinkDataModule:
    node = cfg.datamodule.copy()
    node.root = absolute(node.root)
    datamodule: PartitionedDataModule | PartitionedLinkDataModule = build(node, "datamodule", **arguments)
    return datamodule


def _check_links(cfg: DictConfig) -> None:
    """Raise a ValueError if the class of the DataModule does not make batches of edges."""
    classes = (LinkDataModule, *[FullGraphDataModule] * (cfg.task.name == "link"))
    if isinstance(target_of(cfg.datamodule), type) and not is_a(cfg.datamodule, *classes):
        raise ValueError(
            f"task={cfg.task.name} trains on batches of edges; use datamodule=link, persistent_link, "
            f"collective_link or partitioned_link{', or full' if cfg.task.name == 'link' else ''}"
        )


def build_link_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Remove the edges to predict from the message-passing graph, and build the modules that predict them."""
    _check_links(cfg)
    if _is_partitioned(cfg):  # lgnn partition has removed them already
        datamodule = _build_partitioned(cfg)
        return datamodule, _build_module(cfg, data, cfg.model.hidden_channels, target=_saved_link_type(cfg, datamodule))
    edge_type = link_type(cfg, data)
    full = is_a(cfg.datamodule, FullGraphDataModule)  # draws no negatives, so the split has them
    train, *evaluation = split_links(data, edge_type, **cfg.task.split, negatives=full)
    inputs: dict[str, Any] = {"input_train_edges": _labeled_edges(train, edge_type)[0]}
    if full:
        inputs["input_train_labels"] = _labeled_edges(train, edge_type)[1]
    for name, part in zip(("val", "test"), evaluation, strict=True):
        inputs[f"input_{name}_edges"], inputs[f"input_{name}_labels"] = _labeled_edges(part, edge_type)
    for key in ("edge_label", "edge_label_index"):
        del (train if edge_type is None else train[edge_type])[key]  # the loader attaches those of each batch
    datamodule = build(cfg.datamodule, "datamodule", data=train, **inputs)
    return datamodule, _build_module(cfg, data, cfg.model.hidden_channels, target=edge_type)


def _labeled_edges(split: Data | HeteroData, name: EdgeType | None) -> tuple[Tensor | tuple[EdgeType, Tensor], Tensor]:
    """Return labeled edges in the form DataModules accept, and their labels."""
    store = split if name is None else split[name]
    edges = store.edge_label_index
    return edges if name is None else (name, edges), store.edge_label


def _saved_link_type(cfg: DictConfig, datamodule: PartitionedDataModule | PartitionedLinkDataModule) -> EdgeType | None:
    """Return the edge type that a folder was partitioned to predict."""
    edge_type: EdgeType | None = datamodule.partition.link_type
    chosen = cfg.task.get("target")
    if chosen is not None and (edge_type is None or chosen not in ("__".join(edge_type), list(edge_type))):
        raise ValueError(
            f"task.target={chosen}, but the folder was partitioned to predict {'__'.join(edge_type or ('its edges',))}:"
            f" leave it out, or partition again (lgnn partition task={cfg.task.name} task.target=…)"
        )
    return edge_type


def link_type(cfg: DictConfig, data: Data | HeteroData) -> EdgeType | None:
    """Return the edge type that ``task=link`` predicts; None for a homogeneous graph."""
    if not isinstance(data, HeteroData):
        if (target := cfg.task.get("target")) is not None:
            raise ValueError(f"task.target={target}, but the graph is homogeneous; leave it out")
        return None
    return _select_type(cfg, [name for name in data.edge_types if not name[1].startswith("rev_")] or data.edge_types)


def _select_type(cfg: DictConfig, edge_types: list[EdgeType]) -> EdgeType:
    target = cfg.task.get("target")
    matching = [name for name in edge_types if target is None or target in ("__".join(name), list(name))]
    if len(matching) != 1:
        names = ", ".join("__".join(name) for name in edge_types)
        found = f", but matches {' and '.join(map(_format, matching))}" if matching and target is not None else ""
        raise ValueError(
            f"task.target={target} must select one edge type{found}; give one of {names}, or the list of its names, "
            f"such as {_format(('source', 'relation', 'target'))}"
        )
    return matching[0]


def build_recommend_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Build the modules that predict the latest edges, each from the edges before it."""
    if not isinstance(data, HeteroData):
        raise ValueError(
            "task=recommend predicts timestamped edges of a heterogeneous graph, but this one is homogeneous; use "
            "task=link, or convert one table per edge type (lgnn convert source.user__rates__item=FILE …)"
        )
    _check_links(cfg)
    inputs: dict[str, Any] = {"time_attr": cfg.task.time}
    if _is_partitioned(cfg):  # lgnn partition has selected the edges already
        datamodule = _build_partitioned(cfg, **inputs)
        edge_type = _saved_link_type(cfg, datamodule)
    else:
        edge_type, splits = split_in_time(cfg, data)
        for stage, (edges, time) in splits.items():
            inputs[f"input_{stage}_edges"], inputs[f"input_{stage}_time"] = (edge_type, edges), time
        datamodule = build(cfg.datamodule, "datamodule", data=data, **inputs)
    return datamodule, _build_module(cfg, data, cfg.model.hidden_channels, target=edge_type)


def split_in_time(cfg: DictConfig, data: HeteroData) -> tuple[EdgeType, dict[str, tuple[Tensor, Tensor]]]:
    """Return the edge type that ``task=recommend`` predicts and, by stage, its seed edges and their latest time."""
    edge_type = _timed_edge_type(cfg, data)
    edges, time = edges_of(data, edge_type), data[edge_type][cfg.task.time]
    order = torch.argsort(time, stable=True)
    fractions = [cfg.task.split[f"num_{stage}"] for stage in ("train", "val", "test")]
    counts = [max(round(order.numel() * fraction), fraction > 0) for fraction in fractions]  # at least one edge each
    if min(counts) < 1 or sum(counts) > order.numel():
        raise ValueError(f"task.split must leave edges to each of train, val and test, of {order.numel()} in all")
    parts = zip(("train", "val", "test"), torch.split(order[-sum(counts) :], counts), strict=True)
    # Sample neighbors strictly before each seed edge, which otherwise could see itself.
    before = torch.nextafter(time, time.new_tensor(-torch.inf)) if time.is_floating_point() else time - 1
    return edge_type, {stage: (edges[:, part], before[part]) for stage, part in parts}


def _timed_edge_type(cfg: DictConfig, data: HeteroData) -> EdgeType:
    """Return the edge type to predict, which must have the attribute ``task.time``."""
    timed = [name for name in data.edge_types if cfg.task.time in data[name] and not name[1].startswith("rev_")]
    if not timed:
        attributes = {key for store in data.edge_stores for key, value in store.items() if isinstance(value, Tensor)}
        others = sorted(attributes - {"edge_index"})
        hint = f"; give the time's name by task.time=NAME, if it is one of {', '.join(others)}" if others else ""
        raise ValueError(
            f"task=recommend needs the times of edges, but no edge type has the attribute {cfg.task.time!r}{hint}; "
            "task=link needs no times"
        )
    return _select_type(cfg, timed)


def _format(edge_type: EdgeType) -> str:
    return f"[{','.join(edge_type)}]"


def build_task(cfg: DictConfig, data: Data | HeteroData) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """Build the DataModule and LightningModule of ``task.name``."""
    datamodule, module = TASKS[cfg.task.name](cfg, data)
    for part in (datamodule, module):
        check_package(part)
    if type(module).__module__.startswith("lightning_gnn."):  # a user's own module may log any names
        names = (getattr(module, "metric_name", None), *getattr(module, "metric_names", ()), "loss")
        logged = [name for name in names if name is not None]
        if cfg.mode == "train" and cfg.task.metric not in logged:
            raise ValueError(
                f"task.metric={cfg.task.metric} is not among the logged metrics ({', '.join(logged)}); "
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


def build_quiet_trainer(cfg: DictConfig, **more: Any) -> pl.Trainer:
    """Build the configured Trainer without logger, checkpoints, progress bar and callbacks."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments = {**quiet, "callbacks": None, "default_root_dir": cfg.output_dir, **more}
    configured = OmegaConf.masked_copy(cfg.trainer, [key for key in cfg.trainer if key not in arguments])
    with raise_user_errors():
        trainer: pl.Trainer = build(configured, "trainer", **arguments)
    return trainer


def build(node: DictConfig, name: str, **kwargs: Any) -> Any:
    """Build the object of ``_target_`` from its arguments; drop arguments that are null and unknown to its class.

    Hydra only instantiates a partial of the configured arguments: it would copy tensors that pass through it.
    """
    try:
        if ignored := [key for key in kwargs if node.get(key) is not None]:
            raise ValueError(f"{name}.{ignored[0]}={node[ignored[0]]} has no effect, the command sets it; leave it out")
        _choose_package(node)
        partial = instantiate(node, _partial_=True, _convert_="all")
        arguments = partial.keywords | kwargs
        if arguments.get("dirpath") is not None:  # Lightning would create a folder named "file:"
            arguments["dirpath"] = without_file_scheme(arguments["dirpath"])
        parameters = signature(partial.func).parameters
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {key: value for key, value in arguments.items() if value is not None or key in parameters}
        return partial.func(*partial.args, **arguments)
    except (ArithmeticError, AssertionError, AttributeError, LookupError) as error:
        target = str(node.get("_target_")).rpartition(".")[2]
        raise ValueError(f"{name}: cannot build {target}: {type(error).__name__}: {error}") from error
    except Exception as error:
        error.__notes__ = [*getattr(error, "__notes__", []), name]  # type: ignore[attr-defined]
        raise


def _choose_package(node: Any) -> None:
    """Replace the classes of Lightning, nested ones too, by those of the package that this process uses."""
    if isinstance(node, ListConfig):
        parts = list(node)
    elif isinstance(node, DictConfig):
        parts = [node.get(key) for key in node if not OmegaConf.is_interpolation(node, str(key))]
        target = node.get("_target_")
        if isinstance(target, str) and of_package(target) != target:
            node._target_ = of_package(target)
    else:
        return
    for part in parts:
        _choose_package(part)


def _build_module(cfg: DictConfig, data: Data | HeteroData, out_channels: int, **kwargs: Any) -> pl.LightningModule:
    sizes = {"in_channels": data.num_features, "out_channels": out_channels}
    if isinstance(data, HeteroData) != ("metadata" in cfg.model):
        name = str(cfg.model._target_).rpartition(".")[2]
        raise ValueError(
            f"model: {name} is for homogeneous graphs, but this one has the node types {', '.join(data.node_types)}; "
            "use model=rgcn, hetero_sage, rgat or hgt"
            if isinstance(data, HeteroData)
            else f"model: {name} is for heterogeneous graphs; use model=sage, gcn, gin or gat"
        )
    if isinstance(data, HeteroData):
        sizes["metadata"] = data.metadata()
        if any(store.get("x") is None for store in data.node_stores):
            kwargs["embeddings"] = embeddings = TypeEmbeddings(data, cfg.task.embeddings)
            sizes["in_channels"] = data.num_features | embeddings.num_features
    configured = {name: cfg.model.get(name) for name in sizes}
    model = build(cfg.model, "model", **{name: size for name, size in sizes.items() if configured[name] is None})
    # The model must have an output for the target node type, or for both ends of the target edge type.
    ends = [target] if isinstance(target := kwargs.get("target"), str) else [target[0], target[2]] if target else []
    reached = {name[2] for name in model.layers[-1]} if getattr(model, "every", True) is False else {*ends}
    for name in {*ends} - reached:
        raise ValueError(f"model: {type(model).__name__} has no output for {name!r}, which no edges reach; {BACK}")
    omitted = [*_NON_MODULE_KEYS, *(["target"] if "target" in kwargs else [])]
    settings = OmegaConf.masked_copy(cfg.task, [key for key in cfg.task if key not in omitted])
    module: pl.LightningModule = build(settings, "task", model=model, **kwargs)
    return module


def _target(cfg: DictConfig, data: Data | HeteroData) -> str | None:
    """Return the node type to predict; None for a homogeneous graph."""
    target = cfg.task.get("target")
    if not isinstance(data, HeteroData):
        if target is not None:
            raise ValueError(f"task.target={target}, but the graph is homogeneous; leave it out")
        return None
    labeled = [name for name in data.node_types if data[name].get("y") is not None]
    if target is None and len(labeled) == 1:
        target = labeled[0]
    if labeled and target not in labeled:
        raise ValueError(f"task.target={target} is not a node type with labels; give one of {', '.join(labeled)}")
    if not labeled:
        _labels(data)  # raises an error that names what is missing
    return str(target)


def _count_outputs(task: str, store: Data | HeteroData | BaseStorage) -> int:
    """Return the number of model outputs that the node labels require."""
    y = _labels(store)
    columns = y.size(1) if y.dim() > 1 else 1
    fits, expected = {
        "node": (columns == 1 and not y.is_floating_point(), "one integer class per node"),
        "multilabel": (y.dim() == 2 and columns > 0, "0 or 1 for each label of each node, [N, L]"),
        "regression": (y.dim() in (1, 2) and y.is_floating_point(), "numbers, floating [N] or [N, T]"),
    }[task]
    if not fits:
        raise ValueError(
            f"data: y must hold {expected}, but is {y.dtype} {list(y.shape)}; for one class per node use task=node, "
            "for several labels per node task=multilabel, for numbers task=regression"
        )
    if task != "node":
        return columns
    count = int(y.max()) + 1
    if count > max(_MIN_SUSPECT_CLASSES, y.numel()):
        raise ValueError(
            f"data: y holds {count - 1}, but classes are numbered from 0, and a model has one output per class: number "
            "them, y = torch.unique(y, return_inverse=True)[1], or use task=regression"
        )
    return count


def _labels(store: Data | HeteroData | BaseStorage) -> Tensor:
    y: Tensor | None = None if isinstance(store, HeteroData) else store.get("y")
    if y is None:
        raise ValueError("data: the graph has no labels y; use one with labels, or task=link")
    return y


_MIN_SUSPECT_CLASSES = 1 << 16  # more classes than this, and than nodes, are taken for a mistake
TASKS = {
    **dict.fromkeys(("node", "multilabel", "regression"), build_node_task),
    "link": build_link_task,
    "recommend": build_recommend_task,
}
