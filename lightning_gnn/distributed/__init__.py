"""Several ranks that train one model, whatever the system.

Reading order: ``distributed/monitored_ranks.py`` (joins the ranks, and ends them all when one is lost, by
``heartbeat.py``), ``weighted_ddp.py`` (Lightning's DDP for ranks with unequal shares of a mini-batch), ``step_sync.py``
(what they exchange in a step), ``gradient_reducer.py``, ``metric_sync.py`` and ``buffer_sync.py`` (its parts),
``mixed_device_group.py`` (the collectives). Beside them: ``loss_weights.py``, ``notebook_launcher.py``.
"""
