"""A damaged checkpoint is refused by its name, or loads as it was written: never other weights without a word."""

import random

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from tests.cli.command import lgnn
from tests.faults.chains import DATA_MODULES, Chain, Node, same


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A whole checkpoint of a Trainer, and what it holds."""
    folder = tmp_path_factory.mktemp("sound")
    assert Chain(folder, DATA_MODULES["neighbor"], max_epochs=1).run(last={})
    path = folder / "last.ckpt"
    return path, torch.load(path, weights_only=True)


def fit(path):
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1
    )
    trainer.fit(Node(), datamodule=DATA_MODULES["neighbor"](), ckpt_path=path, weights_only=True)


def damaged(kind, content, rng):
    """Return what is left of a file."""
    if kind == "truncated":
        return content[: rng.randrange(len(content))]
    if kind == "zeros at the end":  # as after a crash of the machine
        return content[: (cut := rng.randrange(len(content)))] + bytes(len(content) - cut)
    changed = bytearray(content)
    for _ in range({"one bit": 1, "twenty bits": 20}[kind]):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["one bit", "twenty bits", "truncated", "zeros at the end"])
def test_campaign(kind, sound, tmp_path):
    path, content = tmp_path / "cut.ckpt", sound[0].read_bytes()
    rng = random.Random(kind)
    refused = 0
    for _ in range(60):
        path.write_bytes(damaged(kind, content, rng))
        loaded, message = None, ""
        try:
            loaded = SafeCheckpointIO().load_checkpoint(path, weights_only=True)
        except ValueError as error:
            message = str(error)
        if loaded is None:
            assert str(path) in message
            refused += 1
        else:
            assert same(sound[1], loaded) is None
    assert refused >= 40


def test_a_flipped_weight_is_found_where_torch_finds_nothing(sound, tmp_path):
    path, content = tmp_path / "flipped.ckpt", bytearray(sound[0].read_bytes())
    weight = max(sound[1]["state_dict"].values(), key=torch.Tensor.numel)
    content[content.index(weight.numpy().tobytes()[:16])] ^= 64
    path.write_bytes(content)
    assert same(sound[1], TorchCheckpointIO().load_checkpoint(path, weights_only=True)) is not None
    with pytest.raises(ValueError, match=r"flipped.ckpt is damaged: the checksum of .* is wrong"):
        SafeCheckpointIO().load_checkpoint(path)


def test_a_trainer_names_the_file(sound, tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(sound[0].read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{path} is damaged: .*take another checkpoint, such as one of {tmp_path}"):
        fit(path)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK"])
def test_something_else(content, tmp_path):
    path = tmp_path / "wrong.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} is damaged: it is empty, cut short, or no file of torch's"):
        fit(path)


def test_weights_alone_are_no_checkpoint_of_a_trainer(tmp_path):
    torch.save(Node().state_dict(), tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match=r"weights.ckpt is not a checkpoint of a Trainer"):
        fit(tmp_path / "weights.ckpt")


def test_a_forbidden_type_is_torch_s_own_error(tmp_path):
    path = tmp_path / "trusted.ckpt"
    torch.save({"state_dict": {}, "path": tmp_path}, path)
    with pytest.raises(Exception, match="Weights only load failed"):
        SafeCheckpointIO().load_checkpoint(path, weights_only=True)
    assert SafeCheckpointIO().load_checkpoint(path, weights_only=False)["path"] == tmp_path


def test_files_without_checksums_are_read_as_before(sound, tmp_path):
    checksums = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(sound[1], tmp_path / "without.ckpt")
        SafeCheckpointIO().save_checkpoint(sound[1], tmp_path / "with.ckpt")
        assert not get_crc32_options()
    finally:
        set_crc32_options(checksums)
    for name in ("without", "with"):
        assert same(sound[1], SafeCheckpointIO().load_checkpoint(tmp_path / f"{name}.ckpt")) is None
    content = bytearray((tmp_path / "with.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "with.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "with.ckpt")


def test_the_command_names_the_file(sound, tmp_path, capfd):
    path = tmp_path / "cut.ckpt"
    path.write_bytes(sound[0].read_bytes()[:5000])
    assert lgnn(tmp_path / "run", f"ckpt_path={path}") == 2
    shown = capfd.readouterr().err
    assert f"{path} is damaged" in " ".join(shown.split())
    assert "Traceback" not in shown
