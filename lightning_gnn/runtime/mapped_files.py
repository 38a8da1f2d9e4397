"""Find the file region behind a memory-mapped tensor, so that another process can map it too."""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LEAST = 1 << 20  # minimum tensor size in bytes; smaller ones are not searched
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
# Pages of a private mapping become anonymous when they are written: the file does not hold their content.
_REGION = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +(/.*)\n(?:[A-Z].*\n)*?Anonymous: +0 kB", re.MULTILINE
)


@dataclass(frozen=True)
class FilePart:
    """A byte range of a file."""

    path: str
    offset: int
    size: int

    def map(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], first: int) -> Tensor:
        """Map the range copy-on-write: pages load on first access, and writes never reach the file."""
        begin = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(
                file.fileno(),
                self.offset - begin + self.size,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=begin,
            )
        values = torch.frombuffer(mapped, dtype=dtype, offset=self.offset - begin, count=self.size // dtype.itemsize)
        return values.as_strided(shape, stride, first)


class MappedFiles:
    """The unmodified file mappings of this process; empty on other systems than Linux."""

    def __init__(self) -> None:
        try:
            found = _REGION.findall(Path("/proc/self/smaps").read_text(errors="surrogateescape"))
        except OSError:
            found = []
        self._regions = [(*(int(number, 16) for number in row[:3]), int(row[3]), row[4]) for row in found]

    def find(self, tensor: Tensor) -> FilePart | None:
        """Return the file range that a tensor's storage maps; None if it is not mapped or was written to."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        offset, at, path = 0, address, ""
        for start, end, begin, inode, name in self._regions:  # by address
            if start <= at < end and at < address + size and size >= LEAST:
                if at == address:
                    offset, path = begin + at - start, name
                    try:
                        if os.stat(path).st_ino != inode:
                            return None  # the file was replaced by another of the same name
                    except OSError:
                        return None
                if name != path or begin - start != offset - address:
                    return None
                at = end
        return FilePart(path, offset, size) if path and at >= address + size else None
