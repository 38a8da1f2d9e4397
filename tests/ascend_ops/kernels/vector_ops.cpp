// One vector instruction on n elements, for comparison with numpy: the whole of a, b and y fits in UB.
#include "kernel_operator.h"

using namespace AscendC;

enum Operation : uint32_t {
    ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, ADDS, MULS, MAXS, MINS, EXP, LN, SQRT, ABS, RELU, RECIPROCAL, LEAKY, AXPY, MUL_ADD_DST,
    REDUCE_MAX, REDUCE_MIN, REDUCE_SUM, SELECT_GREATER, SELECT_SCALAR, ROW_ADD, ROW_SUM, BLOCK_MAX, BRCB,
    BIT_MASK,
};

template <typename T> class VectorOperation {
public:
    __aicore__ inline void Run(GM_ADDR a, GM_ADDR b, GM_ADDR y, uint32_t n, float scalar, uint32_t operation)
    {
        GlobalTensor<T> aGm, bGm, yGm;
        aGm.SetGlobalBuffer((__gm__ T*)a, n);
        bGm.SetGlobalBuffer((__gm__ T*)b, n);
        yGm.SetGlobalBuffer((__gm__ T*)y, n);
        pipe_.InitBuffer(a_, 1, n * sizeof(T));
        pipe_.InitBuffer(b_, 1, n * sizeof(T));
        pipe_.InitBuffer(y_, 1, n * sizeof(T));
        pipe_.InitBuffer(work_, n * sizeof(T));
        pipe_.InitBuffer(bits_, n);
        LocalTensor<T> x = a_.template AllocTensor<T>(), z = b_.template AllocTensor<T>();
        DataCopy(x, aGm, n);
        DataCopy(z, bGm, n);
        a_.EnQue(x);
        b_.EnQue(z);
        x = a_.template DeQue<T>();
        z = b_.template DeQue<T>();
        LocalTensor<T> out = y_.template AllocTensor<T>();
        Duplicate(out, static_cast<T>(0.0f), n);
        PipeBarrier<PIPE_V>();
        Apply(out, x, z, n, static_cast<T>(scalar), operation);
        y_.EnQue(out);
        out = y_.template DeQue<T>();
        DataCopy(yGm, out, n);
        y_.FreeTensor(out);
        a_.FreeTensor(x);
        b_.FreeTensor(z);
    }

private:
    __aicore__ inline void Apply(LocalTensor<T>& y, LocalTensor<T>& a, LocalTensor<T>& b, uint32_t n, T s, uint32_t operation)
    {
        const uint32_t lanes = 256 / sizeof(T), repeats = n / lanes;
        LocalTensor<T> work = work_.template Get<T>();
        LocalTensor<uint8_t> bits = bits_.template Get<uint8_t>();
        switch (operation) {
            case ADD: Add(y, a, b, n); break;
            case SUB: Sub(y, a, b, n); break;
            case MUL: Mul(y, a, b, n); break;
            case DIV: Div(y, a, b, n); break;
            case MAXIMUM: Max(y, a, b, n); break;
            case MINIMUM: Min(y, a, b, n); break;
            case ADDS: Adds(y, a, s, n); break;
            case MULS: Muls(y, a, s, n); break;
            case MAXS: Maxs(y, a, s, n); break;
            case MINS: Mins(y, a, s, n); break;
            case EXP: Exp(y, a, n); break;
            case LN: Ln(y, a, n); break;
            case SQRT: Sqrt(y, a, n); break;
            case ABS: Abs(y, a, n); break;
            case RELU: Relu(y, a, n); break;
            case RECIPROCAL: Reciprocal(y, a, n); break;
            case LEAKY: LeakyRelu(y, a, s, n); break;
            case AXPY: Axpy(y, a, s, n); break;
            case MUL_ADD_DST: MulAddDst(y, a, b, n); break;
            case REDUCE_MAX: ReduceMax(y, a, work, n); break;
            case REDUCE_MIN: ReduceMin(y, a, work, n); break;
            case REDUCE_SUM: ReduceSum(y, a, work, n); break;
            case SELECT_GREATER:
                Compare(bits, a, b, CMPMODE::GT, n);
                PipeBarrier<PIPE_V>();
                Select(y, bits, a, b, SELMODE::VSEL_TENSOR_TENSOR_MODE, n);
                break;
            case SELECT_SCALAR:
                CompareScalar(bits, a, s, CMPMODE::LE, n);
                PipeBarrier<PIPE_V>();
                Select(y, bits, a, s, SELMODE::VSEL_TENSOR_SCALAR_MODE, n);
                break;
            // rows of 256 bytes; the first row of b is added to each
            case ROW_ADD: Add(y, a, b, lanes, repeats, BinaryRepeatParams(1, 1, 1, 8, 8, 0)); break;
            case ROW_SUM: WholeReduceSum(y, a, static_cast<int32_t>(lanes), repeats, 1, 1, 8); break;
            case BLOCK_MAX: BlockReduceMax(y, a, repeats, static_cast<int32_t>(lanes), 1, 1, 8); break;
            case BRCB: Brcb(y, a, n / (256 / sizeof(T)), BrcbRepeatParams(1, 8)); break;
            case BIT_MASK: {
                uint64_t mask[2] = {0x5555555555555555ULL, sizeof(T) == 2 ? 1ULL : 0ULL};
                Muls(y, a, s, mask, repeats, UnaryRepeatParams(1, 1, 8, 8));
                break;
            }
            default: break;
        }
    }

    TPipe pipe_;
    TQue<TPosition::VECIN, 1> a_, b_;
    TQue<TPosition::VECOUT, 1> y_;
    TBuf<TPosition::VECCALC> work_, bits_;
};

extern "C" __global__ __aicore__ void vector_half(GM_ADDR a, GM_ADDR b, GM_ADDR y, uint32_t n, float scalar, uint32_t operation)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    VectorOperation<half> op;
    op.Run(a, b, y, n, scalar, operation);
}

extern "C" __global__ __aicore__ void vector_float(GM_ADDR a, GM_ADDR b, GM_ADDR y, uint32_t n, float scalar, uint32_t operation)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    VectorOperation<float> op;
    op.Run(a, b, y, n, scalar, operation);
}
