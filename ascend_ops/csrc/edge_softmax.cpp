// alpha[e, h] = softmax over the in-edges e of each vertex of leaky_relu(source[column(e), h] + target[vertex, h]).
// fp32, any number of heads and of edges: a vertex with more than a batch of edges keeps a running maximum and a
// rescaled sum (all vectors of heads) and gathers its scores a second time. NaN in a row makes the row NaN.
//
// Launch: members vector-core blocks. No workspace. alpha is [entries, heads], in the order of the entries.
#include "edge_scores.h"
#include "vertex_range.h"

using namespace AscendC;
using namespace lightning_gnn;

class EdgeSoftmax {
public:
    __aicore__ inline EdgeSoftmax() {}

    __aicore__ inline void Init(GM_ADDR source, GM_ADDR target, GM_ADDR vertices, GM_ADDR columns, GM_ADDR plan,
                                GM_ADDR alpha, const RowsTiling& t)
    {
        tiling = t;
        slope = FloatOf(tiling.slopeBits);
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        alphaGm.SetGlobalBuffer((__gm__ float*)alpha);
        const uint32_t floats = tiling.batch * UpTo(Least(tiling.heads, HEAD_BLOCK), BLOCK_FLOATS);
        scores.Init(pipe, source, target, columns, tiling.batch, floats);
        pipe.InitBuffer(outQueue, BUFFER_NUM, floats * sizeof(float));
        pipe.InitBuffer(scoreBuffer, floats * sizeof(float));
        pipe.InitBuffer(foldBuffer, floats * sizeof(float));
        pipe.InitBuffer(stateBuffer, 3 * HEAD_BLOCK * sizeof(float));
    }

    __aicore__ inline void Process()
    {
        const VertexRange range = RangeOfBlock(planGm, tiling);
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
        // First pass: the maximum and the sum of exponentials, batch by batch; all in vectors of heads.
        scores.OpenVertex(rows, vertex);
        for (uint32_t e = begin; e < end; e += tiling.batch) {
            const uint32_t n = Least(end - e, tiling.batch);
            Score(e, n);
            UpdateMaximum(n, e == begin);
            Exponentials(scoreBuffer.Get<float>(), n);
            UpdateSum(n, e == begin);
        }
        // Second pass: divide. Only where a vertex has several batches are its scores gathered again.
        const bool kept = end - begin <= tiling.batch;  // the exponentials are still there
        for (uint32_t e = begin; e < end; e += tiling.batch) {
            const uint32_t n = Least(end - e, tiling.batch);
            LocalTensor<float> values = scoreBuffer.Get<float>();
            if (!kept) {
                Score(e, n);
                Exponentials(values, n);
            }
            LocalTensor<float> out = outQueue.AllocTensor<float>();
            Div(out, values, Sum(), static_cast<uint64_t>(rows.lanes), Narrow<uint8_t>(n), rows.OneToAll());
            outQueue.EnQue(out);
            out = outQueue.DeQue<float>();
            rows.StoreRows(alphaGm, out, e, n);
            outQueue.FreeTensor(out);
            PipeBarrier<PIPE_V>();
        }
    }

    __aicore__ inline void Score(uint32_t first, uint32_t n)
    {
        LocalTensor<float> values = scoreBuffer.Get<float>();
        scores.Gather(rows, values, first, n);
        LeakyRelu(values, values, slope, static_cast<int32_t>(n * rows.lanes));
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void UpdateMaximum(uint32_t n, bool first)
    {
        const int32_t lanes = static_cast<int32_t>(rows.lanes);
        LocalTensor<float> fold = foldBuffer.Get<float>();
        // A copy, since folding spoils its rows and the scores are needed for the exponentials.
        Adds(fold, scoreBuffer.Get<float>(), 0.0f, static_cast<int32_t>(n) * lanes);
        PipeBarrier<PIPE_V>();
        rows.FoldMax(fold, n);
        if (first) {
            Adds(Maximum(), fold, 0.0f, lanes);
        } else {
            Max(fold, fold, Maximum(), lanes);
            PipeBarrier<PIPE_V>();
            // The maximum grew: what was summed up so far counts exp(old - new) times as much.
            Sub(Scale(), Maximum(), fold, lanes);
            PipeBarrier<PIPE_V>();
            Exp(Scale(), Scale(), lanes);
            Adds(Maximum(), fold, 0.0f, lanes);
        }
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void UpdateSum(uint32_t n, bool first)
    {
        const int32_t lanes = static_cast<int32_t>(rows.lanes);
        LocalTensor<float> fold = foldBuffer.Get<float>();
        Adds(fold, scoreBuffer.Get<float>(), 0.0f, static_cast<int32_t>(n) * lanes);
        PipeBarrier<PIPE_V>();
        rows.FoldSum(fold, n);
        if (first) {
            Adds(Sum(), fold, 0.0f, lanes);
        } else {
            Mul(Sum(), Sum(), Scale(), lanes);
            PipeBarrier<PIPE_V>();
            Add(Sum(), Sum(), fold, lanes);
        }
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Exponentials(const LocalTensor<float>& values, uint32_t n)
    {
        Sub(values, values, Maximum(), static_cast<uint64_t>(rows.lanes), Narrow<uint8_t>(n), rows.OneToAll());
        PipeBarrier<PIPE_V>();
        Exp(values, values, static_cast<int32_t>(n * rows.lanes));
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline LocalTensor<float> Maximum() { return stateBuffer.Get<float>(); }
    __aicore__ inline LocalTensor<float> Sum() { return stateBuffer.Get<float>()[HEAD_BLOCK]; }
    __aicore__ inline LocalTensor<float> Scale() { return stateBuffer.Get<float>()[2 * HEAD_BLOCK]; }

    TPipe pipe;
    EdgeScores scores;
    HeadRows rows;
    TQue<TPosition::VECOUT, 1> outQueue;
    TBuf<TPosition::VECCALC> scoreBuffer, foldBuffer, stateBuffer;
    GlobalTensor<int32_t> verticesGm, planGm;
    GlobalTensor<float> alphaGm;
    RowsTiling tiling;
    float slope;
};

extern "C" __global__ __aicore__ void edge_softmax(GM_ADDR source, GM_ADDR target, GM_ADDR vertices, GM_ADDR columns,
                                                   GM_ADDR plan, GM_ADDR alpha, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    EdgeSoftmax op;
    op.Init(source, target, vertices, columns, plan, alpha, tiling);
    op.Process();
}
