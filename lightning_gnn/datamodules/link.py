"""DataModule for link prediction with neighbor sampling."""

from __future__ import annotations

import copy
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, NegativeSampling
from torch_geometric.typing import EdgeType
from typing_extensions import Unpack, override

from lightning_gnn.datamodules.base import MiniBatchDataModule, seed_times
from lightning_gnn.datamodules.full_batch import FullBatch
from lightning_gnn.datamodules.options import DataModuleOptions
from lightning_gnn.graph.checks import check_edge_labels, check_edges
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import edges_of
from lightning_gnn.graph.remote import RemoteCSCGraph, RemoteHeteroCSCGraph
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.loaders import LinkLoader
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.messages import true_or_false
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler
from lightning_gnn.sampling.non_edges import FilteredNegatives, KnownEdges, known_edges

_NEGATIVE_OPTIONS = ("neg_sampling", "neg_sampling_ratio")


class LinkDataModule(MiniBatchDataModule):
    """Mini-batches of seed edges with sampled neighborhoods, with the keywords of PyG's ``LightningLinkData``.

    Args:
        data: The graph used for message passing; it should not contain the edges to predict.
        input_train_edges: Training edges, int64 ``[2, n]``; by default all edges of the graph. In a heterogeneous graph
            a pair (edge type, edges), or the edge type for all of its edges.
        input_val_edges, input_test_edges, input_pred_edges: Edges for validation, testing and prediction. Without them,
            the stage has no loader.
        input_train_labels, input_val_labels, input_test_labels, input_pred_labels: Edge labels ``[n]``; by default all
            edges are positive.
        input_train_time, input_val_time, input_test_time, input_pred_time: Edge times ``[n]`` in a temporal graph:
            neighbors later than this are not sampled. By default each endpoint's own time is the limit.
        num_neighbors: Fanout of each hop, in in-edges per node; -1 takes all.
        neg_sampling: PyG's ``NegativeSampling``, or its mode. It does not apply to evaluation edges with labels, nor to
            prediction.
        neg_sampling_ratio: Alternatively, the number of negatives per training edge (``"binary"``); 0 for none.
        filter_negatives: Draw the negatives of validation and testing again that are edges of the predicted type: in
            ``data``, or among the labeled edges of training, validation and testing (except those labeled 0). Times do
            not matter: a pair that is an edge at any time is not drawn. If ``data`` is undirected, neither
            are reversed labeled edges. Otherwise, as in PyG, negatives are pairs of nodes drawn without a look at the
            graph, and some are edges. Negatives of training are always drawn that way.
        batch_size: Edges per mini-batch.
        num_workers: Number of threads that prefetch mini-batches.
        seed: Random seed; by default torch's initial seed.
        link_sampler: A custom sampler with PyG's interface.
        inference: ``"sampled"``; or ``"full"`` or :class:`~lightning_gnn.nn.FullInference` to run validation, testing
            and prediction on the full graph, layer by layer. Validation and test edges then require labels.
        eval_loader_kwargs: Options that the evaluation loaders and their sampler override, such as ``num_neighbors`` or
            ``neg_sampling``.
        **options: :class:`~lightning_gnn.datamodules.SamplingOptions` (such as ``disjoint``, ``time_attr``
            or ``exclude_seed_edges``), :class:`~lightning_gnn.datamodules.StorageOptions` (such as
            ``memory="8GB"``), and further arguments of :class:`~lightning_gnn.loading.LinkLoader`, such as
            ``shuffle=False``. PyG's options for worker processes are accepted without effect:
            :data:`~lightning_gnn.loading.options.WITHOUT_EFFECT`.

    Raises:
        TypeError, ValueError: ``data`` is not a PyG graph, edges or labels do not match it, the training split is
            empty, features contain NaN, or an option is unknown or invalid.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import LinkDataModule
        >>> path = Data(x=torch.eye(5), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> datamodule = LinkDataModule(path, num_neighbors=[1], neg_sampling_ratio=1, batch_size=4, shuffle=False)
        >>> batch = next(iter(datamodule.train_dataloader()))
        >>> batch.edge_label  # the edges of the graph, then one negative edge for each
        tensor([1., 1., 1., 1., 0., 0., 0., 0.])
        >>> batch.n_id[batch.edge_label_index[:, :4]]
        tensor([[0, 1, 2, 3],
                [1, 2, 3, 4]])
    """

    kind = "link"

    def __init__(
        self,
        data: Data | HeteroData,
        input_train_edges: Any = None,
        input_train_labels: Tensor | None = None,
        input_train_time: Tensor | None = None,
        input_val_edges: Any = None,
        input_val_labels: Tensor | None = None,
        input_val_time: Tensor | None = None,
        input_test_edges: Any = None,
        input_test_labels: Tensor | None = None,
        input_test_time: Tensor | None = None,
        input_pred_edges: Any = None,
        input_pred_labels: Tensor | None = None,
        input_pred_time: Tensor | None = None,
        *,
        num_neighbors: Fanouts | None = None,
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: float | None = None,
        filter_negatives: bool = False,
        batch_size: int = 1,
        num_workers: int = 0,
        seed: int | None = None,
        link_sampler: BaseSampler | None = None,
        inference: str | FullInference = "sampled",
        eval_loader_kwargs: dict[str, Any] | None = None,
        **options: Unpack[DataModuleOptions],
    ) -> None:
        keywords = {"num_workers": num_workers, **options}
        super().__init__(data, link_sampler, seed, batch_size, num_neighbors, inference, eval_loader_kwargs, keywords)
        if input_train_edges is None:
            if isinstance(data, HeteroData):
                raise ValueError("input_train_edges is missing: a heterogeneous graph requires (edge_type, edges)")
            input_train_edges = CSCGraph.from_data(data).to_edge_index() if data.edge_index is None else data.edge_index
        given = {
            "train": (input_train_edges, input_train_labels),
            "val": (input_val_edges, input_val_labels),
            "test": (input_test_edges, input_test_labels),
            "predict": (input_pred_edges, input_pred_labels),
        }
        times = (input_train_time, input_val_time, input_test_time, input_pred_time)
        self._edges: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._types: dict[str, EdgeType | None] = {}
        self._sizes: dict[EdgeType | None, tuple[int, int]] = {}
        self._times: dict[str, Tensor | None] = {}
        ends = {}
        for (stage, (edges, labels)), time in zip(given.items(), times, strict=True):
            self._types[stage], edges, ends[stage] = _resolve_edges(data, edges, stage)
            self._sizes[self._types[stage]] = ends[stage]
            self._edges[stage] = valid, _ = as_edges(edges, labels, ends[stage], stage)
            count = None if valid is None else valid.size(1)
            self._times[stage] = None if time is None else seed_times(self.graph_sampler, stage, time, count, "edges")
        for stage in ("val", "test"):
            if self._edges[stage][0] is None:
                setattr(self, f"{stage}_dataloader", None)
        if not self._edges["train"][0].numel():  # type: ignore[union-attr]
            raise ValueError("the training split is empty; give input_train_edges with at least one edge")
        self.neg_sampling = self.eval_neg_sampling = _parse_negatives(neg_sampling, neg_sampling_ratio, ends["train"])
        own = {key: self.eval_loader_kwargs.pop(key) for key in _NEGATIVE_OPTIONS if key in self.eval_loader_kwargs}
        if own:
            self.eval_neg_sampling = _parse_negatives(**own, sizes=ends["train"], where="eval_loader_kwargs: ")
        evaluated = [self._edges[stage][1] for stage in ("val", "test") if self._edges[stage][0] is not None]
        if own and self.eval_neg_sampling is not None and evaluated and all(labels is not None for labels in evaluated):
            raise ValueError(f"eval_loader_kwargs: {min(own)} has no effect: the evaluation edges have labels")
        if self.neg_sampling is not None and self.neg_sampling.is_triplet() and input_train_labels is not None:
            raise ValueError("input_train_labels cannot be used with triplets, whose edges are all positive; omit it")
        self.filter_negatives = true_or_false(filter_negatives, "filter_negatives")
        self._known: dict[EdgeType | None, KnownEdges] = {}
        if self.filter_negatives:
            self._check_filter([labels is None for labels in evaluated])

    def _check_filter(self, are_sampled: list[bool]) -> None:
        """Raise a ValueError if ``filter_negatives`` has no effect: ``are_sampled`` for each stage of evaluation."""
        sampler = self.eval_graph_sampler
        if not isinstance(sampler, NeighborSampler):
            raise ValueError(
                f"filter_negatives=True needs a sampler of this package, but link_sampler is {type(sampler).__name__}, "
                "which draws its own negatives; leave one of them out"
            )
        if isinstance(sampler.whole_graph, RemoteCSCGraph | RemoteHeteroCSCGraph):
            raise ValueError("filter_negatives=True needs all edges on each rank; set topology='whole'")
        reason = None
        if self.eval_neg_sampling is None:
            reason = "neg_sampling is missing"
        elif not are_sampled:
            reason = "there are no validation or test edges"
        elif not any(are_sampled):
            reason = "the evaluation edges have labels, so no negatives are sampled for them"
        if reason is not None:
            raise ValueError(f"filter_negatives=True has no effect: {reason}")

    def large_arrays(self) -> dict[str, object]:
        """Return graph, features and labeled edges, by name."""
        return {**super().large_arrays(), **{f"{stage} edges": edges for stage, edges in self._edges.items()}}

    @override
    def num_seeds(self, stage: str) -> int:
        return self.seed_edges(stage)[0].size(1)

    def seed_edges(self, stage: str) -> tuple[Tensor, Tensor | None]:
        """Return the edges and labels of a stage; raise a ValueError if it has none."""
        edges, labels = self._edges[stage]
        if edges is None:
            raise ValueError(f"the {stage} stage requires input_{stage.removesuffix('ict')}_edges")
        return edges, labels

    @override
    def full_loader(self, stage: str) -> DataLoader[FullBatch]:
        return self.evaluation.loader(stage, self._types[stage], **self.labeled_edges(stage))

    def labeled_edges(self, stage: str) -> dict[str, Tensor]:
        """Return ``edge_label_index`` and, if given, ``edge_label`` of a stage that is evaluated exactly."""
        edges, labels = self.seed_edges(stage)
        if labels is None and stage != "predict":
            raise ValueError(
                f"inference='full' does not sample negative edges; use input_{stage}_edges with positives and "
                f"negatives, and input_{stage}_labels"
            )
        return {"edge_label_index": edges, **({} if labels is None else {"edge_label": labels})}

    @override
    def sampled_loader(self, stage: str, data: Batch, sampler: BaseSampler, **options: Any) -> LinkLoader:
        edges, labels = self.seed_edges(stage)
        neg_sampling = self.neg_sampling if stage == "train" else self.eval_neg_sampling
        if stage == "predict" or (stage != "train" and labels is not None):
            neg_sampling = None
        if stage != "train" and self.filter_negatives and neg_sampling is not None:
            neg_sampling = FilteredNegatives(neg_sampling, self._known_edges(self._types[stage]))
        return LinkLoader(
            data,
            sampler,
            edge_label_index=edges if self._types[stage] is None else (self._types[stage], edges),
            edge_label=labels,
            **({} if self._times[stage] is None else {"edge_label_time": self._times[stage]}),
            neg_sampling=neg_sampling,
            **self.loader_arguments(stage, edges.size(1)) | options,
        )

    def _known_edges(self, edge_type: EdgeType | None) -> KnownEdges:
        """Return the edges of a type that are no negatives in evaluation."""
        if edge_type not in self._known:
            # Labels of 0 mark edges that are known not to exist; edges to predict are not known.
            labeled = [
                edges if labels is None else edges[:, (labels != 0).reshape(edges.size(1), -1).any(1)]
                for stage, (edges, labels) in self._edges.items()
                if edges is not None and stage != "predict" and self._types[stage] == edge_type
            ]
            graph: Any = self.graph_sampler.whole_graph
            relation = graph if edge_type is None else graph.relations.get(edge_type)
            self._known[edge_type] = known_edges(
                relation, labeled, self._sizes[edge_type], edge_type is None or edge_type[0] == edge_type[-1]
            )
        return self._known[edge_type]


