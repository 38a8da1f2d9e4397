"""Checkpoint files that a crash, a full disk or a flipped bit cannot turn into something else unnoticed."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.utilities.cloud_io import _is_local_file_protocol
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_gnn.runtime.files import flush, whole_file

_CHUNK = 1 << 22


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but a local file is written beside its target, brought to the disk and then renamed.

    Lightning's writes to the directory for temporary files, from where a file of another file system is copied: a
    process that is killed meanwhile leaves neither the old checkpoint nor the new one. What is read is checked
    against the checksums in the file, which ``torch.load`` leaves out. Elsewhere than in local files it is Lightning's.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Args:
            path: Where to; what was there stays until all is written.
            storage_options: None; Lightning's says what to do about others.
        """
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = _local(path)
        checksums = get_crc32_options()
        set_crc32_options(True)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as file:
                torch.save(checkpoint, file)
            flush(target.parent)
        except (OSError, RuntimeError) as error:
            raise _not_written(target, error) from error
        finally:
            set_crc32_options(checksums)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            weights_only: Whether to refuse all but tensors and plain types; None leaves that to torch.
        """
        if not _is_local_file_protocol(path) or not _local(path).is_file():
            return super().load_checkpoint(path, map_location, weights_only)
        target = _local(path)
        if (damage := damage_of(target)) is not None:
            raise ValueError(damage)
        try:
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise
            if zipfile.is_zipfile(target) and isinstance(error, (pickle.UnpicklingError, AttributeError, ImportError)):
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"{target} could not be read")
                raise  # it holds a type that is not allowed, or not there
            with target.open("rb") as file:
                torchs = file.read(1) in (b"P", b"\x80")  # a zip file, or a pickle as before torch 1.6
            reason = _first_line(error) if torchs else "it does not begin like a file of torch's"
            raise ValueError(_message(target, f"cannot be read as a checkpoint: {reason}")) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(_message(target, "is not a checkpoint of a Trainer: it holds no state_dict"))
        return checkpoint


def use_safe_files(trainer: pl.Trainer) -> None:
    """Let a trainer read and write its checkpoints so, unless it was given a way of its own."""
    if type(getattr(trainer.strategy, "checkpoint_io", None)) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = SafeCheckpointIO()


def damage_of(path: Path) -> str | None:
    """Compare a checkpoint with the checksums in it; say what is wrong and what lies beside it, None if nothing is."""
    damage = _damage(path)
    return None if damage is None else _message(path, f"is damaged: {damage}")


def _local(path: Any) -> Path:
    return Path(str(path).removeprefix("file://"))


def _damage(path: Path) -> str | None:
    """Compare a file with the checksums in it; return what is wrong, None if nothing is or nothing can be told."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":  # torch's format before 1.6, or no checkpoint at all
            return None if path.stat().st_size else "it is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if any(record.CRC for record in records):  # torch can be told to leave all of them out
                wrong = next((record.filename for record in records if not _is_sound(archive, record)), None)
                return None if wrong is None else f"the checksum of {wrong} is wrong"
    except MemoryError:
        raise
    except Exception as error:  # of a damaged file, zipfile raises errors of many kinds
        return f"it is cut short, or its index is wrong ({_first_line(error)})"
    return None


def _is_sound(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    expected, info.CRC = info.CRC, None  # type: ignore[assignment]  # zipfile's own check tells no file from none
    found = 0
    with archive.open(info) as record:
        while chunk := record.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found == expected


def _message(path: Path, wrong: str) -> str:
    try:
        beside = [item for item in path.parent.glob("*.ckpt") if item.is_file() and item.name != path.name]
        beside.sort(key=lambda item: item.stat().st_mtime, reverse=True)
    except OSError:
        beside = []
    others = ", ".join(item.name for item in beside[:3])
    advice = f"beside it lie {others} (the newest first)" if others else "there is no other checkpoint beside it"
    return f"{path} {wrong}; take another checkpoint: {advice}"


def _not_written(path: Path, error: Exception) -> OSError:
    number = error.errno if isinstance(error, OSError) else None
    what = error.strerror or str(error) if isinstance(error, OSError) else _first_line(error)
    kept = "the one that was there is as it was" if path.exists() else "nothing was written"
    return OSError(number, f"the checkpoint could not be written: {what}; {kept}", str(path))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
