"""Aggregate and update on an Ascend chip, or on its twin: sums on the vector cores while the cube core multiplies.

Numbers are float16 inside, scaled by a power of two per tensor found on the device; sums and products are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ascend_ops.tiling import aggregate_update_tiling, combine_tiling, up, update_constants, update_tiling
from lightning_gnn.ops.aggregate.ascend_twin import say_converted
from lightning_gnn.ops.aggregate.chip_max import entries_of_edges, maxima, maxima_backward
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update.reference import Update
from lightning_gnn.ops.dropout import row_dropout_torch

HALF_EXPONENT = 15  # 2^15 is the last power of two that float16 has
MAX_EXPONENT = 60  # two factors and their product stay finite in float32
TILE = 128  # rows and columns of a tile of a product

Launch = Callable[[str, int, list[Tensor], list[Tensor], Any], None]  # kernel, blocks, inputs, outputs and tiling
Kept = list[Tensor | None]  # what the gradient needs: sums and their scale, weights as the kernels read them and theirs


@dataclass(frozen=True)
class Half:
    """Rows in float16, filled up with zeros to a multiple of 16 columns, and what they were multiplied with."""

    values: Tensor  # float16 [n, up(columns)]
    scale: Tensor | None  # a power of two, 0-dimensional on the device, or None for 1


@dataclass(frozen=True)
class Chip:
    """The operators of ``reference.py``, executed by the kernels: sums first, so that the product is nearly free."""

    launch: Launch  # runs a kernel, on the device of its tensors or in simulation
    cores: int

    def update(self, call: Update, keep: bool) -> tuple[Tensor, Kept]:
        """Return what ``reference.update`` does for one relation, and what :meth:`backward` needs."""
        edges, x, weight, self_weight, bias = call.edges, call.x, *_of_one(call)
        num_targets, num_out, num_in = edges[0].numel() - 1, *weight.shape
        laid = _laid_out(weight, self_weight)
        own = 0 if self_weight is None else num_targets
        table, values, of_values = _prepared(edges, x, call.mean, own > 0)
        sums, y = self._fused(edges, table, values, laid, (num_in, num_out), own, call.mean, transpose_b=True)
        scale = _times(table.scale, of_values)
        out = _unscaled(y, _times(scale, laid.scale))
        out = (out if bias is None else out + bias).to(x.dtype)
        if call.p is not None:
            out = row_dropout_torch(out.relu(), call.p, call.key, None)
        return out, [sums if keep else None, scale, laid.values, laid.scale]

    def backward(
        self, call: Update, grad: Tensor, kept: Kept, result: Tensor | None, wanted: list[bool]
    ) -> list[Tensor]:
        """Return what ``reference.update_backward`` does for one relation."""
        # Go back through the activation before the gradients are rounded to float16.
        edges, x, weight, self_weight, _ = call.edges, call.x, *_of_one(call)
        if result is not None:
            grad = reference.through_relu_dropout(grad, result, call.p or 0.0)
        wants_x, wants_weight, wants_self, wants_bias = wanted
        # The forward pass has kept its float16 sums and weights with their scales, so that nothing is converted twice.
        num_targets, (num_out, num_in) = grad.size(0), weight.shape
        none = x.new_empty(0)
        grad_x = grad_weight = grad_self = none
        sums, sums_scale, stored, stored_scale = kept
        assert stored is not None
        rows = half_rows(grad)
        # The gradient of x is the fused kernel over the transposed edges; own rows are added by it.
        if wants_x:
            back = _backward_edges(edges, x.size(0), call.mean)
            own = 0 if self_weight is None else num_targets
            table, values, of_values = _prepared(back, grad, False, own > 0)
            layout, sizes = Half(stored, stored_scale), (num_out, num_in)
            _, y = self._fused(back, table, values, layout, sizes, own, False, transpose_b=False)
            grad_x = _unscaled(y, _times(_times(table.scale, of_values), stored_scale)).to(x.dtype)
        # The gradients of the weights are products of rows; scales of both factors are undone afterwards.
        if wants_weight:
            assert sums is not None
            product = self._product_of_rows(rows.values, sums, num_out, num_in)
            grad_weight = _unscaled(product, _times(rows.scale, sums_scale)).to(x.dtype)
        if wants_self:
            features = half_rows(x[:num_targets])
            product = self._product_of_rows(rows.values, features.values, num_out, num_in)
            grad_self = _unscaled(product, _times(rows.scale, features.scale)).to(x.dtype)
        # The kernel serves one relation, but the operator's parameters have a dimension for relations.
        of_parameters = grad_weight, grad_self, grad.sum(0) if wants_bias else none
        return [grad_x, *(gradient.unsqueeze(0) for gradient in of_parameters)]

    def sums(self, edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
        """Add up rows as ``reference.sums`` does, in float32, without autograd."""
        table, values, of_values = _prepared(edges, x, mean, False)
        sums, _ = self._fused(edges, table, values, None, (x.size(1), 0), 0, mean, transpose_b=True)
        return _unscaled(sums[:, : x.size(1)].float(), _times(table.scale, of_values))

    def sums_backward(self, edges: list[Tensor], grad: Tensor, num_sources: int, mean: bool) -> Tensor:
        """Return the gradient of the rows that :meth:`sums` adds up, in float32."""
        return self.sums(_backward_edges(edges, num_sources, mean), grad, False)

    def maxima(self, edges: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of each target's rows, and how many attain it, in float32, without autograd."""
        best, ties = maxima(self.launch, entries_of_edges(edges, self.cores), x.float().unsqueeze(1), None)
        return best.squeeze(1), ties.squeeze(1)

    def maxima_backward(self, edges: list[Tensor], shares: Tensor, best: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the rows that :meth:`maxima` compares, in float32."""
        back = entries_of_edges(torch.ops.lightning_gnn.edges_by_source(edges, x.size(0)), self.cores)
        shares, best, x = (rows.float().unsqueeze(1) for rows in (shares, best, x))
        return maxima_backward(self.launch, back, shares, best, x, None).squeeze(1)

    def _fused(
        self,
        edges: list[Tensor],
        table: Half,
        values: Tensor | None,
        laid: Half | None,
        sizes: tuple[int, int],
        own_rows: int,
        mean: bool,
        transpose_b: bool,
    ) -> tuple[Tensor, Tensor]:
        """Launch aggregate_update; return the sums, float16 and filled up, and the result, float32 ``[rows, n]``."""
        # Allocate the outputs; the result is padded to whole blocks of columns.
        indptr, indices = edges[0].to(torch.int32), edges[1]
        (k, n), num_rows = sizes, edges[0].numel() - 1
        x = table.values
        sums = x.new_empty(num_rows, x.size(1))
        y = x.new_empty(num_rows if n else 1, up(max(n, 1)), dtype=torch.float32)
        # Absent inputs are replaced by small tensors, as the kernel takes all of them.
        stored = x.new_zeros(1, 16) if laid is None else laid.values
        tiling = aggregate_update_tiling(
            num_rows,
            k,
            n,
            stored.size(1),
            own_rows=own_rows,
            own_offset=stored.size(1) // 2 if own_rows else 0,
            weighted=values is not None,
            mean=mean,
            transpose_b=transpose_b,
        )
        weights = x.new_zeros(1, dtype=torch.float32) if values is None else values
        # A core takes at least one tile, so that small inputs start fewer cores.
        inputs = [x, indptr, indices, weights, stored, _constants(x.device)]
        self.launch("aggregate_update", min(self.cores, -(-num_rows // TILE)), inputs, [sums, y], tiling)
        return sums, y[:, :n]

    def _product_of_rows(self, a: Tensor, b: Tensor, m: int, n: int) -> Tensor:
        """Multiply the transpose of a with b, float32 ``[m, n]``; k, their rows, is cut so that all cores have some."""
        k = a.size(0)
        tiles = -(-m // TILE) * -(-n // TILE)
        parts = min(max(self.cores // tiles, 1), -(-k // TILE))
        tiling = update_tiling(m, k, n, a.size(1), b.size(1), transpose_a=True, float_out=True, split_k=parts)
        y = a.new_empty(m * parts, up(n), dtype=torch.float32)
        inputs = [a.contiguous(), b.contiguous(), a.new_zeros(1), _constants(a.device)]
        self.launch("update", min(self.cores, tiles * parts), inputs, [y], tiling)
        if parts > 1:
            added = y.new_empty(m, up(n))
            combine = combine_tiling(m, up(n), parts_per_row=parts, float_out=True)
            nothing = torch.zeros(4, dtype=torch.int32, device=y.device)
            self.launch("combine_parts", min(2 * self.cores, m), [y, nothing], [added], combine)
            y = added
        return y[:, :n]


def half_rows(x: Tensor, exponent: Tensor | int = HALF_EXPONENT) -> Half:
    """Return rows in float16; those that are float16 stay as they are, the others' largest ends near ``2^exponent``."""
    scale, source = None, x.detach()
    if x.dtype != torch.float16:
        say_converted(x.dtype)
        source = source.float() if x.dtype == torch.bfloat16 else source
        largest = source.nan_to_num(0.0, 0.0, 0.0).abs().amax()
        power = torch.where(largest > 0, exponent - largest.log2().ceil(), torch.zeros_like(largest))
        scale = power.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2()
        source, scale = source * scale, scale.float()
    columns = up(x.size(1))
    if columns == x.size(1):
        return Half(source.to(torch.float16).contiguous(), scale)
    values = source.new_zeros(x.size(0), columns, dtype=torch.float16)
    values[:, : x.size(1)] = source
    return Half(values, scale)


def _of_one(call: Update) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return weight, self_weight and bias of the only relation."""
    self_weight, bias = (None if tensor is None else tensor[0] for tensor in (call.self_weight, call.bias))
    return call.weight[0], self_weight, bias


def _prepared(edges: list[Tensor], x: Tensor, mean: bool, own: bool) -> tuple[Half, Tensor | None, Tensor | None]:
    """Return features and edge weights scaled so that no sum overflows float16; ``own``: weights keep their scale."""
    indptr, indices, *weight = edges
    if not weight:
        if mean or x.dtype == torch.float16:
            return half_rows(x), None, None
        most = indptr.diff().amax().clamp(min=1).to(torch.float32).log2().ceil()
        return half_rows(x, HALF_EXPONENT - most), None, None
    values, degrees = weight[0].detach().float(), indptr.diff()
    rows = torch.repeat_interleave(degrees, output_size=indices.numel())
    largest = values.new_zeros(degrees.numel()).index_add(0, rows, values.abs())
    largest = (largest / degrees.clamp(min=1) if mean else largest).amax()
    known = (largest > 0) & largest.isfinite()
    power = torch.where(known, largest.log2().ceil(), torch.zeros_like(largest)).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    scale = None
    if not own:
        scale = (-power.clamp(max=0)).exp2()
        values = values * scale
    return half_rows(x, HALF_EXPONENT - power.clamp(min=0)), values.contiguous(), scale


def _backward_edges(edges: list[Tensor], num_sources: int, mean: bool) -> list[Tensor]:
    """Return edges by source, whose weights are divided by the number of edges of their target if ``mean``."""
    back: list[Tensor] = torch.ops.lightning_gnn.edges_by_source(edges, num_sources)
    if not mean:
        return back
    indptr, indices, *weight = back
    degrees = edges[0].diff().clamp(min=1).to(torch.float32)
    share = degrees.reciprocal().index_select(0, indices)
    return [indptr, indices, weight[0].float() * share if weight else share]


def _laid_out(weight: Tensor, self_weight: Tensor | None) -> Half:
    """Return W, and S beside it, as the kernels of forward and backward read them."""
    if self_weight is None:
        return half_rows(weight)
    columns, width = weight.size(1), up(weight.size(1))
    both = weight.new_zeros(weight.size(0), 2 * width)
    both[:, :columns] = weight.detach()
    both[:, width : width + columns] = self_weight.detach()
    return half_rows(both)


@cache
def _constants(device: torch.device) -> Tensor:
    return torch.from_numpy(update_constants()).to(device)


def _times(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b


def _unscaled(rows: Tensor, scale: Tensor | None) -> Tensor:
    return rows if scale is None else rows / scale
