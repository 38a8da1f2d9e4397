// Weights in the order of a kernel, and as dense tiles: made once of weights that come again unchanged.
#ifndef LIGHTNING_GNN_LAID_OUT_H
#define LIGHTNING_GNN_LAID_OUT_H

#include "device_tables.h"
#include "numbers.h"

namespace lightning_gnn {

struct Tiles {
    at::Tensor dense;  // float16 [heads, denseHalves], 0 where a value is not finite
    at::Tensor note;   // int32 [8], not 0 where there was one
};

// Weights are known by their storage, version and view, and by the stream: what one stream makes another must not read
// without waiting. weight undefined: ones.
Half LaidOut(const CubeOnDevice& tables, const at::Tensor& weight, Scaling scaling);
Tiles LaidOutTiles(const GatheredOnDevice& tables, const at::Tensor& weight, Scaling scaling, const Half& values);

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_LAID_OUT_H
