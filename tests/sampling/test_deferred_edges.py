"""``e_id`` is computed on first access, with the same result for every reader, and never without access."""

import copy
import pickle

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.data.storage import EdgeStorage, GlobalStorage

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.loading import NodeLoader
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.sampling import NeighborSampler
from tests.batching_data import small_data
from tests.sampling.test_node_datamodule import make_trainer
from tests.sampling.test_typed import collect_contents, typed_data


@pytest.fixture
def looked_up(record_calls):
    """Record the look-ups of positions in the user's edge order."""
    return record_calls(NeighborSampler, "original_positions")


def make_graph():
    data = small_data(num_nodes=60, num_edges=400)
    del data.edge_attr, data.edge_weight
    return data


def make_batches(data, **options):
    seeds = {"input_nodes": "paper"} if "paper" in getattr(data, "node_types", ()) else {}
    return list(NodeLoader(data, NeighborSampler(data, [3, 2]), batch_size=20, seed=1, **seeds, **options))


def make_eager_batches(data, **options):
    """Return mini-batches with ``e_id`` computed at once, as for transforms of the sampler's output."""
    return make_batches(data, transform_sampler_output=lambda out: out, thread_safe=True, **options)


READERS = {
    "e_id": lambda batch: {"e_id": batch.e_id},
    "an item": lambda batch: {"e_id": batch["e_id"]},
    "getattr": lambda batch: {"e_id": getattr(batch, "e_id", None)},
    "get": lambda batch: {"e_id": batch._store.get("e_id")},
    "to_dict": lambda batch: batch.to_dict(),
    "to_namedtuple": lambda batch: batch.to_namedtuple()._asdict(),
    "iteration": lambda batch: dict(iter(batch)),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)).to_dict(),
    "clone": lambda batch: batch.clone().to_dict(),
    "copy": lambda batch: copy.copy(batch).to_dict(),
    "deepcopy": lambda batch: copy.deepcopy(batch).to_dict(),
    "to": lambda batch: batch.to("cpu").to_dict(),
    "contiguous": lambda batch: batch.contiguous().detach().cpu().to_dict(),
    "apply": lambda batch: batch.apply(torch.clone).to_dict(),
    "update": lambda batch: Data(n_id=batch.n_id).update(batch).to_dict(),
    "a batch of batches": lambda batch: Batch.from_data_list([batch]).to_data_list()[0].to_dict(),
}


@pytest.mark.parametrize("how", READERS)
def test_whoever_reads_it_finds_it(how, looked_up):
    data = make_graph()
    for a, b in zip(make_batches(data), make_eager_batches(data), strict=True):
        del looked_up[:]
        assert isinstance(a._store, GlobalStorage)
        assert a.keys() == b.keys()
        assert "e_id" in a
        assert len(a._store) == len(b._store)
        assert looked_up == []
        mine, theirs = READERS[how](a), READERS[how](b)
        assert torch.equal(mine["e_id"], theirs["e_id"])
        for key in mine:
            assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])), key
        assert len(looked_up) == 1
        assert torch.equal(a.e_id, b.e_id)
        assert str(a) == str(b)
        assert torch.equal(data.edge_index[:, a.e_id], a.n_id[a.edge_index])


def test_training_does_not_read_it(looked_up):
    module = NeighborDataModule(make_graph(), num_neighbors=[3, 2], batch_size=16, seed=3)
    make_trainer(max_epochs=2).fit(NodeClassifier(GraphSAGE(12, 8, 2, 4), 4), module)
    assert looked_up == []


def test_graphs_with_types(looked_up):
    data = typed_data()
    for store in data.edge_stores:
        for key in [key for key in store if key != "edge_index"]:
            del store[key]
    made, plain = make_batches(data), make_eager_batches(data)
    del looked_up[:]
    for a, b in zip(made, plain, strict=True):
        assert all(isinstance(store, EdgeStorage) for store in a.edge_stores)
        assert set(a.edge_types) == set(b.edge_types)
        a = a.to("cpu")
        assert looked_up == []
        assert collect_contents(a) == collect_contents(b)
        assert set(a.e_id_dict) == set(b.e_id_dict)
        del looked_up[:]


@pytest.mark.medium
def test_a_compiled_model_reads_a_mini_batch_alike():
    def model(batch):
        return batch.x[batch.edge_index[0]].sum(0)

    for batch in make_batches(make_graph())[:1]:
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(batch), model(batch))
        ids = torch.compile(lambda batch: batch.e_id + 1, backend="eager")
        assert torch.equal(ids(batch), batch.e_id + 1)
