"""Runs Ascend C kernels on the CPU twin: strict checks, results, byte and cycle counts."""

import ctypes
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from .build import build

_LOCK = threading.Lock()  # the runtime supports one launch at a time
_BY_VALUE, _READ_WRITE, _READ_ONLY, _SCRATCH = range(4)

Array = np.ndarray[Any, Any] | torch.Tensor | ctypes.Structure
"""Memory of a kernel: C-contiguous NumPy arrays and CPU tensors are used in place; structures are copied."""


class TwinViolation(RuntimeError):
    """A kernel violated a rule of the chip; attributes give kernel, block, core, file, line, rule and message."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.kernel: str = record["kernel"]
        self.block: int = record["block"]
        self.core: str = record["core"]
        self.file: str = record["file"]
        self.line: int = record["line"]
        self.rule: str = record["rule"]
        self.message: str = record["message"]
        location = f", block {self.block}, {self.core}" if self.block >= 0 else ""
        source = f", {Path(self.file).name}:{self.line}" if self.file else ""
        super().__init__(f"{self.kernel}{location}{source}: {self.rule}: {self.message}")


@dataclass(frozen=True)
class ReadOnly:
    """Array that the kernel may only read; its reads are not tracked, which makes the run faster."""

    array: Array


@dataclass(frozen=True)
class Scratch:
    """Uninitialized array: reading a byte before writing it is a violation."""

    array: Array


Argument = float | Array | ReadOnly | Scratch


@dataclass(frozen=True)
class LaunchResult:
    """Statistics of one launch."""

    kernel: str
    makespan: float  # cycles until the last core finished
    bytes: dict[str, float]  # transferred per path: hbm_read, l2_read, gm_write, gm_to_ub, gm_to_l1, ub_to_gm, …
    fractals: float  # 16x16x16 products of the cube
    elements: float  # elements of vector instructions
    instructions: int
    cores: list[dict[str, Any]]  # for each core: block, kind, sub, end, and busy cycles of scalar, vector, cube, …
    lints: list[str] = field(default_factory=list)  # warnings that are not violations

    def busy(self, unit: str) -> float:
        """Return the busy cycles of one unit, summed over all cores."""
        return float(sum(core[unit] for core in self.cores))


class _Argument(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("mode", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("name", ctypes.c_char_p),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("chip", ctypes.c_char_p),
        ("blocks", ctypes.c_int64),
        ("seed", ctypes.c_int64),
        ("max_instructions", ctypes.c_int64),
        ("require_double_buffer", ctypes.c_int32),
        ("nan_allowed", ctypes.c_int32),
        ("parameters", ctypes.POINTER(ctypes.c_double)),
    ]


class Twin:
    """Runtime of the twin with a set of kernels, by default those of ``csrc``, optionally built with sanitizers."""

    def __init__(self, sources: Sequence[Path | str] | None = None, sanitize: bool = False) -> None:
        runtime, built = build(None if sources is None else [Path(s) for s in sources], sanitize=sanitize)
        self._library = ctypes.CDLL(str(runtime))
        self._parts = [ctypes.CDLL(str(b.library)) for b in built]
        for function in ("twin_kernels", "twin_parameters", "twin_launch"):
            getattr(self._library, function).restype = ctypes.c_char_p
        signatures = json.loads(self._library.twin_kernels())
        self.kernels: dict[str, list[tuple[str, str, int]]] = {}
        for part in built:
            for name, parameters in part.kernels.items():
                types = signatures[name]
                self.kernels[name] = [(p, kind, size) for p, (kind, size) in zip(parameters, types, strict=True)]
        rows = json.loads(self._library.twin_parameters())
        self.parameters: dict[str, float] = {name: value for name, value, _ in rows}

    def launch(
        self,
        kernel: str,
        args: Sequence[Argument],  # one per parameter: a number or ctypes.Structure by value, otherwise an array
        num_blocks: int,  # a block of a mixed kernel has one cube core and two vector cores
        arch: str = "910b",  # or "910", the unified core; "910b" is Atlas A2, with split cores
        seed: int = 0,  # 0 runs the cores in order; any other value randomizes their order
        require_double_buffer: bool = False,  # repeated use of a single-buffered queue is a violation
        mmad_nan: bool = True,  # False makes NaN operands of Mmad a violation
        parameters: Mapping[str, float] | None = None,  # costs that replace those of the chip
        max_instructions: int = 1 << 40,  # abort a kernel that does not terminate
    ) -> LaunchResult:
        """Run a kernel on all blocks; it modifies arrays in place."""
        if kernel not in self.kernels:
            raise ValueError(f"unknown kernel {kernel!r}; choose one of {', '.join(sorted(self.kernels))}")
        if arch not in ("910b", "910"):
            raise ValueError(f"arch must be '910b' or '910', but is {arch!r}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, but is {num_blocks}")
        signature = self.kernels[kernel]
        if len(args) != len(signature):
            raise ValueError(f"{kernel} takes {len(signature)} arguments {[s[0] for s in signature]}, not {len(args)}")
        owners: list[object] = []  # references to the memory of the pointers
        packed = (_Argument * max(len(args), 1))()
        for slot, value, (name, kind, size) in zip(packed, args, signature, strict=False):
            _pack(slot, value, f"{kernel}: argument {name!r}", name, kind, size, owners)
        unknown = set(parameters or ()) - set(self.parameters)
        if unknown:
            choices = ", ".join(sorted(self.parameters))
            raise ValueError(f"unknown cost parameters {', '.join(sorted(unknown))}; choose from {choices}")
        numbers = {**self.parameters, **(parameters or {})}
        values = (ctypes.c_double * len(numbers))(*(numbers[name] for name in self.parameters))
        options = _Options(arch.encode(), num_blocks, seed, max_instructions, require_double_buffer, mmad_nan, values)
        with _LOCK:
            text = self._library.twin_launch(kernel.encode(), packed, len(args), ctypes.byref(options))
            reply = json.loads(text.decode())
        if reply["violation"]:
            raise TwinViolation(reply["violation"])
        lints = [f"{Path(v['file']).name}:{v['line']}: {v['rule']}: {v['message']}" for v in reply["lints"]]
        counts = {name: reply[name] for name in ("makespan", "bytes", "fractals", "elements", "instructions", "cores")}
        return LaunchResult(kernel, **counts, lints=lints)


@lru_cache(maxsize=1)
def default_twin() -> Twin:
    """Return the twin with the kernels of ``csrc``, built on first use."""
    return Twin()


def _pack(slot: _Argument, value: Argument, where: str, name: str, kind: str, size: int, owners: list[object]) -> None:
    slot.name = name.encode()
    if kind == "p":
        _pack_pointer(slot, value, where, owners)
        return
    data: ctypes.Structure | ctypes._SimpleCData[Any]
    if isinstance(value, ctypes.Structure):
        data = value
    elif kind == "f":
        data = {4: ctypes.c_float, 8: ctypes.c_double}[size](float(cast(float, value)))
    elif kind == "i":
        number = int(cast(int, value))
        if not -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
            raise ValueError(f"{where}: {number} does not fit in {size} bytes")
        data = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[size](number)
    else:
        raise ValueError(f"{where} is a struct of {size} bytes: pass a ctypes.Structure")
    if ctypes.sizeof(data) != size:
        raise ValueError(f"{where} must have {size} bytes, but the structure has {ctypes.sizeof(data)}")
    owners.append(data)
    slot.data, slot.bytes, slot.mode, slot.unit = ctypes.addressof(data), size, _BY_VALUE, 1


def _pack_pointer(slot: _Argument, value: Argument, where: str, owners: list[object]) -> None:
    mode = _READ_WRITE
    if isinstance(value, ReadOnly | Scratch):
        mode = _READ_ONLY if isinstance(value, ReadOnly) else _SCRATCH
        value = value.array
    if isinstance(value, ctypes.Structure):
        value, mode = np.frombuffer(bytes(value), np.uint8), _READ_ONLY
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{where}: the twin needs a tensor on the CPU, but it is on {value.device}")
        value = value.detach().numpy()
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{where} is a pointer: pass a numpy array, a CPU tensor or a ctypes.Structure")
    if not value.flags.c_contiguous:
        raise ValueError(f"{where}: the array is not contiguous")
    if mode != _READ_ONLY and not value.flags.writeable:
        mode = _READ_ONLY
    owners.append(value)
    unit = value.itemsize if value.itemsize in (1, 2, 4, 8, 16, 32) else 1
    slot.data, slot.bytes, slot.mode, slot.unit = value.ctypes.data, value.nbytes, mode, unit
