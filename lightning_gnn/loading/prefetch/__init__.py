"""Mini-batches prepared ahead: one protocol, and a small class for each schedule."""

from lightning_gnn.loading.prefetch.protocol import Prefetcher
from lightning_gnn.loading.prefetch.threads import ThreadPrefetcher

__all__ = ["Prefetcher", "ThreadPrefetcher"]
