#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "aclrtlaunch_edge_products.h"
#include "aclrtlaunch_edge_softmax.h"
#include "aclrtlaunch_edge_softmax_backward.h"
#include "aclrtlaunch_edge_sum.h"
#include "device_tables.h"
#include "launch.h"
#include "numbers.h"
#include "ops.h"

namespace lightning_gnn {

namespace {

constexpr int PRODUCT_EXPONENT = 14;  // products are float32: both factors may use the range of float16

}  // namespace

at::Tensor EdgeProducts(at::TensorList chunks, const at::Tensor& rowSide, const at::Tensor& columnSide,
                        at::IntArrayRef chunkRanges)
{
    const c10::OptionalDeviceGuard guard(rowSide.device());
    const int64_t heads = rowSide.size(1), columns = rowSide.size(2), numEdges = chunks[3].numel();
    const at::Tensor out = at::zeros({numEdges, heads, 1}, rowSide.options().dtype(at::kFloat));
    if (numEdges == 0 || columns == 0) {
        return out.squeeze(2).to(columnSide.scalar_type());
    }
    const auto tables = RowTablesOf(chunks, chunkRanges);
    const Half left = HalfRows(rowSide, {PRODUCT_EXPONENT, false});
    const Half right = HalfRows(columnSide, {PRODUCT_EXPONENT, false});
    Launch("edge_products", aclrtlaunch_edge_products, tables->members, left.values, right.values, tables->vertices,
           tables->columns, tables->plan, out, ProductsTilingOf(chunks, *tables, heads, columns));
    return Result(out, 1, left.scale, right.scale, {}, columnSide.scalar_type()).squeeze(2);
}

at::Tensor EdgeSoftmax(at::TensorList chunks, const at::Tensor& rowScores, const at::Tensor& columnScores,
                       double negativeSlope, at::IntArrayRef chunkRanges)
{
    const c10::OptionalDeviceGuard guard(rowScores.device());
    const int64_t heads = rowScores.size(1), numEdges = chunks[3].numel();
    const at::Tensor out = at::empty({numEdges, heads}, rowScores.options().dtype(at::kFloat));
    if (out.numel() > 0) {
        const auto tables = RowTablesOf(chunks, chunkRanges);
        Launch("edge_softmax", aclrtlaunch_edge_softmax, tables->members, Plain(columnScores, at::kFloat),
               Plain(rowScores, at::kFloat), tables->vertices, tables->columns, tables->plan, out,
               SoftmaxTilingOf(chunks, *tables, heads, negativeSlope));
    }
    return out.to(rowScores.scalar_type());
}

at::Tensor EdgeSoftmaxBackward(at::TensorList chunks, const at::Tensor& rowScores, const at::Tensor& columnScores,
                               double negativeSlope, const at::Tensor& attention, const at::Tensor& grad,
                               at::IntArrayRef chunkRanges)
{
    const c10::OptionalDeviceGuard guard(rowScores.device());
    const auto options = rowScores.options().dtype(at::kFloat);
    const at::Tensor out = at::empty(attention.sizes(), options);
    if (out.numel() > 0) {
        const auto tables = RowTablesOf(chunks, chunkRanges);
        // The kernel also adds the gradient up by row, which here is left to EdgeSums: it is wanted less often.
        const at::Tensor rowGrad = at::empty(rowScores.sizes(), options);
        Launch("edge_softmax_backward", aclrtlaunch_edge_softmax_backward, tables->members,
               Plain(columnScores, at::kFloat), Plain(rowScores, at::kFloat), tables->vertices, tables->columns,
               tables->plan, Plain(attention, at::kFloat), Plain(grad, at::kFloat), out, rowGrad,
               SoftmaxTilingOf(chunks, *tables, rowScores.size(1), negativeSlope));
    }
    return out.to(rowScores.scalar_type());
}

at::Tensor EdgeSums(at::TensorList chunks, int64_t numRows, const std::optional<at::Tensor>& edgeIds,
                    const at::Tensor& values, at::IntArrayRef chunkRanges)
{
    const c10::OptionalDeviceGuard guard(values.device());
    const int64_t heads = values.size(1);
    const at::Tensor out = at::zeros({numRows, heads}, values.options().dtype(at::kFloat));
    if (values.numel() > 0) {
        const auto tables = RowTablesOf(chunks, chunkRanges);
        const auto options = values.options().dtype(at::kInt);
        const at::Tensor edges = edgeIds.has_value() ? Plain(*edgeIds, at::kInt) : at::arange(values.size(0), options);
        Launch("edge_sum", aclrtlaunch_edge_sum, tables->members, Plain(values, at::kFloat), tables->vertices, edges,
               tables->plan, out, SoftmaxTilingOf(chunks, *tables, heads, 0.0));
    }
    return out.to(values.scalar_type());
}

}  // namespace lightning_gnn
