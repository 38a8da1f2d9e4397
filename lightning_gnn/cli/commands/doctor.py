"""``lgnn doctor``: report which optional hardware and software is present, and how to get the rest."""

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_gnn.accelerators import NPUAccelerator
from lightning_gnn.ascend_ops import binding
from lightning_gnn.cli.commands import kernel_check
from lightning_gnn.cli.versions import version_of
from lightning_gnn.systems import SYSTEMS, System, describe, installed, load_system

State = Literal["present", "missing", "broken"]
_MARKS = {"present": ("yes", "green"), "missing": ("no", "yellow"), "broken": ("broken", "red")}


@dataclass(frozen=True)
class Finding:
    """State of one device, package or tool."""

    name: str
    state: State  # "present" means that it was found, and loads where that can be tried; not that it was used
    detail: str  # version and location, or the problem
    needed_for: str  # the feature that does not work without it
    advice: str = ""  # how to get it; empty if present


def examine() -> list[Finding]:
    """Check all devices, packages and tools without importing a module that could fail on import."""
    triton_chooses = os.environ.get("CC") or ("gcc" if shutil.which("gcc") or not shutil.which("clang") else "clang")
    return [
        Finding("torch", "present", torch.__version__, "everything"),
        _package("pytorch-lightning", "pytorch-lightning", "everything", "pip install pytorch-lightning"),
        _package("PyG", "torch-geometric", "everything", "pip install torch_geometric"),
        _package("numba", "numba", "everything", "pip install numba"),
        _cuda(),
        _package(
            "Triton",
            "triton",
            "the GPU kernels",
            "only for a GPU: pip install 'lightning-gnn[gpu]' (Linux only); CUDA builds of torch bring it along",
        ),
        _pyg_lib(),
        _cann(),
        _torch_npu(),
        _npu(),
        _kernels(),
        _compiler(triton_chooses, "the GPU kernels", "apt install gcc"),
        _python_h(),
        _compiler("g++", "the CPU twin of the Ascend C kernels; the NPU binding", "apt install g++"),
        _compiler("cmake", "the NPU binding", "pip install cmake"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings as a table; return 1 if a required package is missing."""
    parser = argparse.ArgumentParser("lgnn doctor", description="Show what is present and missing on this machine.")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compile the Ascend C kernels, compare them with torch on the NPU, or simulated without an NPU, and print "
        "a report for an issue",
    )
    if parser.parse_args(arguments).kernels:
        return _check_kernels()
    findings = examine()
    _print(findings)
    return int(any(finding.state != "present" for finding in findings if finding.needed_for == "everything"))


def _check_kernels() -> int:
    """Compare the kernels with torch's operators; return 1 if one is wrong, or if they cannot run."""
    try:
        device, backend = kernel_check.select_device()
        checks = kernel_check.check_kernels(device, backend)
    except binding.BindingError as error:
        print(error)
        return 1
    print("\n".join(kernel_check.report(device, checks)))
    return int(not all(check.is_right for check in checks))


def _print(findings: Sequence[Finding]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
        style="bold",
        highlight=False,
    )
    table = Table("", "", "found", "needed for")
    for finding in findings:
        mark, style = _MARKS[finding.state]
        table.add_row(finding.name, f"[{style}]{mark}[/]", finding.detail, finding.needed_for)
    console.print(table)
    console.print(_systems())
    console.print(_layers())
    for finding in findings:
        if finding.advice:
            console.print(f"{finding.name}: {finding.advice}", highlight=False, markup=False)


def _systems() -> Table:
    """Return a table of the systems, also installed ones, with the devices that they run on and those present here."""
    table = Table("system", "package", "runs on", "on this machine", "see")
    for system in SYSTEMS:
        _add_system(table, system, f"lightning_gnn.{system.package}", f"docs/{system.page}")
    for entry in installed():
        try:
            system = load_system(entry)
        except ImportError as error:
            table.add_row(
                entry.name, describe(entry), "", f"[red]broken[/]: {escape(str(error.__cause__ or error))}", ""
            )
        else:
            _add_system(table, system, describe(entry), system.page)
    return table


def _add_system(table: Table, system: System, package: str, page: str) -> None:
    present = [device for device in system.devices if _is_available(device)]
    here = ", ".join(present) if present else f"[yellow]no[/]: needs {' or '.join(system.devices)}"
    table.add_row(system.title, package, ", ".join(system.devices), here, page)


def _is_available(device: str) -> bool:
    """Return whether torch finds a device of a type."""
    if device == "npu":
        return NPUAccelerator.is_available()
    try:
        return bool(torch.get_device_module(device).is_available())
    except RuntimeError:  # a type that torch does not have
        return False


def _layers() -> Table:
    """Return a table of the layers that run as one fused operator on mini-batches."""
    from lightning_gnn.nn.conv.backends import IMPLS
    from lightning_gnn.nn.conv.fused import FusedSpec
    from lightning_gnn.nn.conv.table import OURS
    from lightning_gnn.nn.hetero.attention import TransformerConv
    from lightning_gnn.nn.hetero.layers import RelationalConv

    table = Table("layer or model of lightning_gnn.nn", "in one operator on mini-batches", "by, on")

    def add(name: str, fused: FusedSpec) -> None:
        backends = (f"{impl.name}, {' or '.join(impl.devices)}" for impl in IMPLS[fused.operator])
        table.add_row(name, fused.what, "; ".join(backends))

    for layer in OURS:
        add(layer.__name__, layer.fused)
    add("HeteroGraphSAGE, RGCN", RelationalConv.fused)
    add("RGAT, HGT", TransformerConv.fused)
    table.add_row("all others", "nothing: PyG's own operators run", "")
    return table


def _package(name: str, package: str, needed_for: str, advice: str) -> Finding:
    found = version_of(package)
    if found is None:
        return Finding(name, "missing", "not installed", needed_for, advice)
    return Finding(name, "present", found, needed_for)


def _cuda() -> Finding:
    needed = "trainer=gpu, datamodule=persistent on the GPU"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("CUDA", "present", f"CUDA {torch.version.cuda}: {', '.join(names)}", needed)
    if torch.version.cuda is None:
        detail = "torch was built without CUDA"
        advice = "on a machine with an NVIDIA GPU, install a CUDA build of torch, see pytorch.org"
    else:
        detail = f"torch was built with CUDA {torch.version.cuda}, but finds no GPU"
        advice = "see whether nvidia-smi lists the GPU; its driver may be missing or too old"
    return Finding("CUDA", "missing", detail, needed, advice)


def _pyg_lib() -> Finding:
    needed = "nothing here: PyG's own samplers, to compare with"
    advice = "optional; wheels are on PyG's own index"
    finding = _package("pyg-lib", "pyg-lib", needed, advice)
    if finding.state != "present":
        return finding
    if (reason := _try_import("pyg_lib")) is None:
        return finding
    return Finding("pyg-lib", "broken", reason, needed, "install the wheel that was built for this version of torch")


def _cann() -> Finding:
    needed = "accelerator=npu"
    advice = "install Huawei's CANN toolkit 8 or newer, then `source .../ascend-toolkit/set_env.sh`"
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return Finding("CANN", "missing", "ASCEND_HOME_PATH is not set", needed, advice)
    if not Path(home).is_dir():
        return Finding("CANN", "broken", f"ASCEND_HOME_PATH={home} is not a folder", needed, advice)
    info = next((path for path in sorted(Path(home).glob("*-linux/ascend_toolkit_install.info"))), None)
    match = re.search(r"^version=(.+)$", info.read_text(), re.MULTILINE) if info else None
    return Finding("CANN", "present", f"{match[1] if match else 'version unknown'} at {home}", needed)


def _torch_npu() -> Finding:
    needed = "accelerator=npu"
    if importlib.util.find_spec("torch_npu") is None:
        advice = "after CANN: pip install torch-npu, in the version of torch"
        return Finding("torch_npu", "missing", "not installed", needed, advice)
    if (reason := _try_import("torch_npu")) is None:
        return Finding("torch_npu", "present", version_of("torch-npu") or "version unknown", needed)
    return Finding("torch_npu", "broken", reason, needed, "it needs the matching CANN version, with set_env.sh sourced")


def _try_import(module: str) -> str | None:
    """Import a module in a subprocess, since it may crash; return the error or None."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=120)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["the import failed"])[-1]


def _npu() -> Finding:
    needed = "accelerator=npu"
    devices = sorted(Path("/dev").glob("davinci[0-9]*"))
    if devices:
        return Finding("Ascend NPU", "present", f"{len(devices)} devices", needed)
    advice = "on a machine with an NPU, install Huawei's driver and firmware; in a container, pass the devices through"
    return Finding("Ascend NPU", "missing", "no /dev/davinci*", needed, advice)


def _kernels() -> Finding:
    needed = "accelerator=npu at full speed"
    if not (problems := binding.missing()):
        detail = "can be built; `lgnn doctor --kernels` builds them and compares them with torch"
        return Finding("Ascend C kernels", "present", detail, needed)
    names = [problem.split(" (")[0].replace(" or newer", "") for problem in problems]
    return Finding("Ascend C kernels", "missing", f"need {', '.join(names)}", needed, f"get {'; '.join(problems)}")


def _python_h() -> Finding:
    path = Path(sysconfig.get_paths()["include"], "Python.h")
    if path.is_file():
        return Finding("Python.h", "present", str(path), "the GPU kernels")
    return Finding("Python.h", "missing", f"not at {path}", "the GPU kernels", "apt install python3-dev")


def _compiler(name: str, needed: str, advice: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, "missing", "not on the PATH", needed, advice)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    first = (done.stdout.splitlines() or ["version unknown"])[0]
    return Finding(name, "present", first, needed)
