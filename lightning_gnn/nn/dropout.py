"""Fast dropout whose mask is a function of one random key and independent of the number of threads."""

from torch import Tensor, nn

from lightning_gnn.ops.dropout import dropout


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` whose mask is a function of one key: the same on the CPU and, with Triton, on a GPU.

    Each call draws a 64-bit key from torch's CPU generator; a hash of (key, i, c) decides whether element (i, c) of
    ``[n, ...]`` is dropped. ``seed_everything``, activation checkpointing and resumed runs thus reproduce masks for
    any number of threads. Otherwise (other devices, CUDA graphs, compiled or transformed functions, in place, torch
    modes like the one in which ``"ascend_hybrid"`` draws dropout) it is torch's dropout.

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
        """Return ``input`` ``[n, ...]`` with some elements dropped and the others scaled by ``1 / (1 - p)``."""
        return super().forward(input) if self.inplace else dropout(input, self.p, self.training)
