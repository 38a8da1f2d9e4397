// y = a x b, one 32 x 32 product per block and step: the vector cores copy a (half its rows each) into a workspace slot,
// the cube core multiplies. `fault` plants one mistake; fault NONE is a correct kernel.
#include "kernel_operator.h"

using namespace AscendC;

enum Fault : uint32_t {
    NONE,
    VECTOR_ON_CUBE,
    UB_ON_CUBE,
    L0A_OVERFLOW,
    L0C_OVERFLOW,
    K_NOT_FRACTAL,
    M_IS_ONE,
    M_TOO_LARGE,
    WRONG_SOURCE_STRIDE,
    HALF_TRANSPOSED,
    L0_MISALIGNED,
    LOAD_REPEAT,
    ND2NZ_STRIDE,
    FIXPIPE_STRIDE,
    FIXPIPE_SHORT_RUN,
    FIXPIPE_ROWS_OVERLAP,
    FIXPIPE_COLUMNS,
    FIXPIPE_QUANT,
    MISSING_PIPE_M,
    MISSING_M_FIX,
    ONE_VECTOR_CORE_SILENT,
    EXTRA_SET,
    MISSING_READY,
    MISSING_FREE,
    RESERVED_FLAG,
    STALE_PADDING,
    SYNC_ALL_OF_VECTORS,
    EVENT_IDS_SPENT,
};

constexpr uint32_t EDGE = 32, HALF = EDGE / 2, TILE = EDGE * EDGE;
constexpr uint16_t READY = 0, FREE = 1;

class Multiply {
public:
    __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR y, GM_ADDR workspace, uint32_t steps, uint32_t fault)
    {
        steps_ = steps;
        fault_ = fault;
        block_ = GetBlockIdx();
        if ASCEND_IS_AIV {
            block_ = GetBlockIdx() / 2;
        }
        aGm_.SetGlobalBuffer((__gm__ half*)a + block_ * steps * TILE, steps * TILE);
        bGm_.SetGlobalBuffer((__gm__ half*)b, TILE);
        yGm_.SetGlobalBuffer((__gm__ float*)y + block_ * TILE, TILE);
        wsGm_.SetGlobalBuffer((__gm__ half*)workspace + block_ * TILE, TILE);
        if ASCEND_IS_AIC {
            pipe_.InitBuffer(a1_, 2, TILE * sizeof(half));
            pipe_.InitBuffer(b1_, 2, TILE * sizeof(half));
            pipe_.InitBuffer(a2_, fault == L0A_OVERFLOW ? 40 : 2, TILE * sizeof(half));
            pipe_.InitBuffer(b2_, 2, TILE * sizeof(half));
            pipe_.InitBuffer(co1_, fault == L0C_OVERFLOW ? 33 : 1, TILE * sizeof(float));
            if (fault == UB_ON_CUBE) {
                pipe_.InitBuffer(rows_, 1, 1024);
            }
        }
        if ASCEND_IS_AIV {
            pipe_.InitBuffer(rows_, 2, HALF * EDGE * sizeof(half));
        }
    }

    __aicore__ inline void Process()
    {
        if ASCEND_IS_AIV {
            for (uint32_t step = 0; step < steps_; ++step) {
                Produce(step);
            }
            CrossCoreWaitFlag(FREE);
            if (fault_ == EXTRA_SET) {
                CrossCoreSetFlag<0x2, PIPE_MTE3>(5);
            }
        }
        if ASCEND_IS_AIC {
            Consume();
        }
    }

