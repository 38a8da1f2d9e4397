"""``lgnn export``: export a trained model to a program that runs without this package."""

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch_geometric.data import HeteroData

from lightning_gnn.cli.assemble import build_data, build_task, check_config
from lightning_gnn.cli.command_line import UserError, absolute, raise_user_errors
from lightning_gnn.cli.saved_run import rebuild
from lightning_gnn.cli.search_path import initialize
from lightning_gnn.nn.export import check_onnx, export_onnx, export_program
from lightning_gnn.report.console import be_quiet, say
from lightning_gnn.runtime.files import check_writable, write_whole
from lightning_gnn.runtime.urls import cached_path

_SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}
_NUM_NODES, _NUM_EDGES = 100, 400  # size of the random graph on which the program is compared with its model


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a model; return 2 for wrong settings or a model that cannot be exported."""
    parser = argparse.ArgumentParser(
        "lgnn export",
        description="Export a trained model to a program of plain operators, for graphs of any size: torch.export, "
        "which needs only torch, or ONNX. Its inputs are x [num_nodes, F] and edge_index [2, num_edges].",
    )
    parser.add_argument("overrides", nargs="+", help="ckpt_path=PATH, and overrides of the configuration saved in it")
    parser.add_argument("--format", choices=[*_SUFFIXES], default="torch", help="(default: %(default)s)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="(default: model.pt2 or model.onnx)")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="return only the rows of the first N nodes (default: all rows)"
    )
    chosen = parser.parse_args(arguments)
    path: Path = chosen.to or Path(f"model{_SUFFIXES[chosen.format]}")
    # Compose the configuration saved with the checkpoint, in an output folder that is removed afterwards.
    try:
        with initialize(), tempfile.TemporaryDirectory() as folder, raise_user_errors():
            rebuilt = rebuild("train", OverridesParser.create().parse_overrides(chosen.overrides))
            typed = [*chosen.overrides, *rebuilt.deletions, "mode=predict", f"output_dir={folder}"]
            summary = write(compose(rebuilt.config_name, overrides=typed), path, chosen.format, chosen.seeds)
    except (HydraException, UserError) as error:
        say(f"error: {error}", "red")
        return 2
    Console(highlight=False, markup=False, soft_wrap=True).print(summary)
    return 0


def write(cfg: DictConfig, path: Path, form: str, num_seeds: int | None) -> str:
    """Export the model of ``ckpt_path`` to a file; return a one-line summary."""
    # Check the configuration, and build the run of the checkpoint.
    be_quiet()
    if form == "onnx":
        check_onnx()
    check_config(cfg)
    if path.is_dir():
        raise ValueError(f"--to={path} is a folder; give a file, such as {path / f'model{_SUFFIXES[form]}'}")
    check_writable(path.parent, "the folder of --to")
    data = build_data(cfg)
    if isinstance(data, HeteroData):
        raise ValueError("lgnn export writes models of homogeneous graphs; serve heterogeneous ones as examples/ do")
    _, module = build_task(cfg, data)
    # Load the weights without executing pickled code.
    checkpoint = torch.load(cached_path(absolute(cfg.ckpt_path)), map_location="cpu", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"])
    if not isinstance(network := getattr(module, "model", None), torch.nn.Module):
        name = type(module).__name__
        raise ValueError(f"{name}.model is not a torch.nn.Module; export it by lightning_gnn.nn.export_program")
    # Export the network in the requested format.
    num_features = data.num_features
    program = export_program(network, num_features, num_seeds)
    if form == "onnx":
        path.parent.mkdir(parents=True, exist_ok=True)
        export_onnx(network, num_features, path, num_seeds)
    else:
        content = io.BytesIO()  # torch aborts the process if it cannot write to its file
        torch.export.save(program, content)
        write_whole(path, content.getvalue())
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
