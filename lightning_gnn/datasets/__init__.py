"""Data sets: published and synthetic graphs, graphs in folders, and tables that become graphs.

Reading order: ``datasets/registry.py`` (published data sets), ``datasets/folder.py`` and ``datasets/hetero_folder.py``
(graphs on disk) with ``datasets/topology_files.py``, ``datasets/relational.py`` (a database as a graph),
``datasets/convert.py`` (tables in files that are larger than memory) by way of ``datasets/table_files.py`` and
``datasets/text_files.py``, ``datasets/synthetic.py``.
"""

from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import load_hetero_folder, save_hetero_folder
from lightning_gnn.datasets.relational import from_tables

__all__ = [
    "convert_tables",
    "from_tables",
    "load_folder",
    "load_hetero_folder",
    "save_hetero_folder",
]
