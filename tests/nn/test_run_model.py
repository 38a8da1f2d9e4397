"""A model gets from the batch what its forward takes, in our modules and in a user's own."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv
from torch_geometric.nn import SAGEConv as PyGSAGEConv

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier, run_model
from lightning_gnn.runtime.lightning import pl
from tests.batching_data import small_data
from tests.refusals import refuses

DATA = small_data(num_nodes=120, num_edges=600)
SIZES = {"num_neighbors": [3, 3], "batch_size": 20, "seed": 1}


class Embedded(nn.Module):
    """Adds an embedding of each node to the outputs; takes the batch's weights, and what a transform adds."""

    def __init__(self):
        super().__init__()
        self.net, self.table = GraphSAGE(12, 8, 2, 4), nn.Embedding(120, 4)
        self.given = []

    def forward(self, x, edge_index, edge_weight=None, *, n_id, age=None, absent="default"):
        self.given.append((n_id, edge_weight, age, absent))
        return self.net(x, edge_index) + self.table(n_id)


def with_age(batch):
    batch.age = batch.n_id * 2
    return batch


def test_keyword_only_parameters_are_attributes_of_the_batch():
    model = Embedded().eval()
    for batch in NeighborDataModule(DATA, transform=with_age, **SIZES).train_dataloader():
        out = run_model(model, batch)
        n_id, edge_weight, age, absent = model.given[-1]
        assert torch.equal(n_id, batch.n_id)
        assert torch.equal(age, 2 * batch.n_id)
        assert torch.equal(edge_weight, batch.edge_weight)
        assert absent == "default"
        torch.testing.assert_close(out, model.net(batch.x, batch.edge_index) + model.table(batch.n_id))


class OwnModule(pl.LightningModule):
    """A user's module, which runs its model by one call."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        out = run_model(self.model, batch)[: batch.batch_size]
        return nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_a_users_module_trains_the_weights_that_ours_does():
    trained = []
    for make in (OwnModule, lambda model: NodeClassifier(model, num_classes=4)):
        torch.manual_seed(3)
        module = make(Embedded())
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, NeighborDataModule(DATA, **SIZES))
        trained.append([parameter.detach() for parameter in module.model.parameters()])
    assert all(map(torch.equal, *trained))


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = HeteroConv({("a", "to", "a"): PyGSAGEConv(3, 2)})

    def forward(self, x_dict, edge_index_dict, *, n_id_dict, scale):
        return {
            kind: scale * rows + n_id_dict[kind][:, None] for kind, rows in self.conv(x_dict, edge_index_dict).items()
        }


def test_by_type_a_name_collects_an_attribute():
    batch = HeteroData(scale=2.0)
    batch["a"].x, batch["a"].n_id = torch.randn(5, 3), torch.arange(5)
    batch["a", "to", "a"].edge_index = torch.randint(5, (2, 9))
    model = Typed()
    want = 2 * model.conv(batch.x_dict, batch.edge_index_dict)["a"] + torch.arange(5)[:, None]
    torch.testing.assert_close(run_model(model, batch)["a"], want)


def test_what_the_batch_lacks_is_named():
    batch = Data(x=DATA.x, edge_index=DATA.edge_index)
    refuses(
        ValueError,
        "Embedded.forward takes 'n_id' from the batch, which has only edge_index, x",
        run_model,
        Embedded(),
        batch,
    )
    refuses(TypeError, "needs a batch of .*, but got dict", run_model, Embedded(), {"x": DATA.x})


class Sized(nn.Module):
    def forward(self, x, edge_index, *, size=None):
        assert size is None
        return x


def test_methods_of_the_batch_are_not_passed():
    assert run_model(Sized(), Data(x=DATA.x, edge_index=DATA.edge_index)) is DATA.x
    with pytest.raises(AssertionError, match="3 is None"):  # but an attribute of that name is
        run_model(Sized(), Data(x=DATA.x, edge_index=DATA.edge_index, size=3))


class Doubling:
    """Another way to run a model, also in training."""

    def __init__(self, trains):
        self.trains = trains

    def run(self, model, batch, embeddings=None):
        return 2 * model(batch.x, batch.edge_index)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_runner_replaces_the_call(training, trains):
    batch = Data(x=DATA.x, edge_index=DATA.edge_index, runner=Doubling(trains))
    model = GraphSAGE(12, 8, 2, 4).train(training)
    factor = 2 if trains or not training else 1
    torch.testing.assert_close(run_model(model, batch), factor * model(batch.x, batch.edge_index))
