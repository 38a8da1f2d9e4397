// A tiling struct from global memory to the scalar registers, and waiting for one pipe of the same core.
#ifndef LIGHTNING_GNN_LOAD_TILING_H
#define LIGHTNING_GNN_LOAD_TILING_H

#include "kernel_operator.h"
#include "tiling.h"

namespace lightning_gnn {

constexpr int32_t BUFFER_NUM = 2;  // buffers per queue: one is filled while the other is used

__aicore__ inline uint32_t Up16(uint32_t value) { return (value + 15U) / 16U * 16U; }
__aicore__ inline uint32_t UpTo(uint32_t value, uint32_t unit) { return (value + unit - 1U) / unit * unit; }
__aicore__ inline uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// A count as an instruction's field takes it. 256 in a field of 8 bits would be 0: the instruction would do nothing, or
// all, without a word. CANN checks assertions where they are compiled in, the twin always.
template <typename Field>
__aicore__ inline Field Narrow(uint32_t value)
{
    ASCENDC_ASSERT((value <= static_cast<Field>(~static_cast<Field>(0))),
                   { KERNEL_LOG(KERNEL_ERROR, "%u does not fit an instruction's field", value); });
    return static_cast<Field>(value);
}

template <typename Tiling>
__aicore__ inline void LoadTiling(Tiling& tiling, GM_ADDR address)
{
    constexpr uint32_t words = sizeof(Tiling) / sizeof(uint32_t);
    AscendC::GlobalTensor<uint32_t> source;
    source.SetGlobalBuffer((__gm__ uint32_t*)address, words);
    uint32_t* target = reinterpret_cast<uint32_t*>(&tiling);
    for (uint32_t i = 0; i < words; ++i) {
        target[i] = source.GetValue(i);
    }
}

// The float with these bits. A cast of the pointer would break the aliasing rule: compilers may read it before the write.
__aicore__ inline float FloatOf(uint32_t bits)
{
    union {
        uint32_t bits;
        float value;
    } both = {bits};
    return both.value;
}

// Queues order only the two pipes of their positions; everything else is ordered by hand.
template <AscendC::HardEvent event>
__aicore__ inline void Sync()
{
    const event_t id = static_cast<event_t>(GetTPipePtr()->FetchEventID(event));
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
}

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_LOAD_TILING_H
