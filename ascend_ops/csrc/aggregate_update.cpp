// A layer on a mini-batch in one kernel, sum and product side by side:
//   sums[t] = sum over the edges e of row t of value[e] * x[column[e]]      (vector cores, fp32, rounded to fp16 once)
//   y[t]    = sums[t] x b, and for the first ownRows rows + x[t] x own     (cube core, fp16 in, fp32 out)
// A block takes row tiles of 128 in turn. Its two vector cores add up 64 rows each, and raise a flag; the cube core
// multiplies the tile while they are at the next one. So the sums, which the gradient of b wants anyway, are the
// workspace. With the edges by source, x the gradient and transposeB = 0 the same kernel is the gradient of x.
//
// The edges come as they are on the device, in CSR: a mini-batch is used once, so no table is worth making for it.
//
// Storage: b and own lie side by side in one matrix, own ownOffset columns to the right, as [n, ..] where transposeB,
// else as [k, ..]. Columns are filled up to a multiple of 16 with zeros.
//
// Launch: any number of blocks of a cube core and two vector cores. n == 0: no product, only sums.
#include "product_tile.h"

using namespace AscendC;
using namespace lightning_gnn;

constexpr uint16_t FLAG_SUMMED = 0, FLAG_TAKEN = 1;
constexpr uint32_t TILE = 128;
constexpr uint32_t AHEAD = 8;  // tiles that vector cores may be ahead: a flag counts to 15

class SumRows {
public:
    __aicore__ inline SumRows() {}

