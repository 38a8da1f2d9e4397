"""Forecast of CPU training from its first mini-batches and steps, with its bottleneck and faster settings.

Reading order: ``limits.py`` (peak rates of the machine), ``preparation.py`` (cost of preparing a mini-batch),
``steps.py`` (cost of a training step by parts), ``overlap.py`` (both in parallel on the same cores), ``forecast.py``
(epoch time, bottleneck, other settings), ``report.py`` (tables), ``advice.py`` (largest part of a completed run).
"""

from lightning_gnn.planning.forecast import CPUForecast, measure_run
from lightning_gnn.planning.limits import MachineLimits, machine_limits

__all__ = ["CPUForecast", "MachineLimits", "machine_limits", "measure_run"]
