"""A checkpoint that is being overwritten stays until the new one is whole: after a kill, a full disk, an error."""

import os
import random
import resource
import signal
import time
from pathlib import Path

import fsspec
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_gnn.runtime import checkpoint_io
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO, use_safe_files
from tests.faults.chains import DATA_MODULES, Chain, Killed, Node
from tests.full_graph.launch import CONTEXT
from tests.patience import PATIENCE


def checkpoint(number, size=1000):
    return {"state_dict": {"weight": torch.full((size,), float(number))}}


def number_in(path):
    return int(SafeCheckpointIO().load_checkpoint(path)["state_dict"]["weight"].unique().item())


@pytest.fixture
def last(tmp_path):
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(checkpoint(1), path)
    return path


def save_for_ever(path):
    number = 2
    while True:
        SafeCheckpointIO().save_checkpoint(checkpoint(number, 200_000), path)
        number += 1


@pytest.mark.slow
def test_killed_at_any_moment_of_writing(last):
    rng = random.Random("moments")
    for _ in range(5):
        process = CONTEXT.Process(target=save_for_ever, args=(last,))
        process.start()
        before = last.stat().st_mtime_ns
        while last.stat().st_mtime_ns == before:
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
        assert number_in(last) >= 2
    SafeCheckpointIO().save_checkpoint(checkpoint(1), last)
    assert [item.name for item in last.parent.iterdir()] == ["last.ckpt"]  # nothing is left of the dead


@pytest.mark.parametrize("step", ["save", "fsync", "replace"])
def test_an_end_before_the_new_file_has_its_name(step, last, monkeypatch):
    def end(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(torch if step == "save" else os, step, end)
    with pytest.raises(Killed):
        SafeCheckpointIO().save_checkpoint(checkpoint(2), last)
    monkeypatch.undo()
    assert number_in(last) == 1
    assert [item.name for item in last.parent.iterdir()] == ["last.ckpt"]


def test_the_file_and_its_name_are_brought_to_the_disk(last, monkeypatch):
    synced, fsync = [], os.fsync

    def note(number):
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    SafeCheckpointIO().save_checkpoint(checkpoint(2), last)
    assert synced[0].endswith(".part")
    assert Path(synced[0]).parent == last.parent
    assert synced[1:] == [str(last.parent)]


def test_temporary_files_elsewhere_play_no_part(last, monkeypatch):
    """Lightning's own writer goes through them, and copies."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(FileNotFoundError):
        TorchCheckpointIO().save_checkpoint(checkpoint(2), last)
    SafeCheckpointIO().save_checkpoint(checkpoint(2), last)
    assert number_in(last) == 2


@pytest.fixture
def small_disk():
    """No file grows beyond 64 KB: the system refuses to write, as a full disk does."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(last, small_disk):
    with pytest.raises(OSError, match=r"could not be written: .*the one that was there is as it was") as raised:
        SafeCheckpointIO().save_checkpoint(checkpoint(2, 100_000), last)
    assert raised.value.filename == str(last)
    assert number_in(last) == 1
    with pytest.raises(OSError, match="nothing was written"):
        SafeCheckpointIO().save_checkpoint(checkpoint(2, 100_000), last.parent / "new.ckpt")
    assert [item.name for item in last.parent.iterdir()] == ["last.ckpt"]


def test_a_disk_that_fills_while_training(tmp_path, monkeypatch):
    chain = Chain(tmp_path, DATA_MODULES["neighbor"])
    saved = []

    def save(checkpoint, file):
        saved.append(checkpoint["global_step"])
        if len(saved) == 3:
            raise OSError(28, "No space left on device")
        return original(checkpoint, file)

    original = torch.save
    monkeypatch.setattr(checkpoint_io.torch, "save", save)
    with pytest.raises(OSError, match=r"could not be written: No space left on device; the one .*last.ckpt"):
        chain.run(last={"every_n_train_steps": 2})
    assert saved == [2, 4, 6]
    kept = SafeCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
    assert kept["global_step"] == 4


def test_other_places_are_lightning_s(tmp_path):
    SafeCheckpointIO().save_checkpoint(checkpoint(3), "memory://folder/last.ckpt")
    assert fsspec.filesystem("memory").exists("/folder/last.ckpt")
    assert number_in("memory://folder/last.ckpt") == 3
    SafeCheckpointIO().save_checkpoint(checkpoint(4), f"file://{tmp_path}/url.ckpt")
    assert number_in(f"file://{tmp_path}/url.ckpt") == number_in(tmp_path / "url.ckpt") == 4
    with pytest.raises(FileNotFoundError, match=r"none.ckpt"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        SafeCheckpointIO().save_checkpoint(checkpoint(4), tmp_path / "last.ckpt", storage_options={})


def test_links_to_the_last_checkpoint(tmp_path):
    last = ModelCheckpoint(tmp_path, save_last="link", every_n_train_steps=2)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[last], enable_progress_bar=False, max_epochs=2)
    trainer.fit(Node(), datamodule=DATA_MODULES["neighbor"]())
    assert isinstance(trainer.strategy.checkpoint_io, SafeCheckpointIO)
    assert (tmp_path / "last.ckpt").is_symlink()
    assert SafeCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == trainer.global_step


def test_a_user_s_own_way_of_writing_stays():
    class Own(TorchCheckpointIO):
        pass

    trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[Own()])
    use_safe_files(trainer)
    assert type(trainer.strategy.checkpoint_io) is Own
