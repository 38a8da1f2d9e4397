// The row-wise update of a layer and its gradients on the cube core: y = a x b (+ bias)(, ReLU), fp16 in, fp32 in L0C.
//   forward           a = x [V, K],  b = weight [N, K] transposed, bias, ReLU
//   gradient of x     a = dy [V, N], b = weight [N, K]
//   gradient of weight a = dy transposed [N, V], b = x [V, K]: k is the number of vertices, so it is cut into splitK
//                     parts to give every block some; combine_parts adds them up
// It uses the same building blocks as aggregate_cube rather than the Matmul API: the CPU twin can then hold every
// instruction to the rules of the chip, which it could not do inside a library, and the host needs no library tiling.
//
// Storage: columns filled up to a multiple of 16 with zeros; rows need no filler, what is missing of a fractal comes
// from `constants` (half: 16 x 128 zeros, then 128 x 16 with ones in the columns 0 and 1). The bias is a product too:
// rows 0 and 1 of `bias` (half [16, n], the rest zero) are the bias rounded to half and what that lost, which adds up
// to nearly fp32; the ones multiply them.
//
// Launch: any number of cube-core blocks. No workspace; with splitK > 1, y is float [m * splitK, ldy] parts, row r's
// part s being row r * splitK + s.
#include "cube_blocks.h"

using namespace AscendC;
using namespace lightning_gnn;

constexpr uint32_t ZEROS = 16 * 128;  // elements of zeros in front of the ones

class Update {
public:
    __aicore__ inline Update() {}

    __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR bias, GM_ADDR constants, GM_ADDR y,
                                const UpdateTiling& t)
    {
        tiling = t;
        aGm.SetGlobalBuffer((__gm__ half*)a);
        bGm.SetGlobalBuffer((__gm__ half*)b);
        biasGm.SetGlobalBuffer((__gm__ half*)bias);
        constantsGm.SetGlobalBuffer((__gm__ half*)constants);
        halfGm.SetGlobalBuffer((__gm__ half*)y);
        floatGm.SetGlobalBuffer((__gm__ float*)y);
        // 128 x 128 x 128: two tiles of 32 KiB fill L0A and L0B, two sums of 64 KiB fill L0C, so loads, products and
        // stores of neighbouring steps overlap.
        const uint32_t aBytes = tiling.tileM * tiling.tileK * sizeof(half);
        const uint32_t bBytes = tiling.tileK * tiling.tileN * sizeof(half);
        pipe.InitBuffer(a1Queue, BUFFER_NUM, aBytes);
        pipe.InitBuffer(b1Queue, BUFFER_NUM, bBytes);
        pipe.InitBuffer(a2Queue, BUFFER_NUM, aBytes);
        pipe.InitBuffer(b2Queue, BUFFER_NUM, bBytes);
        pipe.InitBuffer(sumQueue, BUFFER_NUM, tiling.tileM * tiling.tileN * sizeof(float));
    }

    __aicore__ inline void Process()
    {
        const uint32_t across = (tiling.n + tiling.tileN - 1) / tiling.tileN;
        const uint32_t down = (tiling.m + tiling.tileM - 1) / tiling.tileM;
        const uint64_t tiles = static_cast<uint64_t>(across) * down * tiling.splitK;
        // Tiles go to the blocks in turn, the parts of k of one tile to neighbouring blocks.
        for (uint64_t i = GetBlockIdx(); i < tiles; i += GetBlockNum()) {
            const uint32_t part = static_cast<uint32_t>(i % tiling.splitK);
            const uint32_t place = static_cast<uint32_t>(i / tiling.splitK);
            Tile(place / across * tiling.tileM, place % across * tiling.tileN, part);
        }
    }

