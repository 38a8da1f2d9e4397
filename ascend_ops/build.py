"""Compiles the CPU twin and the Ascend C kernels with g++ into shared libraries, cached by source content."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lightning_gnn.runtime.store import kept_folder

ROOT = Path(__file__).resolve().parent
TWIN = ROOT / "twin"
CSRC = ROOT / "csrc"

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+__aicore__\s+void\s+(\w+)\s*\(([^)]*)\)')
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """The compiler is missing or could not compile a source."""


@dataclass(frozen=True)
class Built:
    """Shared library with the kernels of one source."""

    library: Path
    kernels: dict[str, tuple[str, ...]]  # kernel name -> parameter names, in order


@lru_cache(maxsize=4)
def compiler() -> tuple[str, str]:
    """Return path and version of the C++ compiler (``CXX`` or g++)."""
    wanted = os.environ.get("CXX") or "g++"
    path = shutil.which(wanted)
    if path is None:
        raise BuildError(
            f"the Ascend kernels' tiling and twin are compiled with {wanted!r}, which is not installed: install g++ 10 "
            "or newer (Debian, Ubuntu: apt install g++) or name another compiler in the environment variable CXX"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return path, version


def kernels_in(source: Path) -> dict[str, tuple[str, ...]]:
    """Return the kernels that a source defines: name -> parameter names."""
    found = {}
    for name, parameters in _KERNEL.findall(source.read_text()):
        found[name] = tuple(p.split()[-1].lstrip("*&") for p in parameters.split(",") if p.strip())
    return found


def build(sources: Sequence[Path] | None = None, sanitize: bool = False) -> tuple[Path, list[Built]]:
    """Build the twin's runtime and one library per kernel source, by default for all in ``csrc``."""
    # A process that loads a build with sanitize=True needs the environment in tests/ascend_ops/test_twin.py.
    if sources is None:
        sources = [s for s in sorted(CSRC.glob("*.cpp")) if kernels_in(s)]
    path, version = compiler()
    flags = _flags(sanitize)
    headers = sorted((TWIN / "include").rglob("*.h"))
    base = digest([version, *flags], headers)
    parts = sorted((TWIN / "src").glob("*.cpp"))
    runtime_key = digest([base], [*parts, *(TWIN / "src").glob("*.h")])
    wanted = [(source, kernels_in(source)) for source in sources]
    for source, kernels in wanted:
        if not kernels:
            raise BuildError(f'{source} defines no kernel (extern "C" __global__ __aicore__ void name(...))')
    name = f"libtwin-{runtime_key[:16]}.so"

    def make_runtime(pool: ThreadPoolExecutor, folder: Path) -> None:
        _log(f"building the Ascend twin with {Path(path).name} into {folder.parent}")
        units = (parts[0::2], parts[1::2])  # two translation units: parsing the headers dominates compile time
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            outputs = [Path(scratch) / f"{unit[0].stem}.o" for unit in units]
            objects = list(pool.map(lambda unit, output: _compile_object(path, flags, unit, output), units, outputs))
            _link(path, flags, [*map(str, objects), f"-Wl,-soname,{name}"], folder / name, TWIN)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = kept_folder("twin", runtime_key, lambda folder: make_runtime(pool, folder), f"runtime, {version}")
        runtime = made / name

        def library(item: tuple[Path, dict[str, tuple[str, ...]]]) -> Path:
            source, kernels = item
            file = f"{source.stem}.so"

            def make(folder: Path) -> None:
                _log(f"building the Ascend twin's kernels in {source.name} with {Path(path).name}")
                _compile(path, flags, source, kernels, runtime, folder / file)

            # The runtime's path is part of the key, because the library's rpath contains it.
            key = digest([runtime_key, str(runtime)], _find_includes(source))
            return kept_folder("twin", key, make, f"{source.name}, {version}") / file

        libraries = list(pool.map(library, wanted))
    return runtime, [Built(library, kernels) for library, (_, kernels) in zip(libraries, wanted, strict=True)]


def build_tiling() -> Path:
    """Build the library of the host's tiling (``csrc/host_*.cpp``), which does not need the twin; return its path."""
    path, version = compiler()
    flags = ["-std=c++17", "-fPIC", "-O2", "-Wall", "-Wextra"]
    sources = sorted(CSRC.glob("host_*.cpp"))
    name = "libtiling.so"

    def make(folder: Path) -> None:
        _log(f"building the Ascend kernels' tiling with {Path(path).name} into {folder.parent}")
        _link(path, flags, list(map(str, sources)), folder / name, CSRC)

    key = digest([version, *flags], [*sources, *sorted(CSRC.glob("*tiling.h"))])
    return kept_folder("twin", key, make, f"tiling, {version}") / name


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _flags(sanitize: bool) -> list[str]:
    # -fno-gnu-unique and hidden symbols separate classes of the same name in different kernels.
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-g1", "-Wall", "-Wno-unknown-pragmas"]
    flags += [f"-I{TWIN / 'include'}"]
    if platform.machine() == "x86_64" and "f16c" in _cpu_flags():
        flags.append("-mf16c")
    if sanitize:
        return [*flags, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    return [*flags, "-O2", "-Wl,-z,defs"]


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((x for x in text.splitlines() if x.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def digest(words: Iterable[str], files: Iterable[Path]) -> str:
    """Return a digest of words and of the files' names and contents, in 32 hexadecimal digits."""
    hasher = hashlib.sha256()
    for word in words:
        hasher.update(word.encode() + b"\0")
    for file in files:
        hasher.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return hasher.hexdigest()[:32]


def _find_includes(source: Path) -> list[Path]:
    """Return the source and all local files that it includes, directly or indirectly."""
    seen: dict[Path, None] = {}
    todo = [source]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen[file] = None
        for name in _INCLUDE.findall(file.read_text()):
            near = (file.parent / name).resolve()
            if near.exists():
                todo.append(near)
    return list(seen)


def _run(command: list[str], what: Path) -> None:
    # Do not preload this process's sanitizer into the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise BuildError(f"{Path(command[0]).name} could not compile {what}:\n" + "\n".join(lines[:60]))


def _compile_object(path: str, flags: list[str], sources: list[Path], target: Path) -> Path:
    unit = target.with_suffix(".cpp")
    unit.write_text("".join(f'#include "{s}"\n' for s in sources))
    _run([path, *flags, "-c", str(unit), "-o", str(target)], sources[0].parent)
    return target


def _link(path: str, flags: list[str], inputs: list[str], target: Path, what: Path) -> None:
    _run([path, *flags, "-shared", *inputs, "-o", str(target)], what)


def _compile(path: str, flags: list[str], source: Path, kernels: Iterable[str], runtime: Path, target: Path) -> None:
    lines = [f'#include "{source.resolve()}"', '#include "twin/launch.h"', *(f"TWIN_REGISTER({k})" for k in kernels)]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wrapper = Path(scratch) / f"{target.stem}.cpp"
        wrapper.write_text("\n".join(lines) + "\n")
        inputs = [str(wrapper), str(runtime), f"-Wl,-rpath,{runtime.parent}"]
        _link(path, [*flags, f"-I{source.resolve().parent}"], inputs, target, source)
