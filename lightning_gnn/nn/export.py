"""Trained models as programs of plain operators, which run without this package: ``torch.export`` and ONNX."""

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

if TYPE_CHECKING:  # which takes a second to import
    from torch.export import ExportedProgram

_NUM_NODES, _NUM_EDGES = 5, 7  # of the graph that the program is made on; others have any numbers of both


def export_program(
    model: nn.Module, num_features: int, num_seeds: int | None = None, edge_weight: bool = False
) -> ExportedProgram:
    """Return a trained model as a program of ATen's operators for graphs of any size.

    It takes ``x`` float32 ``[N, num_features]`` and ``edge_index`` int64 ``[2, E]`` (source, target), and returns what
    the model returns for them in evaluation. They may be a whole graph, or the sampled neighborhood of some nodes, as
    mini-batches hold it: the seeds first, whose rows are then the first ones.

    Args:
        model: Maps ``x`` and ``edge_index`` to a row per node; or ``NodeClassifier`` and the like, whose ``model`` is
            taken. It stays as it is.
        num_seeds: How many rows to return, those of the first nodes: 1 for programs that answer for a single node. None
            returns all.
        edge_weight: Whether it takes ``edge_weight`` float32 ``[E]`` besides, as a GCN may.

    Returns:
        What ``torch.export.save`` writes, and what is called as ``program.module()(x, edge_index)``.

    Raises:
        ValueError: The model cannot be exported, or takes other features, or dictionaries of several types.

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
    plain = _Plain(model, num_seeds).eval()
    x = torch.zeros(_NUM_NODES, num_features)
    nodes = torch.arange(_NUM_EDGES) % _NUM_NODES
    edge_index = torch.stack([nodes, (nodes + 1) % _NUM_NODES])
    num_edges = Dim("num_edges")
    shapes: dict[str, Any] = {"x": {0: Dim("num_nodes")}, "edge_index": {1: num_edges}}
    given = [x, edge_index]
    if edge_weight:
        shapes["edge_weight"] = {0: num_edges}
        given.append(torch.ones(_NUM_EDGES))
    running: list[tuple[str, nn.Module]] = []
    for path, layer in plain.model.named_modules():
        layer.register_forward_pre_hook(lambda layer, _, path=path: running.append((path, layer)))
        layer.register_forward_hook(lambda *_: (running.pop(), None)[1])
    try:
        with torch.no_grad(), _without_traces():
            return export(plain, tuple(given), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # of many kinds
        name, reason = type(plain.model).__name__, _reason(error, running)
        raise ValueError(f"{name} cannot be exported for {num_features} features: {reason}") from error


def _reason(error: Exception, running: list[tuple[str, nn.Module]]) -> str:
    """Say in short why an export has failed, in which layer, and what to do."""
    text = textwrap.shorten(str(error).strip().partition("\n")[0], 200)
    path, layer = running[-1] if running else ("", None)
    where = f", in {type(layer).__name__} ({path})" if path else ""
    return f"{text}{where}; use another layer or aggr, or serve the module itself from its checkpoint"


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keep from the user what torch.export prints and logs when it fails: the whole graph as far as it was traced."""
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
    logger.setLevel(level if verbose else logging.ERROR)  # else it warns that torchvision is missing
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
    except Exception as error:  # of many kinds
        name = type(getattr(model, "model", model)).__name__
        raise ValueError(f"{name} cannot be written as ONNX: {_reason(error, [])}") from error
    finally:
        logger.setLevel(level)
    return Path(path)


def check_onnx() -> None:
    """Say which packages ONNX needs."""
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ModuleNotFoundError(f"ONNX needs {' and '.join(missing)}: pip install 'lightning-gnn[onnx]'")


class _Plain(nn.Module):
    """A copy of a model in evaluation, with nothing of training around it."""

    def __init__(self, model: nn.Module, num_seeds: int | None) -> None:
        super().__init__()
        if isinstance(model, GNNModule):
            model = model.model
        self.model = copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().float().requires_grad_(False)
        self.num_seeds = num_seeds
        for layer in self.model.modules():
            if getattr(layer, "cached", False):
                layer.cached = False
                for name in [name for name in vars(layer) if name.startswith("_cached_")]:  # of one graph
                    setattr(layer, name, None)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        rows: Tensor = self.model(x, edge_index, *(() if edge_weight is None else (edge_weight,)))
        return rows if self.num_seeds is None else rows[: self.num_seeds]
