// Zeros in place of what is not finite, and whether there was any.
//
// 0 * NaN is NaN, so one such feature would reach every row of its tile, neighbour or not, and the documents of Mmad warn
// of exceptions on NaN. Non-finite features and weights are therefore replaced by 0 and noticed; if there were any,
// aggregate_repair.h adds what they contribute, to their own rows only.
#ifndef LIGHTNING_GNN_FINITE_FILTER_H
#define LIGHTNING_GNN_FINITE_FILTER_H

#include "load_tiling.h"

namespace lightning_gnn {

constexpr float HALF_MAX = 65504.0f;

class FiniteFilter {
public:
    __aicore__ inline FiniteFilter() {}

    // most: numbers that are cleaned at once at most.
    __aicore__ inline void Init(AscendC::TPipe& pipe, uint32_t most)
    {
        maskBytes = UpTo(most / 8, 32);
        pipe.InitBuffer(maskBuffer, 3 * maskBytes);
        // A bit for each place, set for as long as all that was seen there was finite: so a cleaning costs one And, and
        // the scalar unit looks once, at the end.
        AscendC::LocalTensor<uint16_t> finite = maskBuffer.Get<uint16_t>()[maskBytes];  // the third mask
        AscendC::Duplicate(finite, static_cast<uint16_t>(0xFFFF), static_cast<int32_t>(maskBytes / 2));
    }

    // count: a multiple of 128, the 256 bytes that a comparison works on. The caller waits for the result.
    __aicore__ inline void Clean(const AscendC::LocalTensor<half>& clean, const AscendC::LocalTensor<half>& numbers,
                                 uint32_t count)
    {
        AscendC::LocalTensor<uint8_t> below = maskBuffer.Get<uint8_t>();
        AscendC::LocalTensor<uint8_t> above = below[maskBytes];
        AscendC::LocalTensor<uint16_t> finite = maskBuffer.Get<uint16_t>()[maskBytes];
        AscendC::LocalTensor<uint16_t> mask = below.template ReinterpretCast<uint16_t>();
        AscendC::CompareScalar(below, numbers, static_cast<half>(HALF_MAX), AscendC::CMPMODE::LE, count);
        AscendC::CompareScalar(above, numbers, static_cast<half>(-HALF_MAX), AscendC::CMPMODE::GE, count);
        AscendC::PipeBarrier<PIPE_V>();
        const int32_t words = static_cast<int32_t>(count / 16);
        // Finite is what is neither above the largest half nor below the least; a comparison with NaN is false.
        AscendC::And(mask, mask, above.template ReinterpretCast<uint16_t>(), words);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::And(finite, finite, mask, words);
        AscendC::Select(clean, below, numbers, static_cast<half>(0.0f), AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE,
                        count);
    }

    // Whether anything was not finite.
    __aicore__ inline bool Met()
    {
        AscendC::LocalTensor<uint64_t> finite =
            maskBuffer.Get<uint16_t>()[maskBytes].template ReinterpretCast<uint64_t>();
        Sync<AscendC::HardEvent::V_S>();
        uint64_t all = ~0ULL;
        for (uint32_t i = 0; i < maskBytes / sizeof(uint64_t); ++i) {
            all &= finite.GetValue(i);
        }
        return all != ~0ULL;
    }

private:
    AscendC::TBuf<AscendC::TPosition::VECCALC> maskBuffer;
    uint32_t maskBytes;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_FINITE_FILTER_H
