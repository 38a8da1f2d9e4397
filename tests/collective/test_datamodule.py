"""Collective batching does not change training, whichever processor prepares the mini-batches."""

import os
import signal
import threading
import warnings

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.collective.workers import THREAD_NAME
from lightning_gnn.datamodules.node import NeighborDataModule
from tests.batching_data import small_data
from tests.full_graph import launch
from tests.gpu_sampling.test_datamodule import DEVICE, assert_same_content
from tests.patience import PATIENCE
from tests.sampling.test_node_datamodule import Model, make_trainer
from tests.threads import list_threads

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("no_thread_left")]

SIZES = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 3}
COLLECTIVE = CollectivePlan("collective", 2, 3)
PLANS = [COLLECTIVE, CollectivePlan("cpu", 1, 2), CollectivePlan("gpu", 1, 0), "auto"]


@pytest.fixture(autouse=True)
def same_torch_threads():
    """Check that no test changes the number of torch's threads."""
    torch_threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == torch_threads


def make_datamodule(plan=COLLECTIVE, **kwargs):
    options = {**SIZES, "num_workers": 2, "gpu_route": "cpu", "profile_batches": 2, "gpu_buffer_size": 4}
    return CollectiveDataModule(small_data(), plan=plan, **{**options, **kwargs})


def fit_model(data, seed=5, ckpt_path=None, model=None, **kwargs):
    pl.seed_everything(seed, verbose=False)
    model = Model() if model is None else model
    make_trainer(**{"max_epochs": 2, **kwargs}).fit(model, data, ckpt_path=ckpt_path)
    assert not list_threads(THREAD_NAME)
    return model


def assert_same_training(a, b):
    assert a.history == b.history
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)


def select_messages(warned, text):
    return [str(warning.message) for warning in warned if text in str(warning.message)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: getattr(plan, "mode", plan))
def test_training_is_that_of_the_neighbor_datamodule_bit_for_bit(plan):
    expected = fit_model(NeighborDataModule(small_data(), **SIZES))
    for _ in range(2):
        assert_same_training(fit_model(make_datamodule(plan)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"topology": "device", "features": "device"},
        {"topology": "pinned", "features": "pinned", "cache_bytes": 4000},
    ],
    ids=str,
)
def test_the_gpus_mini_batches_are_those_of_the_cpu(options):
    sizes = {"num_neighbors": [3, 2], "batch_size": 8, "seed": 3}
    data = small_data(num_nodes=60, num_edges=300)
    module = CollectiveDataModule(data, **sizes, num_workers=1, plan=COLLECTIVE, device=DEVICE, **options)
    loader = module.train_dataloader()
    batches = list(loader)
    assert loader.prefetcher.route is not None
    for batch, expected in zip(batches, NeighborDataModule(data, **sizes).train_dataloader(), strict=True):
        assert_same_content(batch, expected)
        assert batch.x.device.type == batch.y.device.type == batch.edge_index.device.type == DEVICE


