"""Published and synthetic datasets, graph folders, and conversion of table files to graph folders."""

from typing import TYPE_CHECKING

from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import load_hetero_folder, save_hetero_folder
from lightning_gnn.runtime.moved_names import find_moved

__all__ = [
    "convert_tables",
    "load_folder",
    "load_hetero_folder",
    "save_hetero_folder",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute name
    __getattr__ = find_moved(__name__)
