// out[vertex, h] = sum over the entries of a vertex of values[edge of the entry, h], fp32. With the transposed chunks
// and their edge ids this is the gradient of the source scores.
//
// Launch: members vector-core blocks. No workspace. out must hold zeros for vertices without entries.
#include "head_rows.h"
#include "vertex_range.h"

using namespace AscendC;
using namespace lightning_gnn;

class EdgeSum {
public:
    __aicore__ inline EdgeSum() {}

    __aicore__ inline void Init(GM_ADDR values, GM_ADDR vertices, GM_ADDR edges, GM_ADDR plan, GM_ADDR out,
                                const RowsTiling& t)
    {
        tiling = t;
        valuesGm.SetGlobalBuffer((__gm__ float*)values);
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        edgesGm.SetGlobalBuffer((__gm__ int32_t*)edges);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        outGm.SetGlobalBuffer((__gm__ float*)out);
        const uint32_t floats = tiling.batch * UpTo(Least(tiling.heads, HEAD_BLOCK), BLOCK_FLOATS);
        pipe.InitBuffer(edgeQueue, BUFFER_NUM, UpTo(tiling.batch * sizeof(int32_t), 32));
        pipe.InitBuffer(valueQueue, BUFFER_NUM, floats * sizeof(float));
        pipe.InitBuffer(sumQueue, BUFFER_NUM, HEAD_BLOCK * sizeof(float));
    }

    __aicore__ inline void Process()
    {
        const VertexRange range = RangeOfBlock(planGm, tiling);
        for (uint32_t head = 0; head < tiling.heads; head += HEAD_BLOCK) {
            rows.Set(head, tiling.heads);
            for (uint32_t i = range.begin; i < range.end; ++i) {
                Vertex(verticesGm.GetValue(i * VERTEX_FIELDS), verticesGm.GetValue(i * VERTEX_FIELDS + 1),
                       verticesGm.GetValue(i * VERTEX_FIELDS + 2));
            }
        }
    }

private:
    __aicore__ inline void Vertex(uint32_t vertex, uint32_t begin, uint32_t end)
    {
        const int32_t lanes = static_cast<int32_t>(rows.lanes);
        LocalTensor<float> sum = sumQueue.AllocTensor<float>();
        // Sums of a vertex stay in UB over its batches, and leave it once.
        Duplicate(sum, 0.0f, lanes);
        for (uint32_t e = begin; e < end; e += tiling.batch) {
            const uint32_t n = Least(end - e, tiling.batch);
            LocalTensor<float> values = Gather(e, n);
            // Folding spoils the gathered rows, which nobody needs again.
            PipeBarrier<PIPE_V>();
            rows.FoldSum(values, n);
            Add(sum, sum, values, lanes);
            valueQueue.FreeTensor(values);
        }
        sumQueue.EnQue(sum);
        sum = sumQueue.DeQue<float>();
        rows.StoreRows(outGm, sum, vertex, 1);
        sumQueue.FreeTensor(sum);
    }

    __aicore__ inline LocalTensor<float> Gather(uint32_t first, uint32_t n)
    {
        LocalTensor<int32_t> edge = edgeQueue.AllocTensor<int32_t>();
        DataCopyPad(edge, edgesGm[first], DataCopyExtParams(1, n * sizeof(int32_t), 0, 0, 0),
                    DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        edgeQueue.EnQue(edge);
        edge = edgeQueue.DeQue<int32_t>();
        Sync<HardEvent::MTE2_S>();
        LocalTensor<float> values = valueQueue.AllocTensor<float>();
        // Entries of a transposed row have their values anywhere: one copy for each, all heads together.
        for (uint32_t i = 0; i < n; ++i) {
            rows.CopyRow(values[i * rows.lanes], valuesGm, edge.GetValue(i));
        }
        Sync<HardEvent::S_MTE2>();
        edgeQueue.FreeTensor(edge);
        valueQueue.EnQue(values);
        return valueQueue.DeQue<float>();
    }

    TPipe pipe;
    HeadRows rows;
    TQue<TPosition::VECIN, 1> edgeQueue, valueQueue;
    TQue<TPosition::VECOUT, 1> sumQueue;
    GlobalTensor<float> valuesGm, outGm;
    GlobalTensor<int32_t> verticesGm, edgesGm, planGm;
    RowsTiling tiling;
};

extern "C" __global__ __aicore__ void edge_sum(GM_ADDR values, GM_ADDR vertices, GM_ADDR edges, GM_ADDR plan,
                                               GM_ADDR out, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    EdgeSum op;
    op.Init(values, vertices, edges, plan, out, tiling);
    op.Process();
}
