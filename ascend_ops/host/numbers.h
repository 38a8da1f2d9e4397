// Numbers as the kernels take them: float16 rows filled up to whole 32-byte blocks, and plain float32 tables.
#ifndef LIGHTNING_GNN_NUMBERS_H
#define LIGHTNING_GNN_NUMBERS_H

#include <ATen/core/Tensor.h>

namespace lightning_gnn {

// A tensor in float16, and the power of two by which it was multiplied (on the device; undefined: 1).
struct Half {
    at::Tensor values;
    at::Tensor scale;
};

// float16 has 5 bits of exponent, too few for the gradients of a mean over a large split. So wider numbers are brought
// near 2^exponent by a factor of their own per tensor: the largest finite one ends in (2^(exponent - 2), 2^exponent].
// float16 stays as it is unless `rescale`. inf and NaN stay what they are.
struct Scaling {
    int exponent;
    bool rescale;
};

// x [N, H, C] -> [N, H, C filled up to a multiple of 16 with zeros].
Half HalfRows(const at::Tensor& x, Scaling scaling);

// One value per entry and head [E, H] -> [H, stride] in the kernel's order: slots [E] says where, parallel edges add up.
Half HalfValues(const at::Tensor& weight, const at::Tensor& slots, int64_t stride, Scaling scaling);

// The same in float32, head by head in the order of the entries: [E, H] -> [H, E].
Half FloatValues(const at::Tensor& weight, Scaling scaling);

// Takes the fillers and the factors off: y [N, H, padded] -> [N, H, columns] of a dtype; divisor [N] or undefined.
at::Tensor Result(const at::Tensor& y, int64_t columns, const at::Tensor& scale, const at::Tensor& otherScale,
                  const at::Tensor& divisor, at::ScalarType dtype);

// A contiguous copy, in the plain layout: a tensor of torch_npu may lie in a layout of its own.
at::Tensor Plain(const at::Tensor& x, at::ScalarType dtype);

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_NUMBERS_H
