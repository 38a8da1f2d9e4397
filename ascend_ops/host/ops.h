// The operators of the namespace lightning_gnn for the NPU; lightning_gnn/ops/aggregate/backends.py has their schemas and
// reference.py their definitions. A maximum has no kernel: lightning_gnn/ops/aggregate/npu.py sends it to
// torch's own operators.
#ifndef LIGHTNING_GNN_OPS_H
#define LIGHTNING_GNN_OPS_H

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace lightning_gnn {

std::tuple<at::Tensor, at::Tensor> AggregateChunks(at::TensorList chunks, int64_t numRows, const at::Tensor& x,
                                                   const std::optional<at::Tensor>& weight, std::string_view reduce,
                                                   at::IntArrayRef slices, at::IntArrayRef chunkRanges);

// The same by the vector cores alone, which a plan may prefer.
std::tuple<at::Tensor, at::Tensor> AggregateVector(at::TensorList chunks, int64_t numRows, const at::Tensor& x,
                                                   const std::optional<at::Tensor>& weight, std::string_view reduce,
                                                   at::IntArrayRef slices, at::IntArrayRef chunkRanges);

at::Tensor EdgeProducts(at::TensorList chunks, const at::Tensor& rowSide, const at::Tensor& columnSide,
                        at::IntArrayRef chunkRanges);

at::Tensor EdgeSoftmax(at::TensorList chunks, const at::Tensor& rowScores, const at::Tensor& columnScores,
                       double negativeSlope, at::IntArrayRef chunkRanges);

at::Tensor EdgeSoftmaxBackward(at::TensorList chunks, const at::Tensor& rowScores, const at::Tensor& columnScores,
                               double negativeSlope, const at::Tensor& attention, const at::Tensor& grad,
                               at::IntArrayRef chunkRanges);

at::Tensor EdgeSums(at::TensorList chunks, int64_t numRows, const std::optional<at::Tensor>& edgeIds,
                    const at::Tensor& values, at::IntArrayRef chunkRanges);

// A kernel of mini-batches on tensors that its caller has made: inputs, outputs and tiling are its parameters.
void LaunchKernel(std::string_view kernel, int64_t blocks, at::TensorList in, at::TensorList out,
                  const at::Tensor& tiling);

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_OPS_H
