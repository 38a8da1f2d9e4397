"""``lgnn export``: a trained model as a program that runs without this package."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch_geometric.data import HeteroData

from lightning_gnn.cli.assemble import build_data, build_task, check_config
from lightning_gnn.cli.command_line import UserError, explained
from lightning_gnn.cli.saved_run import rebuild
from lightning_gnn.nn.export import check_onnx, export_onnx, export_program
from lightning_gnn.report.console import be_quiet, say

_ENDINGS = {"torch": ".pt2", "onnx": ".onnx"}
_NUM_NODES, _NUM_EDGES = 100, 400  # of the graph on which a program is held against its model


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the program; returns 2 where there is no model that can be one."""
    parser = argparse.ArgumentParser(
        "lgnn export",
        description="Write a trained model as a program of plain operators, for graphs of any size: torch.export's, "
        "which torch alone runs, or ONNX. It takes x [num_nodes, F] and edge_index [2, num_edges].",
    )
    parser.add_argument("overrides", nargs="+", help="ckpt_path=PATH, whose run is rebuilt, and what is to differ")
    parser.add_argument("--format", choices=[*_ENDINGS], default="torch", help="(default: %(default)s)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="(default: model.pt2 or model.onnx)")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="return the rows of the first N nodes alone (default: of all)"
    )
    chosen = parser.parse_args(arguments)
    path: Path = chosen.to or Path(f"model{_ENDINGS[chosen.format]}")
    # Compose the configuration saved with the checkpoint, in an output folder that is removed afterwards.
    try:
        with (
            initialize_config_module("lightning_gnn.conf", version_base="1.3"),
            tempfile.TemporaryDirectory() as folder,
            explained(),
        ):
            rebuilt = rebuild("train", OverridesParser.create().parse_overrides(chosen.overrides))
            typed = [*chosen.overrides, *rebuilt.deletions, "mode=predict", f"output_dir={folder}"]
            said = write(compose(rebuilt.config_name, overrides=typed), path, chosen.format, chosen.seeds)
    except (HydraException, UserError) as error:
        say(f"error: {error}", "red")
        return 2
    Console(highlight=False, markup=False, soft_wrap=True).print(said)
    return 0


def write(cfg: DictConfig, path: Path, form: str, num_seeds: int | None) -> str:
    """Write the model of ``ckpt_path``, and return what to say of it."""
    # Check the configuration, and build the run of the checkpoint.
    be_quiet()
    if form == "onnx":
        check_onnx()
    check_config(cfg)
    data = build_data(cfg)
    if isinstance(data, HeteroData):
        raise ValueError("lgnn export writes models of graphs without types; serve those of others as examples/ do")
    _, module = build_task(cfg, data)
    # Load the weights without executing pickled code.
    checkpoint = torch.load(to_absolute_path(cfg.ckpt_path), map_location="cpu", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"])
    if not isinstance(network := getattr(module, "model", None), torch.nn.Module):
        name = type(module).__name__
        raise ValueError(f"{name} has no network as its attribute model; export it by lightning_gnn.nn.export_program")
    # Export the network, as the format demands.
    num_features = data.num_features
    program = export_program(network, num_features, num_seeds)
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "onnx":
        export_onnx(network, num_features, path, num_seeds)
    else:
        torch.export.save(program, path)
    # Compare the program with the model on a random graph, and report the difference.
    x, edge_index = torch.randn(_NUM_NODES, num_features), torch.randint(_NUM_NODES, (2, _NUM_EDGES))
    with torch.inference_mode():
        rows = program.module()(x, edge_index)
        expected = network.eval()(x, edge_index)[:num_seeds]
    count = "num_nodes" if num_seeds is None else num_seeds
    return (
        f"{path}: x [num_nodes, {num_features}], edge_index [2, num_edges] -> [{count}, {rows.size(1)}]; on a graph of "
        f"{_NUM_NODES} nodes it differs from {OmegaConf.select(cfg, 'model._target_').rpartition('.')[2]} by at most "
        f"{(rows - expected).abs().max():.1e}"
    )