def _resolve_edges(data: Data | HeteroData, given: Any, stage: str) -> tuple[EdgeType | None, Any, tuple[int, int]]:
    """Return the edge type (None in a homogeneous graph), the edges, and the numbers of source and target nodes."""
    if isinstance(data, Data):
        return None, given, (data.num_nodes, data.num_nodes)
    if given is None:
        return None, None, (0, 0)
    name = f"input_{stage.removesuffix('ict')}_edges"
    is_type = isinstance(given, tuple) and len(given) == 3 and all(isinstance(part, str) for part in given)
    edge_type, edges = (given, None) if is_type else given if isinstance(given, tuple | list) else (None, given)
    if not isinstance(edge_type, tuple) or len(edge_type) != 3:
        raise TypeError(f"a heterogeneous graph requires {name}=(edge_type, edges)")
    for node_type in (edge_type[0], edge_type[2]):
        if node_type not in data.node_types:
            raise ValueError(f"{name}: no such node type: {node_type!r}; use {', '.join(data.node_types)}")
    if edges is None:
        if edge_type not in data.edge_types:
            raise ValueError(f"{name}: no such edge type: {edge_type}; give the edges too")
        edges = edges_of(data, edge_type)
    return edge_type, edges, (data[edge_type[0]].num_nodes, data[edge_type[2]].num_nodes)