private:
    __aicore__ inline void Tile(uint32_t row, uint32_t column, uint32_t part)
    {
        const uint32_t rows = Least(tiling.m - row, tiling.tileM), n = Least(tiling.n - column, tiling.tileN);
        const uint32_t m = Up16(rows);
        const uint64_t steps = (tiling.k + tiling.tileK - 1) / tiling.tileK;
        const uint32_t begin = static_cast<uint32_t>(steps * part / tiling.splitK);
        const uint32_t end = static_cast<uint32_t>(steps * (part + 1) / tiling.splitK);
        LocalTensor<float> sum = sumQueue.AllocTensor<float>();
        bool first = true;
        // The bias first, as one product of depth 16 that also clears the sums.
        if (tiling.hasBias != 0) {
            LoadBias(m, column, n);
            Step(sum, m, CUBE_EDGE, n, true, false, false);
            first = false;
        }
        // Along k the sums stay in L0C, in float32.
        for (uint32_t step = begin; step < end; ++step) {
            const uint32_t at = step * tiling.tileK, depth = Least(tiling.k - at, tiling.tileK);
            LoadTiles(row, rows, column, n, at, depth);
            Step(sum, m, Up16(depth), n, first, tiling.transposeA != 0, tiling.transposeB != 0);
            first = false;
        }
        sumQueue.EnQue(sum);
        sum = sumQueue.DeQue<float>();
        // Row r, part s: row r * splitK + s, so consecutive rows are splitK * ldy apart.
        const uint64_t to = (static_cast<uint64_t>(row) * tiling.splitK + part) * tiling.ldy + column;
        if (tiling.floatOut != 0) {
            lightning_gnn::StoreRows(floatGm[to], sum, m, rows, n, tiling.splitK * tiling.ldy, tiling.relu != 0);
        } else {
            lightning_gnn::StoreRows(halfGm[to], sum, m, rows, n, tiling.splitK * tiling.ldy, tiling.relu != 0);
        }
        sumQueue.FreeTensor(sum);
    }

    // rows x columns at stride ld -> NZ, the rows filled up to a fractal with zeros: what lies there otherwise could
    // be NaN, and NaN * 0 would reach the sum.
    __aicore__ inline void LoadFilled(const LocalTensor<half>& target, const GlobalTensor<half>& source, uint32_t rows,
                                      uint32_t columns, uint32_t ld)
    {
        const uint32_t padded = Up16(rows);
        LoadNz(target, source, rows, columns, ld, padded);
        if (padded > rows) {
            LoadNz(target[rows * CUBE_EDGE], constantsGm, padded - rows, columns, columns, padded);
        }
    }

    __aicore__ inline void LoadTiles(uint32_t row, uint32_t rows, uint32_t column, uint32_t n, uint32_t at,
                                     uint32_t depth)
    {
        LocalTensor<half> a1 = a1Queue.AllocTensor<half>();
        LocalTensor<half> b1 = b1Queue.AllocTensor<half>();
        if (tiling.transposeA != 0) {
            LoadFilled(a1, aGm[static_cast<uint64_t>(at) * tiling.lda + row], depth, Up16(rows), tiling.lda);
        } else {
            LoadFilled(a1, aGm[static_cast<uint64_t>(row) * tiling.lda + at], rows, Up16(depth), tiling.lda);
        }
        if (tiling.transposeB != 0) {
            // the rows of the stored matrix are y's columns, of which there may be fewer than n
            const uint32_t stored = Least(tiling.storedN - column, n);
            LoadFilled(b1, bGm[static_cast<uint64_t>(column) * tiling.ldb + at], stored, Up16(depth), tiling.ldb);
        } else {
            LoadFilled(b1, bGm[static_cast<uint64_t>(at) * tiling.ldb + column], depth, n, tiling.ldb);
        }
        a1Queue.EnQue(a1);
        b1Queue.EnQue(b1);
    }

    __aicore__ inline void LoadBias(uint32_t m, uint32_t column, uint32_t n)
    {
        LocalTensor<half> a1 = a1Queue.AllocTensor<half>();
        LocalTensor<half> b1 = b1Queue.AllocTensor<half>();
        LoadNz(a1, constantsGm[ZEROS], m, CUBE_EDGE, CUBE_EDGE, m);
        LoadNz(b1, biasGm[column], CUBE_EDGE, n, tiling.n, CUBE_EDGE);
        a1Queue.EnQue(a1);
        b1Queue.EnQue(b1);
    }

    __aicore__ inline void Step(const LocalTensor<float>& sum, uint32_t m, uint32_t k, uint32_t n, bool first,
                                bool transposeA, bool transposeB)
    {
        LocalTensor<half> a1 = a1Queue.DeQue<half>();
        LocalTensor<half> b1 = b1Queue.DeQue<half>();
        LocalTensor<half> a2 = a2Queue.AllocTensor<half>();
        LocalTensor<half> b2 = b2Queue.AllocTensor<half>();
        // L1 to L0: what is stored transposed needs no other copy, only other fractals (cube_blocks.h).
        if (transposeA) {
            LoadTransposedA(a2, a1, m, k);
        } else {
            LoadA(a2, a1, m, k);
        }
        if (transposeB) {
            LoadTransposedB(b2, b1, k, n);
        } else {
            LoadB(b2, b1, k, n);
        }
        a1Queue.FreeTensor(a1);
        b1Queue.FreeTensor(b1);
        a2Queue.EnQue(a2);
        b2Queue.EnQue(b2);
        a2 = a2Queue.DeQue<half>();
        b2 = b2Queue.DeQue<half>();
        Multiply(sum, a2, b2, m, k, n, first);
        a2Queue.FreeTensor(a2);
        b2Queue.FreeTensor(b2);
    }

    TPipe pipe;
    TQue<TPosition::A1, 1> a1Queue;
    TQue<TPosition::B1, 1> b1Queue;
    TQue<TPosition::A2, 1> a2Queue;
    TQue<TPosition::B2, 1> b2Queue;
    TQue<TPosition::CO1, 1> sumQueue;
    GlobalTensor<half> aGm, bGm, biasGm, constantsGm, halfGm;
    GlobalTensor<float> floatGm;
    UpdateTiling tiling;
};

extern "C" __global__ __aicore__ void update(GM_ADDR a, GM_ADDR b, GM_ADDR bias, GM_ADDR constants, GM_ADDR y,
                                             GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    UpdateTiling tiling;
    LoadTiling(tiling, tilingGm);
    Update op;
    op.Init(a, b, bias, constants, y, tiling);
    op.Process();
}
