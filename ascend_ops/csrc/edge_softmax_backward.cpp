// Gradient of edge_softmax: with s = source + target before the leaky ReLU and g the gradient of alpha,
//   score_grad[e] = alpha[e] * (g[e] - sum over the row of alpha * g) * (s[e] > 0 ? 1 : slope)
// and target_grad[vertex] is its sum over the row. The gradient of the sources is its sum over the transposed rows
// (edge_sum).
//
// Launch: members vector-core blocks. No workspace. target_grad must hold zeros for vertices without entries.
#include "edge_scores.h"
#include "vertex_range.h"

using namespace AscendC;
using namespace lightning_gnn;

class EdgeSoftmaxBackward {
public:
    __aicore__ inline EdgeSoftmaxBackward() {}

    __aicore__ inline void Init(GM_ADDR source, GM_ADDR target, GM_ADDR vertices, GM_ADDR columns, GM_ADDR plan,
                                GM_ADDR alpha, GM_ADDR alphaGrad, GM_ADDR scoreGrad, GM_ADDR targetGrad,
                                const RowsTiling& t)
    {
        tiling = t;
        slope = FloatOf(tiling.slopeBits);
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        alphaGm.SetGlobalBuffer((__gm__ float*)alpha);
        alphaGradGm.SetGlobalBuffer((__gm__ float*)alphaGrad);
        scoreGradGm.SetGlobalBuffer((__gm__ float*)scoreGrad);
        targetGradGm.SetGlobalBuffer((__gm__ float*)targetGrad);
        floats = UpTo(tiling.batch * UpTo(Least(tiling.heads, HEAD_BLOCK), BLOCK_FLOATS), HEAD_BLOCK);
        scores.Init(pipe, source, target, columns, tiling.batch, floats);
        // One buffer each: a second of all three would not fit UB beside the scores and the work.
        pipe.InitBuffer(alphaQueue, 1, floats * sizeof(float));
        pipe.InitBuffer(gradQueue, 1, floats * sizeof(float));
        pipe.InitBuffer(outQueue, 1, floats * sizeof(float));
        pipe.InitBuffer(sumQueue, 1, HEAD_BLOCK * sizeof(float));
        pipe.InitBuffer(workBuffer, 2 * floats * sizeof(float));
        pipe.InitBuffer(stateBuffer, 2 * HEAD_BLOCK * sizeof(float));
        pipe.InitBuffer(maskBuffer, UpTo(floats / 8, 32));
    }

