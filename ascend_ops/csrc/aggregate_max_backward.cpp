// The gradient of a maximum along the transpose: out[v, slice] = sum over the out-edges of v of weight * shares[target,
// slice] where weight * x[v, slice] is the target's maximum, in float32. shares are the maxima's gradients, divided by
// how many entries attain them. NaN attains NaN. Rows come in batches of entries (entry_batches.h).
//
// pairs: float [targets, 2, ldy], maxima and shares side by side, so that one copy brings both.
// note: int32 [8], the first not 0 where a maximum is NaN.
// Launch: groups * members vector-core blocks. No workspace. Vertices that are listed without entries get 0.
#include "entry_batches.h"

using namespace AscendC;
using namespace lightning_gnn;

class AggregateMaxBackward {
public:
    __aicore__ inline AggregateMaxBackward() {}

    __aicore__ inline void Init(GM_ADDR pairs, GM_ADDR x, GM_ADDR vertices, GM_ADDR columns, GM_ADDR values,
                                GM_ADDR plan, GM_ADDR note, GM_ADDR y, const RowsTiling& t)
    {
        tiling = t;
        pairsGm.SetGlobalBuffer((__gm__ float*)pairs);
        xGm.SetGlobalBuffer((__gm__ float*)x);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        noteGm.SetGlobalBuffer((__gm__ int32_t*)note);
        yGm.SetGlobalBuffer((__gm__ float*)y);
        strange = noteGm.GetValue(0) != 0;
        batches.Init(pipe, vertices, columns, values, tiling);
        const uint32_t room = UpTo(tiling.panelColumns, FLOAT_LANES);
        floats = tiling.batch * room;
        // Maxima, shares, and the vertices' own rows; then weights.
        pipe.InitBuffer(rowQueue, BUFFER_NUM, (3 * floats + batches.WeightRoom()) * sizeof(float));
        pipe.InitBuffer(outQueue, BUFFER_NUM, room * sizeof(float));
        pipe.InitBuffer(levelBuffer, floats * sizeof(float));
        maskBytes = UpTo(floats / 8, 32);
        pipe.InitBuffer(maskBuffer, 2 * maskBytes);
        ClearBuffers(rowQueue, 3 * floats);
    }

    __aicore__ inline void Process()
    {
        const VertexRange range = RangeOfBlock(planGm, tiling);
        for (uint32_t panel = range.panelBegin; panel < range.panelEnd; ++panel) {
            const uint32_t at = tiling.panelOffset + panel * PANEL_FIELDS;
            column = planGm.GetValue(at);
            width = planGm.GetValue(at + 1);
            head = planGm.GetValue(at + 2);
            lanes = UpTo(width, FLOAT_LANES);
            Panel(range);
        }
    }

private:
    __aicore__ inline void Panel(const VertexRange& range)
    {
        batches.Begin(range);
        ahead = batches.Find(range.begin);
        Go(range.begin);
        if (batches.First() < batches.Last()) {
            Load(batches.First());
        }
        for (uint32_t at = batches.First(); at < batches.Last();) {
            const uint32_t n = batches.Count(at);
            if (at + n < batches.Last()) {
                Load(at + n);  // the next rows are on their way while these are compared
            }
            Reduce(at, n);
            at += n;
        }
    }

    // On to the first vertex from `vertex` on that has entries; those before it have none.
    __aicore__ inline void Go(uint32_t vertex)
    {
        cursor = batches.Find(vertex);
        for (; vertex < cursor.vertex; ++vertex) {
            out = outQueue.AllocTensor<float>();
            Duplicate(out, 0.0f, static_cast<int32_t>(lanes));
            Store(vertex);
        }
        fresh = true;
    }

    __aicore__ inline void Load(uint32_t first)
    {
        LocalTensor<float> rows = rowQueue.AllocTensor<float>();
        const LocalTensor<int32_t> list = batches.Open(first);
        const uint32_t n = batches.Count(first);
        const DataCopyParams both(2, Narrow<uint16_t>(width / FLOAT_BLOCK),
                                  Narrow<uint16_t>((tiling.ldy - width) / FLOAT_BLOCK),
                                  Narrow<uint16_t>((floats - width) / FLOAT_BLOCK));
        uint32_t own = 2 * floats;
        for (uint32_t at = 0; at < n;) {
            const uint32_t end = Least(n, ahead.end - first);
            DataCopy(rows[own], xGm[static_cast<uint64_t>(batches.Name(ahead.vertex)) * tiling.ldx + column], width);
            own += lanes;
            for (; at < end; ++at) {
                const uint64_t target = static_cast<uint32_t>(list.GetValue(at));
                DataCopy(rows[at * lanes], pairsGm[target * 2 * tiling.ldy + column], both);
            }
            if (ahead.end == first + at) {
                ahead = batches.Find(ahead.vertex + 1);
            }
        }
        if (tiling.weighted != 0) {
            batches.CopyWeights(rows[3 * floats], head, first);
        }
        batches.Close();
        rowQueue.EnQue(rows);
    }

