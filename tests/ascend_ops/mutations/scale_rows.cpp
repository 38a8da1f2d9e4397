// y = 2 x by rows on the vector cores; `fault` plants one mistake. Fault NONE is a correct kernel.
#include "kernel_operator.h"

using namespace AscendC;

enum Fault : uint32_t {
    NONE,
    MISSING_ENQUE,
    USED_BEFORE_DEQUE,
    FREED_TWICE,
    NEVER_FREED,
    NEVER_DEQUED,
    USED_AFTER_FREE,
    QUEUE_TOO_DEEP,
    FOREIGN_QUEUE,
    ODD_COUNT,
    MISALIGNED_ADDRESS,
    UB_OVERFLOW,
    TOO_MANY_BUFFERS,
    LOCAL_BOUNDS,
    ROW_OUT_OF_BOUNDS,
    DECLARED_BOUNDS,
    BLOCKS_RACE,
    SINGLE_BUFFER,
    MISSING_MTE2_S,
    MISSING_V_MTE3,
    MISSING_PIPE_BARRIER,
    UNINITIALISED,
    EVENT_TWICE,
    WAIT_NEVER_SET,
    SET_NEVER_WAITED,
    EVENT_ID,
    REPEAT_TIMES,
    NARROWED,
    OVERLAP,
    CUBE_ON_VECTOR,
    L1_ON_VECTOR,
    CROSS_FLAG,
    ATOMIC_LEFT_ON,
    ATOMIC_TYPE,
    SYNC_ALL_LEFT,
    SELECT_WITHOUT_ROOM,
};

class ScaleRows {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, uint32_t rows, uint32_t columns, uint32_t fault)
    {
        rows_ = rows;
        columns_ = columns;
        fault_ = fault;
        xGm_.SetGlobalBuffer((__gm__ float*)x, (fault == DECLARED_BOUNDS ? 1 : rows) * columns);
        yGm_.SetGlobalBuffer((__gm__ float*)y, rows * columns);
        pipe_.InitBuffer(in_, fault == SINGLE_BUFFER ? 1 : 2, columns * sizeof(float));
        pipe_.InitBuffer(out_, 2, columns * sizeof(float));
        pipe_.InitBuffer(work_, fault == UB_OVERFLOW ? 192 * 1024 : 2048);
        if (fault == TOO_MANY_BUFFERS) {
            pipe_.InitBuffer(other_, 60, 32);
        }
        if (fault == FOREIGN_QUEUE) {
            pipe_.InitBuffer(other_, 1, 32);
        }
        if (fault == L1_ON_VECTOR) {
            pipe_.InitBuffer(cube_, 1, 1024);
        }
        if (fault == SELECT_WITHOUT_ROOM) {
            pipe_.InitBuffer(other_, 1, 184 * 1024);
        }
    }

    __aicore__ inline void Process()
    {
        if (fault_ == SYNC_ALL_LEFT && GetBlockIdx() == 0) {
            return;
        }
        for (uint32_t row = GetBlockIdx(); row < rows_; row += GetBlockNum()) {
            Row(fault_ == BLOCKS_RACE ? row - GetBlockIdx() : row);
        }
        if (fault_ == ROW_OUT_OF_BOUNDS) {
            Row(rows_);
        }
        if (fault_ == SYNC_ALL_LEFT) {
            SyncAll<true>();
        }
    }