# -- options of Lightning


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5},
        {"fast_dev_run": 2},
        {"max_steps": 5, "max_epochs": -1},
        {"val_check_interval": 2},
        {"overfit_batches": 4},
        {"num_sanity_val_steps": 2},
        {"accumulate_grad_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
def test_lightnings_options_work_and_leave_nothing_behind(options):
    expected = fit_model(NeighborDataModule(small_data(), **SIZES), **options)
    data = make_datamodule()
    assert_same_training(fit_model(data, **options), expected)
    assert all(batching.ring.num_slots == 0 for batching in data._batchings)


@pytest.mark.parametrize("plan", ["auto", COLLECTIVE])
def test_fitting_twice_and_testing(plan):
    data = make_datamodule(plan)
    first, second = fit_model(data), fit_model(data)
    assert_same_training(first, second)
    run = make_trainer(max_epochs=1)
    run.fit(first, data)
    run.test(first, data, verbose=False)
    assert torch.cat(run.predict(first, data)).tolist() == list(range(400))


class Failing(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            raise ValueError("the model failed")
        return super().training_step(batch, batch_idx)


def test_a_model_that_fails_leaves_no_thread_and_no_buffer():
    data = make_datamodule()
    loaders = []
    original = data.train_dataloader
    data.train_dataloader = lambda: loaders.append(original()) or loaders[-1]
    run = make_trainer()
    with pytest.raises(ValueError, match="the model failed"):
        run.fit(Failing(), data)
    assert not list_threads(THREAD_NAME)
    assert loaders[0].prefetcher.ring.num_slots == 0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_waiting_for_a_worker_leaves_nothing():
    waiting, release = threading.Event(), threading.Event()

    def slow(batch):
        if threading.current_thread() is not threading.main_thread():
            waiting.set()
            release.wait(PATIENCE)
        return batch

    def interrupt():
        waiting.wait(PATIENCE)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(0.5, release.set).start()

    data = make_datamodule(CollectivePlan("cpu", 1, 2), transform=slow, thread_safe=True)
    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(SystemExit):
            fit_model(data, limit_val_batches=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list_threads(THREAD_NAME)
    assert all(batching.ring.num_slots == 0 for batching in data._batchings)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["auto", COLLECTIVE])
def test_resuming_in_mid_epoch_is_bit_exact(tmp_path, plan):
    def run(folder, **kwargs):
        saver = pl.callbacks.ModelCheckpoint(tmp_path / folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        return fit_model(make_datamodule(plan), callbacks=[saver], **kwargs)

    whole = run("whole")
    for step in (3, 9, 15):
        resumed = run("resumed", ckpt_path=tmp_path / "whole" / f"step={step}.ckpt", seed=99)
        assert resumed.history == whole.history[step:]
        for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)


# -- plans


def test_a_plan_is_made_once_and_taken_from_a_file(tmp_path):
    data = make_datamodule("auto")
    assert data.plan is None
    fit_model(data)
    made = data.plan
    assert made.times is not None
    fit_model(data)
    assert data.plan is made
    made.save(tmp_path / "plan.yaml")
    again = make_datamodule(tmp_path / "plan.yaml")
    fit_model(again, max_epochs=1)
    assert again.plan == made


# -- machines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_without_a_gpu_it_says_so_once_and_is_the_plain_pipeline(num_workers):
    data = make_datamodule("auto", gpu_route="auto", num_workers=num_workers)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = fit_model(data)
        loader = data.train_dataloader()
        data.val_dataloader()
    assert len(select_messages(warned, "No GPU")) == 1
    assert isinstance(loader.prefetcher, CollectiveBatching)
    assert loader.prefetcher.ring is None
    assert data.plan.mode == ("gpu" if num_workers == 0 else "cpu")
    assert_same_training(found, fit_model(NeighborDataModule(small_data(), **SIZES)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_both_is_not_used_where_one_is_missing():
    data = make_datamodule(COLLECTIVE, gpu_route="auto")
    with pytest.warns(UserWarning, match=r"only one prepares mini-batches here \(cpu\)"):
        data.train_dataloader()
    assert data.plan.mode == "cpu"


def train_rank(rank, folder):
    """Train an epoch, and resume from its middle; return the training seeds of both, and the weights."""
    found = []
    for name, ckpt_path in (("whole", None), ("resumed", f"{folder}/whole/step=3.ckpt")):
        pl.seed_everything(1, verbose=False)
        model = Model()
        saver = pl.callbacks.ModelCheckpoint(
            f"{folder}/{name}", every_n_train_steps=3, save_top_k=-1, filename="{step}"
        )
        run = make_trainer(devices=2, strategy="ddp", max_epochs=1, num_sanity_val_steps=0, callbacks=[saver])
        run.fit(model, make_datamodule("auto", num_workers=1), ckpt_path=ckpt_path)
        found.append((model.history, [parameter.detach().numpy() for parameter in model.parameters()]))
    return found


@pytest.mark.slow
def test_two_processes_share_the_seeds_and_resume(tmp_path):
    ranks = launch.run(train_rank, 2, str(tmp_path))
    expected = small_data().train_mask.nonzero().view(-1).tolist()

    def check(*histories):
        seeds = [[seed for step in history for seed in step[1]] for history in histories]
        assert len(seeds[0]) == len(seeds[1])
        assert sorted(set(seeds[0] + seeds[1])) == expected
        assert len(seeds[0] + seeds[1]) - len(expected) == len(expected) % 2  # with an odd number, one is repeated

    check(*[whole[0] for whole, _ in ranks])
    check(*[whole[0][:3] + resumed[0] for whole, resumed in ranks])
    for whole, resumed in ranks:
        assert resumed[0] == whole[0][3:]
        assert all((a == b).all() for a, b in zip(resumed[1], whole[1], strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpu_buffer_size": 0}, ValueError, "gpu_buffer_size must be at least 1, but is 0"),
        ({"gpu_buffer_size": True}, ValueError, "gpu_buffer_size must be a whole number, but is True"),
        ({"profile_batches": 0}, ValueError, "profile_batches must be at least 1, but is 0"),
        ({"gpu_route": "npu"}, ValueError, "gpu_route='npu' is unknown; use one of auto, cpu"),
        (
            {"plan": 3},
            ValueError,
            "plan must be 'auto', 'paper', a CollectivePlan or the path of a plan file, but is 3",
        ),
        ({"plan": None}, ValueError, "plan must be 'auto'"),
        ({"plan": "nowhere.yaml"}, FileNotFoundError, "nowhere.yaml"),
        ({"num_workers": -1}, ValueError, "num_workers must not be negative"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_datamodule(**options)
