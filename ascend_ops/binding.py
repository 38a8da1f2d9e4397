"""Builds the kernels and their torch binding for an NPU on first use, and loads them.

Requires CANN (toolkit and environment), torch_npu, CMake, a C++ compiler and an Atlas A2 or A3 chip (dav-c220).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from lightning_gnn.runtime.store import kept_folder

from .build import CSRC, ROOT, digest

HOST = ROOT / "host"
LIBRARY = "liblightning_gnn_ascend.so"
CHIPS = re.compile(r"Ascend910B\d|Ascend910_93\d\d")
"""Chips of the architecture dav-c220, by CANN's names; ``Ascend910B`` without a digit is the first generation."""

_lock = threading.Lock()
_loaded: Path | None = None


class BindingError(RuntimeError):
    """The binding cannot be built; the message names the missing parts or ends with the compiler's last lines."""


def soc_version() -> str:
    """Return CANN's name of the chip: ``$SOC_VERSION`` or that of the current NPU; empty without an NPU."""
    given = os.environ.get("SOC_VERSION", "")
    if given or not hasattr(torch, "npu"):
        return given
    try:
        return str(torch.npu.get_device_name()) if torch.npu.device_count() else ""
    except Exception:  # report a broken driver as a missing chip
        return ""


def missing() -> list[str]:
    """Return the missing build requirements with their remedies, without importing anything or starting a process."""
    problems = []
    if importlib.util.find_spec("torch_npu") is None:
        release = torch.__version__.split("+")[0]
        problems.append(f"torch_npu (pip install 'lightning-gnn[npu]', in the release for torch {release})")
    # CMake reports missing parts of an installed toolkit, such as its compiler.
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if not home or not Path(home).is_dir():
        state = f"ASCEND_HOME_PATH={home!r} is not a folder" if home else "ASCEND_HOME_PATH is not set"
        problems.append(
            f"CANN ({state}: install the CANN toolkit from https://www.hiascend.com/software/cann and source its "
            "set_env.sh)"
        )
    # Check the host tools.
    if shutil.which("cmake") is None:
        problems.append("cmake 3.18 or newer (pip install cmake)")
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        problems.append("a C++ compiler (apt install g++, or name one in CXX)")
    # The kernels support only the chips in CHIPS.
    chip = soc_version()
    if not CHIPS.match(chip):
        found = f"this is {chip}" if chip else "no NPU was found; to build without one, set SOC_VERSION=Ascend910B3"
        problems.append(f"an Atlas A2 or A3 chip ({found})")
    return problems


def build() -> Path:
    """Build the library, or return the cached one of the same sources, chip and releases."""
    problems = missing()
    chip = soc_version()
    # The cache key needs torch_npu, CANN and the chip; a cached library does not need the compilers.
    has_key = importlib.util.find_spec("torch_npu") is not None and os.environ.get("ASCEND_HOME_PATH") and chip
    if not has_key:
        raise BindingError(f"the NPU kernels cannot be built without {'; '.join(problems)}")

    def make(folder: Path) -> None:
        if problems:
            raise BindingError(f"the NPU kernels cannot be built without {'; '.join(problems)}")
        details = f"{chip} into {folder.parent}; this takes minutes, and happens only once"
        print(f"building the Ascend C kernels for {details}", file=sys.stderr, flush=True)
        _compile(chip, folder / LIBRARY)

    return kept_folder("npu", _digest(chip), make, f"kernels for {chip}") / LIBRARY


def load() -> Path:
    """Build the library if needed and register the ``npu`` operators of ``lightning_gnn.ops``, once per process."""
    global _loaded
    with _lock:
        if _loaded is None:
            library = build()
            try:
                torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            except Exception as error:
                raise BindingError(f"torch cannot load {library}: {error}") from error
            _loaded = library
        return _loaded


def _find_torch_npu() -> Path:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise BindingError("torch_npu is not installed")
    return Path(spec.origin).parent


def _digest(chip: str) -> str:
    """Return a digest of all inputs of the build, including the releases of torch, torch_npu and CANN."""
    home = Path(os.environ["ASCEND_HOME_PATH"]).resolve()
    stamps = [*sorted(home.glob("version.*")), *sorted(home.glob("*.info")), _find_torch_npu() / "version.py"]
    words = [chip, torch.__version__, str(home), str(_find_torch_npu()), os.environ.get("CXX", "")]
    files = [*stamps, *sorted(CSRC.glob("*")), *sorted(HOST.glob("*"))]
    return digest(words, (file for file in files if file.is_file()))


def _compile(chip: str, library: Path) -> None:
    descriptor, name = tempfile.mkstemp("-build.log", "lightning_gnn-npu-")
    os.close(descriptor)
    log = Path(name)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        configure = [
            *("cmake", "-S", str(HOST), "-B", scratch),
            f"-DSOC_VERSION={chip}",
            f"-DTORCH_NPU_PATH={_find_torch_npu()}",
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DASCEND_PYTHON_EXECUTABLE={sys.executable}",
        ]
        if compiler := os.environ.get("CXX"):
            configure.append(f"-DCMAKE_CXX_COMPILER={compiler}")
        _run(configure, log)
        _run(["cmake", "--build", scratch, "--parallel", str(min(os.cpu_count() or 1, 8))], log)
        os.replace(Path(scratch) / LIBRARY, library)
    log.unlink()


def _run(command: list[str], log: Path) -> None:
    with log.open("a") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise BindingError(f"{' '.join(command[:2])} failed with status {status} (full output in {log}):\n{end}")
