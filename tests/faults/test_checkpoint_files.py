"""A checkpoint being overwritten remains until the new one is complete: after a kill, a full disk, an error."""

import errno
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import fsspec
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_gnn.callbacks import BestCheckpoint
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO, use_safe_files
from tests.faults.chains import DATA_MODULES, Killed, Node
from tests.full_graph.launch import CONTEXT
from tests.patience import PATIENCE
from tests.refusals import refuses


def save(number, path, size=1000, **options):
    checkpoint = {"state_dict": {"weight": torch.full((size,), float(number))}}
    SafeCheckpointIO().save_checkpoint(checkpoint, path, **options)


def read_number(path):
    return int(SafeCheckpointIO().load_checkpoint(path)["state_dict"]["weight"].unique().item())


def is_alone(path):
    return [item.name for item in path.parent.iterdir()] == [path.name]  # no temporary files remain


@pytest.fixture
def last(tmp_path):
    save(1, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def save_for_ever(path):
    number = 2
    while True:
        save(number, path, 200_000)
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
        assert read_number(last) >= 2
    save(1, last)
    assert is_alone(last)


@pytest.mark.parametrize(("module", "step"), [(torch, "save"), (os, "fsync"), (os, "replace")])
def test_an_end_before_the_new_file_has_its_name(module, step, last, monkeypatch):
    def end(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(module, step, end)
    with pytest.raises(Killed):
        save(2, last)
    monkeypatch.undo()
    assert read_number(last) == 1
    assert is_alone(last)


def test_the_file_and_its_name_are_brought_to_the_disk_from_beside_it(last, monkeypatch):
    synced, fsync = [], os.fsync

    def note(number):
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")  # the folder that Lightning's own writer and copies would use
    save(2, last)
    assert synced[0].endswith(".part")
    assert Path(synced[0]).parent == last.parent
    assert synced[1:] == [str(last.parent)]


def test_a_full_disk(last, monkeypatch):
    save(2, last.parent / "whole.ckpt", 100_000)
    size = (last.parent / "whole.ckpt").stat().st_size
    (last.parent / "whole.ckpt").unlink()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would truncate it without an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))  # the maximum file size
    try:
        said = rf"could not be written: File too large; it needs {size} bytes, and .* left: .*file is unchanged"
        with pytest.raises(OSError, match=said) as raised:
            save(2, last, 100_000)
        refuses(OSError, "nothing was written", save, 2, last.parent / "new.ckpt", 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(last))
    assert read_number(last) == 1
    assert is_alone(last)


def test_other_places_are_lightning_s(tmp_path):
    save(3, "memory://folder/last.ckpt")
    assert fsspec.filesystem("memory").exists("/folder/last.ckpt")
    assert read_number("memory://folder/last.ckpt") == 3
    save(4, f"file://{tmp_path}/url.ckpt")
    assert read_number(f"file://{tmp_path}/url.ckpt") == read_number(tmp_path / "url.ckpt") == 4
    refuses(FileNotFoundError, r"none.ckpt", read_number, tmp_path / "none.ckpt")
    refuses(TypeError, "storage_options", save, 4, tmp_path / "last.ckpt", storage_options={})


def test_links_to_the_last_checkpoint(tmp_path):
    last = ModelCheckpoint(tmp_path, save_last="link", every_n_train_steps=2)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[last], enable_progress_bar=False, max_epochs=2)
    trainer.fit(Node(), datamodule=DATA_MODULES["neighbor"]())
    assert isinstance(trainer.strategy.checkpoint_io, SafeCheckpointIO)
    assert (tmp_path / "last.ckpt").is_symlink()
    assert SafeCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == trainer.global_step


def test_a_plain_trainer_with_the_callback_alone(tmp_path):
    best = BestCheckpoint(tmp_path)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[best], enable_progress_bar=False, max_steps=1)
    trainer.fit(BoringModel())
    assert isinstance(trainer.strategy.checkpoint_io, SafeCheckpointIO)


def test_a_user_s_own_way_of_writing_stays():
    class Own(TorchCheckpointIO):
        pass

    trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[Own()])
    use_safe_files(trainer)
    assert type(trainer.strategy.checkpoint_io) is Own
