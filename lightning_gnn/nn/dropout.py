"""Dropout that draws one number from torch's generator, and its mask from that: fast, and the same for any threads."""

from torch import Tensor, nn

from lightning_gnn.ops.dropout import dropout


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` whose mask on the CPU is a function of one key, so that it is drawn in vectors and threads.

    Each call draws a 64-bit key from torch's generator of the CPU, and number (i, c) of ``[n, ...]`` is kept or dropped
    by a hash of (key, i, c). So ``seed_everything``, activation checkpointing and resumed runs repeat masks, for any
    number of threads. Elsewhere (other devices, compiled or transformed functions, in place, modes of torch such as the
    one in which ``"ascend_hybrid"`` draws dropout) it is torch's own.

    Examples:
        >>> import torch
        >>> from lightning_gnn.nn import Dropout
        >>> dropout = Dropout(0.5)
        >>> sorted(set(dropout(torch.ones(100, 100)).flatten().tolist()))
        [0.0, 2.0]
        >>> dropout.eval()(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` ``[n, ...]`` with some numbers dropped, the others times ``1 / (1 - p)``."""
        return super().forward(input) if self.inplace else dropout(input, self.p, self.training)
