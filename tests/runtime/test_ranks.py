import os
import runpy
import subprocess
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger
from torch.distributed import DistBackendError, DistNetworkError, TCPStore

from lightning_gnn.distributed import monitored_ranks as ranks
from lightning_gnn.distributed.exceptions import end_process, is_communication_error
from tests.full_graph.launch import observe, run
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit
import os

import torch.distributed as dist

atexit.register(lambda: print("open" if dist.is_initialized() else "closed", flush=True))  # the last of all

from lightning_gnn.distributed.monitored_ranks import _leave
from tests.hyscale.training import Plain, fit, make_hybrid


class Failing(Plain):
    def training_step(self, batch, index):
        if {fails}:
            raise ValueError("no more")
        return super().training_step(batch, index)


if __name__ == "__main__":
    fit(Failing(), make_hybrid(2), epochs=1)
    assert dist.is_initialized()
    _leave(os.getppid())  # in a fork, which has not opened it
    assert dist.is_initialized()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_is_closed_unless_a_rank_may_be_lost(fails, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fails=fails))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode != 0) == fails, done.stderr
    assert done.stdout.count("closed") == (0 if fails else 2), done.stdout
    assert ("no more" in done.stderr) == fails


SOON = timedelta(seconds=30)


@pytest.fixture
def torchruns_store(monkeypatch):
    """A torchrun agent's store, and a function that joins a rank as if its process had just started."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def join(restarts, agents, fresh=True):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(agents))
        if fresh:
            monkeypatch.setattr(ranks, "_RENDEZVOUS_COUNTER", count())
        return ranks.rendezvous(0, 1, SOON)

    yield join
    del store


def test_ranks_that_torchrun_starts_again_do_not_find_what_those_before_have_left(torchruns_store):
    torchruns_store(0, 1).set("address", "of a process that is gone")
    again = torchruns_store(1, 1)
    assert not again.check(["address"])
    again.set("address", "new")
    assert torchruns_store(1, 1, fresh=False).get("address") == b"new", "a process may join twice"


def test_a_store_of_several_agents_that_outlives_a_start_is_refused(torchruns_store):
    torchruns_store(0, 2)
    with pytest.raises(RuntimeError, match="start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        torchruns_store(1, 2)


TRAIN = """
import os, signal, sys
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from lightning_gnn import FullGraphDataModule
from lightning_gnn.nn import GCN, NodeClassifier
from tests.full_graph.training import small_data
from tests.hyscale.training import Plain, make_data, make_hybrid

class Kill(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

kind, folder = sys.argv[1:]
torch.set_num_threads(1)
pl.seed_everything(1, verbose=False)
if kind == "hyscale":
    module, data, strategy, epochs = Plain(), make_data(), make_hybrid(2), 2
else:
    data, strategy, epochs = FullGraphDataModule(small_data(dtype=torch.float32)), "ascend_hybrid", 8
    module = NodeClassifier(GCN(6, 8, 2, 7), num_classes=7)
callbacks = [Kill(), ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)]
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False, enable_progress_bar=False,
    limit_val_batches=0, callbacks=callbacks, enable_model_summary=False,
)
trainer.fit(module, data, ckpt_path="last", weights_only=True)
if trainer.is_global_zero:
    torch.save((trainer.global_step, module.state_dict()), folder + "/trained")
"""
"""Trains from the last checkpoint on; in the first run, the second rank exits during training."""


def _whole(rank, *arguments):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # all ranks stay
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.campaign(seldom=True)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hyscale", "ascend_hybrid"])
def test_a_strategy_goes_on_when_torchrun_has_started_its_ranks_again(kind, tmp_path):
    """With real torchrun, whose restarted ranks get the store of the previous ones."""
    script, folders = tmp_path / "train.py", [tmp_path / "killed", tmp_path / "whole"]
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, str(script), kind, str(folders[0])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "Restored all states from the checkpoint" in done.stdout + done.stderr
    run(_whole, 2, str(script), kind, str(folders[1]))
    (steps, killed), (others, whole) = (torch.load(folder / "trained", weights_only=True) for folder in folders)
    assert steps == others == 8
    for name, value in whole.items():
        torch.testing.assert_close(killed[name], value, rtol=1e-5, atol=1e-6)


def lose_rank(rank):
    """Lose a rank in a collective; return whether each error is recognized as such."""
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=3))
    if rank == 1:
        time.sleep(1)
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return is_communication_error(error), str(error)


@pytest.mark.slow
def test_errors_of_the_backend_mean_a_lost_rank():
    taken, text = observe(lose_rank, 2, lost=[1]).results[0]
    assert taken, text


class Fails(pl.Callback):
    def on_exception(self, trainer, module, exception):
        raise ValueError("no more")


class Says(pl.Callback):
    def on_exception(self, trainer, module, exception):
        self.said = str(exception)


def test_loggers_and_callbacks_finish_before_a_rank_is_ended(tmp_path, monkeypatch):
    codes, says, logger = [], Says(), CSVLogger(tmp_path, flush_logs_every_n_steps=1000)
    monkeypatch.setattr(os, "_exit", codes.append)
    logger.log_metrics({"loss": 1.5})
    end_process("rank 0 exits because rank 1 died", pl.Trainer(logger=logger, callbacks=[Fails(), says]))
    assert codes == [1]
    assert says.said == "rank 0 exits because rank 1 died"
    assert "1.5" in (Path(logger.log_dir) / "metrics.csv").read_text()


class Refused(RuntimeError):
    pass


OF_USERS = [
    RuntimeError("my database query timed out"),
    RuntimeError("socket hang up"),
    RuntimeError("connection closed by peer"),
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    Refused("gloo/ is a folder"),
    ValueError("NCCL error"),
    ConnectionResetError("connection reset"),
    TimeoutError("timed out"),
]
OF_BACKENDS = [DistNetworkError("rank 1 does not answer"), DistBackendError("NCCL error")]


@pytest.mark.parametrize("error", [*OF_USERS, *OF_BACKENDS], ids=str)
def test_errors_of_backends_alone_mean_a_lost_rank(error):
    try:
        raise error
    except type(error):
        assert is_communication_error(error) == (error in OF_BACKENDS)
