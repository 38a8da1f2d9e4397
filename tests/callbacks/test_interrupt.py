"""A run that is stopped and resumed ends with the same weights as an uninterrupted run, bit for bit."""

import re
import shlex
import signal
import threading
from functools import cache

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.callbacks import StopOnSignal
from tests.cli.command import NODE, fork, lgnn, load_weights, metrics_of, signal_at

ONE_CYCLE = ["task._target_=tests.cli.command.OneCycle"]
VARIANTS = {
    "plain": [],
    "threads": ["datamodule.num_workers=2"],
    "one-cycle": ONE_CYCLE,
    "accumulated": ["trainer.accumulate_grad_batches=2"],
    "mid-epoch validation": ["+trainer.val_check_interval=2", "trainer.check_val_every_n_epoch=1"],
}


pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that returns the folder of an uninterrupted run of a variant."""

    @cache
    def run(variant="plain"):
        folder = tmp_path_factory.mktemp("whole")
        assert lgnn(folder, *VARIANTS[variant]) == 0
        return folder

    return run


def assert_same_weights(left, right):
    left, right = load_weights(left / "checkpoints/last.ckpt"), load_weights(right / "checkpoints/last.ckpt")
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [2, 5, 8])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, variant, step, whole):
    overrides = VARIANTS[variant]
    assert lgnn(tmp_path / "cut", *overrides, *signal_at(step, signal.SIGINT)) == 130
    assert not (tmp_path / "cut/metrics.json").exists()
    assert lgnn(tmp_path / "resumed", *overrides, f"ckpt_path={tmp_path}/cut/checkpoints/last-interrupted.ckpt") == 0
    assert_same_weights(whole(variant), tmp_path / "resumed")
    assert metrics_of(whole(variant))["test_acc"] == metrics_of(tmp_path / "resumed")["test_acc"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 10])
def test_interrupted_in_validation(tmp_path, whole, step):
    assert lgnn(tmp_path / "cut", *signal_at(step, signal.SIGINT, hook="on_validation_start")) == 130
    assert lgnn(tmp_path / "resumed", f"ckpt_path={tmp_path}/cut/checkpoints/last-interrupted.ckpt") == 0
    # After the last step, the resumed run only tests.
    assert_same_weights(whole(), tmp_path / ("cut" if step == 10 else "resumed"))
    assert metrics_of(whole())["test_acc"] == metrics_of(tmp_path / "resumed")["test_acc"]


@pytest.mark.slow
def test_message_and_command_to_resume(tmp_path, capfd):
    assert lgnn(tmp_path / "a dir", *signal_at(2, signal.SIGTERM)) == 143
    shown = capfd.readouterr().err
    assert "SIGTERM: stopping after this batch" in shown
    command = shlex.split(re.search(r"^ +(lgnn .*)$", shown, re.MULTILINE)[1])
    assert command[1 : 1 + len(NODE)] == NODE
    assert command[-1] == f"ckpt_path='{tmp_path}/a dir/checkpoints/last-interrupted.ckpt'"
    assert lgnn(tmp_path / "resumed", command[-1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "more", "said"),
    [
        (8, {"times": 2}, "ckpt_path={}/checkpoints/"),  # the second signal stops the run immediately
        (2, {"times": 2}, "no checkpoint was saved"),
        (0, {"hook": "on_test_start"}, "checkpoints/"),
    ],
)
def test_a_second_signal_and_one_in_the_test_name_the_last_checkpoint(tmp_path, capfd, step, more, said):
    assert lgnn(tmp_path, *signal_at(step, signal.SIGINT, **more)) == 130
    assert said.format(tmp_path) in capfd.readouterr().err
    assert not (tmp_path / "checkpoints/last-interrupted.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "one-cycle"])
def test_killed_and_resumed_from_a_periodic_checkpoint(tmp_path, variant):
    overrides = [*NODE, *VARIANTS[variant], "callbacks.last.every_n_train_steps=3"]
    killed = fork(*overrides, f"hydra.run.dir={tmp_path}/cut", *signal_at(8, signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL
    assert torch.load(tmp_path / "cut/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    # Every fifth step ends an epoch, so both runs end with the checkpoint of the last step.
    assert lgnn(tmp_path / "whole", *VARIANTS[variant], "callbacks.last.every_n_train_steps=5") == 0
    resumed = ["callbacks.last.every_n_train_steps=5", f"ckpt_path={tmp_path}/cut/checkpoints/last.ckpt"]
    assert lgnn(tmp_path / "resumed", *VARIANTS[variant], *resumed) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
def test_interrupted_process(tmp_path):
    cut = fork(*NODE, f"hydra.run.dir={tmp_path}/cut", *signal_at(3, signal.SIGINT))
    assert cut.returncode == 130, cut.stderr
    assert "Traceback" not in cut.stderr
    assert (tmp_path / "cut/checkpoints/last-interrupted.ckpt").is_file()


@pytest.fixture
def trainer(tmp_path):
    return pl.Trainer(callbacks=[pl.Callback()], logger=False, default_root_dir=tmp_path, enable_progress_bar=False)


def test_leaves_signals_alone_outside_the_main_thread(trainer):
    before = signal.getsignal(signal.SIGINT)
    stop = StopOnSignal()

    def start():
        stop.setup(trainer, None, "fit")
        trainer._signal_connector.register_signal_handlers()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert not stop._previous


def test_restores_the_handlers_after_a_run_and_after_an_error(trainer):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop = StopOnSignal()
    for end in (stop.teardown, stop.on_exception):
        stop.setup(trainer, None, "fit")
        trainer._signal_connector.register_signal_handlers()
        assert signal.getsignal(signal.SIGINT) == stop._handle
        end(trainer, None, None)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
