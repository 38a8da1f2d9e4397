"""Published and synthetic datasets, graph folders, and conversion of table files to graph folders."""

from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import load_hetero_folder, save_hetero_folder

__all__ = ["convert_tables", "load_folder", "load_hetero_folder", "save_hetero_folder"]
