// Casts, padded and strided copies, atomic sums, barriers between blocks: each kernel is one use of the API.
#include "kernel_operator.h"

using namespace AscendC;

template <typename To, typename From> __aicore__ inline void CastAll(GM_ADDR x, GM_ADDR y, uint32_t n, uint32_t mode)
{
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    constexpr uint32_t TILE = 4096;
    GlobalTensor<From> xGm;
    GlobalTensor<To> yGm;
    xGm.SetGlobalBuffer((__gm__ From*)x, n);
    yGm.SetGlobalBuffer((__gm__ To*)y, n);
    pipe.InitBuffer(in, 2, TILE * sizeof(From));
    pipe.InitBuffer(out, 2, TILE * sizeof(To));
    for (uint32_t i = 0; i < n; i += TILE) {
        LocalTensor<From> a = in.AllocTensor<From>();
        DataCopy(a, xGm[i], TILE);
        in.EnQue(a);
        a = in.DeQue<From>();
        LocalTensor<To> b = out.AllocTensor<To>();
        Cast(b, a, static_cast<RoundMode>(mode), TILE);
        in.FreeTensor(a);
        out.EnQue(b);
        b = out.DeQue<To>();
        DataCopy(yGm[i], b, TILE);
        out.FreeTensor(b);
    }
}

extern "C" __global__ __aicore__ void cast_to_float(GM_ADDR x, GM_ADDR y, uint32_t n, uint32_t mode)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    CastAll<float, half>(x, y, n, mode);
}

extern "C" __global__ __aicore__ void cast_to_half(GM_ADDR x, GM_ADDR y, uint32_t n, uint32_t mode)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    CastAll<half, float>(x, y, n, mode);
}

extern "C" __global__ __aicore__ void cast_to_int(GM_ADDR x, GM_ADDR y, uint32_t n, uint32_t mode)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    CastAll<int32_t, float>(x, y, n, mode);
}

// Rows of `columns` elements, `ldx` apart, to rows `ldy` apart, each padded to 32 bytes in UB with `pad`.
extern "C" __global__ __aicore__ void copy_padded(
    GM_ADDR x, GM_ADDR y, GM_ADDR padded, uint32_t rows, uint32_t columns, uint32_t ldx, uint32_t ldy, float pad)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
    GlobalTensor<half> xGm, yGm, paddedGm;
    const uint32_t wide = (columns + 15) / 16 * 16;
    xGm.SetGlobalBuffer((__gm__ half*)x);
    yGm.SetGlobalBuffer((__gm__ half*)y);
    paddedGm.SetGlobalBuffer((__gm__ half*)padded, rows * wide);
    pipe.InitBuffer(queue, 2, rows * wide * sizeof(half));
    LocalTensor<half> t = queue.AllocTensor<half>();
    DataCopyPad(t, xGm, DataCopyExtParams(rows, columns * sizeof(half), (ldx - columns) * sizeof(half), 0, 0),
        DataCopyPadExtParams<half>(true, 0, wide - columns, static_cast<half>(pad)));
    queue.EnQue(t);
    t = queue.DeQue<half>();
    DataCopyPad(yGm, t, DataCopyExtParams(rows, columns * sizeof(half), 0, (ldy - columns) * sizeof(half), 0));
    DataCopy(paddedGm, t, rows * wide);
    queue.FreeTensor(t);
}

// Every block adds the same row to y; fp32 sums of small integers do not depend on the order.
extern "C" __global__ __aicore__ void atomic_sum(GM_ADDR x, GM_ADDR y, uint32_t n)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
    GlobalTensor<float> xGm, yGm;
    xGm.SetGlobalBuffer((__gm__ float*)x, n * GetBlockNum());
    yGm.SetGlobalBuffer((__gm__ float*)y, n);
    pipe.InitBuffer(queue, 1, n * sizeof(float));
    LocalTensor<float> t = queue.AllocTensor<float>();
    DataCopy(t, xGm[n * GetBlockIdx()], n);
    queue.EnQue(t);
    t = queue.DeQue<float>();
    SetAtomicAdd<float>();
    DataCopy(yGm, t, n);
    SetAtomicNone();
    queue.FreeTensor(t);
}

// Two phases: every block writes its row of the workspace, all meet, every block reads its neighbor's row.
extern "C" __global__ __aicore__ void rotate_rows(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, uint32_t n, uint32_t barrier)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
    GlobalTensor<float> from, to;
    const uint32_t blocks = GetBlockNum(), b = GetBlockIdx();
    pipe.InitBuffer(queue, 2, n * sizeof(float));
    for (uint32_t phase = 0; phase < 2; ++phase) {
        from.SetGlobalBuffer((__gm__ float*)(phase == 0 ? x : workspace), n * blocks);
        to.SetGlobalBuffer((__gm__ float*)(phase == 0 ? workspace : y), n * blocks);
        LocalTensor<float> t = queue.AllocTensor<float>();
        DataCopy(t, from[(phase == 0 ? b : (b + 1) % blocks) * n], n);
        queue.EnQue(t);
        t = queue.DeQue<float>();
        DataCopy(to[b * n], t, n);
        queue.FreeTensor(t);
        if (barrier != 0) {
            SyncAll<true>();
        }
    }
}