def as_edges(edges: object, labels: object, sizes: tuple[int, int], stage: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the edges and labels of a stage as tensors."""
    name = f"input_{'pred' if stage == 'predict' else stage}"
    if edges is None:
        if labels is not None:
            raise ValueError(f"{name}_labels are given without {name}_edges")
        return None, None
    edges = check_edges(edges, sizes, f"{name}_edges")
    return edges, None if labels is None else check_edge_labels(labels, edges.size(1), f"{name}_labels")


def _parse_negatives(
    neg_sampling: object = None, neg_sampling_ratio: object = None, sizes: tuple[int, int] = (0, 0), where: str = ""
) -> NegativeSampling | None:
    """Return PyG's ``NegativeSampling`` for any form that PyG accepts; None without negative edges."""
    if neg_sampling_ratio is not None:
        if neg_sampling is not None:
            raise ValueError(f"{where}give neg_sampling or neg_sampling_ratio, not both")
        if not isinstance(neg_sampling_ratio, Real) or isinstance(neg_sampling_ratio, bool):
            raise TypeError(f"{where}neg_sampling_ratio must be a number, but is {neg_sampling_ratio!r}")
        ratio = float(neg_sampling_ratio)
        if not 0 <= ratio < float("inf"):
            raise ValueError(f"{where}neg_sampling_ratio must not be negative, but is {ratio:g}")
        neg_sampling = NegativeSampling("binary", ratio) if ratio else None
    if neg_sampling is None:
        return None
    try:
        parsed = copy.copy(NegativeSampling.cast(neg_sampling))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{where}invalid neg_sampling={neg_sampling!r}: {error}; use 'binary' or 'triplet', or a "
            "torch_geometric.sampler.NegativeSampling"
        ) from None
    for name, num_nodes in zip(("src_weight", "dst_weight"), sizes, strict=True):
        setattr(parsed, name, _validate_probabilities(getattr(parsed, name), num_nodes, f"{where}{name}"))
    return parsed


def _validate_probabilities(given: object, num_nodes: int, name: str) -> Tensor | None:
    if given is None:
        return None
    weight = torch.as_tensor(given)
    if weight.shape != (num_nodes,):
        raise ValueError(
            f"{name} of the negative sampling must have the shape [{num_nodes}], one entry per node, but has "
            f"{list(weight.shape)}"
        )
    if not (bool((weight >= 0).all()) and 0 < float(weight.sum()) < float("inf")):
        raise ValueError(f"{name} of the negative sampling must be finite, not negative, and not zero everywhere")
    return weight if weight.is_floating_point() else weight.float()