    __aicore__ inline void Process()
    {
        const VertexRange range = RangeOfBlock(planGm, tiling);
        // A comparison takes whole 256 bytes; what lies behind the last row must be something.
        Duplicate(workBuffer.Get<float>(), 0.0f, static_cast<int32_t>(2 * floats));
        PipeBarrier<PIPE_V>();
        for (uint32_t head = 0; head < tiling.heads; head += HEAD_BLOCK) {
            rows.Set(head, tiling.heads);
            for (uint32_t i = range.begin; i < range.end; ++i) {
                Vertex(verticesGm.GetValue(i * VERTEX_FIELDS), verticesGm.GetValue(i * VERTEX_FIELDS + 1),
                       verticesGm.GetValue(i * VERTEX_FIELDS + 2));
            }
        }
    }

private:
    __aicore__ inline void Vertex(uint32_t vertex, uint32_t begin, uint32_t end)
    {
        const int32_t lanes = static_cast<int32_t>(rows.lanes);
        LocalTensor<float> inner = stateBuffer.Get<float>();
        LocalTensor<float> total = inner[HEAD_BLOCK];
        scores.OpenVertex(rows, vertex);
        Duplicate(inner, 0.0f, 2 * static_cast<int32_t>(HEAD_BLOCK));
        PipeBarrier<PIPE_V>();
        // First pass: the sum of alpha * g over the row, which every entry's gradient needs. Second pass: the
        // gradients.
        for (uint32_t e = begin; e < end; e += tiling.batch) {
            InnerProducts(e, Least(end - e, tiling.batch), inner);
        }
        for (uint32_t e = begin; e < end; e += tiling.batch) {
            Gradients(e, Least(end - e, tiling.batch), inner, total);
        }
        LocalTensor<float> out = sumQueue.AllocTensor<float>();
        Adds(out, total, 0.0f, lanes);
        sumQueue.EnQue(out);
        out = sumQueue.DeQue<float>();
        rows.StoreRows(targetGradGm, out, vertex, 1);
        sumQueue.FreeTensor(out);
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline LocalTensor<float> CopyIn(TQue<TPosition::VECIN, 1>& queue, const GlobalTensor<float>& source,
                                                uint32_t first, uint32_t n)
    {
        LocalTensor<float> values = queue.AllocTensor<float>();
        rows.CopyRows(values, source, first, n);
        queue.EnQue(values);
        return queue.DeQue<float>();
    }

    __aicore__ inline void InnerProducts(uint32_t first, uint32_t n, const LocalTensor<float>& inner)
    {
        LocalTensor<float> work = workBuffer.Get<float>();
        LocalTensor<float> alpha = CopyIn(alphaQueue, alphaGm, first, n);
        LocalTensor<float> grad = CopyIn(gradQueue, alphaGradGm, first, n);
        Mul(work, alpha, grad, static_cast<int32_t>(n * rows.lanes));
        alphaQueue.FreeTensor(alpha);
        gradQueue.FreeTensor(grad);
        PipeBarrier<PIPE_V>();
        rows.FoldSum(work, n);
        Add(inner, inner, work, static_cast<int32_t>(rows.lanes));
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Gradients(uint32_t first, uint32_t n, const LocalTensor<float>& inner,
                                     const LocalTensor<float>& total)
    {
        const int32_t count = static_cast<int32_t>(n * rows.lanes);
        const uint32_t compared = UpTo(n * rows.lanes, HEAD_BLOCK);
        LocalTensor<float> work = workBuffer.Get<float>();
        LocalTensor<float> steep = work[floats];
        LocalTensor<uint8_t> positive = maskBuffer.Get<uint8_t>();
        scores.Gather(rows, work, first, n);
        // The side of the leaky ReLU on which a score lies, one bit each; gathered again rather than kept in memory.
        CompareScalar(positive, work, 0.0f, CMPMODE::GT, compared);
        PipeBarrier<PIPE_V>();
        LocalTensor<float> alpha = CopyIn(alphaQueue, alphaGm, first, n);
        LocalTensor<float> grad = CopyIn(gradQueue, alphaGradGm, first, n);
        Sub(steep, grad, inner, static_cast<uint64_t>(rows.lanes), Narrow<uint8_t>(n), rows.OneToAll());
        gradQueue.FreeTensor(grad);
        PipeBarrier<PIPE_V>();
        Mul(steep, steep, alpha, count);
        alphaQueue.FreeTensor(alpha);
        PipeBarrier<PIPE_V>();
        // Both slopes of all, and the mask picks: there is no branch per element.
        Muls(work, steep, slope, count);
        PipeBarrier<PIPE_V>();
        Select(work, positive, steep, work, SELMODE::VSEL_TENSOR_TENSOR_MODE, compared);
        PipeBarrier<PIPE_V>();
        LocalTensor<float> out = outQueue.AllocTensor<float>();
        Adds(out, work, 0.0f, count);
        outQueue.EnQue(out);
        out = outQueue.DeQue<float>();
        rows.StoreRows(scoreGradGm, out, first, n);
        outQueue.FreeTensor(out);
        PipeBarrier<PIPE_V>();
        // work is spoiled after this: it has been copied out.
        rows.FoldSum(work, n);
        Add(total, total, work, static_cast<int32_t>(rows.lanes));
        PipeBarrier<PIPE_V>();
    }

    TPipe pipe;
    EdgeScores scores;
    HeadRows rows;
    TQue<TPosition::VECIN, 1> alphaQueue, gradQueue;
    TQue<TPosition::VECOUT, 1> outQueue, sumQueue;
    TBuf<TPosition::VECCALC> workBuffer, stateBuffer, maskBuffer;
    GlobalTensor<int32_t> verticesGm, planGm;
    GlobalTensor<float> alphaGm, alphaGradGm, scoreGradGm, targetGradGm;
    RowsTiling tiling;
    uint32_t floats;
    float slope;
};

extern "C" __global__ __aicore__ void edge_softmax_backward(GM_ADDR source, GM_ADDR target, GM_ADDR vertices,
                                                            GM_ADDR columns, GM_ADDR plan, GM_ADDR alpha,
                                                            GM_ADDR alphaGrad, GM_ADDR scoreGrad, GM_ADDR targetGrad,
                                                            GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    EdgeSoftmaxBackward op;
    op.Init(source, target, vertices, columns, plan, alpha, alphaGrad, scoreGrad, targetGrad, tiling);
    op.Process();
}
