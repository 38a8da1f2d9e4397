"""Aggregate and update on an Ascend chip, real or simulated: vector cores aggregate while the cube core multiplies.

Inputs are float16, scaled by a power of two per tensor that is computed on the device; sums and products are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ascend_ops.tiling import aggregate_update_tiling, combine_tiling, up, update_constants, update_tiling
from lightning_gnn.ops.aggregate.ascend_twin import warn_converted
from lightning_gnn.ops.aggregate.chip_max import entries_of_edges, maxima, maxima_backward
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update.reference import Update
from lightning_gnn.ops.dropout import row_dropout_torch

HALF_EXPONENT = 15  # 2^15 is the largest power of two in float16
MAX_EXPONENT = 60  # keeps two factors and their product finite in float32
TILE = 128  # rows and columns per tile of a product

Launch = Callable[[str, int, list[Tensor], list[Tensor], Any], None]  # kernel, blocks, inputs, outputs and tiling
Saved = list[Tensor | None]  # saved for backward: sums, their scale, weights in the layout of the kernels, their scale


@dataclass(frozen=True)
class Half:
    """Rows in float16, padded with zeros to a multiple of 16 columns, and the factor by which they were scaled."""

    values: Tensor  # float16 [n, up(columns)]
    scale: Tensor | None  # a power of two, zero-dimensional on the device, or None for 1


@dataclass(frozen=True)
class Chip:
    """The operators of ``reference.py``, executed by the kernels; aggregating first hides the cost of the product."""

    launch: Launch  # launches a kernel on the device of its tensors, or simulates it
    cores: int  # number of AI cores

    def update(self, call: Update, keep: bool) -> tuple[Tensor, Saved]:
        """Run ``reference.update`` for one relation; also return the tensors that :meth:`backward` needs."""
        edges, x, weight, self_weight, bias = call.edges, call.x, *_get_parameters(call)
        num_targets, num_out, num_in = edges[0].numel() - 1, *weight.shape
        weights = _concatenate_weights(weight, self_weight)
        own_rows = 0 if self_weight is None else num_targets
        table, values, value_scale = _scale_inputs(edges, x, call.mean, own_rows > 0)
        sums, y = self._fused(edges, table, values, weights, (num_in, num_out), own_rows, call.mean, transpose_b=True)
        scale = _multiply_scales(table.scale, value_scale)
        out = _unscale(y, _multiply_scales(scale, weights.scale))
        out = (out if bias is None else out + bias).to(x.dtype)
        if call.p is not None:
            out = row_dropout_torch(out.relu(), call.p, call.key, None)
        return out, [sums if keep else None, scale, weights.values, weights.scale]

    def backward(
        self, call: Update, grad: Tensor, saved: Saved, result: Tensor | None, wanted: list[bool]
    ) -> list[Tensor]:
        """Run ``reference.update_backward`` for one relation."""
        # Differentiate the activation before the gradients are rounded to float16.
        edges, x, weight, self_weight, _ = call.edges, call.x, *_get_parameters(call)
        if result is not None:
            grad = reference.relu_dropout_backward(grad, result, call.p or 0.0)
        wants_x, wants_weight, wants_self, wants_bias = wanted
        # The forward pass saved its float16 sums and weights with their scales, so that they are not converted twice.
        num_targets, (num_out, num_in) = grad.size(0), weight.shape
        empty = x.new_empty(0)
        grad_x = grad_weight = grad_self = empty
        sums, sums_scale, weights, weights_scale = saved
        assert weights is not None
        rows = half_rows(grad)
        # The fused kernel over the transposed edges computes the gradient of x, including the targets' own rows.
        if wants_x:
            back = _backward_edges(edges, x.size(0), call.mean)
            own_rows = 0 if self_weight is None else num_targets
            table, values, value_scale = _scale_inputs(back, grad, False, own_rows > 0)
            layout, sizes = Half(weights, weights_scale), (num_out, num_in)
            _, y = self._fused(back, table, values, layout, sizes, own_rows, False, transpose_b=False)
            scale = _multiply_scales(_multiply_scales(table.scale, value_scale), weights_scale)
            grad_x = _unscale(y, scale).to(x.dtype)
        # The gradients of the weights are products of rows; the scales of both factors are undone afterwards.
        if wants_weight:
            assert sums is not None
            product = self._product_of_rows(rows.values, sums, num_out, num_in)
            grad_weight = _unscale(product, _multiply_scales(rows.scale, sums_scale)).to(x.dtype)
        if wants_self:
            features = half_rows(x[:num_targets])
            product = self._product_of_rows(rows.values, features.values, num_out, num_in)
            grad_self = _unscale(product, _multiply_scales(rows.scale, features.scale)).to(x.dtype)
        # The kernel supports one relation, but the operator's parameters have a dimension for relations.
        parameter_grads = grad_weight, grad_self, grad.sum(0) if wants_bias else empty
        return [grad_x, *(gradient.unsqueeze(0) for gradient in parameter_grads)]

    def sums(self, edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
        """Run ``reference.sums``, accumulating in float32, without autograd."""
        table, values, value_scale = _scale_inputs(edges, x, mean, False)
        sums, _ = self._fused(edges, table, values, None, (x.size(1), 0), 0, mean, transpose_b=True)
        return _unscale(sums[:, : x.size(1)].float(), _multiply_scales(table.scale, value_scale))

    def sums_backward(self, edges: list[Tensor], grad: Tensor, num_sources: int, mean: bool) -> Tensor:
        """Return the gradient of the rows that :meth:`sums` aggregates, in float32."""
        return self.sums(_backward_edges(edges, num_sources, mean), grad, False)

    def maxima(self, edges: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum of each target's rows and the number of ties, in float32, without autograd."""
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
        weights: Half | None,
        sizes: tuple[int, int],
        own_rows: int,
        mean: bool,
        transpose_b: bool,
    ) -> tuple[Tensor, Tensor]:
        """Launch aggregate_update; return the sums, float16 and padded, and the result, float32 ``[rows, n]``."""
        # Allocate the outputs; the result is padded to full blocks of columns.
        indptr, indices = edges[0].to(torch.int32), edges[1]
        (k, n), num_rows = sizes, edges[0].numel() - 1
        x = table.values
        sums = x.new_empty(num_rows, x.size(1))
        y = x.new_empty(num_rows if n else 1, up(max(n, 1)), dtype=torch.float32)
        # The kernel takes all inputs, so absent ones are replaced by small tensors.
        stored = x.new_zeros(1, 16) if weights is None else weights.values
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
        factors = x.new_zeros(1, dtype=torch.float32) if values is None else values
        # A core processes at least one tile, so that small inputs start fewer cores.
        inputs = [x, indptr, indices, factors, stored, _constants(x.device)]
        self.launch("aggregate_update", min(self.cores, -(-num_rows // TILE)), inputs, [sums, y], tiling)
        return sums, y[:, :n]

    def _product_of_rows(self, a: Tensor, b: Tensor, m: int, n: int) -> Tensor:
        """Multiply the transpose of a by b, float32 ``[m, n]``; the rows (k) are split to occupy all cores."""
        k = a.size(0)
        tiles = -(-m // TILE) * -(-n // TILE)
        parts = min(max(self.cores // tiles, 1), -(-k // TILE))
        tiling = update_tiling(m, k, n, a.size(1), b.size(1), transpose_a=True, float_out=True, split_k=parts)
        y = a.new_empty(m * parts, up(n), dtype=torch.float32)
        inputs = [a.contiguous(), b.contiguous(), a.new_zeros(1), _constants(a.device)]
        self.launch("update", min(self.cores, tiles * parts), inputs, [y], tiling)
        if parts > 1:
            total = y.new_empty(m, up(n))
            combine = combine_tiling(m, up(n), parts_per_row=parts, float_out=True)
            no_splits = torch.zeros(4, dtype=torch.int32, device=y.device)
            self.launch("combine_parts", min(2 * self.cores, m), [y, no_splits], [total], combine)
            y = total
        return y[:, :n]


def half_rows(x: Tensor, exponent: Tensor | int = HALF_EXPONENT) -> Half:
    """Convert rows to float16; other dtypes are scaled such that the largest element is near ``2^exponent``."""
    scale, source = None, x.detach()
    if x.dtype != torch.float16:
        warn_converted(x.dtype)
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


def _get_parameters(call: Update) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weight, self_weight and bias of the single relation."""
    self_weight, bias = (None if tensor is None else tensor[0] for tensor in (call.self_weight, call.bias))
    return call.weight[0], self_weight, bias


def _scale_inputs(edges: list[Tensor], x: Tensor, mean: bool, own: bool) -> tuple[Half, Tensor | None, Tensor | None]:
    """Scale features and edge weights such that no sum overflows float16; ``own`` leaves the edge weights unscaled."""
    indptr, indices, *weight = edges
    if not weight:
        if mean or x.dtype == torch.float16:
            return half_rows(x), None, None
        exponent = indptr.diff().amax().clamp(min=1).to(torch.float32).log2().ceil()
        return half_rows(x, HALF_EXPONENT - exponent), None, None
    values, degrees = weight[0].detach().float(), indptr.diff()
    rows = torch.repeat_interleave(degrees, output_size=indices.numel())
    largest = values.new_zeros(degrees.numel()).index_add(0, rows, values.abs())
    largest = (largest / degrees.clamp(min=1) if mean else largest).amax()
    valid = (largest > 0) & largest.isfinite()
    power = torch.where(valid, largest.log2().ceil(), torch.zeros_like(largest)).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    scale = None
    if not own:
        scale = (-power.clamp(max=0)).exp2()
        values = values * scale
    return half_rows(x, HALF_EXPONENT - power.clamp(min=0)), values.contiguous(), scale


def _backward_edges(edges: list[Tensor], num_sources: int, mean: bool) -> list[Tensor]:
    """Sort edges by source; ``mean`` divides their weights by the number of edges of their target."""
    back: list[Tensor] = torch.ops.lightning_gnn.edges_by_source(edges, num_sources)
    if not mean:
        return back
    indptr, indices, *weight = back
    degrees = edges[0].diff().clamp(min=1).to(torch.float32)
    share = degrees.reciprocal().index_select(0, indices)
    return [indptr, indices, weight[0].float() * share if weight else share]


def _concatenate_weights(weight: Tensor, self_weight: Tensor | None) -> Half:
    """Concatenate W and S in the layout that the forward and backward kernels read."""
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


def _multiply_scales(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b


def _unscale(rows: Tensor, scale: Tensor | None) -> Tensor:
    return rows if scale is None else rows / scale
