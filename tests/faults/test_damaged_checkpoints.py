"""A damaged checkpoint is rejected by name or loads exactly as written: it never silently gives other weights."""

import random

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from tests.faults.chains import DATA_MODULES, Chain, Node, find_difference
from tests.refusals import refuses

EMPTY = "is damaged: it is empty, truncated or not a torch file"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An intact checkpoint of a Trainer, and its content."""
    folder = tmp_path_factory.mktemp("sound")
    assert Chain(folder, DATA_MODULES["neighbor"], max_epochs=1).run(last={})
    path = folder / "last.ckpt"
    return path, torch.load(path, weights_only=True)


def flip_bits(content, rng, bits):
    changed = bytearray(content)
    for _ in range(bits):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def write_zeros(content, rng):
    """Overwrite a block with zeros, as after a crash of the machine."""
    return content[: (cut := rng.randrange(len(content)))] + bytes(len(content) - cut)


DAMAGES = {
    "one bit": lambda content, rng: flip_bits(content, rng, 1),
    "twenty bits": lambda content, rng: flip_bits(content, rng, 20),
    "truncated": lambda content, rng: content[: rng.randrange(len(content))],
    "zeros at the end": write_zeros,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_campaign(kind, sound, tmp_path):
    path, content = tmp_path / "cut.ckpt", sound[0].read_bytes()
    rng, refused = random.Random(kind), []
    for _ in range(60):
        path.write_bytes(DAMAGES[kind](content, rng))
        try:
            assert find_difference(sound[1], SafeCheckpointIO().load_checkpoint(path, weights_only=True)) is None
        except ValueError as error:
            refused.append(str(path) in str(error))
    assert len(refused) >= 40
    assert all(refused)


def test_a_flipped_weight_is_found_where_torch_finds_nothing(sound, tmp_path):
    path, content = tmp_path / "flipped.ckpt", bytearray(sound[0].read_bytes())
    weight = max(sound[1]["state_dict"].values(), key=torch.Tensor.numel)
    content[content.index(weight.numpy().tobytes()[:16])] ^= 64
    path.write_bytes(content)
    assert find_difference(sound[1], TorchCheckpointIO().load_checkpoint(path, weights_only=True)) is not None
    with pytest.raises(ValueError, match=r"flipped.ckpt is damaged: the checksum of .* is wrong"):
        SafeCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: whole[:-100], "is damaged: .*use another checkpoint, such as one of "),
        (lambda whole: b"", EMPTY),
        (lambda whole: b"\x93NUMPY", EMPTY),
        (lambda whole: b"PK", EMPTY),
        (None, "is not a checkpoint of a Trainer"),  # only weights
    ],
)
def test_a_trainer_names_the_file(content, said, sound, tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(content(sound[0].read_bytes())) if content else torch.save(Node().state_dict(), path)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **quiet)
    with pytest.raises(ValueError, match=f"{path} {said}"):
        trainer.fit(Node(), datamodule=DATA_MODULES["neighbor"](), ckpt_path=path, weights_only=True)


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
        assert find_difference(sound[1], SafeCheckpointIO().load_checkpoint(tmp_path / f"{name}.ckpt")) is None
    content = bytearray((tmp_path / "with.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "with.ckpt").write_bytes(content)
    refuses(ValueError, "checksum", SafeCheckpointIO().load_checkpoint, tmp_path / "with.ckpt")
