"""Objects on their way between a notebook and its ranks, which cannot import what the notebook's cells define."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.runtime.mapped_files import LEAST, MappedFiles

_COMMON: dict[str, list[Any]] = {}
"""By the name of a group of ranks: what this process and the other both have."""
_NUMBERS = itertools.count()


class Parcel:
    """A file in memory, without a name, that child processes inherit and that is gone with the last of them.

    Classes and functions of ``__main__`` travel by value. Tensors and NumPy arrays are mapped by who unpacks them:
    however many ranks do, their memory is there once, and yet what one writes is its own. Tensors that show a file are
    mapped from that.

    Args:
        descriptor: Of the file, if it is there already.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("parcel") if descriptor is None else descriptor

    def pack(self, content: Any, common: Sequence[Any] = (), group: str = "") -> list[Any]:
        """Write an object; return the classes and functions in it that cannot be imported.

        Args:
            content: The object.
            common: What who unpacks has too, and takes instead, in the same order.
            group: Whose ``common`` it is.

        Raises:
            Exception: Something cannot be pickled.
        """
        os.ftruncate(self.descriptor, 0)
        return pack(content, f"/proc/self/fd/{self.descriptor}", common, group)

    def unpack(self, device: str | None = None) -> Any:
        """Read the object; None if nothing was written.

        Args:
            device: Where its tensors go; None leaves each where it was.
        """
        if not os.fstat(self.descriptor).st_size:
            return None
        path = f"/proc/self/fd/{self.descriptor}"
        return torch.load(path, map_location=device, mmap=True, weights_only=False)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)


def pack(content: Any, to: str | IO[bytes], common: Sequence[Any] = (), group: str = "") -> list[Any]:
    """Write an object as :meth:`Parcel.pack` does, but to any file."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    files: list[MappedFiles] = []
    places = {id(one): place for place, one in enumerate(common)}
    defined: list[Any] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined,unused-ignore]
        def reducer_override(self, one: Any) -> Any:
            if (place := places.get(id(one))) is not None:
                return take, (group, place)
            if type(one) is Tensor and one.device.type == "cpu" and one.layout is torch.strided:
                if not one.requires_grad and one.untyped_storage().nbytes() >= LEAST:
                    files[:] = files or [MappedFiles()]
                    if (part := files[0].find(one)) is not None:
                        return part.map, (one.dtype, one.shape, one.stride(), one.storage_offset())
                return NotImplemented
            if type(one) in (np.ndarray, np.memmap) and one.nbytes >= LEAST and one.flags.c_contiguous:
                with suppress(TypeError):  # no tensor can be of its type
                    return Tensor.numpy, (torch.from_numpy(one if one.flags.writeable else one.copy()),)
            reduced = super().reducer_override(one)
            if isinstance(reduced, tuple) and (isinstance(one, type) or callable(one)):
                defined.append(one)
            return reduced

    pickler = SimpleNamespace(Pickler=Pickler, __name__="cloudpickle")
    # The list comes last, when it is full; all that is in it has been written already.
    torch.save((content, defined), to, pickle_module=pickler, pickle_protocol=5)
    return defined


def new_group() -> str:
    """Return a name for a group of ranks that no other one of this process has."""
    return f"{os.getpid()}-{next(_NUMBERS)}"


def share(group: str, common: list[Any] | None) -> None:
    """Set what a group's parcels may leave out because it is here, or forget it."""
    if common is None:
        _COMMON.pop(group, None)
    else:
        _COMMON[group] = common


def take(group: str, place: int) -> Any:
    """Return what is here already of a parcel's content."""
    return _COMMON[group][place]
