// y[v, slice] = max over the in-edges of v of weight * x[column, slice], in float32 as it is, and how many of them attain
// it, which backward shares the gradient by. NaN is the largest of all, and counted as such. Rows come in batches of
// entries (entry_batches.h); those of a vertex are folded upon each other, log2 of their number instructions.
//
// note: int32 [8], the first not 0 where features or weights are not finite: only then NaN is looked for.
// Launch: groups * members vector-core blocks. No workspace. Vertices that are listed without entries get 0 and 0.
#include "entry_batches.h"

using namespace AscendC;
using namespace lightning_gnn;

class AggregateMax {
public:
    __aicore__ inline AggregateMax() {}

    __aicore__ inline void Init(GM_ADDR x, GM_ADDR vertices, GM_ADDR columns, GM_ADDR values, GM_ADDR plan,
                                GM_ADDR note, GM_ADDR y, GM_ADDR ties, const RowsTiling& t)
    {
        tiling = t;
        xGm.SetGlobalBuffer((__gm__ float*)x);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        noteGm.SetGlobalBuffer((__gm__ int32_t*)note);
        yGm.SetGlobalBuffer((__gm__ float*)y);
        tiesGm.SetGlobalBuffer((__gm__ float*)ties);
        strange = noteGm.GetValue(0) != 0;
        batches.Init(pipe, vertices, columns, values, tiling);
        room = UpTo(tiling.panelColumns, FLOAT_LANES);
        const uint32_t floats = tiling.batch * room;
        pipe.InitBuffer(rowQueue, BUFFER_NUM, (floats + batches.WeightRoom()) * sizeof(float));
        pipe.InitBuffer(outQueue, BUFFER_NUM, 3 * room * sizeof(float));
        pipe.InitBuffer(topBuffer, (tiling.batch + 1) / 2 * room * sizeof(float));
        pipe.InitBuffer(levelBuffer, floats * sizeof(float));
        pipe.InitBuffer(onesBuffer, floats * sizeof(float));
        pipe.InitBuffer(nextBuffer, room * sizeof(float));
        pipe.InitBuffer(maskBuffer, floats / 8);
        pipe.InitBuffer(otherBuffer, UpTo(room / 8, 32));
        ClearBuffers(rowQueue, floats);
        Duplicate(onesBuffer.Get<float>(), 1.0f, static_cast<int32_t>(floats));
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
            Duplicate(out, 0.0f, static_cast<int32_t>(3 * room));
            Store(vertex);
        }
        fresh = true;
    }

    __aicore__ inline void Load(uint32_t at)
    {
        LocalTensor<float> rows = rowQueue.AllocTensor<float>();
        const LocalTensor<int32_t> list = batches.Open(at);
        const uint32_t n = batches.Count(at);
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t source = static_cast<uint32_t>(list.GetValue(i));
            DataCopy(rows[i * lanes], xGm[static_cast<uint64_t>(source) * tiling.ldx + column], width);
        }
        if (tiling.weighted != 0) {
            batches.CopyWeights(rows[tiling.batch * room], head, at);
        }
        batches.Close();
        rowQueue.EnQue(rows);
    }

    __aicore__ inline void Reduce(uint32_t first, uint32_t n)
    {
        LocalTensor<float> rows = rowQueue.DeQue<float>();
        if (tiling.weighted != 0) {
            batches.SpreadWeights(rows[tiling.batch * room], n);
            batches.Multiply(rows, rows, false, 0, n, lanes);
        }
        for (uint32_t at = 0; at < n;) {
            const uint32_t end = Least(n, cursor.end - first);
            if (fresh) {
                out = outQueue.AllocTensor<float>();
            }
            Segment(rows[at * lanes], end - at);
            at = end;
            if (cursor.end == first + at) {
                if (strange) {
                    PutNan();
                }
                Store(cursor.vertex);
                Go(cursor.vertex + 1);
            }
        }
        rowQueue.FreeTensor(rows);
    }

    // n rows of one vertex, compared with each other and with what was before.
    __aicore__ inline void Segment(const LocalTensor<float>& rows, uint32_t n)
    {
        LocalTensor<float> top = topBuffer.Get<float>(), level = levelBuffer.Get<float>();
        LocalTensor<float> ties = onesBuffer.Get<float>();
        LocalTensor<uint8_t> mask = maskBuffer.Get<uint8_t>();
        PipeBarrier<PIPE_V>();  // rows may have just been multiplied
        if (strange) {
            CountNumbers(rows, n);
        }
        // The last half of the rows onto the first, until one is left.
        uint32_t count = n - n / 2;
        Max(top, rows, rows[(n - count) * lanes], static_cast<int32_t>(count * lanes));
        PipeBarrier<PIPE_V>();
        while (count > 1) {
            const uint32_t half = count / 2;
            count -= half;
            Max(top, top, top[count * lanes], static_cast<int32_t>(half * lanes));
            PipeBarrier<PIPE_V>();
        }
        if (n > 1) {
            SpreadRow(level, top, n, lanes);
            PipeBarrier<PIPE_V>();
            Compare(mask, rows, level, CMPMODE::EQ, n * lanes);
            PipeBarrier<PIPE_V>();
            Select(level, mask, ties, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, n * lanes);
            PipeBarrier<PIPE_V>();
            FoldSum(level, n, lanes);
            ties = level;
        }
        Merge(top, ties);
        fresh = false;
    }

    __aicore__ inline void Merge(const LocalTensor<float>& top, const LocalTensor<float>& ties)
    {
        const int32_t count = static_cast<int32_t>(lanes);
        LocalTensor<float> known = out[room];
        if (fresh) {
            Max(out, top, top, count);
            Adds(known, ties, 0.0f, count);
            return;
        }
        LocalTensor<float> next = nextBuffer.Get<float>(), level = levelBuffer.Get<float>();
        LocalTensor<uint8_t> before = maskBuffer.Get<uint8_t>(), now = otherBuffer.Get<uint8_t>();
        Max(next, out, top, count);
        PipeBarrier<PIPE_V>();
        Compare(before, out, next, CMPMODE::EQ, lanes);
        Compare(now, top, next, CMPMODE::EQ, lanes);
        PipeBarrier<PIPE_V>();
        Select(known, before, known, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);
        Select(level, now, ties, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);
        PipeBarrier<PIPE_V>();
        Add(known, known, level, count);
        Max(out, next, next, count);
    }

    // How many entries are not NaN.
    __aicore__ inline void CountNumbers(const LocalTensor<float>& rows, uint32_t n)
    {
        LocalTensor<float> level = levelBuffer.Get<float>(), numbers = out[2 * room];
        LocalTensor<uint8_t> mask = maskBuffer.Get<uint8_t>();
        Compare(mask, rows, rows, CMPMODE::EQ, n * lanes);  // false for NaN
        PipeBarrier<PIPE_V>();
        Select(level, mask, onesBuffer.Get<float>(), 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, n * lanes);
        PipeBarrier<PIPE_V>();
        FoldSum(level, n, lanes);
        if (fresh) {
            Adds(numbers, level, 0.0f, static_cast<int32_t>(lanes));
        } else {
            Add(numbers, numbers, level, static_cast<int32_t>(lanes));
        }
        PipeBarrier<PIPE_V>();
    }

    // Where an entry is NaN, what Max makes of it is the chip's affair: the result is NaN, attained by those that are.
    __aicore__ inline void PutNan()
    {
        const int32_t count = static_cast<int32_t>(lanes);
        const float nan = FloatOf(0x7FC00000U);
        LocalTensor<float> known = out[room], numbers = out[2 * room];
        LocalTensor<uint8_t> mask = maskBuffer.Get<uint8_t>();
        PipeBarrier<PIPE_V>();
        Muls(numbers, numbers, -1.0f, count);
        PipeBarrier<PIPE_V>();
        Adds(numbers, numbers, static_cast<float>(cursor.end - cursor.begin), count);
        PipeBarrier<PIPE_V>();
        CompareScalar(mask, numbers, 0.0f, CMPMODE::EQ, lanes);
        PipeBarrier<PIPE_V>();
        Select(out, mask, out, nan, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);
        Select(known, mask, known, numbers, SELMODE::VSEL_TENSOR_TENSOR_MODE, lanes);
    }

    __aicore__ inline void Store(uint32_t vertex)
    {
        outQueue.EnQue(out);
        out = outQueue.DeQue<float>();
        const uint64_t at = static_cast<uint64_t>(batches.Name(vertex)) * tiling.ldy + column;
        DataCopy(yGm[at], out, width);
        DataCopy(tiesGm[at], out[room], width);
        outQueue.FreeTensor(out);
    }

    TPipe pipe;
    EntryBatches batches;
    TQue<TPosition::VECIN, BUFFER_NUM> rowQueue;  // depth 2: two EnQue without a DeQue between them
    TQue<TPosition::VECOUT, 1> outQueue;          // maxima, how many attain them, how many entries are not NaN
    TBuf<TPosition::VECCALC> topBuffer, levelBuffer, onesBuffer, nextBuffer, maskBuffer, otherBuffer;
    GlobalTensor<float> xGm, yGm, tiesGm;
    GlobalTensor<int32_t> planGm, noteGm;
    LocalTensor<float> out;
    RowsTiling tiling;
    VertexCursor cursor;
    uint32_t column, width, head, lanes, room;
    bool strange, fresh;
};

extern "C" __global__ __aicore__ void aggregate_max(GM_ADDR x, GM_ADDR vertices, GM_ADDR columns, GM_ADDR values,
                                                    GM_ADDR plan, GM_ADDR note, GM_ADDR y, GM_ADDR ties,
                                                    GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    AggregateMax op;
    op.Init(x, vertices, columns, values, plan, note, y, ties, tiling);
    op.Process();
}
