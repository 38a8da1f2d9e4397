"""Prefetchers: the protocol, and one class per schedule."""

from lightning_gnn.loading.prefetch.protocol import Prefetcher
from lightning_gnn.loading.prefetch.threads import ThreadPrefetcher

__all__ = ["Prefetcher", "ThreadPrefetcher"]
