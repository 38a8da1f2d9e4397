// One tile of a matrix product on the cube core, summed along k in L0C: global memory -> L1 -> L0 -> cube. Shared by
// update and aggregate_update.
//
// 128 x 128 x 128: two tiles of 32 KiB fill L0A and L0B, two sums of 64 KiB fill L0C, so loads, products and stores of
// neighbouring steps overlap. Rows need no filler in memory: what is missing of a fractal comes from `constants` (half:
// 16 x 128 zeros, then 128 x 16 with ones in the columns 0 and 1), for what lies there otherwise could be NaN, and
// NaN * 0 would reach the sum.
#ifndef LIGHTNING_GNN_PRODUCT_TILE_H
#define LIGHTNING_GNN_PRODUCT_TILE_H

#include "cube_blocks.h"

namespace lightning_gnn {

class ProductTile {
public:
    __aicore__ inline ProductTile() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR constants, uint32_t tileM, uint32_t tileN, uint32_t tileK)
    {
        constantsGm.SetGlobalBuffer((__gm__ half*)constants);
        pipe.InitBuffer(a1Queue, BUFFER_NUM, tileM * tileK * sizeof(half));
        pipe.InitBuffer(b1Queue, BUFFER_NUM, tileK * tileN * sizeof(half));
        pipe.InitBuffer(a2Queue, BUFFER_NUM, tileM * tileK * sizeof(half));
        pipe.InitBuffer(b2Queue, BUFFER_NUM, tileK * tileN * sizeof(half));
        pipe.InitBuffer(sumQueue, BUFFER_NUM, tileM * tileN * sizeof(float));
    }

    __aicore__ inline AscendC::LocalTensor<float> Begin()
    {
        first = true;
        return sumQueue.AllocTensor<float>();
    }

    // The sums, readable by Fixpipe once the last product is done.
    __aicore__ inline AscendC::LocalTensor<float> Finish(AscendC::LocalTensor<float> sum)
    {
        sumQueue.EnQue(sum);
        return sumQueue.DeQue<float>();
    }

    __aicore__ inline void Free(AscendC::LocalTensor<float>& sum) { sumQueue.FreeTensor(sum); }

    // Stored rows x columns at stride ld, the next operand of a product, filled up to `height` rows.
    __aicore__ inline void LoadLeft(const AscendC::GlobalTensor<half>& source, uint32_t rows, uint32_t columns,
                                    uint32_t ld, uint32_t height)
    {
        AscendC::LocalTensor<half> a1 = a1Queue.AllocTensor<half>();
        LoadFilled(a1, source, rows, columns, ld, height);
        a1Queue.EnQue(a1);
    }

    __aicore__ inline void LoadRight(const AscendC::GlobalTensor<half>& source, uint32_t rows, uint32_t columns,
                                     uint32_t ld)
    {
        AscendC::LocalTensor<half> b1 = b1Queue.AllocTensor<half>();
        LoadFilled(b1, source, rows, columns, ld, Up16(rows));
        b1Queue.EnQue(b1);
    }

    // sum += left [m, k] x right [k, n], of which the first product begins at zero; what is stored transposed needs no
    // other copy, only other fractals (cube_blocks.h).
    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& sum, uint32_t m, uint32_t k, uint32_t n,
                                    bool transposeA, bool transposeB)
    {
        AscendC::LocalTensor<half> a1 = a1Queue.DeQue<half>();
        AscendC::LocalTensor<half> b1 = b1Queue.DeQue<half>();
        AscendC::LocalTensor<half> a2 = a2Queue.AllocTensor<half>();
        AscendC::LocalTensor<half> b2 = b2Queue.AllocTensor<half>();
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
        lightning_gnn::Multiply(sum, a2, b2, m, k, n, first);
        first = false;
        a2Queue.FreeTensor(a2);
        b2Queue.FreeTensor(b2);
    }

    AscendC::GlobalTensor<half> constantsGm;

private:
    // rows x columns -> NZ, filled up with zeros to `height` rows, a multiple of 16.
    __aicore__ inline void LoadFilled(const AscendC::LocalTensor<half>& target,
                                      const AscendC::GlobalTensor<half>& source, uint32_t rows, uint32_t columns,
                                      uint32_t ld, uint32_t height)
    {
        LoadNz(target, source, rows, columns, ld, height);
        for (uint32_t at = rows; at < height; at += CUBE_EDGE) {
            LoadNz(target[at * CUBE_EDGE], constantsGm, Least(height - at, CUBE_EDGE), columns, columns, height);
        }
    }

    AscendC::TQue<AscendC::TPosition::A1, 1> a1Queue;
    AscendC::TQue<AscendC::TPosition::B1, 1> b1Queue;
    AscendC::TQue<AscendC::TPosition::A2, 1> a2Queue;
    AscendC::TQue<AscendC::TPosition::B2, 1> b2Queue;
    AscendC::TQue<AscendC::TPosition::CO1, 1> sumQueue;
    bool first;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_PRODUCT_TILE_H
