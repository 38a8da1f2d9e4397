"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MISSING = "not installed"


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on; no names or paths of the machine."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    described = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "numba", "pytorch-lightning", "torch-geometric", "pyg-lib", "torch-sparse"):
        try:
            described[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:
            described[package.replace("-", "_")] = MISSING
    return described