    __aicore__ inline void Init(TPipe& pipe, GM_ADDR x, GM_ADDR indptr, GM_ADDR columns, GM_ADDR values, GM_ADDR sums,
                                const AggregateUpdateTiling& t)
    {
        tiling = t;
        xGm.SetGlobalBuffer((__gm__ half*)x);
        indptrGm.SetGlobalBuffer((__gm__ int32_t*)indptr);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        valuesGm.SetGlobalBuffer((__gm__ float*)values);
        sumsGm.SetGlobalBuffer((__gm__ half*)sums);
        // As in aggregate_vector: columns and weights of a batch in one buffer; rows and results have two, one in use
        // and one on its way.
        pipe.InitBuffer(listQueue, BUFFER_NUM, tiling.batch * 2 * sizeof(int32_t));
        pipe.InitBuffer(rowQueue, BUFFER_NUM, tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(outQueue, BUFFER_NUM, tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(sumBuffer, tiling.panelColumns * sizeof(float));
        pipe.InitBuffer(rowBuffer, tiling.panelColumns * sizeof(float));
    }

    __aicore__ inline void Rows(uint32_t first, uint32_t last)
    {
        rows = last;
        for (column = 0; first < last && column < tiling.ldx; column += tiling.panelColumns) {
            width = Least(tiling.ldx - column, tiling.panelColumns);
            row = first;
            rowBegin = indptrGm.GetValue(first);
            rowEnd = indptrGm.GetValue(first + 1);
            const uint32_t end = indptrGm.GetValue(last);
            Clear();
            // The rows' edges follow each other, so a list serves many rows, and copies go on over their borders.
            for (uint32_t e = rowBegin; e < end; e += tiling.batch) {
                Entries(e, Least(end - e, tiling.batch));
            }
            while (row < last) {
                Close();
            }
        }
    }

private:
    __aicore__ inline void Clear()
    {
        PipeBarrier<PIPE_V>();  // the row before may still be read
        Duplicate(sumBuffer.Get<float>(), 0.0f, static_cast<int32_t>(width));
    }

    // Send the row's sums away, rounded once, and go on to the next row.
    __aicore__ inline void Close()
    {
        LocalTensor<float> sum = sumBuffer.Get<float>();
        PipeBarrier<PIPE_V>();
        if (tiling.mean != 0 && rowEnd > rowBegin) {
            Muls(sum, sum, 1.0f / static_cast<float>(static_cast<int32_t>(rowEnd - rowBegin)),
                 static_cast<int32_t>(width));
            PipeBarrier<PIPE_V>();
        }
        LocalTensor<half> out = outQueue.AllocTensor<half>();
        Cast(out, sum, RoundMode::CAST_RINT, width);
        outQueue.EnQue(out);
        out = outQueue.DeQue<half>();
        DataCopy(sumsGm[static_cast<uint64_t>(row) * tiling.ldx + column], out, width);
        outQueue.FreeTensor(out);
        Clear();
        ++row;
        rowBegin = rowEnd;
        rowEnd = row < rows ? static_cast<uint32_t>(indptrGm.GetValue(row + 1)) : rowEnd;
    }

    __aicore__ inline void Entries(uint32_t start, uint32_t n)
    {
        LocalTensor<int32_t> list = listQueue.AllocTensor<int32_t>();
        const DataCopyExtParams words(1, n * sizeof(int32_t), 0, 0, 0);  // lists start anywhere
        DataCopyPad(list, columnsGm[start], words, DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        if (tiling.weighted != 0) {
            DataCopyPad(list[tiling.batch].template ReinterpretCast<float>(), valuesGm[start], words,
                        DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
        }
        listQueue.EnQue(list);
        list = listQueue.DeQue<int32_t>();
        Sync<HardEvent::MTE2_S>();
        LocalTensor<float> weights = list[tiling.batch].template ReinterpretCast<float>();
        LocalTensor<float> sum = sumBuffer.Get<float>(), wide = rowBuffer.Get<float>();
        const int32_t count = static_cast<int32_t>(width);
        CopyRow(list.GetValue(0));
        for (uint32_t i = 0; i < n; ++i) {
            if (i + 1 < n) {
                CopyRow(list.GetValue(i + 1));  // the next row is on its way while this one is added
            }
            while (start + i >= rowEnd) {
                Close();
            }
            LocalTensor<half> copied = rowQueue.DeQue<half>();
            PipeBarrier<PIPE_V>();
            Cast(wide, copied, RoundMode::CAST_NONE, width);
            rowQueue.FreeTensor(copied);
            PipeBarrier<PIPE_V>();
            if (tiling.weighted != 0) {
                Axpy(sum, wide, weights.GetValue(i), count);
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
        LocalTensor<half> copied = rowQueue.AllocTensor<half>();
        DataCopy(copied, xGm[static_cast<uint64_t>(vertex) * tiling.ldx + column], width);
        rowQueue.EnQue(copied);
    }

    TQue<TPosition::VECIN, 1> listQueue;
    TQue<TPosition::VECIN, BUFFER_NUM> rowQueue;  // depth 2: two EnQue without a DeQue between them
    TQue<TPosition::VECOUT, 1> outQueue;
    TBuf<TPosition::VECCALC> sumBuffer, rowBuffer;
    GlobalTensor<half> xGm, sumsGm;
    GlobalTensor<float> valuesGm;
    GlobalTensor<int32_t> indptrGm, columnsGm;
    AggregateUpdateTiling tiling;
    uint32_t column, width, row, rows, rowBegin, rowEnd;
};

class MultiplySums {
public:
    __aicore__ inline MultiplySums() {}

    __aicore__ inline void Init(TPipe& pipe, GM_ADDR x, GM_ADDR b, GM_ADDR constants, GM_ADDR sums, GM_ADDR y,
                                const AggregateUpdateTiling& t)
    {
        tiling = t;
        xGm.SetGlobalBuffer((__gm__ half*)x);
        bGm.SetGlobalBuffer((__gm__ half*)b);
        sumsGm.SetGlobalBuffer((__gm__ half*)sums);
        yGm.SetGlobalBuffer((__gm__ float*)y);
        product.Init(pipe, constants, TILE, TILE, TILE);
    }

    __aicore__ inline void Rows(uint32_t first, uint32_t rows)
    {
        const uint32_t own = tiling.ownRows > first ? Least(tiling.ownRows - first, rows) : 0, m = Up16(rows);
        for (uint32_t column = 0; column < tiling.n; column += TILE) {
            const uint32_t n = Least(tiling.n - column, TILE);
            LocalTensor<float> sum = product.Begin();
            Multiply(sum, sumsGm, first, rows, m, column, n, 0);
            if (own > 0) {
                Multiply(sum, xGm, first, own, m, column, n, tiling.ownOffset);
            }
            sum = product.Finish(sum);
            StoreRows(yGm[static_cast<uint64_t>(first) * tiling.n + column], sum, m, rows, n, tiling.n, false);
            product.Free(sum);
        }
    }

private:
    // sum += left[first : first + rows] x the part of b that begins at `offset`; the tile has m rows.
    __aicore__ inline void Multiply(const LocalTensor<float>& sum, const GlobalTensor<half>& left, uint32_t first,
                                    uint32_t rows, uint32_t m, uint32_t column, uint32_t n, uint32_t offset)
    {
        for (uint32_t at = 0; at < tiling.ldx; at += TILE) {
            const uint32_t depth = Least(tiling.ldx - at, TILE), real = Least(tiling.k - at, depth);
            product.LoadLeft(left[static_cast<uint64_t>(first) * tiling.ldx + at], rows, depth, tiling.ldx, m);
            if (tiling.transposeB != 0) {
                const uint32_t stored = Least(tiling.storedN - column, n);
                product.LoadRight(bGm[static_cast<uint64_t>(column) * tiling.ldb + offset + at], stored, depth,
                                  tiling.ldb);
            } else {
                product.LoadRight(bGm[static_cast<uint64_t>(at) * tiling.ldb + offset + column], real, n, tiling.ldb);
            }
            product.Multiply(sum, m, depth, n, false, tiling.transposeB != 0);
        }
    }

    ProductTile product;
    GlobalTensor<half> xGm, bGm, sumsGm;
    GlobalTensor<float> yGm;
    AggregateUpdateTiling tiling;
};

extern "C" __global__ __aicore__ void aggregate_update(GM_ADDR x, GM_ADDR indptr, GM_ADDR columns, GM_ADDR values,
                                                       GM_ADDR b, GM_ADDR constants, GM_ADDR sums, GM_ADDR y,
                                                       GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AggregateUpdateTiling tiling;
    LoadTiling(tiling, tilingGm);
    const uint32_t tiles = (tiling.rows + TILE - 1) / TILE;
    TPipe pipe;
    if ASCEND_IS_AIC {
        if (tiling.n == 0) {
            return;
        }
        MultiplySums multiply;
        multiply.Init(pipe, x, b, constants, sums, y, tiling);
        for (uint32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
            CrossCoreWaitFlag(FLAG_SUMMED);
            multiply.Rows(tile * TILE, Least(tiling.rows - tile * TILE, TILE));
            CrossCoreSetFlag<0x2, PIPE_MTE2>(FLAG_TAKEN);
        }
    }
    if ASCEND_IS_AIV {
        SumRows sum;
        sum.Init(pipe, x, indptr, columns, values, sums, tiling);
        uint32_t ahead = 0;
        for (uint32_t tile = GetBlockIdx() / 2; tile < tiles; tile += GetBlockNum()) {
            if (ahead == AHEAD) {
                CrossCoreWaitFlag(FLAG_TAKEN);
                --ahead;
            }
            const uint32_t first = tile * TILE + GetSubBlockIdx() * (TILE / 2);
            sum.Rows(first, Least(first + TILE / 2, tiling.rows));
            if (tiling.n != 0) {
                CrossCoreSetFlag<0x2, PIPE_MTE3>(FLAG_SUMMED);
                ++ahead;
            }
        }
        for (; ahead > 0; --ahead) {
            CrossCoreWaitFlag(FLAG_TAKEN);  // leave the counter at zero for the next kernel
        }
    }
}
