// The vertex-centric baseline (paper, section 3): y[v, slice] = sum over the in-edges of v of weight * x[column, slice]
// on the vector cores, one row of x per copy (row_sums.h); fp16 in, fp32 accumulation, fp16 out. One group of columns is
// the baseline (data parallel); with more groups it follows the plan as aggregate_cube does.
//
// Launch: groups * members vector-core blocks. No workspace. y must hold zeros in rows without entries.
#include "row_sums.h"
#include "vertex_range.h"

using namespace AscendC;
using namespace lightning_gnn;

class AggregateVector {
public:
    __aicore__ inline AggregateVector() {}

    __aicore__ inline void Init(GM_ADDR x, GM_ADDR vertices, GM_ADDR columns, GM_ADDR values, GM_ADDR plan, GM_ADDR y,
                                const RowsTiling& t)
    {
        tiling = t;
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        yGm.SetGlobalBuffer((__gm__ half*)y);
        sums.Init(pipe, x, columns, values, tiling);
    }

    __aicore__ inline void Process()
    {
        range = RangeOfBlock(planGm, tiling);
        if (range.begin == range.end) {
            return;
        }
        const uint32_t begin = verticesGm.GetValue(range.begin * VERTEX_FIELDS + 1);
        const uint32_t end = verticesGm.GetValue((range.end - 1) * VERTEX_FIELDS + 2);
        for (uint32_t panel = range.panelBegin; panel < range.panelEnd; ++panel) {
            const uint32_t at = tiling.panelOffset + panel * PANEL_FIELDS;
            column = planGm.GetValue(at);
            const uint32_t width = planGm.GetValue(at + 1), head = planGm.GetValue(at + 2);
            sums.Begin(column, width, static_cast<uint64_t>(head) * tiling.valueStride);
            next = range.begin;
            Next();
            sums.Add(*this, begin, end);
            Close();
        }
    }

    __aicore__ inline uint32_t End() const { return vertexEnd; }

    __aicore__ inline void Close()
    {
        sums.Send(yGm[static_cast<uint64_t>(vertex) * tiling.ldy + column]);
        if (next < range.end) {
            Next();
        }
    }

private:
    __aicore__ inline void Next()
    {
        vertex = verticesGm.GetValue(next * VERTEX_FIELDS);
        vertexEnd = verticesGm.GetValue(next * VERTEX_FIELDS + 2);
        ++next;
    }

    TPipe pipe;
    RowSums sums;
    GlobalTensor<half> yGm;
    GlobalTensor<int32_t> verticesGm, planGm;
    RowsTiling tiling;
    VertexRange range;
    uint32_t column, next, vertex, vertexEnd;  // the next vertex is one after the one that is summed
};

extern "C" __global__ __aicore__ void aggregate_vector(GM_ADDR x, GM_ADDR vertices, GM_ADDR columns, GM_ADDR values,
                                                       GM_ADDR plan, GM_ADDR y, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    AggregateVector op;
    op.Init(x, vertices, columns, values, plan, y, tiling);
    op.Process();
}
