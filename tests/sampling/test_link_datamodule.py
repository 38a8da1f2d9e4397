import pytest
import torch
from torch_geometric.loader import LinkLoader

from lightning_gnn.sampling.link_datamodule import LinkDataModule
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.sampling.test_loader import assert_same


class Fixed(NeighborSampler):
    def sample_from_edges(self, inputs, neg_sampling=None, key=None):
        return super().sample_from_edges(inputs, neg_sampling, key=5)


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("disjoint", [False, True])
def test_batches_equal_pygs(negatives, disjoint):
    data = small_data()
    sampler = Fixed(data, [3, 2], disjoint=disjoint)
    edges = data.edge_index[:, :90]
    theirs = LinkLoader(data, sampler, edge_label_index=edges, neg_sampling=negatives, batch_size=20)
    ours = LinkDataModule(
        data, input_val_edges=edges, link_sampler=sampler, neg_sampling=negatives, batch_size=20, num_workers=2
    ).val_dataloader()
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def test_every_training_edge_comes_once_with_fresh_negatives():
    data = small_data()
    module = LinkDataModule(data, num_neighbors=[2], neg_sampling="binary", batch_size=500, num_workers=1, seed=1)
    loader = module.train_dataloader()
    first = list(loader)
    assert sorted(torch.cat([batch.input_id for batch in first]).tolist()) == list(range(4000))
    fresh = list(loader)
    assert sorted(torch.cat([batch.input_id for batch in fresh]).tolist()) == list(range(4000))
    assert fresh[0].n_id.tolist() != first[0].n_id.tolist()
    again = LinkDataModule(data, num_neighbors=[2], neg_sampling="binary", batch_size=500, seed=1).train_dataloader()
    for a, b in zip(first + fresh, [*again, *again], strict=True):
        assert_same(a, b)


def test_labelled_edges_get_no_further_negatives_in_evaluation():
    data = small_data()
    labels = torch.tensor([1.0, 0.0] * 10)
    module = LinkDataModule(
        data,
        input_val_edges=data.edge_index[:, :20],
        input_val_labels=labels,
        num_neighbors=[2],
        neg_sampling="binary",
        batch_size=20,
    )
    assert next(iter(module.val_dataloader())).edge_label.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"input_train_edges": torch.tensor([[0], [400]])}, ValueError, "input_train_edges holds node 400"),
        ({"input_val_edges": torch.tensor([0, 1])}, ValueError, r"input_val_edges must have the shape \[2, n\]"),
        ({"input_val_edges": torch.rand(2, 2)}, TypeError, "input_val_edges must be an int64"),
        (
            {"input_test_edges": torch.tensor([[0], [1]]), "input_test_labels": torch.ones(3)},
            ValueError,
            r"has the shape \[3\]",
        ),
        ({"input_train_edges": torch.empty(2, 0, dtype=torch.int64)}, ValueError, "training split is empty"),
        ({"num_neighbors": None}, ValueError, "num_neighbors is missing"),
        (
            {"input_train_time": torch.arange(3)},
            ValueError,
            "input_train_time is given, but edges",
        ),
    ],
)
def test_bad_input_is_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        LinkDataModule(small_data(), **{"num_neighbors": [2], **kwargs})
