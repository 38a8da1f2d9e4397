// The vertex-centric baseline (paper, section 3): y[v, slice] = sum over the in-edges of v of weight * x[column, slice]
// on the vector cores, one row of x per copy; fp16 in, fp32 accumulation, fp16 out. One group of columns is the
// baseline (data parallel); with more groups it follows the plan as aggregate_cube does.
//
// Launch: groups * members vector-core blocks. No workspace. y must hold zeros in rows without entries.
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
        xGm.SetGlobalBuffer((__gm__ half*)x);
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        valuesGm.SetGlobalBuffer((__gm__ float*)values);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        yGm.SetGlobalBuffer((__gm__ half*)y);
        // Columns and weights of a batch in one buffer; rows and results have two, one in use and one on its way.
        pipe.InitBuffer(listQueue, BUFFER_NUM, tiling.batch * 2 * sizeof(int32_t));
        pipe.InitBuffer(rowQueue, BUFFER_NUM, tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(outQueue, BUFFER_NUM, tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(sumBuffer, tiling.panelColumns * sizeof(float));
        pipe.InitBuffer(rowBuffer, tiling.panelColumns * sizeof(float));
    }

    __aicore__ inline void Process()
    {
        const VertexRange range = RangeOfBlock(planGm, tiling);
        for (uint32_t panel = range.panelBegin; panel < range.panelEnd; ++panel) {
            const uint32_t at = tiling.panelOffset + panel * PANEL_FIELDS;
            column = planGm.GetValue(at);
            width = planGm.GetValue(at + 1);
            head = planGm.GetValue(at + 2);
            for (uint32_t i = range.begin; i < range.end; ++i) {
                Vertex(i);
            }
        }
    }

private:
    __aicore__ inline void Vertex(uint32_t i)
    {
        const uint32_t vertex = verticesGm.GetValue(i * VERTEX_FIELDS);
        const uint32_t begin = verticesGm.GetValue(i * VERTEX_FIELDS + 1);
        const uint32_t end = verticesGm.GetValue(i * VERTEX_FIELDS + 2);
        // The last vertex's Cast still reads the sums: the barrier lets it end before they are cleared.
        LocalTensor<float> sum = sumBuffer.Get<float>();
        PipeBarrier<PIPE_V>();
        Duplicate(sum, 0.0f, static_cast<int32_t>(width));
        for (uint32_t e = begin; e < end; e += tiling.batch) {
            Entries(e, Least(end - e, tiling.batch), sum);
        }
        // Rounded once, at the end. Nobody else writes this row and slice.
        LocalTensor<half> out = outQueue.AllocTensor<half>();
        PipeBarrier<PIPE_V>();
        Cast(out, sum, RoundMode::CAST_RINT, width);
        outQueue.EnQue(out);
        out = outQueue.DeQue<half>();
        DataCopy(yGm[static_cast<uint64_t>(vertex) * tiling.ldy + column], out, width);
        outQueue.FreeTensor(out);
    }

    __aicore__ inline void Entries(uint32_t first, uint32_t n, const LocalTensor<float>& sum)
    {
        LocalTensor<int32_t> list = listQueue.AllocTensor<int32_t>();
        const DataCopyExtParams words(1, n * sizeof(int32_t), 0, 0, 0);  // lists of a vertex start anywhere
        DataCopyPad(list, columnsGm[first], words, DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        if (tiling.weighted != 0) {
            DataCopyPad(list[tiling.batch].template ReinterpretCast<float>(),
                        valuesGm[static_cast<uint64_t>(head) * tiling.valueStride + first], words,
                        DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
        }
        listQueue.EnQue(list);
        list = listQueue.DeQue<int32_t>();
        Sync<HardEvent::MTE2_S>();
        LocalTensor<float> weights = list[tiling.batch].template ReinterpretCast<float>();
        LocalTensor<float> wide = rowBuffer.Get<float>();
        const int32_t count = static_cast<int32_t>(width);
        CopyRow(list.GetValue(0));
        for (uint32_t e = 0; e < n; ++e) {
            if (e + 1 < n) {
                CopyRow(list.GetValue(e + 1));  // the next row is on its way while this one is added
            }
            LocalTensor<half> row = rowQueue.DeQue<half>();
            PipeBarrier<PIPE_V>();
            // To float32 first: thousands of halves would lose the small ones.
            Cast(wide, row, RoundMode::CAST_NONE, width);
            rowQueue.FreeTensor(row);
            PipeBarrier<PIPE_V>();
            if (tiling.weighted != 0) {
                Axpy(sum, wide, weights.GetValue(e), count);
            } else {
                Add(sum, sum, wide, count);
            }
        }
        // The scalar unit has read its list: MTE2 may fill the buffer again.
        Sync<HardEvent::S_MTE2>();
        listQueue.FreeTensor(list);
    }

    __aicore__ inline void CopyRow(uint32_t vertex)
    {
        LocalTensor<half> row = rowQueue.AllocTensor<half>();
        DataCopy(row, xGm[static_cast<uint64_t>(vertex) * tiling.ldx + column], width);
        rowQueue.EnQue(row);
    }

    TPipe pipe;
    TQue<TPosition::VECIN, 1> listQueue;
    TQue<TPosition::VECIN, BUFFER_NUM> rowQueue;  // depth 2: two EnQue without a DeQue between them
    TQue<TPosition::VECOUT, 1> outQueue;
    TBuf<TPosition::VECCALC> sumBuffer, rowBuffer;
    GlobalTensor<half> xGm, yGm;
    GlobalTensor<float> valuesGm;
    GlobalTensor<int32_t> verticesGm, columnsGm, planGm;
    RowsTiling tiling;
    uint32_t column, width, head;
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
