"""Checkpoint files with atomic writes and verified checksums, so that a crash or damage cannot go unnoticed."""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_gnn.runtime.files import DISK_ADVICE, disk_full_cause, flush, whole_file
from lightning_gnn.runtime.lightning import TorchCheckpointIO, _is_local_file_protocol, pl

log = logging.getLogger(__name__)


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO`` that writes a local file under a temporary name, flushes and renames it.

    Loading verifies the file's checksums, which ``torch.load`` ignores.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; keep the existing file until all is written.

        Raises:
            OSError: The file, which it names, cannot be written; on a full disk, with the bytes needed and left.
        """
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        log.debug(f"writing the checkpoint {path}")
        target, checksums = _local(path), get_crc32_options()
        set_crc32_options(True)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as file:
                torch.save(checkpoint, file)
            flush(target.parent)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            number = getattr(error, "errno", None)
            if (full := disk_full_cause(error)) is not None and full.errno is not None:
                number, free = full.errno, shutil.disk_usage(target.parent).free
                reason = (
                    f"{os.strerror(full.errno)}; it needs {_count_bytes(checkpoint)} bytes, and its disk has "
                    f"{free} bytes left: {DISK_ADVICE}"
                )
            outcome = "the existing file is unchanged" if target.exists() else "nothing was written"
            raise OSError(number, f"the checkpoint could not be written: {reason}; {outcome}", str(target)) from error
        finally:
            set_crc32_options(checksums)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; raise a ValueError if the file is damaged or not a Lightning checkpoint."""
        log.debug(f"reading the checkpoint {path}")
        target = _local(path)
        if _is_local_file_protocol(path) and target.is_file() and (damage := damage_of(target)):
            raise ValueError(damage)
        try:
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        except (RuntimeError, EOFError, ValueError, LookupError) as error:
            raise ValueError(f"{path} cannot be read as a checkpoint: {str(error).partition(chr(10))[0]}") from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(f"{path} is not a checkpoint of a Trainer: it holds no state_dict")
        return checkpoint


def use_safe_files(trainer: pl.Trainer) -> None:
    """Make a trainer use :class:`SafeCheckpointIO`, unless the user chose another checkpoint plugin."""
    if type(getattr(trainer.strategy, "checkpoint_io", None)) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = SafeCheckpointIO()


def damage_of(path: Path) -> str | None:
    """Verify the checksums of a checkpoint; return a message if it is damaged, else None."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch can be configured to write no checksums
            bad = archive.testzip() if any(record.CRC for record in archive.infolist()) else None
        problem = bad and f"the checksum of {bad} is wrong"
    except Exception as error:  # zipfile raises many exception types for damaged files
        with path.open("rb") as file:
            if file.read(1) == b"\x80":  # torch's format before 1.6
                return None
        problem = f"it is empty, truncated or not a torch file ({error or type(error).__name__})"
    return problem and f"{path} is damaged: {problem}; use another checkpoint, such as one of {path.parent}"


def _count_bytes(checkpoint: dict[str, Any]) -> int:
    """Return the size of the file that ``torch.save`` would write."""
    file = _CountingFile()
    torch.save(checkpoint, cast(IO[bytes], file))  # torch uses only these methods
    return file.size


class _CountingFile:
    """Counts the bytes written to it and discards them."""

    size = 0

    def write(self, content: bytes) -> int:
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        pass


def _local(path: str | Path) -> Path:
    return Path(str(path).removeprefix("file://"))
