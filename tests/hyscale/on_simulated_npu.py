"""Run by test_devices.py in a process of its own, whose torch has a simulated NPU."""

import pytest

from tests.accelerators import simulated_npu

simulated_npu.install()

import lightning_gnn  # noqa: E402, F401  registers the accelerator
from tests.hyscale.models import Module, data_module, difference, fit, hybrid, left_threads  # noqa: E402
from tests.hyscale.test_logging import Logging  # noqa: E402
from tests.hyscale.test_manual import TwoOptimizers  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Module, {"cpu_trainers": 2, "cpu_share": 0.5}),
        (Module, {"cpu_trainers": 0}),
        (Module, {"cpu_trainers": 1, "cpu_share": 1.0}),
        (TwoOptimizers, {"cpu_trainers": 1, "cpu_share": 0.2, "prefetch": 1}),
        (Logging, {"cpu_trainers": 1, "shares": [0.3, 0.7]}),
    ],
    ids=str,
)
def test_they_train_as_one(kind, options):
    plain, ours = kind(), kind()
    _, reference = fit(plain)
    _, run = fit(ours, hybrid(**options), accelerator="npu")
    parameters = list(ours.parameters())
    assert difference([parameter.detach().cpu() for parameter in parameters], list(plain.parameters())) < 1e-12
    assert not left_threads()
    assert str(run.strategy.root_device) == "npu:0"
    for name in ("accuracy", "count", "loss_step", "precision_epoch"):
        if name in reference.callback_metrics:
            assert float(run.callback_metrics[name]) == pytest.approx(float(reference.callback_metrics[name]))


def test_the_share_to_begin_with_is_measured_and_the_manager_goes_on():
    strategy = hybrid(1, drm=True)
    fit(Module(), strategy, data_module(), accelerator="npu")
    assert strategy.balance.mapping.total == 20
    assert 0 <= strategy.balance.weights[0] <= 1
    assert strategy.balance.history[0][0].transfer > 0


def test_without_a_cpu_trainer_there_is_no_replica_at_work():
    strategy = hybrid(0)
    fit(Module(), strategy, accelerator="npu")
    assert strategy.trainers.names == ["0 (npu:0)"]
