"""Random transforms, user-defined orders and trained features: equal for every loader and after resuming."""

import copy
import pickle
import random

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler
from torch_geometric.nn import GraphSAGE

from lightning_gnn import CollectiveDataModule, HyScaleStrategy, NeighborDataModule, PersistentSamplerDataModule
from tests.batching_data import small_data
from tests.full_graph.launch import run
from tests.sampling.test_node_datamodule import Model, make_trainer

OPTIONS = {"num_neighbors": [4, 3], "batch_size": 64, "seed": 3}
MODULES = {
    "neighbor": lambda data, **kwargs: NeighborDataModule(data, **OPTIONS, num_workers=0, **kwargs),
    "threads": lambda data, **kwargs: NeighborDataModule(data, **OPTIONS, num_workers=3, **kwargs),
    "collective": lambda data, **kwargs: CollectiveDataModule(
        data, **OPTIONS, num_workers=2, gpu_route="cpu", **kwargs
    ),
    "persistent": lambda data, **kwargs: PersistentSamplerDataModule(data, **OPTIONS, num_workers=2, **kwargs),
}


def jitter(batch):
    """Draw from the generators of torch and Python, as PyG's random transforms do."""
    batch.x = batch.x + torch.randn(batch.x.size(1)) * random.random()
    return batch


def fit(module, folder=None, strategy="auto", seed=3, ckpt_path=None, **kwargs):
    pl.seed_everything(seed, verbose=False)
    model = Model()
    callbacks = []
    if folder is not None:
        callbacks = [pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")]
    options = {"callbacks": callbacks} if callbacks else {}
    make_trainer(strategy=strategy, limit_val_batches=0, **options, **kwargs).fit(model, module, ckpt_path=ckpt_path)
    return model


def assert_equal_weights(a, b):
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
def test_a_random_transform_trains_the_same_weights_with_every_loader():
    models = {name: fit(make(small_data(), transform=jitter)) for name, make in MODULES.items()}
    alone = HyScaleStrategy(cpu_trainers=1, drm=False)
    models["hyscale"] = fit(MODULES["threads"](small_data(), transform=jitter), strategy=alone)
    plain = fit(MODULES["neighbor"](small_data()))
    for name, model in models.items():
        assert model.history == models["neighbor"].history, name
        assert_equal_weights(model, models["neighbor"])
    assert plain.history != models["neighbor"].history


def check_resuming(name, folder, make_strategy=lambda: "auto"):
    def one(part, **kwargs):
        return fit(MODULES[name](small_data(), transform=jitter), folder / part, make_strategy(), **kwargs)

    whole = one("whole")
    assert len(whole.history) in (12, 24)
    resumed = one("resumed", ckpt_path=folder / "whole" / "step=6.ckpt", seed=99)
    assert_equal_weights(whole, resumed)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["threads", "collective"])
def test_it_resumes_bit_for_bit(tmp_path, name):
    check_resuming(name, tmp_path)


def check_resuming_on_rank(rank, folder):
    check_resuming("threads", folder, lambda: HyScaleStrategy(cpu_trainers=2, drm=False))


@pytest.mark.slow
def test_it_resumes_bit_for_bit_on_several_ranks(tmp_path):
    run(check_resuming_on_rank, 2, tmp_path)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
def test_an_own_order_gives_new_samples_in_each_epoch_and_the_same_in_each_run():
    def run(num_workers):
        data = small_data()
        seeds = int(data.train_mask.sum())
        order = BatchSampler(RandomSampler(range(seeds), generator=torch.Generator().manual_seed(1)), 50, False)
        return fit(
            NeighborDataModule(data, num_neighbors=[2], batch_sampler=order, num_workers=num_workers, seed=3)
        ).history

    history = run(0)
    assert history == run(2)
    per_epoch = len(history) // 3
    sampled = [sum(step[2] for step in history[i * per_epoch : (i + 1) * per_epoch]) for i in range(3)]
    assert len(set(sampled)) == 3


class Embedded(pl.LightningModule):
    """Learns node embeddings and weights with the given optimizers."""

    def __init__(self, data, sparse=False, model=GraphSAGE):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.sparse = data.x, sparse
        self.model = model(12, 16, 2, 4)
        self.automatic_optimization = not sparse

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        seeds = slice(batch.batch_size) if "batch_size" in batch else batch.train_mask
        loss = torch.nn.functional.cross_entropy(out[seeds], batch.y[seeds])
        if self.sparse:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            assert self.embedding.grad.is_sparse
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self):
        if self.sparse:
            return torch.optim.SparseAdam([self.embedding], 0.1), torch.optim.Adam(self.model.parameters(), 0.01)
        return torch.optim.SGD(self.parameters(), 0.5)


def learn(make, strategy="auto", sparse=False, model=GraphSAGE, **kwargs):
    data = small_data()
    data.x = nn.Parameter(data.x)
    pl.seed_everything(3, verbose=False)
    model = Embedded(data, sparse, model)
    module = make(data, sparse_grad=True) if sparse else make(data)
    make_trainer(strategy=strategy, limit_val_batches=0, **kwargs).fit(model, module)
    return model


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_learn_the_same_with_every_loader(sparse):
    models = {name: learn(make, sparse=sparse) for name, make in MODULES.items()}
    for name, model in models.items():
        assert_equal_weights(model, models["neighbor"])
        assert not torch.equal(model.embedding, small_data().x), name


def learn_on(rank, trainers):
    def make(data):
        return NeighborDataModule(data, **{**OPTIONS, "num_neighbors": [-1, -1]}, num_workers=2)

    strategy = "auto" if trainers is None else HyScaleStrategy(cpu_trainers=trainers, drm=False)
    return [parameter.detach() for parameter in learn(make, strategy).parameters()]


@pytest.mark.medium
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_they_learn_with_several_trainers(trainers):
    alone = learn_on(0, None)
    for shared in run(learn_on, trainers, trainers):
        for a, b in zip(alone, shared, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("features", ["pinned", "device"])
def test_the_kernels_leave_trained_features_and_transforms_to_the_training_thread(features):
    def on_kernels(data, **kwargs):
        return PersistentSamplerDataModule(data, **OPTIONS, device="cpu", features=features, **kwargs)

    assert_equal_weights(learn(on_kernels, max_epochs=1), learn(MODULES["neighbor"], max_epochs=1))
    found = fit(on_kernels(small_data(), transform=jitter), max_epochs=1)
    assert found.history == fit(MODULES["neighbor"](small_data(), transform=jitter), max_epochs=1).history


@pytest.mark.parametrize("name", MODULES)
def test_a_copy_makes_the_same_mini_batches(name):
    module = MODULES[name](small_data())
    sent = pickle.loads(pickle.dumps(module))  # as ddp_spawn does
    expected = [batch.e_id.tolist() for batch in module.train_dataloader()]
    assert [batch.e_id.tolist() for batch in sent.train_dataloader()] == expected
    assert [batch.e_id.tolist() for batch in copy.deepcopy(sent).train_dataloader()] != expected  # the second pass
