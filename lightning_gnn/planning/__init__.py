"""What users ask before a run: how long it will take, which DataModule to use, and how to divide it.

*Forecast* (``lgnn plan`` on a CPU): ``limits.py`` (peak rates of the machine), ``preparation.py`` (cost of preparing a
mini-batch), ``steps.py`` (cost of a training step by parts), ``overlap.py`` (both in parallel on the same cores),
``forecast.py`` (epoch time, bottleneck, other settings), ``report.py`` (tables), ``advice.py`` (largest part of a
completed run). *Choice* (``datamodule=auto``): ``choice.py``. *Plan*: ``hyscale.py`` (hybrid training here, or on a
machine that ``machine.py`` reads), ``cluster.py`` and ``cluster_traffic.py`` (several machines).
"""

from lightning_gnn.planning.forecast import CPUForecast, measure_run
from lightning_gnn.planning.limits import MachineLimits, machine_limits

__all__ = ["CPUForecast", "MachineLimits", "machine_limits", "measure_run"]
