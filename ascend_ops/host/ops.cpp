// Loaded by ascend_ops/binding.py after lightning_gnn has defined the operators: torch compares these signatures with
// the schemas when it loads this library.
#include "ops.h"

#include <torch/library.h>

TORCH_LIBRARY_IMPL(lightning_gnn, PrivateUse1, m)
{
    m.impl("aggregate_chunks", TORCH_FN(lightning_gnn::AggregateChunks));
    m.impl("aggregate_vector", TORCH_FN(lightning_gnn::AggregateVector));
    m.impl("edge_products", TORCH_FN(lightning_gnn::EdgeProducts));
    m.impl("edge_softmax", TORCH_FN(lightning_gnn::EdgeSoftmax));
    m.impl("edge_softmax_backward", TORCH_FN(lightning_gnn::EdgeSoftmaxBackward));
    m.impl("edge_sums", TORCH_FN(lightning_gnn::EdgeSums));
    m.impl("launch_kernel", TORCH_FN(lightning_gnn::LaunchKernel));
}