private:
    __aicore__ inline void Row(uint32_t row)
    {
        LocalTensor<float> in = in_.AllocTensor<float>();
        if (fault_ == ODD_COUNT) {
            DataCopy(in, xGm_[row * columns_], columns_ - 1);
        }
        if (fault_ == MISALIGNED_ADDRESS) {
            DataCopy(in[2], xGm_[row * columns_], columns_ - 8);
        }
        DataCopy(in, xGm_[row * columns_], fault_ == LOCAL_BOUNDS ? columns_ + 8 : columns_);
        if (fault_ == FOREIGN_QUEUE) {
            other_.EnQue(in);
        }
        if (fault_ == MISSING_MTE2_S) {
            first_ = in.GetValue(0);
        }
        if (fault_ != MISSING_ENQUE) {
            in_.EnQue(in);
        }
        if (fault_ == QUEUE_TOO_DEEP) {
            LocalTensor<float> second = in_.AllocTensor<float>();
            DataCopy(second, xGm_[row * columns_], columns_);
            in_.EnQue(second);
        }
        if (fault_ == NEVER_DEQUED) {
            return;
        }
        if (fault_ != USED_BEFORE_DEQUE) {
            in = in_.DeQue<float>();
        }
        LocalTensor<float> out = out_.AllocTensor<float>();
        LocalTensor<float> work = work_.Get<float>();
        if (fault_ == UNINITIALISED) {
            Add(out, in, work, columns_);
        }
        Muls(work, in, 2.0f, columns_);
        if (fault_ != MISSING_PIPE_BARRIER) {
            PipeBarrier<PIPE_V>();
        }
        Adds(out, work, 0.0f, columns_);
        if (fault_ != NEVER_FREED) {
            in_.FreeTensor(in);
        }
        Break(in, out, work);
        if (fault_ == MISSING_V_MTE3) {
            DataCopy(yGm_[row * columns_], out, columns_);
        }
        out_.EnQue(out);
        out = out_.DeQue<float>();
        if (fault_ == ATOMIC_TYPE) {
            SetAtomicAdd<half>();
        }
        if (fault_ == ATOMIC_LEFT_ON) {
            SetAtomicAdd<float>();
        }
        DataCopy(yGm_[row * columns_], out, columns_);
        out_.FreeTensor(out);
    }

    __aicore__ inline void Break(LocalTensor<float>& in, LocalTensor<float>& out, LocalTensor<float>& work)
    {
        if (fault_ == FREED_TWICE) {
            in_.FreeTensor(in);
        }
        if (fault_ == USED_AFTER_FREE) {
            Adds(work, in, 1.0f, columns_);
        }
        if (fault_ == EVENT_TWICE) {
            SetFlag<HardEvent::V_MTE2>(EVENT_ID7);
            SetFlag<HardEvent::V_MTE2>(EVENT_ID7);
        }
        if (fault_ == WAIT_NEVER_SET) {
            WaitFlag<HardEvent::MTE3_V>(EVENT_ID5);
        }
        if (fault_ == SET_NEVER_WAITED && GetBlockIdx() == 1) {
            SetFlag<HardEvent::V_S>(EVENT_ID3);
            fault_ = NONE;
        }
        if (fault_ == EVENT_ID) {
            SetFlag<HardEvent::V_S>(8);
        }
        if (fault_ == REPEAT_TIMES) {
            Add(work, work, work, 64, 300, BinaryRepeatParams(1, 1, 1, 0, 0, 0));
        }
        if (fault_ == NARROWED) {
            const uint32_t repeats = 256;
            ASCENDC_ASSERT((repeats <= 255), { KERNEL_LOG(KERNEL_ERROR, "%u repeats", repeats); });
            Add(work, work, work, 64, static_cast<uint8_t>(repeats), BinaryRepeatParams(1, 1, 1, 0, 0, 0));
        }
        if (fault_ == OVERLAP) {
            Adds(work[8], work, 1.0f, columns_);
        }
        if (fault_ == CUBE_ON_VECTOR) {
            Mmad(LocalTensor<float>(), LocalTensor<half>(), LocalTensor<half>(), MmadParams());
        }
        if (fault_ == CROSS_FLAG) {
            CrossCoreSetFlag<0x2, PIPE_MTE3>(0);
        }
        if (fault_ == SELECT_WITHOUT_ROOM) {
            LocalTensor<uint8_t> mask = work.ReinterpretCast<uint8_t>();
            PipeBarrier<PIPE_V>();
            Select(out, mask, out, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, columns_);
        }
    }

    TPipe pipe_;
    TQue<TPosition::VECIN, 1> in_, other_;
    TQue<TPosition::VECOUT, 1> out_;
    TQue<TPosition::A1, 1> cube_;
    TBuf<TPosition::VECCALC> work_;
    GlobalTensor<float> xGm_, yGm_;
    uint32_t rows_, columns_, fault_;
    float first_ = 0.0f;
};

extern "C" __global__ __aicore__ void scale_rows(GM_ADDR x, GM_ADDR y, uint32_t rows, uint32_t columns, uint32_t fault)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ScaleRows op;
    op.Init(x, y, rows, columns, fault);
    op.Process();
}
