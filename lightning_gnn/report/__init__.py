"""What a run leaves behind: metrics.json, a table on the screen, report.html and report.png.

The pictures, which need matplotlib, are in :mod:`~lightning_gnn.report.charts`; the comparison of a sweep, which needs
Hydra, is in :mod:`~lightning_gnn.report.comparison`.
"""

from lightning_gnn.report.metrics import collect_metrics, print_table, reporting, write_metrics

__all__ = ["collect_metrics", "print_table", "reporting", "write_metrics"]
