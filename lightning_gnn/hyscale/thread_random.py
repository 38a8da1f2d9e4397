"""Random numbers of a trainer thread, although torch has one CPU generator per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_gnn.hyscale.pipeline import GLOBAL_RANDOM

_TAKE_GENERATOR = {
    function
    for owner, names in (
        (torch, ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson")),
        (
            Tensor,
            (
                "bernoulli",
                "bernoulli_",
                "cauchy_",
                "exponential_",
                "geometric_",
                "log_normal_",
                "multinomial",
                "normal_",
                "random_",
                "uniform_",
            ),
        ),
    )
    for name in names
    if (function := getattr(owner, name, None)) is not None
}
_LIKE: dict[Any, Callable[..., Tensor]] = {
    torch.rand_like: lambda out, generator: out.uniform_(generator=generator),
    torch.randn_like: lambda out, generator: out.normal_(generator=generator),
}
_DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
# These draw inside, where no generator can be given to them.
_DRAW_INSIDE = {
    function
    for owner, names in (
        (
            F,
            (
                "alpha_dropout",
                "dropout1d",
                "dropout2d",
                "dropout3d",
                "feature_alpha_dropout",
                "fractional_max_pool2d",
                "fractional_max_pool3d",
                "gumbel_softmax",
                "multi_head_attention_forward",
                "rrelu",
                "scaled_dot_product_attention",
            ),
        ),
        (
            torch,
            (
                "alpha_dropout",
                "feature_dropout",
                "feature_alpha_dropout",
                "gru",
                "lstm",
                "randint_like",
                "rnn_relu",
                "rnn_tanh",
                "rrelu",
                "binomial",
            ),
        ),
    )
    for name in names
    if (function := getattr(owner, name, None)) is not None
}
_DRAW = {*_TAKE_GENERATOR, *_LIKE, *_DROPOUTS, *_DRAW_INSIDE}


class ThreadRandom(TorchFunctionMode):
    """Within this context, torch draws CPU random numbers from a generator of the thread's own.

    So what a trainer draws depends on its seed alone, not on the others. A few functions that cannot be given a
    generator run one thread at a time, with the global one in the state of this one. Accelerators have their own.
    Activation checkpointing does not restore this generator: do not combine it with dropout.

    Args:
        seed: Where the generator begins.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass the generator to what draws."""
        kwargs = kwargs or {}
        if func not in _DRAW:  # nearly always: this is called for every operator
            return func(*args, **kwargs)
        if func in _TAKE_GENERATOR:
            if kwargs.get("generator") is None and self._on_cpu(args, kwargs):
                kwargs = {**kwargs, "generator": self.generator}
        elif func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        elif func in _LIKE and self._on_cpu(args, kwargs):
            kwargs.pop("generator", None)
            out = torch.empty_like(*args, **kwargs)
            with torch.no_grad():
                return _LIKE[func](out, self.generator)
        elif func in _DRAW_INSIDE:
            return self._alone(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_cpu(self, args: Any, kwargs: Any) -> bool:
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        tensors = [value for value in args if isinstance(value, Tensor)]
        return tensors[0].is_cpu if tensors else torch.get_default_device().type == "cpu"

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
        train: bool = True,
    ) -> Tensor:
        inplace = inplace or func is torch.dropout_
        training = train if training is None else training
        if not training or p == 0.0 or not input.is_cpu or not 0.0 <= p < 1.0:
            return F.dropout(input, p, training, inplace)
        mask = torch.empty_like(input).bernoulli_(1.0 - p, generator=self.generator).div_(1.0 - p)
        return input.mul_(mask) if inplace else input * mask

    def _alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        with GLOBAL_RANDOM:
            before = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(torch.get_rng_state())
                torch.set_rng_state(before)