    __aicore__ inline void Reduce(uint32_t first, uint32_t n)
    {
        LocalTensor<float> rows = rowQueue.DeQue<float>();
        if (tiling.weighted != 0) {
            batches.SpreadWeights(rows[3 * floats], n);
            batches.Multiply(rows[floats], rows[floats], false, 0, n, lanes);
        }
        uint32_t own = 2 * floats;
        for (uint32_t at = 0; at < n; own += lanes) {
            const uint32_t end = Least(n, cursor.end - first);
            if (fresh) {
                out = outQueue.AllocTensor<float>();
            }
            Segment(rows[own], rows[at * lanes], rows[floats + at * lanes], at, end - at);
            at = end;
            if (cursor.end == first + at) {
                Store(cursor.vertex);
                Go(cursor.vertex + 1);
            }
        }
        rowQueue.FreeTensor(rows);
    }

    // n entries of one vertex, the batch's from `at` on.
    __aicore__ inline void Segment(const LocalTensor<float>& own, const LocalTensor<float>& best,
                                   const LocalTensor<float>& shares, uint32_t at, uint32_t n)
    {
        LocalTensor<float> message = levelBuffer.Get<float>();
        LocalTensor<uint8_t> mask = maskBuffer.Get<uint8_t>();
        if (tiling.weighted != 0) {
            batches.Multiply(message, own, true, at, n, lanes);
        } else {
            SpreadRow(message, own, n, lanes);
        }
        PipeBarrier<PIPE_V>();
        Compare(mask, message, best, CMPMODE::EQ, n * lanes);
        PipeBarrier<PIPE_V>();
        if (strange) {
            AddNan(message, n);
        }
        Select(shares, mask, shares, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, n * lanes);
        PipeBarrier<PIPE_V>();
        FoldSum(shares, n, lanes);
        const int32_t count = static_cast<int32_t>(lanes);
        if (fresh) {
            Adds(out, shares, 0.0f, count);
        } else {
            Add(out, out, shares, count);
        }
        fresh = false;
    }

    // Into the mask: where the message is NaN, for then the maximum is.
    __aicore__ inline void AddNan(const LocalTensor<float>& message, uint32_t n)
    {
        LocalTensor<uint8_t> mask = maskBuffer.Get<uint8_t>();
        LocalTensor<uint16_t> met = mask.template ReinterpretCast<uint16_t>();
        Compare(mask[maskBytes], message, message, CMPMODE::NE, n * lanes);
        PipeBarrier<PIPE_V>();
        Or(met, met, mask[maskBytes].template ReinterpretCast<uint16_t>(), static_cast<int32_t>(n * lanes / 16));
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Store(uint32_t vertex)
    {
        outQueue.EnQue(out);
        out = outQueue.DeQue<float>();
        DataCopy(yGm[static_cast<uint64_t>(batches.Name(vertex)) * tiling.ldx + column], out, width);
        outQueue.FreeTensor(out);
    }

    TPipe pipe;
    EntryBatches batches;
    TQue<TPosition::VECIN, BUFFER_NUM> rowQueue;  // depth 2: two EnQue without a DeQue between them
    TQue<TPosition::VECOUT, 1> outQueue;
    TBuf<TPosition::VECCALC> levelBuffer, maskBuffer;
    GlobalTensor<float> pairsGm, xGm, yGm;
    GlobalTensor<int32_t> planGm, noteGm;
    LocalTensor<float> out;
    RowsTiling tiling;
    VertexCursor cursor, ahead;
    uint32_t column, width, head, lanes, floats, maskBytes;
    bool strange, fresh;
};

extern "C" __global__ __aicore__ void aggregate_max_backward(GM_ADDR pairs, GM_ADDR x, GM_ADDR vertices,
                                                             GM_ADDR columns, GM_ADDR values, GM_ADDR plan,
                                                             GM_ADDR note, GM_ADDR y, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    AggregateMaxBackward op;
    op.Init(pairs, x, vertices, columns, values, plan, note, y, tiling);
    op.Process();
}
