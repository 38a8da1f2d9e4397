"""Process group for tests whose ranks need no Trainer."""

from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tests.patience import PATIENCE


@contextmanager
def joined():
    """Create a process group of the ranks that tests.full_graph.launch has started."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()
