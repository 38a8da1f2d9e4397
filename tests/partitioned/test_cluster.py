"""The scripts that start training on a cluster, run unchanged on processes of one machine."""

import getpass
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.partitioned import partition_graph
from tests.full_graph.launch import free_port, run
from tests.patience import PATIENCE

pytest.importorskip("pyarrow", reason="several ranks need the extra partition")
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
OPTIONS = ["--every", "2", "--epochs", "2", "--batch-size", "8", "--accelerator", "cpu"]
DISTURBED = """
import os, runpy, signal, subprocess, sys, time
import pytorch_lightning as pl

class Disturb(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        env = os.environ
        if trainer.global_step == 11 and env.get("RANK") == "2" and env["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == 11 and env.get("SLURM_PROCID") == "1" and "SLURM_RESTART_COUNT" not in env:
            # To all ranks, as --signal does before the time limit.
            subprocess.run(["scancel", "--signal=USR1", env["SLURM_JOB_ID"]], check=True)
            while all(getattr(callback, "signal", None) is None for callback in trainer.callbacks):
                time.sleep(0.01)

before = pl.Trainer.__init__
def disturbed(self, *args, callbacks, **options):
    before(self, *args, callbacks=[*callbacks, Disturb()], **options)
pl.Trainer.__init__ = disturbed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script whose first start is disturbed at step 11: torchrun's third rank is killed, SLURM sends its signal."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster") / "parts"
    partition_graph(planted_power_law(2000, 12000, num_classes=4, num_features=8, seed=1), folder, 4, "ldg")
    return str(folder)


def start(script, *arguments, **env):
    command = [str(CLUSTER / script), *map(str, arguments)]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # makes torchrun end its ranks
        process.wait(PATIENCE)
        raise
    return process.returncode, said


def _train(rank, *arguments):
    torch.set_num_threads(1)
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(CLUSTER / "train.py"), run_name="__main__")


def load_weights(folder):
    trained = torch.load(folder / "trained.ckpt", weights_only=True)
    return trained["global_step"], trained["state_dict"]


@pytest.mark.slow
def test_torchrun_starts_again_what_has_lost_a_rank(parts, tmp_path):
    run(_train, 4, parts, "--checkpoints", str(tmp_path / "whole"), *OPTIONS)
    (tmp_path / "killed.py").write_text(DISTURBED)
    code, said = start(
        "torchrun.sh", tmp_path / "killed.py", CLUSTER / "train.py", parts, "--checkpoints", tmp_path / "killed",
        *OPTIONS, RANKS="4", RESTARTS="1",
    )  # fmt: skip
    assert code == 0, said
    assert re.search(r"rank 2 \(process \d+ on .*\) died", said), said
    assert re.search(r"Restored all states from the checkpoint at .*last\.ckpt", said), said
    assert "14 steps, test accuracy" in said
    (steps, whole), (others, killed) = (load_weights(tmp_path / name) for name in ("whole", "killed"))
    assert steps == others == 14
    for name, value in whole.items():  # a process rounds the sum of four gradients differently in its first step
        torch.testing.assert_close(killed[name], value, rtol=1e-5, atol=1e-6)


def write_slurm_commands(folder, **commands):
    """Write replacements of SLURM's commands to a folder; return PATH with this folder first."""
    for name, lines in commands.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "1"}


SRUN = """
export SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NTASKS_PER_NODE=1 SLURM_NODELIST=127.0.0.1 SLURM_LOCALID=0
export SLURM_JOB_NAME=cluster MASTER_ADDR=127.0.0.1
shift  # --kill-on-bad-exit=1
SLURM_PROCID=1 SLURM_NODEID=1 "$@" &
SLURM_PROCID=0 SLURM_NODEID=0 "$@" && wait $!
"""


@pytest.mark.slow
def test_slurm_starts_the_ranks(parts, tmp_path):
    env = write_slurm_commands(tmp_path, srun=SRUN, scontrol="exit 1")
    arguments = [CLUSTER / "train.py", parts, "--checkpoints", tmp_path / "checkpoints", *OPTIONS]
    code, said = start("slurm.sh", *arguments, **env)
    assert code == 0, said
    assert "MEMBER: 2/2" in said
    assert "26 steps, test accuracy" in said


def test_a_job_that_has_lost_a_rank_is_queued_again(tmp_path):
    env = write_slurm_commands(tmp_path, srun="exit 1", scontrol='echo asked for "$@"')
    assert start("slurm.sh", "train.py", "parts", **env) == (0, "asked for requeue 77\n")
    assert start("slurm.sh", "train.py", "parts", **env, SLURM_RESTART_COUNT="3") == (1, "")
    for script in ("slurm.sh", "torchrun.sh"):
        code, said = start(script, "train.py", **env)
        assert code == 2
        assert "usage: " in said


CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={other_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
"""Of a cluster of this machine alone."""
DAEMONS = ("slurmctld", "slurmd")


@pytest.fixture
def slurm(tmp_path):
    """Start SLURM's own daemons; return the environment of its commands."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in (*DAEMONS, "sbatch", "srun") if shutil.which(name, path=path) is None]:
        pytest.skip(f"SLURM is not installed (Debian: slurm-wlm): no {', '.join(missing)}")
    config, host = tmp_path / "slurm.conf", socket.gethostname().partition(".")[0]
    ports = {"port": free_port(), "other_port": free_port()}
    config.write_text(CONFIG.format(host=host, user=getpass.getuser(), folder=tmp_path, **ports))
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(config), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "daemons").open("w") as said:
        daemons = [subprocess.Popen([name, "-D"], env=env, stdout=said, stderr=said) for name in DAEMONS]
    try:
        wait_for(lambda: "idle" in ask(env, "sinfo", "-h", "-o", "%T") or any(daemon.poll() for daemon in daemons))
        if any(daemon.poll() for daemon in daemons):
            pytest.skip(f"SLURM does not start here: {(tmp_path / 'daemons').read_text()[-500:]}")
        yield env
        ask(env, "scancel", "--user", getpass.getuser())
        wait_for(lambda: not ask(env, "squeue", "-h"))
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(PATIENCE)


def ask(env, *command):
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE).stdout


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_slurms_signal_saves_and_requeues_a_job_of_two_ranks(slurm, parts, tmp_path):
    (tmp_path / "disturbed.py").write_text(DISTURBED)
    output, folder = tmp_path / "job", tmp_path / "requeued"
    submit = ["sbatch", f"--output={output}", f"--chdir={tmp_path}", "--nodes=1-1", "--ntasks-per-node=2", "--mem=0"]
    script = [CLUSTER / "slurm.sh", tmp_path / "disturbed.py", CLUSTER / "train.py"]
    ask(slurm, *submit, "--cpus-per-task=1", *map(str, script), parts, "--checkpoints", str(folder), *OPTIONS)
    wait_for(lambda: not ask(slurm, "squeue", "-h"))
    said = output.read_text()
    assert "DUE TO JOB REQUEUE" in said, said
    assert re.search(r"Restored all states from the checkpoint at .*last-interrupted\.ckpt", said), said
    assert torch.load(folder / "last-interrupted.ckpt", weights_only=True)["global_step"] == 12
    run(_train, 2, parts, "--checkpoints", str(tmp_path / "whole"), *OPTIONS)
    (steps, whole), (others, requeued) = (load_weights(tmp_path / name) for name in ("whole", "requeued"))
    assert steps == others
    assert all(torch.equal(requeued[name], value) for name, value in whole.items())
