// The row-wise update of a layer and its gradients on the cube core: y = a x b (+ bias)(, ReLU), fp16 in, fp32 in L0C.
//   forward           a = x [V, K],  b = weight [N, K] transposed, bias, ReLU
//   gradient of x     a = dy [V, N], b = weight [N, K]
//   gradient of weight a = dy transposed [N, V], b = x [V, K]: k is the number of vertices, so it is cut into splitK
//                     parts to give every block some; combine_parts adds them up
// It uses the same building blocks as aggregate_cube rather than the Matmul API: the CPU twin can then hold every
// instruction to the rules of the chip, which it could not do inside a library, and the host needs no library tiling.
//
// Storage: columns filled up to a multiple of 16 with zeros; rows need no filler (product_tile.h). The bias is a product
// too: rows 0 and 1 of `bias` (half [16, n], the rest zero) are the bias rounded to half and what that lost, which adds
// up to nearly fp32; the ones of `constants` multiply them.
//
// Launch: any number of cube-core blocks. No workspace; with splitK > 1, y is float [m * splitK, ldy] parts, row r's
// part s being row r * splitK + s.
#include "product_tile.h"

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
        halfGm.SetGlobalBuffer((__gm__ half*)y);
        floatGm.SetGlobalBuffer((__gm__ float*)y);
        product.Init(pipe, constants, tiling.tileM, tiling.tileN, tiling.tileK);
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
        LocalTensor<float> sum = product.Begin();
        // The bias first, as one product of depth 16 that also clears the sums.
        if (tiling.hasBias != 0) {
            product.LoadLeft(product.constantsGm[ZEROS], m, CUBE_EDGE, CUBE_EDGE, m);
            product.LoadRight(biasGm[column], CUBE_EDGE, n, tiling.n);
            product.Multiply(sum, m, CUBE_EDGE, n, false, false);
        }
        // Along k the sums stay in L0C, in float32.
        for (uint32_t step = begin; step < end; ++step) {
            const uint32_t at = step * tiling.tileK, depth = Least(tiling.k - at, tiling.tileK);
            LoadTiles(row, rows, column, n, at, depth);
            product.Multiply(sum, m, Up16(depth), n, tiling.transposeA != 0, tiling.transposeB != 0);
        }
        sum = product.Finish(sum);
        // Row r, part s: row r * splitK + s, so consecutive rows are splitK * ldy apart.
        const uint64_t to = (static_cast<uint64_t>(row) * tiling.splitK + part) * tiling.ldy + column;
        if (tiling.floatOut != 0) {
            lightning_gnn::StoreRows(floatGm[to], sum, m, rows, n, tiling.splitK * tiling.ldy, tiling.relu != 0);
        } else {
            lightning_gnn::StoreRows(halfGm[to], sum, m, rows, n, tiling.splitK * tiling.ldy, tiling.relu != 0);
        }
        product.Free(sum);
    }

    __aicore__ inline void LoadTiles(uint32_t row, uint32_t rows, uint32_t column, uint32_t n, uint32_t at,
                                     uint32_t depth)
    {
        if (tiling.transposeA != 0) {
            product.LoadLeft(aGm[static_cast<uint64_t>(at) * tiling.lda + row], depth, Up16(rows), tiling.lda,
                             Up16(depth));
        } else {
            product.LoadLeft(aGm[static_cast<uint64_t>(row) * tiling.lda + at], rows, Up16(depth), tiling.lda,
                             Up16(rows));
        }
        if (tiling.transposeB != 0) {
            // the rows of the stored matrix are y's columns, of which there may be fewer than n
            const uint32_t stored = Least(tiling.storedN - column, n);
            product.LoadRight(bGm[static_cast<uint64_t>(column) * tiling.ldb + at], stored, Up16(depth), tiling.ldb);
        } else {
            product.LoadRight(bGm[static_cast<uint64_t>(at) * tiling.ldb + column], depth, n, tiling.ldb);
        }
    }

    TPipe pipe;
    ProductTile product;
    GlobalTensor<half> aGm, bGm, biasGm, halfGm;
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
