"""Dropout with a mask that depends on (key, global row, column) only, however rows are distributed over ranks."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from lightning_gnn.ops.aggregate.numba_rows import flatten, use_huge_pages, widen
from lightning_gnn.ops.hashing import GOLDEN, MIX_1, MIX_2, NODE_STEP, mix, mix_compiled, node_key_compiled
from lightning_gnn.ops.library import Context, check_shapes, define, library, runs_triton
from lightning_gnn.ops.worker_threads import run_all

_DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
_TILE_ROWS = 1024
_ELEMENTS_PER_THREAD = 1 << 18  # elements that pay for waking one more thread


def row_dropout(x: Tensor, p: float, key: int, rows: Tensor | None = None) -> Tensor:
    """Zero each element with probability ``p`` and multiply the others by ``1 / (1 - p)``, identically on every device.

    The mask of element (i, c) is half of a hash of (``key``, ``rows[i]``, ``c // 2``), the lower half for even c.
    ``rows`` is int64 or int32 ``[n]``, by default 0, 1, …; the backward pass recomputes the mask.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be a probability in [0, 1], but is {p}")
    if not x.is_floating_point() or (rows is not None and rows.dtype not in (torch.int64, torch.int32)):
        rows_dtype = None if rows is None else rows.dtype
        raise TypeError(f"x must be floating and rows int64 or int32, but they are {x.dtype} and {rows_dtype}")
    if rows is not None:
        check_shapes({"rows": (rows, [*x.shape[:1]])})
    if p == 0.0:
        return x.clone()
    return _with_autograd(x, p, mixed_key(key), rows)


def mixed_key(key: int) -> int:
    """Hash the key to a signed 64-bit integer, the form in which the operators take it."""
    return _to_signed(mix(key))


class _RowDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, p: float, key: int, rows: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.rest = p, key
        dropped: Tensor = torch.ops.lightning_gnn.row_dropout(x, p, key, rows)
        return dropped

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _with_autograd(grad, *ctx.rest, *ctx.saved_tensors), None, None, None


_with_autograd: Callable[..., Tensor] = _RowDropout.apply


def _threshold(p: float) -> int:
    """Return the minimum 32-bit hash of an element that is retained."""
    return min(round(p * 2**32), 2**32 - 1)


_MASK = (1 << 64) - 1


def _to_signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit integer as a signed one."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically, as if it were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_torch(z: Tensor) -> Tensor:
    """Apply ``hashing.mix``; an int64 product has the same lower 64 bits as a uint64 product."""
    z = (z ^ _shift_right(z, 30)) * _to_signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _to_signed(MIX_2)
    return z ^ _shift_right(z, 31)


def row_dropout_torch(x: Tensor, p: float, key: int, rows: Tensor | None) -> Tensor:
    """Apply :func:`row_dropout` with torch's own operators; ``key`` is mixed already."""
    if x.numel() == 0 or p == 1.0:
        return x.new_zeros(x.shape)
    ids = torch.arange(x.size(0), device=x.device) if rows is None else rows.to(torch.int64)
    columns = x.numel() // x.size(0)
    streams = _mix_torch(ids * _to_signed(NODE_STEP) ^ key)
    pairs = torch.arange(1, (columns + 1) // 2 + 1, device=x.device)
    hashes = _mix_torch(streams[:, None] + pairs * _to_signed(GOLDEN))
    halves = torch.stack([hashes & 0xFFFFFFFF, _shift_right(hashes, 32)], dim=2).flatten(1)[:, :columns]
    keep = halves >= _threshold(p)
    return torch.where(keep.view(x.shape), x * (1.0 / (1.0 - p)), 0).to(x.dtype).contiguous()


define(
    "row_dropout(Tensor x, float p, int key, Tensor? rows) -> Tensor",
    row_dropout_torch,
    fake=lambda x, *_: x.new_empty(x.shape),
)


@torch.library.impl(library, "row_dropout", "CPU")
def _row_dropout_cpu(x: Tensor, p: float, key: int, rows: Tensor | None) -> Tensor:
    if x.numel() == 0 or p == 1.0:
        return x.new_zeros(x.shape)
    scale = 1.0 / (1.0 - p)
    shape = (x.size(0), x.numel() // x.size(0))
    ids = np.arange(x.size(0)) if rows is None else rows.contiguous().numpy()
    whole = widen(x).view(shape)
    out = use_huge_pages(torch.empty_like(whole))
    # A scale of the array's dtype makes the compiled code round as torch does.
    arrays = (whole.numpy(), ids, out.numpy(), whole.numpy().dtype.type(scale))
    _run_over_rows(drop_rows, shape, *compiled_mask(p, key), *arrays)
    return out.view(x.shape).to(x.dtype)


@torch.library.impl(library, "row_dropout", "CUDA")
def row_dropout_cuda(x: Tensor, p: float, key: int, rows: Tensor | None) -> Tensor:
    """Apply :func:`row_dropout` on a GPU, with the bits of the CPU; ``key`` is mixed already."""
    if x.numel() == 0 or p == 1.0 or not runs_triton(x.device):
        return row_dropout_torch(x, p, key, rows)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x.view(x.size(0), -1), out.view(x.size(0), -1), p, key, None if rows is None else rows.contiguous(), False)
    return out


def relu_dropout_cuda(x: Tensor, p: float, key: int) -> Tensor:
    """Apply ReLU and :func:`row_dropout` to contiguous ``x`` ``[n, C]`` on a GPU, in place if Triton runs there."""
    if x.numel() == 0 or p == 0.0:
        return x.relu_()
    if p == 1.0 or not runs_triton(x.device):
        return row_dropout_torch(x.relu_(), p, key, None)
    _launch(x, x, p, key, None, True)
    return x


def _launch(x: Tensor, out: Tensor, p: float, key: int, rows: Tensor | None, relu: bool) -> None:
    from lightning_gnn.triton_kernels import dropout as kernels

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.row_dropout(x, out, 1.0 / (1.0 - p), _threshold(p), key, rows, relu)


def compiled_mask(p: float, key: int) -> tuple[np.uint64, np.uint32]:
    """Convert a mixed key and ``p`` to the key and threshold of the compiled loops."""
    return np.uint64(key & _MASK), np.uint32(_threshold(p))


def _run_over_rows(function: Callable[..., None], shape: tuple[int, int], *arguments: object) -> None:
    """Run a compiled loop over rows on up to ``torch.get_num_threads()`` threads."""
    num_threads = max(1, min(torch.get_num_threads(), shape[0] * shape[1] // _ELEMENTS_PER_THREAD))
    bounds = [shape[0] * i // num_threads for i in range(num_threads + 1)]
    run_all([partial(function, start, stop, *arguments) for start, stop in pairwise(bounds)])


_UGOLDEN = np.uint64(GOLDEN)


@numba.njit(inline="always", cache=True)
def _hash_row(key: np.uint64, row: int, words: np.ndarray) -> None:
    # Word w of a row's stream is the hash of w + 1 steps, so that it can be computed in any order and on any rank. Two
    # columns share a word: vectors of 64-bit hashes fill complete vectors of 32-bit numbers.
    counter = node_key_compiled(key, row)
    for w in range(words.size):
        counter += _UGOLDEN
        words[w] = mix_compiled(counter)


@numba.njit(nogil=True, cache=True)
def drop_rows(
    start: int, stop: int, key: np.uint64, threshold: np.uint32, x: np.ndarray, rows: np.ndarray, out: np.ndarray,
    scale: float,
) -> None:  # fmt: skip
    """Apply dropout to rows ``[start, stop)`` of ``x`` ``[n, C]``; ``scale`` has its dtype, to round as torch does."""
    zero = scale * 0  # has the dtype of x
    words = np.empty((x.shape[1] + 1) // 2, np.uint64)
    halves = words.view(np.uint32)
    for i in range(start, stop):
        _hash_row(key, rows[i], words)
        for c in range(x.shape[1]):
            # A select instead of a branch, so that the compiler vectorizes the loop.
            out[i, c] = x[i, c] * scale if halves[c] >= threshold else zero


def relu_drop_rows(
    first: int, x: Tensor, p: float, key: int, bias: Tensor | None = None, out: Tensor | None = None
) -> None:
    """Write dropout(ReLU(x + bias)) of rows ``[n, C]`` numbered from ``first`` on, in place without ``out``."""
    scale = _scalar(x, 1.0 / (1.0 - p))
    shift = np.zeros(x.size(1), type(scale)) if bias is None else bias.to(_wide(x)).numpy()
    loop = _relu_drop_bfloat16 if x.dtype == torch.bfloat16 else _relu_drop
    loop(first, *compiled_mask(p, key), _array_of(x), shift, _array_of(x if out is None else out), scale)


def relu_drop_backward(grad: Tensor, result: Tensor, p: float, out: Tensor, total: Tensor) -> None:
    """Write the gradient before ReLU and dropout ``[n, C]``, and add its rows to ``total``, float32 or wider."""
    loop = _relu_drop_bfloat16_backward if grad.dtype == torch.bfloat16 else _relu_drop_backward
    loop(_array_of(grad), _array_of(result), _scalar(grad, 1.0 / (1.0 - p)), _array_of(out), total.numpy())


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums of ``x``."""
    return torch.promote_types(x.dtype, torch.float32)


def _scalar(x: Tensor, value: float) -> Any:
    # A factor of the arrays' dtype makes the compiled code round as torch does.
    return torch.empty(0, dtype=_wide(x)).numpy().dtype.type(value)


def _array_of(rows: Tensor) -> np.ndarray:
    """Return an array of the same memory and shape; bfloat16 becomes uint16."""
    return flatten(rows).reshape(rows.shape)


@numba.njit(nogil=True, cache=True)
def _relu_drop(
    first: int, key: np.uint64, threshold: np.uint32, x: np.ndarray, bias: np.ndarray, out: np.ndarray, scale: float
) -> None:
    zero = scale * 0
    words = np.full((out.shape[1] + 1) // 2, np.uint64(0xFFFFFFFFFFFFFFFF))
    halves = words.view(np.uint32)
    for i in range(out.shape[0]):
        if threshold:
            _hash_row(key, first + i, words)
        for c in range(out.shape[1]):
            value = x[i, c] + bias[c]
            # NaN propagates, as in torch's ReLU.
            out[i, c] = zero if (halves[c] < threshold) | (value <= zero) else value * scale


@numba.njit(nogil=True, cache=True)
def _relu_drop_bfloat16(
    first: int, key: np.uint64, threshold: np.uint32, x: np.ndarray, bias: np.ndarray, out: np.ndarray,
    scale: np.float32,
) -> None:  # fmt: skip
    words = np.full((out.shape[1] + 1) // 2, np.uint64(0xFFFFFFFFFFFFFFFF))
    halves = words.view(np.uint32)
    bits = np.empty(out.shape[1], np.uint32)
    values = bits.view(np.float32)
    for i in range(out.shape[0]):
        if threshold:
            _hash_row(key, first + i, words)
        # Separate loops, which the compiler vectorizes.
        for c in range(out.shape[1]):
            bits[c] = np.uint32(x[i, c]) << np.uint32(16)
        for c in range(out.shape[1]):
            value = values[c] + bias[c]
            values[c] = np.float32(0) if (halves[c] < threshold) | (value <= np.float32(0)) else value * scale
        for c in range(out.shape[1]):
            out[i, c] = _round_bits(bits[c])


@numba.njit(nogil=True, cache=True)
def _relu_drop_backward(grad: np.ndarray, result: np.ndarray, scale: float, out: np.ndarray, total: np.ndarray) -> None:
    zero = scale * 0
    for i in range(grad.shape[0]):
        for c in range(grad.shape[1]):
            value = zero if result[i, c] <= zero else grad[i, c] * scale
            out[i, c] = value
            total[c] += value


@numba.njit(nogil=True, cache=True)
def _relu_drop_bfloat16_backward(
    grad: np.ndarray, result: np.ndarray, scale: np.float32, out: np.ndarray, total: np.ndarray
) -> None:
    bits = np.empty(grad.shape[1], np.uint32)
    values = bits.view(np.float32)
    for i in range(grad.shape[0]):
        for c in range(grad.shape[1]):
            # Neither zero nor negative, or NaN.
            at = result[i, c]
            kept = (at != np.uint16(0)) & ((at < np.uint16(0x8000)) | (at > np.uint16(0xFF80)))
            bits[c] = np.uint32(grad[i, c]) << np.uint32(16) if kept else np.uint32(0)
        for c in range(grad.shape[1]):
            values[c] *= scale
        for c in range(grad.shape[1]):
            total[c] += values[c]
        for c in range(grad.shape[1]):
            out[i, c] = _round_bits(bits[c])


@numba.njit(inline="always", cache=True)
def _round_bits(bits: Any) -> Any:
    # Ties to even, as torch rounds. Rounding could carry the fraction of NaN over into infinity.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16((np.uint32(0x7FC00000) if is_nan else rounded) >> np.uint32(16))


def add_relu_drop(x: Tensor, bias: Tensor | None, p: float, key: int) -> Tensor:
    """Return dropout(ReLU(x + bias)) of ``[n, C]`` in one pass over CPU tensors, as :func:`row_dropout` drops.

    ``bias`` has the dtype of ``x``. Differentiable any number of times.
    """
    if not x.is_cpu or x.dtype == torch.float16 or x.numel() == 0 or torch.compiler.is_compiling():
        return row_dropout((x if bias is None else x + bias).relu(), p, key)
    return _fused_with_autograd(x, bias, p, mixed_key(key))


class _AddReluDrop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, bias: Tensor | None, p: float, key: int) -> Tensor:
        # Detached, since other threads record operations.
        x, out = x.detach().contiguous(), use_huge_pages(torch.empty(x.shape, dtype=x.dtype))
        shift = None if bias is None else bias.detach()

        def run(first: int, last: int) -> None:
            relu_drop_rows(first, x[first:last], p, key, shift, out[first:last])

        _run_over_rows(run, (x.size(0), x.size(1)))
        ctx.save_for_backward(out)
        ctx.rest = p, bias is not None
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (result,), (p, has_bias) = ctx.saved_tensors, ctx.rest
        if torch.is_grad_enabled():  # create_graph=True
            before = torch.where(result <= 0, 0, grad * (1.0 / (1.0 - p))).to(grad.dtype)
            return before, before.sum(0) if has_bias else None, None, None
        grad, result = grad.detach().contiguous(), result.detach()
        before = use_huge_pages(torch.empty(grad.shape, dtype=grad.dtype))
        # A sum per tile, so that the bias's gradient does not depend on the threads.
        tiles = range(0, grad.size(0), _TILE_ROWS)
        totals = torch.zeros(len(tiles), grad.size(1), dtype=_wide(grad))

        def run(first: int, last: int) -> None:
            for number in range(first, last):
                rows = slice(tiles[number], tiles[number] + _TILE_ROWS)
                relu_drop_backward(grad[rows], result[rows], p, before[rows], totals[number])

        _run_over_rows(run, (len(tiles), _TILE_ROWS * grad.size(1)))
        return before, totals.sum(0).to(grad.dtype) if has_bias else None, None, None


_fused_with_autograd: Callable[..., Tensor] = _AddReluDrop.apply


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Apply ``torch.nn.functional.dropout``, with a mask hashed from one key of torch's generator where possible."""
    if not training or p == 0.0 or not draws_by_key(x):
        return F.dropout(x, p, training)
    return row_dropout(x, p, draw_key())


def draws_by_key(x: Tensor) -> bool:
    """Return whether :func:`dropout` hashes the mask of ``x`` from a key, instead of calling torch's dropout."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_nested:
        return False
    # A CUDA graph would draw the same key in each replay; torch's generator knows of graphs.
    if not x.is_cpu and not (x.is_cuda and runs_triton(x.device) and not torch.cuda.is_current_stream_capturing()):
        return False
    if not x.is_floating_point() or x.dim() == 0 or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    # A mode that intercepts torch's dropout, as drop_by_row does, must see the call.
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in modes)


def draw_key() -> int:
    """Draw a signed 64-bit integer from torch's default CPU generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None))


class drop_by_row(TorchFunctionMode):
    """Context in which torch's dropout depends on global row numbers: sharded rows get the masks of a single process.

    Every call derives its key from ``key`` and the number of earlier calls. A tensor with ``len(rows)`` rows is taken
    to hold the features of these rows; for any other tensor all ranks compute the same mask. A call that finds torch's
    generator in the state of an earlier call, as in gradient checkpointing, repeats that call's mask. The context must
    therefore include the backward pass.
    """

    def __init__(self, key: int, rows: Tensor | None = None) -> None:
        super().__init__()
        self.key = key
        self.rows = rows
        self.calls = 0
        self._calls_by_state: dict[bytes, int] = {}  # number of the call that found torch's generator in this state

    def next_key(self, drops: bool = True) -> int:
        """Return the key of the next call, or of the earlier call that it repeats; only calls that drop can repeat."""
        if not drops or torch.compiler.is_compiling():
            self.calls += 1
            number = self.calls
        else:
            state = torch.get_rng_state().numpy().tobytes()
            number = self._calls_by_state.setdefault(state, self.calls + 1)
            self.calls = max(self.calls, number)
            torch.rand((), device="cpu")
        return mix((self.key + GOLDEN) ^ (number * NODE_STEP))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept calls of dropout and of ``Tensor.backward``."""
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].numel() == 1 and len(args) < 5 and kwargs.get("inputs") is None:
            kwargs.pop("inputs", None)
            with self:  # a mode is off while it handles a call, but checkpointed layers are recomputed during this one
                return _backward(*args, **kwargs)
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        training = given.get("training", given.get("train", True))
        dropped = self._drop(given["input"], given.get("p", 0.5), training)
        return given["input"].copy_(dropped) if given.get("inplace") or func is torch.dropout_ else dropped

    def _drop(self, x: Tensor, p: float, training: bool) -> Tensor:
        drops = training and p > 0.0 and x.dim() > 0
        key = self.next_key(drops)
        if not drops:
            return x
        return row_dropout(x, p, key, self.rows if self.rows is not None and x.size(0) == self.rows.numel() else None)


def _backward(
    tensor: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Run ``Tensor.backward`` without dispatching to modes, which would be off while it runs."""
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    retain_graph = create_graph if retain_graph is None else retain_graph
    options = {"allow_unreachable": True, "accumulate_grad": True}
    _engine_run_backward((tensor,), (gradient,), retain_graph, create_graph, (), **options)


def edge_dropout(graph: Any, weight: Tensor, p: float, training: bool = True) -> Tensor:
    """Apply dropout to edge weights, ``[E]`` or ``[E, H]`` in forward order, by edge number in :class:`drop_by_row`."""
    # A compiler cannot inspect modes; an active mode intercepts the call of torch's dropout instead.
    modes = [] if torch.compiler.is_compiling() else _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    context = next((mode for mode in reversed(modes) if isinstance(mode, drop_by_row)), None)
    if context is None:
        return dropout(weight, p, training)
    drops = training and p > 0.0
    key = context.next_key(drops)
    if not drops:
        return weight
    return row_dropout(weight, p, key, getattr(graph, "edge_places", None))
