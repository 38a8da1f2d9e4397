"""Compiles the CPU twin and Ascend C kernels with g++ into shared libraries, cached by the content of their sources."""

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
    """The compiler is missing or refused a source."""


@dataclass(frozen=True)
class Built:
    """One shared library with the kernels of one source."""

    library: Path  # path of the shared library
    kernels: dict[str, tuple[str, ...]]  # kernel name -> names of its parameters, in order


@lru_cache(maxsize=4)
def compiler(name: str | None = None) -> tuple[str, str]:
    """Path and version of the C++ compiler (``CXX``, else g++)."""
    wanted = name or os.environ.get("CXX") or "g++"
    path = shutil.which(wanted)
    if path is None:
        raise BuildError(
            f"the Ascend kernels' tiling and twin are compiled with {wanted!r}, which is not installed: install g++ 10 "
            "or newer (Debian, Ubuntu: apt install g++) or name another compiler in the environment variable CXX"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return path, version


def kernels_in(source: Path) -> dict[str, tuple[str, ...]]:
    """The kernels a source defines: name -> parameter names."""
    found = {}
    for name, parameters in _KERNEL.findall(source.read_text()):
        found[name] = tuple(p.split()[-1].lstrip("*&") for p in parameters.split(",") if p.strip())
    return found


def build(sources: Sequence[Path] | None = None, sanitize: bool = False) -> tuple[Path, list[Built]]:
    """Build the twin's runtime and one library for every kernel source, by default all in ``csrc``."""
    # With sanitize, the process that loads the result needs sanitizer_environment().
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
        _say(f"building the Ascend twin with {Path(path).name} into {folder.parent}")
        halves = (parts[0::2], parts[1::2])  # two files at once: the headers cost more than the code
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = list(pool.map(lambda h: _object(path, flags, h, Path(scratch) / f"{h[0].stem}.o"), halves))
            _link(path, flags, [*map(str, objects), f"-Wl,-soname,{name}"], folder / name, TWIN)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = kept_folder("twin", runtime_key, lambda folder: make_runtime(pool, folder), f"runtime, {version}")
        runtime = made / name

        def library(item: tuple[Path, dict[str, tuple[str, ...]]]) -> Path:
            source, kernels = item
            file = f"{source.stem}.so"

            def make(folder: Path) -> None:
                _say(f"building the Ascend twin's kernels in {source.name} with {Path(path).name}")
                _kernel(path, flags, source, kernels, runtime, folder / file)

            # The library names the runtime's folder.
            key = digest([runtime_key, str(runtime)], _needed(source))
            return kept_folder("twin", key, make, f"{source.name}, {version}") / file

        libraries = list(pool.map(library, wanted))
    return runtime, [Built(library, kernels) for library, (_, kernels) in zip(libraries, wanted, strict=True)]


def build_tiling() -> Path:
    """Build the host's tiling (``csrc/host_*.cpp``), which needs nothing of the twin, and return its library."""
    path, version = compiler()
    flags = ["-std=c++17", "-fPIC", "-O2", "-Wall", "-Wextra"]
    sources = sorted(CSRC.glob("host_*.cpp"))
    name = "libtiling.so"

    def make(folder: Path) -> None:
        _say(f"building the Ascend kernels' tiling with {Path(path).name} into {folder.parent}")
        _link(path, flags, list(map(str, sources)), folder / name, CSRC)

    key = digest([version, *flags], [*sources, *sorted(CSRC.glob("*tiling.h"))])
    return kept_folder("twin", key, make, f"tiling, {version}") / name


def sanitizer_environment() -> dict[str, str]:
    """Environment in which a Python process can load libraries that were built with ``sanitize=True``."""
    path, _ = compiler()
    # libstdc++ too: the sanitizer looks up the real __cxa_throw when it starts, before Python has loaded it
    asks = [[path, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    found = [subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() for ask in asks]
    return {
        "LD_PRELOAD": " ".join(found),
        # Python itself leaks by design; the twin's coroutines switch stacks, which this check cannot follow
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _flags(sanitize: bool) -> list[str]:
    # -fno-gnu-unique and hidden symbols keep the classes of two kernels apart even if they share a name
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
    """Return 32 hexadecimal digits that change with the words and with names and content of the files."""
    hasher = hashlib.sha256()
    for word in words:
        hasher.update(word.encode() + b"\0")
    for file in files:
        hasher.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return hasher.hexdigest()[:32]


def _needed(source: Path) -> list[Path]:
    """The source and every file it includes from its own folder, however deep."""
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
    # a sanitizer preloaded into this process is not meant for the compiler
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{Path(command[0]).name} could not compile {what}:\n" + "\n".join(lines[:60]))


def _object(path: str, flags: list[str], sources: list[Path], target: Path) -> Path:
    whole = target.with_suffix(".cpp")
    whole.write_text("".join(f'#include "{s}"\n' for s in sources))
    _run([path, *flags, "-c", str(whole), "-o", str(target)], sources[0].parent)
    return target


def _link(path: str, flags: list[str], inputs: list[str], target: Path, what: Path) -> None:
    _run([path, *flags, "-shared", *inputs, "-o", str(target)], what)


def _kernel(path: str, flags: list[str], source: Path, kernels: Iterable[str], runtime: Path, target: Path) -> None:
    lines = [f'#include "{source.resolve()}"', '#include "twin/launch.h"', *(f"TWIN_REGISTER({k})" for k in kernels)]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wrapper = Path(scratch) / f"{target.stem}.cpp"
        wrapper.write_text("\n".join(lines) + "\n")
        inputs = [str(wrapper), str(runtime), f"-Wl,-rpath,{runtime.parent}"]
        _link(path, [*flags, f"-I{source.resolve().parent}"], inputs, target, source)
