"""Distributed training components shared by all systems.

Reading order: ``distributed/monitored_ranks.py`` (connects the ranks, and aborts all of them if one dies, using
``heartbeat.py``), ``weighted_ddp.py`` (Lightning's DDP for ranks with unequal shares of a mini-batch), ``step_sync.py``
(per-step metadata), ``gradient_reducer.py``, ``metric_sync.py`` and ``buffer_sync.py`` (its parts),
``mixed_device_group.py`` (the collectives). Also: ``loss_weights.py``, ``notebook_launcher.py``.
"""

from lightning_gnn.distributed.monitored_ddp import MonitoredDDPStrategy

__all__ = ["MonitoredDDPStrategy"]
