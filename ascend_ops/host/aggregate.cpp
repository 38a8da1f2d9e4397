#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "aclrtlaunch_aggregate_cube.h"
#include "aclrtlaunch_aggregate_vector.h"
#include "aclrtlaunch_combine_parts.h"
#include "device_tables.h"
#include "laid_out.h"
#include "launch.h"
#include "numbers.h"
#include "ops.h"

namespace lightning_gnn {

namespace {

constexpr int HALF_EXPONENT = 15;  // 2^15 is the last power of two that float16 has

// What is left for weight times feature, so that the sum of a vertex cannot overflow float16.
std::pair<Scaling, Scaling> ScalingsFor(int sumExponent, bool weighted, bool mean)
{
    const int left = HALF_EXPONENT - sumExponent;
    const int weight = !weighted ? 0 : left >= 0 ? left / 2 : left;
    return {{left - weight, mean}, {weight, mean}};
}

// Weights are stored per head: with too few of them, the kernel would read beyond their end.
void CheckHeads(const at::Tensor& x, const std::optional<at::Tensor>& weight)
{
    TORCH_CHECK_VALUE(weight.has_value() || x.size(1) == 1, "the dense-tile kernel requires weights [E, ", x.size(1),
                      "] for x ", x.sizes(), ", but weight is None; without weights, pass x as a single head: ",
                      "x.reshape(", x.size(0), ", 1, ", x.size(1) * x.size(2), ")");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> AggregateChunks(at::TensorList chunks, int64_t numRows, const at::Tensor& x,
                                                   const std::optional<at::Tensor>& weight, std::string_view reduce,
                                                   at::IntArrayRef slices, at::IntArrayRef chunkRanges)
{
    TORCH_CHECK_NOT_IMPLEMENTED(reduce == "sum" || reduce == "mean", "the NPU has no kernel for reduce=", reduce);
    const c10::OptionalDeviceGuard guard(x.device());
    const int64_t heads = x.size(1), columns = x.size(2);
    const at::Tensor none = at::empty({0}, x.options());
    if (chunks[3].numel() == 0 || x.numel() == 0) {
        return {at::zeros({numRows, heads, columns}, x.options()), none};
    }
    CheckHeads(x, weight);
    const auto tables = CubeTablesOf(chunks, numRows, heads, columns, slices, chunkRanges);
    const bool mean = reduce == "mean";
    const auto [forRows, forWeights] = ScalingsFor(tables->sumExponent, weight.has_value(), mean);
    const Half rows = HalfRows(x, forRows), values = LaidOut(*tables, weight.value_or(at::Tensor()), forWeights);
    const int64_t wide = rows.values.size(2);
    const at::Tensor y = at::zeros({numRows, heads, wide}, rows.values.options());
    const at::Tensor parts = at::empty({std::max<int64_t>(tables->numParts, 1), heads * wide},
                                       x.options().dtype(at::kFloat));
    const at::Tensor workspace = at::empty({tables->workspaceBytes}, x.options().dtype(at::kByte));
    Launch("aggregate_cube", aclrtlaunch_aggregate_cube, tables->numBlocks, rows.values, tables->plan,
           tables->rowBlocks, tables->tiles, tables->columns, tables->positions, values.values, tables->runs, y, parts,
           workspace, tables->tiling);
    if (tables->numSplits > 0) {
        Launch("combine_parts", aclrtlaunch_combine_parts, std::min(2 * tables->numBlocks, tables->numSplits), parts,
               tables->splits, y, tables->combineTiling);
    }
    const at::Tensor divisor = mean ? tables->degrees : at::Tensor();
    return {Result(y, columns, rows.scale, values.scale, divisor, x.scalar_type()), none};
}

std::tuple<at::Tensor, at::Tensor> AggregateVector(at::TensorList chunks, int64_t numRows, const at::Tensor& x,
                                                   const std::optional<at::Tensor>& weight, std::string_view reduce,
                                                   at::IntArrayRef slices, at::IntArrayRef chunkRanges)
{
    TORCH_CHECK_NOT_IMPLEMENTED(reduce == "sum" || reduce == "mean", "the NPU has no kernel for reduce=", reduce);
    const c10::OptionalDeviceGuard guard(x.device());
    const int64_t heads = x.size(1), columns = x.size(2);
    const at::Tensor none = at::empty({0}, x.options());
    if (chunks[3].numel() == 0 || x.numel() == 0) {
        return {at::zeros({numRows, heads, columns}, x.options()), none};
    }
    const auto tables = VectorTablesOf(chunks, numRows, heads, columns, slices, chunkRanges);
    const bool mean = reduce == "mean", weighted = weight.has_value();
    const auto [forRows, forWeights] = ScalingsFor(tables->sumExponent, weighted, mean);
    const Half rows = HalfRows(x, forRows);
    const Half values = weighted ? FloatValues(*weight, forWeights)
                                 : Half{at::zeros({1}, x.options().dtype(at::kFloat)), {}};
    const at::Tensor y = at::zeros({numRows, heads, rows.values.size(2)}, rows.values.options());
    Launch("aggregate_vector", aclrtlaunch_aggregate_vector, tables->numBlocks, rows.values, tables->vertices,
           tables->columns, values.values, tables->plan, y, weighted ? tables->weighted : tables->unweighted);
    const at::Tensor divisor = mean ? tables->degrees : at::Tensor();
    return {Result(y, columns, rows.scale, values.scale, divisor, x.scalar_type()), none};
}

}  // namespace lightning_gnn
