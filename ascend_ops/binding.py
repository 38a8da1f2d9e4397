"""Builds the kernels and their binding for a real NPU on first use, and loads them into torch.

Needs CANN (toolkit and environment), torch_npu, cmake, a C++ compiler and an Atlas A2 or A3 chip (dav-c220).
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
    """The binding cannot be built; the message says what is missing, or holds the end of the compiler's output."""


def soc_version() -> str:
    """Return CANN's name of the chip: ``$SOC_VERSION``, else that of the current NPU; empty where there is none."""
    given = os.environ.get("SOC_VERSION", "")
    if given or not hasattr(torch, "npu"):
        return given
    try:
        return str(torch.npu.get_device_name()) if torch.npu.device_count() else ""
    except Exception:  # a broken driver is reported as a missing chip
        return ""


def missing() -> list[str]:
    """Return what the build lacks, each with how to get it; empty where it can start. Imports and starts nothing."""
    problems = []
    if importlib.util.find_spec("torch_npu") is None:
        release = torch.__version__.split("+")[0]
        problems.append(f"torch_npu (pip install 'lightning-gnn[npu]', in the release for torch {release})")
    # What an installed toolkit lacks, such as the compiler, CMake says in its output.
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if not home or not Path(home).is_dir():
        state = f"ASCEND_HOME_PATH={home!r} is no folder" if home else "ASCEND_HOME_PATH is not set"
        problems.append(
            f"CANN ({state}: install the CANN toolkit from https://www.hiascend.com/software/cann and source its "
            "set_env.sh)"
        )
    # The build needs host tools.
    if shutil.which("cmake") is None:
        problems.append("cmake 3.18 or newer (pip install cmake)")
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        problems.append("a C++ compiler (apt install g++, or name one in CXX)")
    # The kernels are written for certain chips only.
    chip = soc_version()
    if not CHIPS.match(chip):
        found = f"this is {chip}" if chip else "no NPU was found; SOC_VERSION=Ascend910B3 names one to build for"
        problems.append(f"an Atlas A2 or A3 chip ({found})")
    return problems


def build() -> Path:
    """Build the library, or return the one that was built from the same sources for the same chip and releases."""
    problems = missing()
    chip = soc_version()
    known = importlib.util.find_spec("torch_npu") is not None and os.environ.get("ASCEND_HOME_PATH") and chip
    if not known:
        raise BindingError(f"the NPU kernels cannot be built without {'; '.join(problems)}")

    def make(folder: Path) -> None:  # what is kept needs no compiler any more
        if problems:
            raise BindingError(f"the NPU kernels cannot be built without {'; '.join(problems)}")
        where = f"{chip}, once, into {folder.parent}; this takes minutes"
        print(f"building the Ascend C kernels for {where}", file=sys.stderr, flush=True)
        _compile(chip, folder / LIBRARY)

    return kept_folder("npu", _digest(chip), make, f"kernels for {chip}") / LIBRARY


def load() -> Path:
    """Build the library where needed and register its operators, of ``lightning_gnn.ops``, for ``npu``, once."""
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


def _torch_npu() -> Path:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise BindingError("torch_npu is not installed")
    return Path(spec.origin).parent


def _digest(chip: str) -> str:
    """Identify everything that the library is made of, the releases of torch, torch_npu and CANN included."""
    home = Path(os.environ["ASCEND_HOME_PATH"]).resolve()
    stamps = [*sorted(home.glob("version.*")), *sorted(home.glob("*.info")), _torch_npu() / "version.py"]
    words = [chip, torch.__version__, str(home), str(_torch_npu()), os.environ.get("CXX", "")]
    files = [*stamps, *sorted(CSRC.glob("*")), *sorted(HOST.glob("*"))]
    return digest(words, (file for file in files if file.is_file()))


def _compile(chip: str, library: Path) -> None:
    number, name = tempfile.mkstemp("-build.log", "lightning_gnn-npu-")
    os.close(number)
    log = Path(name)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        configure = [
            *("cmake", "-S", str(HOST), "-B", scratch),
            f"-DSOC_VERSION={chip}",
            f"-DTORCH_NPU_PATH={_torch_npu()}",
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
        raise BindingError(f"{' '.join(command[:2])} failed with status {status} (all of it in {log}):\n{end}")
