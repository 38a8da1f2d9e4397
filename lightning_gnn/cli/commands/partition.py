"""``lgnn partition``: partition a graph into one part per machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hydra import compose
from omegaconf import MISSING, DictConfig
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType

from lightning_gnn.cli.assemble import build_data, link_type, split_in_time
from lightning_gnn.cli.command_line import UserError, raise_user_errors
from lightning_gnn.cli.search_path import initialize
from lightning_gnn.cli.settings import gigabytes_in, parse_settings, print_with_time, read_settings
from lightning_gnn.cli.splits import split_links
from lightning_gnn.partitioned.folder import check_new_folder
from lightning_gnn.partitioned.partition import Summary, partition_graph
from lightning_gnn.report.console import say

Graph: TypeAlias = Data | HeteroData
_SETTINGS = """settings:
  data=NAME, data.KEY=VALUE  the graph, as for a run: data=custom data.root=FOLDER
  task=link, task.split.…    split edges as a run of this task (or of task=recommend) would, and save the splits for
                             datamodule=partitioned_link
  parts=8                    number of parts
  out=FOLDER                 the folder to make: one folder per part, and a small one that all machines need
  method=metis               metis (fewest edges between parts; in memory), ldg (streaming, for any size) or random
  seed=0                     random seed
  check_features=true        check the features for NaN and infinity first
Copy common/ and its own part-…/ to each machine, or everything to a shared file system. Train on it with
PartitionedDataModule(FOLDER, …), or lgnn datamodule=partitioned datamodule.root=FOLDER"""


_MEMORY_OPTIONS = ("method=ldg", "data.root=FOLDER, whose files are mapped")


@dataclass
class _Settings:
    parts: int = MISSING
    out: str = MISSING
    method: str = "metis"
    seed: int = 0
    check_features: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Partition a graph; return 2 for a wrong graph or settings."""
    description = "Partition a graph into parts balanced in nodes, edges and training seeds."
    settings = read_settings(arguments, "lgnn partition", description, _SETTINGS)
    try:
        with raise_user_errors(memory_options=_MEMORY_OPTIONS):
            of_run = [item for item in settings if item.lstrip("+").partition("=")[0].split(".")[0] in ("data", "task")]
            chosen = parse_settings(_Settings, [item for item in settings if item not in of_run], "lgnn partition")
            check_new_folder(chosen.out, "out")
            with initialize():
                cfg = compose("train", overrides=of_run)
            data, links, edge_type = build_data(cfg), None, None
            if cfg.task.name == "link":
                data, links, edge_type = _hide_links(data, cfg)
            if cfg.task.name == "recommend":
                edge_type, links = _select_latest(data, cfg)
            summary = partition_graph(
                data, chosen.out, chosen.parts, chosen.method, chosen.seed, chosen.check_features, print_with_time(),
                links, edge_type,
            )  # fmt: skip
    except UserError as error:
        say(f"error: {error}", "red")
        return 2
    print("\n".join(_lines(summary)))
    print(f"{gigabytes_in(chosen.out)} in {chosen.out}: PartitionedDataModule({chosen.out!r}, …) trains on it")
    return 0


def _hide_links(data: Graph, cfg: DictConfig) -> tuple[Graph, dict[str, Tensor], EdgeType | None]:
    """Return the graph without the edges that ``task=link`` predicts, these edges, and their type."""
    edge_type = link_type(cfg, data)
    splits = split_links(data, edge_type, **cfg.task.split)
    train, val, test = splits if edge_type is None else (split[edge_type] for split in splits)
    links = {
        "train": train.edge_label_index,
        "val": val.edge_label_index, "val_labels": val.edge_label,
        "test": test.edge_label_index, "test_labels": test.edge_label,
    }  # fmt: skip
    for key in ("edge_label", "edge_label_index"):
        del train[key]
    return splits[0], links, edge_type


def _select_latest(data: Graph, cfg: DictConfig) -> tuple[EdgeType, dict[str, Tensor]]:
    """Return the edge type that ``task=recommend`` predicts, its edges and their times; they stay in the graph."""
    if not isinstance(data, HeteroData):
        raise ValueError("task=recommend needs a heterogeneous graph with timestamped edges")
    edge_type, splits = split_in_time(cfg, data)
    edges = {stage: seed_edges for stage, (seed_edges, _) in splits.items()}
    return edge_type, {**edges, **{f"{stage}_time": time for stage, (_, time) in splits.items()}}


def _lines(summary: Summary) -> list[str]:
    lines = [
        f"{what:>6} per part: {min(counts):,} to {max(counts):,}"
        for what, counts in (("nodes", summary.nodes), ("edges", summary.edges), ("seeds", summary.seeds))
    ]
    lines.append(f"edge cut: {summary.cut:.1%} of the edges connect different parts")
    return lines
