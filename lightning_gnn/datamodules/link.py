"""Link-level training on sampled neighbourhoods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, NegativeSampling

from lightning_gnn.batching import ThreadedLinkLoader
from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.datamodules.neighbor import refuse_unsupported
from lightning_gnn.graph.checks import check_node_data
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.sampling import NeighborSampler


class LinkDataModule(MiniBatchDataModule):
    """Mini-batches of edges with their sampled neighbourhoods, with the keywords of PyG's ``LightningLinkData``.

    Args:
        data: The graph to sample from; leave out of it the edges that are to be predicted.
        input_train_edges: Training edges, int64 ``[2, n]``; all edges of the graph by default.
        input_train_labels: Their labels ``[n]``; without, all are positive.
        input_val_edges: Validation edges; no validation loader without.
        input_val_labels: Their labels.
        input_test_edges: Test edges.
        input_test_labels: Their labels.
        input_pred_edges: Edges to score.
        input_pred_labels: Their labels.
        num_neighbors: In-edges to pick per node, one number per hop; -1 takes all.
        neg_sampling: PyG's ``NegativeSampling``, or its mode; where edges have labels, evaluation adds no negatives.
        batch_size: Edges per mini-batch.
        num_workers: Threads that prepare mini-batches ahead.
        replace: Draw neighbours with replacement.
        disjoint: One tree per seed.
        seed: Start of the random streams; by default torch's initial seed.
        link_sampler: A sampler of your own.
        check_features: Look for NaN and infinity in ``data.x`` first.
        inference: ``"sampled"``; ``"full"`` or :class:`~lightning_gnn.nn.FullInference`: validation, testing and
            prediction run over the whole graph, layer by layer; validation and test edges then need labels.
        eval_loader_kwargs: What the other loaders take instead.
        **kwargs: Further arguments of :class:`~lightning_gnn.batching.ThreadedLinkLoader`.

    Raises:
        TypeError: The graph is not homogeneous, or edges are no integers.
        ValueError: Edges of a wrong shape or out of range, labels of a wrong length, no training edges.
    """

    def __init__(
        self,
        data: Data,
        input_train_edges: Tensor | None = None,
        input_train_labels: Tensor | None = None,
        input_val_edges: Tensor | None = None,
        input_val_labels: Tensor | None = None,
        input_test_edges: Tensor | None = None,
        input_test_labels: Tensor | None = None,
        input_pred_edges: Tensor | None = None,
        input_pred_labels: Tensor | None = None,
        *,
        num_neighbors: Sequence[int] | None = None,
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        replace: bool = False,
        disjoint: bool = False,
        seed: int | None = None,
        link_sampler: BaseSampler | None = None,
        check_features: bool = False,
        inference: str | FullInference = "sampled",
        eval_loader_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unsupported(kwargs)
        super().__init__(seed, batch_size, {"num_workers": num_workers, **kwargs}, eval_loader_kwargs, inference)
        check_node_data(data, check_features)
        if link_sampler is None:
            if num_neighbors is None:
                raise ValueError("num_neighbors is missing; give one fanout per hop, such as [15, 10]")
            link_sampler = NeighborSampler(data, num_neighbors, replace, disjoint, self.seed)
        self.data = data
        self.graph_sampler = link_sampler
        self.neg_sampling = NegativeSampling.cast(neg_sampling)
        if input_train_edges is None:
            input_train_edges = data.edge_index
        self._edges = {
            "train": (input_train_edges, input_train_labels),
            "val": (input_val_edges, input_val_labels),
            "test": (input_test_edges, input_test_labels),
            "predict": (input_pred_edges, input_pred_labels),
        }
        for stage, (edges, labels) in self._edges.items():
            if edges is not None:
                _check_edges(edges, labels, data.num_nodes, stage)
        if input_train_edges is None or input_train_edges.size(1) == 0:
            raise ValueError("the training split is empty; give input_train_edges with at least one edge")
        for stage in ("val", "test"):
            if self._edges[stage][0] is None:
                setattr(self, f"{stage}_dataloader", None)

    @property
    def num_neighbors(self) -> list[int] | None:
        """Fanout of each hop, None for a sampler that has none."""
        return getattr(self.graph_sampler, "num_neighbors", None)

    def train_dataloader(self) -> ThreadedLinkLoader:
        """Return shuffled mini-batches of the training edges."""
        return self._loader("train")

    def val_dataloader(self) -> Any:
        """Return mini-batches of the validation edges, in order, or the whole graph; see ``inference``."""
        return self._loader("val")

    def test_dataloader(self) -> Any:
        """Return mini-batches of the test edges, in order, or the whole graph."""
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        """Return mini-batches of the edges to score, in order, or the whole graph.

        Raises:
            ValueError: There are none.
        """
        if self._edges["predict"][0] is None:
            raise ValueError("there are no edges to score; give input_pred_edges")
        return self._loader("predict")

    def _loader(self, stage: str) -> Any:
        edges, labels = self._edges[stage]
        assert edges is not None
        if stage != "train" and self.inference is not None:
            if labels is None and stage != "predict":
                raise ValueError(
                    f"inference='full' draws no negative edges; give input_{stage}_edges of both kinds, and their "
                    f"input_{stage}_labels"
                )
            self.check_count(stage, edges.size(1))
            asked = {"edge_label_index": edges.long(), **({} if labels is None else {"edge_label": labels})}
            return self.full_loader(stage, **asked)
        without_negatives = stage == "predict" or (stage != "train" and labels is not None)
        return ThreadedLinkLoader(
            self.data,
            self.graph_sampler,
            edge_label_index=edges,
            edge_label=labels,
            neg_sampling=None if without_negatives else self.neg_sampling,
            **self.loader_arguments(stage, edges.size(1)),
        )


def _check_edges(edges: Tensor, labels: Tensor | None, num_nodes: int, stage: str) -> None:
    name = f"input_{'pred' if stage == 'predict' else stage}_edges"
    if not isinstance(edges, Tensor) or edges.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be an int64 tensor [2, n]")
    if edges.dim() != 2 or edges.size(0) != 2:
        raise ValueError(f"{name} must have the shape [2, n], but has {list(edges.shape)}")
    if edges.numel():
        low, high = (int(value) for value in torch.aminmax(edges))
        if low < 0 or high >= num_nodes:
            raise ValueError(f"{name} holds node {low if low < 0 else high}, but the graph has {num_nodes} nodes")
    if labels is not None and labels.size(0) != edges.size(1):
        raise ValueError(f"{name} holds {edges.size(1)} edges, but there are {labels.size(0)} labels")
