"""``lgnn partition``: cut a graph into parts, one for each machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hydra import compose, initialize_config_module
from omegaconf import MISSING, DictConfig
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType

from lightning_gnn.cli.assemble import build_data, link_type, split_in_time
from lightning_gnn.cli.command_line import UserError, explained
from lightning_gnn.cli.settings import gigabytes_in, parsed, print_with_time, typed_settings
from lightning_gnn.cli.splits import split_links
from lightning_gnn.partitioned.partition import Summary, partition_graph
from lightning_gnn.report.console import say

Graph: TypeAlias = Data | HeteroData
_SETTINGS = """settings:
  data=NAME, data.KEY=VALUE  the graph, as for a run: data=custom data.root=FOLDER
  task=link, task.split.…    choose edges, as a run of this task (or of task=recommend) would, and keep them for
                             datamodule=partitioned_link
  parts=8                    how many parts
  out=FOLDER                 the folder to make: one folder per part, and a small one that all machines need
  method=metis               metis (fewest edges between parts; in memory), ldg (a stream, for any size) or random
  seed=0                     of what is random
  check_features=true        look for NaN and infinity first
Copy common/ and its own part-…/ to each machine, or all to a file system that they share. Train on it with
PartitionedDataModule(FOLDER, …), or lgnn datamodule=partitioned datamodule.root=FOLDER"""


@dataclass
class _Settings:
    parts: int = MISSING
    out: str = MISSING
    method: str = "metis"
    seed: int = 0
    check_features: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Partition; returns 2 where something about the graph or the settings is wrong."""
    description = "Cut a graph into parts that are even in nodes, edges and training seeds."
    settings = typed_settings(arguments, "lgnn partition", description, _SETTINGS)
    try:
        with explained():
            of_run = [item for item in settings if item.lstrip("+").partition("=")[0].split(".")[0] in ("data", "task")]
            chosen = parsed(_Settings, [item for item in settings if item not in of_run], "lgnn partition")
            with initialize_config_module("lightning_gnn.conf", version_base="1.3"):
                cfg = compose("train", overrides=of_run)
            data, links, kind = build_data(cfg), None, None
            if cfg.task.name == "link":
                data, links, kind = _hidden(data, cfg)
            if cfg.task.name == "recommend":
                kind, links = _last_in_time(data, cfg)
            summary = partition_graph(
                data, chosen.out, chosen.parts, chosen.method, chosen.seed, chosen.check_features, print_with_time(),
                links, kind,
            )  # fmt: skip
    except UserError as error:
        say(f"error: {error}", "red")
        return 2
    print("\n".join(_lines(summary)))
    print(f"{gigabytes_in(chosen.out)} in {chosen.out}: PartitionedDataModule({chosen.out!r}, …) trains on it")
    return 0


def _hidden(data: Graph, cfg: DictConfig) -> tuple[Graph, dict[str, Tensor], EdgeType | None]:
    """Return the graph without the edges that ``task=link`` predicts, these, and their type."""
    kind = link_type(cfg, data)
    parts = split_links(data, kind, **cfg.task.split)
    train, val, test = parts if kind is None else (part[kind] for part in parts)
    links = {
        "train": train.edge_label_index,
        "val": val.edge_label_index, "val_labels": val.edge_label,
        "test": test.edge_label_index, "test_labels": test.edge_label,
    }  # fmt: skip
    for key in ("edge_label", "edge_label_index"):
        del train[key]
    return parts[0], links, kind


def _last_in_time(data: Graph, cfg: DictConfig) -> tuple[EdgeType, dict[str, Tensor]]:
    """Return the type of the edges that ``task=recommend`` predicts, these and their times; they stay in the graph."""
    if not isinstance(data, HeteroData):
        raise ValueError("task=recommend predicts edges of a graph with types and times")
    kind, splits = split_in_time(cfg, data)
    edges = {stage: given for stage, (given, _) in splits.items()}
    return kind, {**edges, **{f"{stage}_time": time for stage, (_, time) in splits.items()}}


def _lines(summary: Summary) -> list[str]:
    lines = [
        f"{what:>6} per part: {min(counts):,} to {max(counts):,}"
        for what, counts in (("nodes", summary.nodes), ("edges", summary.edges), ("seeds", summary.seeds))
    ]
    lines.append(f"{summary.cut:.1%} of the edges go from one part to another")
    return lines
