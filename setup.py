"""Names the packages of the wheel; all other metadata is in pyproject.toml.

``packages.find`` of pyproject.toml cannot add the packages that ``package-dir`` moves.
"""

from setuptools import find_packages, setup

MOVED = ("ascend_ops", "conf", "triton_kernels")
"""Packages at the top of the repository that the wheel installs below ``lightning_gnn``."""

setup(packages=[*find_packages(include=["lightning_gnn*"]), *(f"lightning_gnn.{name}" for name in MOVED)])
