"""A Triton driver that runs kernels on the CPU: PTX for an H100, translated to C++ and run by ``runtime.h``."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import torch
import triton
from platformdirs import user_cache_path
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from tests.ptx.translate import translate

HEADER = Path(__file__).with_name("runtime.h")
CACHE = Path(os.environ.get("LGNN_PTX_CACHE") or user_cache_path("lightning-gnn", appauthor=False) / "ptx")
FLAGS = ("-O1", "-w", "-std=c++17", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC")


class Config(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64), ("idle", ctypes.c_uint64), ("yield_", ctypes.c_double), ("drain", ctypes.c_double),
        ("stale", ctypes.c_double), ("sites", ctypes.c_void_p),
    ]  # fmt: skip


class Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("loads", "stores", "atomics", "acquires", "releases", "barriers", "stale", "late")
    ]


class Settings:
    """What the next launches do."""

    config = Config(seed=1, idle=1 << 18, yield_=0.2, drain=0.02, stale=0.9)
    fault = staticmethod(lambda ptx: ptx)  # changes PTX before its translation
    count = False  # count sectors, without other threads in between
    resident = 8  # CTAs at a time, of a grid that is not cooperative
    launches: ClassVar[list] = []  # name of the kernel, statistics, counts by Site, (PTX, shared memory) of each launch


class PtxBackend(backends["nvidia"].compiler):
    """Triton's compiler, ending with PTX."""

    def __init__(self, target):
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages, options, language=None):
        super().add_stages(stages, options, *(() if language is None else (language,)))
        del stages["cubin"]

    def hash(self):
        return super().hash() + "-ptx"


def build(cpp):
    """Compile C++ and return the shared library, from the cache if possible."""
    key = hashlib.sha256("\0".join((cpp, HEADER.read_text(), *FLAGS)).encode()).hexdigest()[:24]
    library = CACHE / f"{key}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(cpp)
            subprocess.run(["g++", *FLAGS, "-I", HEADER.parent, source, "-o", built], check=True)
            built.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.run_grid.restype = ctypes.c_char_p
    return loaded


class Utils:
    """What Triton asks a driver's helper module for."""

    def __init__(self):
        self.functions = []

    def load_binary(self, name, ptx, shared, device):
        self.functions.append((ptx.decode(), shared))
        return 0, len(self.functions) - 1, 80, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def unload_module(self, module):
        pass


class Launcher:
    """Launches one compiled kernel."""

    def __init__(self, source, metadata):
        self.kinds, self.cooperative, self.built = list(source.signature.values()), metadata.launch_cooperative_grid, {}

    def __call__(self, x, y, z, stream, function, packed, metadata, on_enter, on_exit, *args):
        ptx, shared = utils.functions[function]
        if Settings.fault not in self.built:
            translation = translate(Settings.fault(ptx))
            self.built[Settings.fault] = translation, build(translation.cpp)
        translation, library = self.built[Settings.fault]
        if x * y * z == 0:
            return
        values = [argument(kind, arg) for kind, arg in zip(self.kinds, args, strict=False) if kind != "constexpr"]
        values += [ctypes.c_uint64(0)] * 2  # scratch memory and profiler, unused
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        config, stats = Config.from_buffer_copy(Settings.config), Stats()
        sites = (ctypes.c_uint64 * (3 * len(translation.sites)))()
        if Settings.count:
            config.sites, config.yield_ = ctypes.addressof(sites), 0
        Settings.config.seed += 1
        resident = x * y * z if self.cooperative else Settings.resident
        grid = (ctypes.c_int * 3)(x, y, z)
        error = library.run_grid(
            grid, translation.threads, shared, resident, pointers, ctypes.byref(config), ctypes.byref(stats)
        )
        counts = Counter()
        for i, site in enumerate(translation.sites if Settings.count else ()):
            counts.update({(site, what): sites[3 * i + j] for j, what in enumerate(("lanes", "requests", "sectors"))})
        told = {n: getattr(stats, n) for n, _ in Stats._fields_}
        Settings.launches.append((translation.name, told, counts, utils.functions[function]))
        if error:
            raise RuntimeError(f"{translation.name}: {error.decode()}")


def argument(kind, arg):
    """Return one argument of a kernel as its parameter."""
    if kind[0] == "*":
        return ctypes.c_uint64(arg.data_ptr() if hasattr(arg, "data_ptr") else arg or 0)
    if kind[0] == "f":
        return (ctypes.c_float if kind == "fp32" else ctypes.c_double)(arg)
    return ctypes.c_int64(int(arg))


utils = Utils()


class Driver(GPUDriver):
    """The driver of an H100 whose streams and devices are none."""

    def __init__(self):
        self.utils, self.launcher_cls = utils, Launcher
        self.get_device_capability, self.get_current_stream = lambda device=0: (9, 0), lambda device=0: 0
        self.get_current_device, self.set_current_device = lambda: 0, lambda device: None

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, kind):
        return kind

    def get_benchmarker(self):
        return None


def install():
    """Make this the driver of Triton's kernels, in a process without its interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set, so that Triton compiles nothing; unset it before importing Triton")
    backends["nvidia"] = Backend(compiler=PtxBackend, driver=backends["nvidia"].driver)
    triton.runtime.driver.set_active(Driver())
