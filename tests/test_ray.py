"""Training on the workers of a local Ray cluster of two CPUs."""

import os
import re
import runpy
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import FullGraphDataModule, PartitionedDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GCN, GraphSAGE, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.full_graph.launch import run
from tests.hyscale.training import SILENT

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "cluster" / "ray_train.py")
GRAPH = planted_power_law(2000, 12000, num_classes=4, num_features=8, seed=1)
STRATEGIES = ("ddp", "hyscale", "ascend_hybrid")
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is missing: pip install 'lightning-gnn[ray]'")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    partition_graph(GRAPH, folder := tmp_path_factory.mktemp("ray") / "parts", 2, "ldg")
    return str(folder)


@pytest.fixture
def cluster(monkeypatch):
    import ray

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # workers import this module
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, runtime_env=environment)
    yield
    ray.shutdown()
    for number, handler in before.items():  # Ray replaces them
        signal.signal(number, handler)


def train(strategy, parts, prepare=lambda trainer: trainer, **options):
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = prepare(pl.Trainer(strategy=strategy, max_epochs=2, deterministic=True, **SILENT, **options))
    if strategy == "ascend_hybrid":
        datamodule, network = FullGraphDataModule(GRAPH), GCN(8, 16, 2, 4)
    else:
        datamodule = PartitionedDataModule(parts, num_neighbors=[4, 4], batch_size=64)
        network = GraphSAGE(8, 16, 2, 4)
    module = NodeClassifier(network, num_classes=4)
    trainer.fit(module, datamodule)
    return module.state_dict(), trainer.global_step, float(trainer.callback_metrics["val_acc"])


def train_as_rank(rank, parts):
    return [train(strategy, parts, devices=2) for strategy in STRATEGIES]


def train_as_worker(config):
    from ray.train import get_context
    from ray.train.lightning import RayLightningEnvironment

    from lightning_gnn.ray import prepare_trainer

    options = {"prepare": prepare_trainer, "plugins": [RayLightningEnvironment()]}
    found = [train(strategy, config["parts"], **options) for strategy in STRATEGIES]
    torch.save(found, f"{config['folder']}/{get_context().get_world_rank()}")


@pytest.mark.slow
def test_workers_of_ray_train_what_ranks_of_torchrun_train(cluster, parts, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config, run_config = {"parts": parts, "folder": str(tmp_path)}, RunConfig(storage_path=str(tmp_path / "storage"))
    TorchTrainer(
        train_as_worker, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2), run_config=run_config
    ).fit()
    for rank, expected in enumerate(run(train_as_rank, 2, parts)):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), expected, rtol=0, atol=0)


def train_example(config):
    """Run the example's function; kill its second rank once, in the fourth epoch."""
    epochs = Path(config["storage"], "epochs")

    class Kill(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.global_rank == 1:
                epochs.write_text(f"{epochs.read_text() if epochs.exists() else ''}{trainer.current_epoch}")
                if config["kills"] and epochs.read_text() == "0123":
                    os.kill(os.getpid(), signal.SIGKILL)

    before = pl.Trainer.__init__

    def with_kill(self, *args, callbacks, **options):
        before(self, *args, callbacks=[Kill(), *callbacks], deterministic=True, **options)

    torch.set_num_threads(1)
    pl.Trainer.__init__ = with_kill  # a worker's process trains once
    runpy.run_path(EXAMPLE)["train"](config)


@pytest.mark.slow
def test_the_example_continues_with_equal_weights_after_losing_a_worker(cluster, parts, tmp_path, monkeypatch, capsys):
    from ray.train import torch as ray_torch

    weights, printed, before = [], [], ray_torch.TorchTrainer
    for kills in (False, True):

        def make_trainer(function, train_loop_config, kills=kills, **options):
            return before(train_example, train_loop_config={**train_loop_config, "kills": kills}, **options)

        monkeypatch.setattr(ray_torch, "TorchTrainer", make_trainer)
        (storage := tmp_path / f"kills {kills}").mkdir()
        options = ["--storage", str(storage), "--epochs", "5", "--batch-size", "64"]
        monkeypatch.setattr(sys, "argv", [EXAMPLE, parts, *options])
        result = runpy.run_path(EXAMPLE, run_name="__main__")["result"]
        weights.append(torch.load(f"{result.checkpoint.path}/checkpoint.ckpt", weights_only=True)["state_dict"])
        printed.append(capsys.readouterr().out.splitlines()[-1])
        # Ray may not have read the last reports, but it has read the first.
        assert re.fullmatch("0123(1?2)?34" if kills else "01234", (storage / "epochs").read_text())
    assert printed[0] == printed[1]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def train_trial(config):
    from ray import tune

    _, steps, accuracy = train(**config)
    tune.report({"steps": steps, "accuracy": accuracy})


@pytest.mark.slow
def test_ray_tune_compares_strategies(cluster, parts, tmp_path):
    from ray import tune

    space = {"parts": parts, "strategy": tune.grid_search(["auto", "hyscale"])}
    run_config = tune.RunConfig(storage_path=str(tmp_path))
    plain, hyscale = (
        result.metrics for result in tune.Tuner(train_trial, param_space=space, run_config=run_config).fit()
    )
    assert (plain["steps"], plain["accuracy"]) == (hyscale["steps"], hyscale["accuracy"])


def test_what_does_not_fit_rays_workers_is_refused(monkeypatch):
    import ray.train.lightning

    from lightning_gnn.ray import prepare_trainer

    def make_trainer(strategy="hyscale", plugins=(ray.train.lightning.RayLightningEnvironment,), **numbers):
        numbers = {"world_size": 3, "world_rank": 2, "node_rank": 1, "local_rank": 0, "local_world_size": 1, **numbers}
        context = SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in numbers.items()})
        monkeypatch.setattr(ray.train, "get_context", lambda: context)
        return pl.Trainer(strategy=strategy, plugins=[plugin() for plugin in plugins], **SILENT)

    with pytest.raises(ValueError, match="1 workers on this node and another number elsewhere"):  # 2 and 1
        prepare_trainer(make_trainer())
    with pytest.raises(RuntimeError, match="RayDDPStrategy"):
        prepare_trainer(make_trainer("auto"))
    with pytest.raises(RuntimeError, match=r"add Trainer\(plugins=\[RayLightningEnvironment\(\)\]\)"):
        prepare_trainer(make_trainer(plugins=()))
    trainer = prepare_trainer(make_trainer(world_size=4, local_world_size=2))
    assert (trainer.num_nodes, trainer.strategy.num_processes, trainer.strategy.trainers.num_cpu) == (2, 2, 2)
    for strategy in STRATEGIES[1:]:  # without prepare_trainer
        with pytest.raises(
            ValueError, match=r"1 in total, but 3 were started: .* Ray \(one worker per device, and lig"
        ):
            make_trainer(strategy).fit(NodeClassifier(GCN(8, 16, 2, 4), num_classes=4), FullGraphDataModule(GRAPH))
