"""Results of a run: metrics.json, a table in the terminal, report.html and report.png."""

from lightning_gnn.report.metrics import collect_metrics, print_table, reporting, write_metrics

__all__ = ["collect_metrics", "print_table", "reporting", "write_metrics"]
