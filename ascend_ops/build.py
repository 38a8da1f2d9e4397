"""Compiles the CPU twin and Ascend C kernels with g++ into shared libraries, cached by the content of their sources."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TWIN = ROOT / "twin"
CSRC = ROOT / "csrc"

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+__aicore__\s+void\s+(\w+)\s*\(([^)]*)\)')
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """The compiler is missing or refused a source."""


@dataclass(frozen=True)
class Built:
    """One shared library with the kernels of one source.

    Args:
        library: Path of the shared library.
        kernels: Kernel name -> names of its parameters, in order.
    """

    library: Path
    kernels: dict[str, tuple[str, ...]]


def cache_folder() -> Path:
    """Where libraries are kept: ``LIGHTNING_GNN_CACHE``, else the user's cache folder."""
    given = os.environ.get("LIGHTNING_GNN_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-gnn"
    return base / "ascend_twin"


@lru_cache(maxsize=4)
def compiler(name: str | None = None) -> tuple[str, str]:
    """Path and version of the C++ compiler (``CXX``, else g++).

    Raises:
        BuildError: No such program.
    """
    wanted = name or os.environ.get("CXX") or "g++"
    path = shutil.which(wanted)
    if path is None:
        raise BuildError(
            f"the Ascend twin compiles kernels with {wanted!r}, which is not installed: install g++ 10 or newer "
            "(Debian, Ubuntu: apt install g++) or name another compiler in the environment variable CXX"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return path, version


def kernels_in(source: Path) -> dict[str, tuple[str, ...]]:
    """The kernels a source defines: name -> parameter names."""
    found = {}
    for name, parameters in _KERNEL.findall(source.read_text()):
        found[name] = tuple(p.split()[-1].lstrip("*&") for p in parameters.split(",") if p.strip())
    return found


def build(
    sources: Sequence[Path] | None = None, sanitize: bool = False, progress: Callable[[str], None] | None = None
) -> tuple[Path, list[Built]]:
    """Builds the twin's runtime and one library for every kernel source.

    Args:
        sources: Kernel sources; None takes every one in ``csrc`` that defines a kernel.
        sanitize: Build with the address and undefined-behaviour sanitizers. The process that loads the result must have
            the address sanitizer's library preloaded (see `sanitizer_environment`).
        progress: Called with a line when something has to be compiled; None prints it to stderr.

    Returns:
        The runtime's library and one `Built` for every source.

    Raises:
        BuildError: The compiler is missing or refused a source; the message holds its output.
    """
    if sources is None:
        sources = [s for s in sorted(CSRC.glob("*.cpp")) if kernels_in(s)]
    path, version = compiler()
    flags = _flags(sanitize)
    headers = sorted((TWIN / "include").rglob("*.h"))
    base = _digest([version, *flags], headers)
    parts = sorted((TWIN / "src").glob("*.cpp"))
    runtime_key = _digest([base], [*parts, *(TWIN / "src").glob("*.h")])
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    runtime = folder / f"libtwin-{runtime_key}.so"
    wanted = [(s, kernels_in(s), folder / f"{s.stem}-{_digest([runtime_key], _needed(s))}.so") for s in sources]
    for source, kernels, _ in wanted:
        if not kernels:
            raise BuildError(f'{source} defines no kernel (extern "C" __global__ __aicore__ void name(...))')
    missing = [item for item in wanted if not item[2].exists()]
    halves = (parts[0::2], parts[1::2])  # two files at once: the headers cost more than the code
    tasks = (len(halves) if not runtime.exists() else 0) + len(missing)
    if tasks:
        say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
        say(f"building the Ascend twin: {tasks} files with {Path(path).name} into {folder}")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not runtime.exists():
            objects = list(pool.map(lambda h: _object(path, flags, h, Path(scratch) / f"{h[0].stem}.o"), halves))
            _link(path, flags, [*map(str, objects), f"-Wl,-soname,{runtime.name}"], runtime, Path(scratch), TWIN)
        list(pool.map(lambda item: _kernel(path, flags, item[0], item[1], runtime, item[2], Path(scratch)), missing))
    return runtime, [Built(library, kernels) for _, kernels, library in wanted]


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


def _digest(words: Iterable[str], files: Iterable[Path]) -> str:
    hasher = hashlib.sha256()
    for word in words:
        hasher.update(word.encode() + b"\0")
    for file in files:
        hasher.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


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


def _link(
    path: str, flags: list[str], inputs: list[str], target: Path, scratch: Path, what: Path | None = None
) -> None:
    part = scratch / target.name
    _run([path, *flags, "-shared", *inputs, "-o", str(part)], what or target)
    os.replace(part, target)  # two processes may build at once: the last one wins with the same content


def _kernel(
    path: str, flags: list[str], source: Path, kernels: Iterable[str], runtime: Path, target: Path, scratch: Path
) -> None:
    wrapper = scratch / f"{target.stem}.cpp"
    lines = [f'#include "{source.resolve()}"', '#include "twin/launch.h"', *(f"TWIN_REGISTER({k})" for k in kernels)]
    wrapper.write_text("\n".join(lines) + "\n")
    inputs = [str(wrapper), str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    _link(path, [*flags, f"-I{source.resolve().parent}"], inputs, target, scratch, source)
