// The vertices and columns of a block in the kernels that go vertex by vertex (RowsTiling).
#ifndef LIGHTNING_GNN_VERTEX_RANGE_H
#define LIGHTNING_GNN_VERTEX_RANGE_H

#include "load_tiling.h"

namespace lightning_gnn {

struct VertexRange {
    uint32_t begin, end;            // places in the list of vertices
    uint32_t panelBegin, panelEnd;
};

__aicore__ inline VertexRange RangeOfBlock(const AscendC::GlobalTensor<int32_t>& planGm, const RowsTiling& tiling)
{
    VertexRange range = {0, 0, 0, 0};
    const uint32_t block = AscendC::GetBlockIdx();
    if (block < tiling.groups * tiling.members) {
        const uint32_t group = block / tiling.members;
        const uint32_t member = block % tiling.members;
        range.begin = planGm.GetValue(tiling.rangeOffset + member);
        range.end = planGm.GetValue(tiling.rangeOffset + member + 1);
        range.panelBegin = planGm.GetValue(group);
        range.panelEnd = planGm.GetValue(group + 1);
    }
    return range;
}

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_VERTEX_RANGE_H
