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
#include "row_sums.h"

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
        indptrGm.SetGlobalBuffer((__gm__ int32_t*)indptr);
        sumsGm.SetGlobalBuffer((__gm__ half*)sums);
        rowSums.Init(pipe, x, columns, values, tiling);
    }

    __aicore__ inline void Rows(uint32_t first, uint32_t last)
    {
        rows = last;
        for (column = 0; first < last && column < tiling.ldx; column += tiling.panelColumns) {
            row = first;
            rowBegin = indptrGm.GetValue(first);
            rowEnd = indptrGm.GetValue(first + 1);
            rowSums.Begin(column, Least(tiling.ldx - column, tiling.panelColumns), 0);
            rowSums.Add(*this, rowBegin, indptrGm.GetValue(last));
            while (row < last) {
                Close();
            }
        }
    }

    __aicore__ inline uint32_t End() const { return rowEnd; }

    __aicore__ inline void Close()
    {
        if (tiling.mean != 0 && rowEnd > rowBegin) {
            rowSums.Scale(1.0f / static_cast<float>(static_cast<int32_t>(rowEnd - rowBegin)));
        }
        rowSums.Send(sumsGm[static_cast<uint64_t>(row) * tiling.ldx + column]);
        ++row;
        rowBegin = rowEnd;
        rowEnd = row < rows ? static_cast<uint32_t>(indptrGm.GetValue(row + 1)) : rowEnd;
    }

private:
    RowSums rowSums;
    GlobalTensor<half> sumsGm;
    GlobalTensor<int32_t> indptrGm;
    AggregateUpdateTiling tiling;
    uint32_t column, row, rows, rowBegin, rowEnd;
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
