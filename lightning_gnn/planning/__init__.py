"""What training on the CPU will take, by its own first mini-batches and steps, and what would shorten it.

Reading order: ``limits.py`` (what the machine reaches at the most), ``preparation.py`` (what a mini-batch costs),
``steps.py`` (what a step costs, part by part), ``overlap.py`` (both at once, on the same cores), ``forecast.py`` (an
epoch, its bottleneck, other settings), ``report.py`` (tables), ``advice.py`` (after a run: the largest part of it).
"""

from lightning_gnn.planning.forecast import CPUForecast, measure_run
from lightning_gnn.planning.limits import MachineLimits, machine_limits

__all__ = ["CPUForecast", "MachineLimits", "machine_limits", "measure_run"]
