// The steps of a matrix product on the cube core, shared by aggregate_cube and update.
// A fractal is 16 x 16 fp16, 512 bytes. With mf, kf, nf the fractals along m, k and n, fractal (i, j) is number
//   j * mf + i in NZ (L1, and L0C in fp32), i * kf + j in Zz (L0A), i * nf + j in Zn (L0B, transposed inside).
#ifndef LIGHTNING_GNN_CUBE_BLOCKS_H
#define LIGHTNING_GNN_CUBE_BLOCKS_H

#include "load_tiling.h"

namespace lightning_gnn {

constexpr uint32_t FRACTAL = CUBE_EDGE * CUBE_EDGE;

// Global memory [rows, columns] at stride ld -> L1 in NZ, with room for paddedRows (a multiple of 16) rows.
__aicore__ inline void LoadNz(const AscendC::LocalTensor<half>& target, const AscendC::GlobalTensor<half>& source,
                              uint32_t rows, uint32_t columns, uint32_t ld, uint32_t paddedRows)
{
    AscendC::Nd2NzParams p;
    // One matrix. Of each row, every 16 columns go to another fractal, a padded height (dstNzC0Stride) apart; the next
    // row is the next 32 bytes (dstNzNStride = 1).
    p.ndNum = 1;
    p.nValue = rows;
    p.dValue = columns;
    p.srcNdMatrixStride = 0;
    p.srcDValue = ld;
    p.dstNzC0Stride = paddedRows;
    p.dstNzNStride = 1;
    p.dstNzMatrixStride = 0;
    AscendC::DataCopy(target, source, p);
}

__aicore__ inline AscendC::LoadData2DParams Fractals(uint32_t repeat, uint32_t stride, bool transpose)
{
    AscendC::LoadData2DParams p;
    // `repeat` fractals, read `stride` fractals apart and written one after another.
    p.startIndex = 0;
    p.repeatTimes = Narrow<uint8_t>(repeat);
    p.srcStride = Narrow<uint16_t>(stride);
    p.sid = 0;
    p.dstGap = 0;
    p.ifTranspose = transpose;
    p.addrMode = 0;
    return p;
}

// A [m, k] as NZ -> Zz.
__aicore__ inline void LoadA(const AscendC::LocalTensor<half>& target, const AscendC::LocalTensor<half>& source,
                             uint32_t m, uint32_t k)
{
    const uint32_t mf = m / CUBE_EDGE, kf = k / CUBE_EDGE;
    // Row i of fractals: in NZ its fractals are mf apart, in Zz side by side.
    for (uint32_t i = 0; i < mf; ++i) {
        AscendC::LoadData(target[i * kf * FRACTAL], source[i * FRACTAL], Fractals(kf, mf, false));
    }
}

// A stored as [k, m]: its NZ already has the order of Zz, only each fractal is transposed.
__aicore__ inline void LoadTransposedA(const AscendC::LocalTensor<half>& target,
                                       const AscendC::LocalTensor<half>& source, uint32_t m, uint32_t k)
{
    AscendC::LoadData(target, source, Fractals(m / CUBE_EDGE * (k / CUBE_EDGE), 1, true));
}

// B [k, n] as NZ -> Zn: each fractal is transposed on the way.
__aicore__ inline void LoadB(const AscendC::LocalTensor<half>& target, const AscendC::LocalTensor<half>& source,
                             uint32_t k, uint32_t n)
{
    const uint32_t kf = k / CUBE_EDGE, nf = n / CUBE_EDGE;
    // The same along n, and the unit wants each fractal of B column by column.
    for (uint32_t i = 0; i < kf; ++i) {
        AscendC::LoadData(target[i * nf * FRACTAL], source[i * FRACTAL], Fractals(nf, kf, true));
    }
}

// B stored as [n, k]: its NZ is Zn.
__aicore__ inline void LoadTransposedB(const AscendC::LocalTensor<half>& target,
                                       const AscendC::LocalTensor<half>& source, uint32_t k, uint32_t n)
{
    AscendC::LoadData(target, source, Fractals(k / CUBE_EDGE * (n / CUBE_EDGE), 1, false));
}

__aicore__ inline void Multiply(const AscendC::LocalTensor<float>& sum, const AscendC::LocalTensor<half>& a,
                                const AscendC::LocalTensor<half>& b, uint32_t m, uint32_t k, uint32_t n, bool first)
{
    AscendC::MmadParams p;
    p.m = m;  // a multiple of 16: m == 1 would switch the unit to a vector product and read A as rows
    p.n = n;
    p.k = k;
    p.unitFlag = 0;
    p.cmatrixSource = false;
    p.cmatrixInitVal = first;  // start from zero, or add to what L0C holds
    AscendC::Mmad(sum, a, b, p);
    if ((m / CUBE_EDGE) * (n / CUBE_EDGE) < 10U) {
        AscendC::PipeBarrier<PIPE_M>();  // so small that the next accumulation would read L0C too early
    }
}

// Rows of L0C (NZ, m rows in all) -> rows of global memory at stride ld.
template <typename T>
__aicore__ inline void StoreRows(const AscendC::GlobalTensor<T>& target, const AscendC::LocalTensor<float>& source,
                                 uint32_t m, uint32_t rows, uint32_t columns, uint32_t ld, bool relu)
{
    AscendC::FixpipeParamsV220 p;
    // NZ back to rows: a fractal of float32 is 16 columns wide, its neighbour is srcStride rows further.
    p.nSize = columns;
    p.mSize = rows;
    p.srcStride = m;
    p.dstStride = ld;
    // Fixpipe rounds to float16 where the target is half, and applies ReLU on the way.
    p.quantPre = sizeof(T) == sizeof(float) ? QuantMode_t::NoQuant : QuantMode_t::F322F16;
    p.deqScalar = 0;
    p.ndNum = 1;
    p.srcNdStride = 0;
    p.dstNdStride = 0;
    p.reluEn = relu;
    p.unitFlag = 0;
    AscendC::Fixpipe<T, float, AscendC::CFG_ROW_MAJOR>(target, source, p);
}

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_CUBE_BLOCKS_H
