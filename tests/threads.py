"""Threads that a test has left."""

import threading

from lightning_gnn.runtime.thread_pipeline import join_abandoned


def list_threads(prefix):
    """Return the names of threads that begin with a prefix, after those of abandoned epochs have ended."""
    join_abandoned()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
