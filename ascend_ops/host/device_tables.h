// The kernels' tables on the device, made once per direction of a graph and plan and kept as long as the graph.
#ifndef LIGHTNING_GNN_DEVICE_TABLES_H
#define LIGHTNING_GNN_DEVICE_TABLES_H

#include <ATen/core/Tensor.h>

#include <memory>

#include "host_tiling.h"

namespace lightning_gnn {

// aggregate_cube's tables; names as in tiling.h.
struct CubeOnDevice {
    at::Tensor tiling, plan, rowBlocks, tiles, columns, positions, slots, runs, splits, combineTiling;
    at::Tensor ones;     // values where there are no weights: how many edges share the place
    at::Tensor degrees;  // entries of each vertex, at least 1, float32
    int64_t numParts, numBlocks, numSplits, workspaceBytes, valueStride;
    int sumExponent;     // k such that no vertex has more than 2^k entries
};

// aggregate_vector's tables.
struct VectorOnDevice {
    at::Tensor plan, vertices, columns, weighted, unweighted;  // the last two: tilings with and without weights
    at::Tensor degrees;
    int64_t numBlocks;
    int sumExponent;
};

// Tables of the kernels that go vertex by vertex on the vector cores, with one group.
struct RowsOnDevice {
    at::Tensor plan, vertices, columns;
    uint32_t members, rangeOffset;
};

// chunks are the six tensors of lightning_gnn/graph/chunks.py; slices and ranges are the bounds of a HybridPlan.
std::shared_ptr<const CubeOnDevice> CubeTablesOf(at::TensorList chunks, int64_t numRows, int64_t heads,
                                                 int64_t columns, at::IntArrayRef slices, at::IntArrayRef ranges);

std::shared_ptr<const VectorOnDevice> VectorTablesOf(at::TensorList chunks, int64_t numRows, int64_t heads,
                                                     int64_t columns, at::IntArrayRef slices, at::IntArrayRef ranges);

// Two members for each range: a worker of the plan has two vector cores.
std::shared_ptr<const RowsOnDevice> RowTablesOf(at::TensorList chunks, at::IntArrayRef ranges);

// The tiling of edge_softmax, edge_softmax_backward and edge_sum, and that of edge_products.
at::Tensor SoftmaxTilingOf(at::TensorList chunks, const RowsOnDevice& tables, int64_t heads, double slope);
at::Tensor ProductsTilingOf(at::TensorList chunks, const RowsOnDevice& tables, int64_t heads, int64_t columns);

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_DEVICE_TABLES_H
