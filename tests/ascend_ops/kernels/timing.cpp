// Kernels for the twin's timing: copies of one size after the other, one vector instruction at chosen addresses,
// scalar reads of global memory at a stride.
#include "kernel_operator.h"

using namespace AscendC;

// Each block reads `copies` tiles of `rows` runs of `bytes` bytes, `stride` bytes apart, one after the other, or writes
// them.
extern "C" __global__ __aicore__ void copy_tiles(
    GM_ADDR x, uint32_t copies, uint32_t rows, uint32_t bytes, uint32_t stride, uint32_t out)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 128 * 1024);
    GlobalTensor<uint8_t> source;
    source.SetGlobalBuffer((__gm__ uint8_t*)x);
    LocalTensor<uint8_t> tile = buffer.Get<uint8_t>();
    if (out != 0) {
        Duplicate(tile.template ReinterpretCast<half>(), static_cast<half>(0.0f), 32 * 1024);
        SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    }
    const DataCopyExtParams in(rows, bytes, stride - bytes, 0, 0), back(rows, bytes, 0, stride - bytes, 0);
    const uint64_t first = static_cast<uint64_t>(GetBlockIdx()) * copies * bytes;
    for (uint32_t i = 0; i < copies; ++i) {
        const uint32_t at = i * rows * bytes % (128 * 1024);
        if (out != 0) {
            DataCopyPad(source[first + static_cast<uint64_t>(i) * bytes], tile, back);
        } else {
            if (at == 0 && i != 0) {
                PipeBarrier<PIPE_MTE2>();
            }
            DataCopyPad(tile[at], source[first + static_cast<uint64_t>(i) * bytes], in,
                        DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
        }
    }
}

// dst = a + b, 64 repeats of floats, `times` times, with operands at chosen addresses. `aBlock` and `aRepeat` are
// the strides of a.
extern "C" __global__ __aicore__ void add_at(
    uint32_t a, uint32_t b, uint32_t y, uint32_t aBlock, uint32_t aRepeat, uint32_t times)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 192 * 1024);
    LocalTensor<float> all = buffer.Get<float>();
    Duplicate(all, 0.0f, 48 * 1024);
    const BinaryRepeatParams strides(1, aBlock, 1, 8, aRepeat, 8);
    for (uint32_t i = 0; i < times; ++i) {
        PipeBarrier<PIPE_V>();
        Add(all[y / 4], all[a / 4], all[b / 4], static_cast<uint64_t>(64), 64, strides);
    }
}

// The same by a count of elements.
extern "C" __global__ __aicore__ void add_count(uint32_t a, uint32_t b, uint32_t y, uint32_t count)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 192 * 1024);
    LocalTensor<half> all = buffer.Get<half>();
    Duplicate(all, static_cast<half>(0.0f), 96 * 1024);
    PipeBarrier<PIPE_V>();
    Add(all[y / 2], all[a / 2], all[b / 2], static_cast<int32_t>(count));
}
