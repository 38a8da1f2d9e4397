"""Exports trained models with ``torch.export`` and ONNX, to run without this package."""

from __future__ import annotations

import copy
import io
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_gnn.nn.module import GNNModule

if TYPE_CHECKING:  # importing it takes a second
    from torch.export import ExportedProgram

_NUM_NODES, _NUM_EDGES = 5, 7  # size of the example graph; both dimensions are dynamic in the program


def export_program(
    model: nn.Module, num_features: int, num_seeds: int | None = None, edge_weight: bool = False
) -> ExportedProgram:
    """Export a trained model as a program of ATen operators for graphs of any size.

    The program takes ``x`` float32 ``[N, num_features]`` and ``edge_index`` int64 ``[2, E]`` (source, target), and
    returns the model's outputs in evaluation mode. The inputs are a whole graph, or the sampled neighborhood of seed
    nodes in the layout of a mini-batch, where the seeds are the first nodes and their outputs the first rows.

    Args:
        model: Maps ``x`` and ``edge_index`` to one row per node; for a ``NodeClassifier`` and similar modules, their
            ``model`` is exported. It is not modified.
        num_seeds: Number of rows to return, those of the first nodes (1 for single-node requests). None returns all.
        edge_weight: Whether the program also takes ``edge_weight`` float32 ``[E]``, for example for a GCN.

    Returns:
        A program for ``torch.export.save`` and for calls as ``program.module()(x, edge_index)``.

    Raises:
        ValueError: The model cannot be exported, takes another number of features, or is heterogeneous.

    Examples:
        >>> import torch
        >>> from lightning_gnn.nn import GraphSAGE, export_program
        >>> model = GraphSAGE(4, 8, num_layers=2, out_channels=3).eval()
        >>> program = export_program(model, num_features=4).module()
        >>> x, edge_index = torch.randn(6, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> torch.allclose(program(x, edge_index), model(x, edge_index), atol=1e-5)
        True
    """
    from torch.export import Dim, export

    if num_seeds is not None and num_seeds < 1:
        raise ValueError(f"num_seeds must be at least 1, or None for all rows, got {num_seeds}")
    plain = _InnerModel(model, num_seeds).eval()
    x = torch.zeros(_NUM_NODES, num_features)
    nodes = torch.arange(_NUM_EDGES) % _NUM_NODES
    edge_index = torch.stack([nodes, (nodes + 1) % _NUM_NODES])
    num_edges = Dim("num_edges")
    shapes: dict[str, Any] = {"x": {0: Dim("num_nodes")}, "edge_index": {1: num_edges}}
    inputs = [x, edge_index]
    if edge_weight:
        shapes["edge_weight"] = {0: num_edges}
        inputs.append(torch.ones(_NUM_EDGES))
    running: list[tuple[str, nn.Module]] = []
    for path, layer in plain.model.named_modules():
        layer.register_forward_pre_hook(lambda layer, _, path=path: running.append((path, layer)))
        layer.register_forward_hook(lambda *_: (running.pop(), None)[1])
    try:
        with torch.no_grad(), _suppress_traces():
            return export(plain, tuple(inputs), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises many exception types
        name, reason = type(plain.model).__name__, _summarize(error, running)
        raise ValueError(f"{name} cannot be exported for {num_features} features: {reason}") from error


def _summarize(error: Exception, running: list[tuple[str, nn.Module]]) -> str:
    """Summarize an export error: the reason, the layer and the remedy."""
    text = textwrap.shorten(str(error).strip().partition("\n")[0], 200)
    path, layer = running[-1] if running else ("", None)
    where = f", in {type(layer).__name__} ({path})" if path else ""
    return f"{text}{where}; use another layer or aggr, or serve the module itself from its checkpoint"


@contextmanager
def _suppress_traces() -> Iterator[None]:
    """Suppress the traced graph that torch.export prints and logs when it fails."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes", "export._trace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export_onnx(
    model: nn.Module, num_features: int, path: str | Path, num_seeds: int | None = None, verbose: bool = False
) -> Path:
    """Write a trained model as an ONNX file of ``x``, ``edge_index`` and ``rows``; see :func:`export_program`.

    Raises:
        ModuleNotFoundError: The packages onnx and onnxscript are missing.
        ValueError: The model cannot be exported.
    """
    check_onnx()
    program = export_program(model, num_features, num_seeds)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(level if verbose else logging.ERROR)  # suppresses a warning that torchvision is missing
    try:
        torch.onnx.export(
            program,
            (),
            str(path),
            dynamo=True,
            input_names=["x", "edge_index"],
            output_names=["rows"],
            external_data=False,
            verbose=verbose,
        )
    except Exception as error:  # torch raises many exception types
        name = type(getattr(model, "model", model)).__name__
        raise ValueError(f"{name} cannot be written as ONNX: {_summarize(error, [])}") from error
    finally:
        logger.setLevel(level)
    return Path(path)


def check_onnx() -> None:
    """Raise a ModuleNotFoundError if a package that ONNX needs is missing."""
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ModuleNotFoundError(f"ONNX needs {' and '.join(missing)}: pip install 'lightning-gnn[onnx]'")


class _InnerModel(nn.Module):
    """A CPU copy of the inner model in float32, without LightningModule, compilation and gradients."""

    def __init__(self, model: nn.Module, num_seeds: int | None) -> None:
        super().__init__()
        if isinstance(model, GNNModule):
            model = model.model
        self.model = copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().float().requires_grad_(False)
        self.num_seeds = num_seeds
        for layer in self.model.modules():
            if getattr(layer, "cached", False):
                layer.cached = False
                for name in [name for name in vars(layer) if name.startswith("_cached_")]:  # tied to one graph
                    setattr(layer, name, None)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        rows: Tensor = self.model(x, edge_index, *(() if edge_weight is None else (edge_weight,)))
        return rows if self.num_seeds is None else rows[: self.num_seeds]
