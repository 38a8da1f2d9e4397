"""What a run leaves behind: metrics.json, a table on the screen, report.html and report.png."""

from lightning_gnn.report.metrics import collect_metrics, print_table, reporting, write_metrics

__all__ = ["collect_metrics", "print_table", "reporting", "write_metrics"]
