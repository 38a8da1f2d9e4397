// Weights in the order of aggregate_cube: made once of weights that come again unchanged.
#ifndef LIGHTNING_GNN_LAID_OUT_H
#define LIGHTNING_GNN_LAID_OUT_H

#include "device_tables.h"
#include "numbers.h"

namespace lightning_gnn {

// Weights are known by their storage, version and view, and by the stream: what one stream makes another must not read
// without waiting. weight undefined: ones.
Half LaidOut(const CubeOnDevice& tables, const at::Tensor& weight, Scaling scaling);

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_LAID_OUT_H