private:
    __aicore__ inline void Produce(uint32_t step)
    {
        const uint32_t sub = GetSubBlockIdx();
        if (step > 0 && fault_ != MISSING_FREE) {
            CrossCoreWaitFlag(FREE);
        }
        const uint32_t rows = fault_ == STALE_PADDING && sub == 1 ? HALF - 3 : HALF;
        LocalTensor<half> part = rows_.AllocTensor<half>();
        DataCopy(part, aGm_[step * TILE + sub * HALF * EDGE], rows * EDGE);
        rows_.EnQue(part);
        part = rows_.DeQue<half>();
        DataCopy(wsGm_[sub * HALF * EDGE], part, rows * EDGE);
        rows_.FreeTensor(part);
        if (fault_ == ONE_VECTOR_CORE_SILENT && sub == 1) {
            return;
        }
        if (fault_ == SYNC_ALL_OF_VECTORS) {
            SyncAll<false>();
        }
        CrossCoreSetFlag<0x2, PIPE_MTE3>(fault_ == RESERVED_FLAG ? 12 : READY);
        if (fault_ == MISSING_FREE && step + 1 == steps_) {
            for (uint32_t i = 1; i < steps_; ++i) {
                CrossCoreWaitFlag(FREE);
            }
        }
    }

    __aicore__ inline void Consume()
    {
        if (fault_ == VECTOR_ON_CUBE) {
            Duplicate(LocalTensor<half>(), half(0.0f), 16);
        }
        if (fault_ == SYNC_ALL_OF_VECTORS) {
            SyncAll<true>();
        }
        if (fault_ == EVENT_IDS_SPENT) {
            for (int i = 0; i < 6; ++i) {
                GetTPipePtr()->AllocEventID<HardEvent::M_MTE1>();
            }
        }
        LocalTensor<float> sum = co1_.AllocTensor<float>();
        for (uint32_t step = 0; step < steps_; ++step) {
            if (fault_ != MISSING_READY) {
                CrossCoreWaitFlag(READY);
            }
            Load();
            CrossCoreSetFlag<0x2, PIPE_MTE2>(FREE);
            Split();
            Product(sum, step == 0);
        }
        if (fault_ == MISSING_READY) {
            for (uint32_t step = 0; step < steps_; ++step) {
                CrossCoreWaitFlag(READY);
            }
        }
        if (fault_ != MISSING_M_FIX) {
            co1_.EnQue(sum);
            sum = co1_.DeQue<float>();
        }
        FixpipeParamsV220 p(EDGE, EDGE, EDGE, EDGE, false);
        if (fault_ == FIXPIPE_STRIDE) {
            p.srcStride = 16;
        }
        if (fault_ == FIXPIPE_SHORT_RUN) {
            p.mSize = p.srcStride = 16;
        }
        if (fault_ == FIXPIPE_ROWS_OVERLAP) {
            p.mSize = 16;
            p.dstStride = EDGE - 16;
        }
        if (fault_ == FIXPIPE_COLUMNS) {
            p.nSize = 24;
        }
        if (fault_ == FIXPIPE_QUANT) {
            p.quantPre = QuantMode_t::F322F16;
        }
        Fixpipe<float, float, CFG_ROW_MAJOR>(yGm_, sum, p);
        co1_.FreeTensor(sum);
    }

    __aicore__ inline void Load()
    {
        LocalTensor<half> a1 = a1_.AllocTensor<half>();
        LocalTensor<half> b1 = b1_.AllocTensor<half>();
        Nd2NzParams p(1, EDGE, EDGE, 0, EDGE, fault_ == ND2NZ_STRIDE ? 16400 : EDGE, 1, 0);
        DataCopy(a1, wsGm_, p);
        DataCopy(b1, bGm_, p);
        a1_.EnQue(a1);
        b1_.EnQue(b1);
    }

    __aicore__ inline void Split()
    {
        LocalTensor<half> a1 = a1_.DeQue<half>();
        LocalTensor<half> b1 = b1_.DeQue<half>();
        LocalTensor<half> a2 = a2_.AllocTensor<half>();
        LocalTensor<half> b2 = b2_.AllocTensor<half>();
        const uint32_t fractals = EDGE / 16;
        LoadData2DParams p;
        p.repeatTimes = fault_ == LOAD_REPEAT ? 256 : fractals;
        p.srcStride = fault_ == WRONG_SOURCE_STRIDE ? 1 : fractals;
        for (uint32_t i = 0; i < fractals; ++i) {
            LoadData(a2[i * fractals * 256 + (fault_ == L0_MISALIGNED ? 16 : 0)], a1[i * 256], p);
        }
        p.ifTranspose = true;
        for (uint32_t i = 0; i < fractals; ++i) {
            if (fault_ == HALF_TRANSPOSED) {
                p.ifTranspose = i == 0;
            }
            LoadData(b2[i * fractals * 256], b1[i * 256], p);
        }
        a2_.EnQue(a2);
        b2_.EnQue(b2);
        a1_.FreeTensor(a1);
        b1_.FreeTensor(b1);
    }

    __aicore__ inline void Product(LocalTensor<float>& sum, bool first)
    {
        LocalTensor<half> a2 = a2_.DeQue<half>();
        LocalTensor<half> b2 = b2_.DeQue<half>();
        const uint32_t m = fault_ == M_IS_ONE ? 1 : fault_ == M_TOO_LARGE ? 4096 : EDGE;
        const uint32_t k = fault_ == K_NOT_FRACTAL ? 20 : EDGE;
        Mmad(sum, a2, b2, MmadParams(m, EDGE, k, 0, false, first));
        if (fault_ != MISSING_PIPE_M) {
            PipeBarrier<PIPE_M>();
        }
        a2_.FreeTensor(a2);
        b2_.FreeTensor(b2);
    }

    TPipe pipe_;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> rows_;
    TQue<TPosition::A1, 1> a1_;
    TQue<TPosition::B1, 1> b1_;
    TQue<TPosition::A2, 1> a2_;
    TQue<TPosition::B2, 1> b2_;
    TQue<TPosition::CO1, 1> co1_;
    GlobalTensor<half> aGm_, bGm_, wsGm_;
    GlobalTensor<float> yGm_;
    uint32_t steps_, fault_, block_;
};

extern "C" __global__ __aicore__ void multiply(
    GM_ADDR a, GM_ADDR b, GM_ADDR y, GM_ADDR workspace, uint32_t steps, uint32_t fault)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    Multiply op;
    op.Init(a, b, y, workspace, steps, fault);
    op.Process();
}
