"""Who prepares mini-batches when: one protocol, and a small class for each schedule.

``threads`` prepares ahead in threads, or in turn without any. ``lookahead`` samples far ahead of the mini-batch whose
features are read from disk. A system adds its own: a stream of the GPU (``persistent``), CPU and GPU by a plan
(``collective``), the stages of HyScale-GNN (``hyscale``).
"""

from lightning_gnn.loading.prefetch.protocol import Prefetcher
from lightning_gnn.loading.prefetch.threads import ThreadPrefetcher

__all__ = ["Prefetcher", "ThreadPrefetcher"]
