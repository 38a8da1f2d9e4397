#include "numbers.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include "tiling.h"

namespace lightning_gnn {

namespace {

constexpr double MAX_EXPONENT = 60;  // two factors and their product stay finite in float32

// 2^k as a scalar on the device, so that the host does not wait for it.
at::Tensor Scale(const at::Tensor& x, int exponent)
{
    if (x.numel() == 0) {
        return {};
    }
    const at::Tensor largest = at::nan_to_num(x, 0.0, 0.0, 0.0).abs().amax();
    const at::Tensor wanted = at::rsub(largest.log2().ceil(), exponent);  // inf where all are 0
    return at::where(largest > 0, wanted.clamp(-MAX_EXPONENT, MAX_EXPONENT), at::zeros_like(wanted)).exp2();
}

at::Tensor Wide(const at::Tensor& x)
{
    return x.scalar_type() == at::kFloat ? x : x.to(at::kFloat);
}

bool Rescaled(const at::Tensor& x, Scaling scaling)
{
    if (x.scalar_type() == at::kHalf) {
        return scaling.rescale;
    }
    TORCH_WARN_ONCE("lightning_gnn: the NPU kernels compute in float16 with float32 sums; ", x.scalar_type(),
                    " is scaled by a power of two per tensor and converted. Use precision=\"16-mixed\" to convert less.");
    return true;
}

}  // namespace

Half HalfRows(const at::Tensor& x, Scaling scaling)
{
    const int64_t columns = x.size(2), padded = (columns + CUBE_EDGE - 1) / CUBE_EDGE * CUBE_EDGE;
    const auto options = x.options().dtype(at::kHalf);
    const std::vector<int64_t> sizes = {x.size(0), x.size(1), padded};
    Half half{padded == columns ? at::empty(sizes, options) : at::zeros(sizes, options), {}};
    at::Tensor source = x;
    if (Rescaled(x, scaling)) {
        source = Wide(x);
        half.scale = Scale(source, scaling.exponent);
        source = half.scale.defined() ? source * half.scale : source;
    }
    half.values.narrow(2, 0, columns).copy_(source);
    return half;
}

Half FloatValues(const at::Tensor& weight, Scaling scaling)
{
    at::Tensor source = Wide(weight), scale;
    if (Rescaled(weight, scaling)) {
        scale = Scale(source, scaling.exponent);
        source = scale.defined() ? source * scale : source;
    }
    return {source.t().contiguous(), scale};
}

Half HalfValues(const at::Tensor& weight, const at::Tensor& slots, int64_t stride, Scaling scaling)
{
    const Half wide = FloatValues(weight, scaling);
    at::Tensor values = at::zeros({weight.size(1), stride}, weight.options().dtype(at::kFloat));
    values.index_add_(1, slots, wide.values);
    return {values.to(at::kHalf), wide.scale};
}

at::Tensor Result(const at::Tensor& y, int64_t columns, const at::Tensor& scale, const at::Tensor& otherScale,
                  const at::Tensor& divisor, at::ScalarType dtype)
{
    at::Tensor out = y.narrow(2, 0, columns);
    if (scale.defined() || otherScale.defined() || divisor.defined()) {
        out = out.to(at::kFloat);
    }
    if (scale.defined() && otherScale.defined()) {
        out = out / (scale * otherScale);
    } else if (scale.defined() || otherScale.defined()) {
        out = out / (scale.defined() ? scale : otherScale);
    }
    if (divisor.defined()) {
        out = out / divisor.view({-1, 1, 1});
    }
    return out.to(dtype).contiguous();
}

at::Tensor Plain(const at::Tensor& x, at::ScalarType dtype)
{
    return at::empty(x.sizes(), x.options().dtype(dtype)).copy_(x);
}

}  // namespace lightning_gnn
