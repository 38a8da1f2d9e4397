// out[e, h] = dot product over head h's columns of a[vertex of e] and b[column of e]: the gradient of the edge weights,
// with a the gradient of the aggregation's result and b its input. fp16 in, fp32 products and sums.
//
// Heads that fit panelColumns together are handled at once, else head by head in pieces of panelColumns. Every block
// takes all columns of its vertices, so that nothing has to be added up between blocks.
//
// Launch: members vector-core blocks. No workspace. out is [entries, heads].
#include "vertex_range.h"

using namespace AscendC;
using namespace lightning_gnn;

constexpr uint32_t LANES = 64;        // floats in one vector instruction
constexpr uint32_t BLOCK_FLOATS = 8;  // floats in 32 bytes

class EdgeProducts {
public:
    __aicore__ inline EdgeProducts() {}

    __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR vertices, GM_ADDR columns, GM_ADDR plan, GM_ADDR out,
                                const RowsTiling& t)
    {
        tiling = t;
        aGm.SetGlobalBuffer((__gm__ half*)a);
        bGm.SetGlobalBuffer((__gm__ half*)b);
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        outGm.SetGlobalBuffer((__gm__ float*)out);
        // Head by head, a result takes a whole block: a reduction writes one float per 32 bytes there, see OneHead.
        together = tiling.heads * tiling.headColumns <= tiling.panelColumns;
        results = UpTo(tiling.batch * (together ? tiling.heads : BLOCK_FLOATS), BLOCK_FLOATS);
        pipe.InitBuffer(columnQueue, BUFFER_NUM, UpTo(tiling.batch * sizeof(int32_t), 32));
        pipe.InitBuffer(aQueue, 1, tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(bQueue, BUFFER_NUM, tiling.batch * tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(outQueue, BUFFER_NUM, results * sizeof(float));
        pipe.InitBuffer(aBuffer, tiling.panelColumns * sizeof(float));
        pipe.InitBuffer(productBuffer, tiling.batch * tiling.panelColumns * sizeof(float));
        pipe.InitBuffer(pieceBuffer, results * sizeof(float));
    }

    __aicore__ inline void Process()
    {
        const VertexRange range = RangeOfBlock(planGm, tiling);
        // The reduction writes one float of each block, but whole blocks are added: the other seven must be something.
        Duplicate(pieceBuffer.Get<float>(), 0.0f, static_cast<int32_t>(results));
        for (uint32_t i = range.begin; i < range.end; ++i) {
            const uint32_t vertex = verticesGm.GetValue(i * VERTEX_FIELDS);
            const uint32_t end = verticesGm.GetValue(i * VERTEX_FIELDS + 2);
            for (uint32_t e = verticesGm.GetValue(i * VERTEX_FIELDS + 1); e < end; e += tiling.batch) {
                Batch(vertex, e, Least(end - e, tiling.batch));
            }
        }
    }

private:
    __aicore__ inline void Batch(uint32_t vertex, uint32_t first, uint32_t n)
    {
        LocalTensor<int32_t> column = columnQueue.AllocTensor<int32_t>();
        DataCopyPad(column, columnsGm[first], DataCopyExtParams(1, n * sizeof(int32_t), 0, 0, 0),
                    DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        columnQueue.EnQue(column);
        column = columnQueue.DeQue<int32_t>();
        Sync<HardEvent::MTE2_S>();
        if (together) {
            LocalTensor<float> out = outQueue.AllocTensor<float>();
            Piece(out, vertex, column, n, 0, tiling.heads, tiling.headColumns, 1);
            outQueue.EnQue(out);
            out = outQueue.DeQue<float>();
            DataCopyPad(outGm[static_cast<uint64_t>(first) * tiling.heads], out,
                        DataCopyExtParams(1, n * tiling.heads * sizeof(float), 0, 0, 0));
            outQueue.FreeTensor(out);
        } else {
            for (uint32_t head = 0; head < tiling.heads; ++head) {
                OneHead(vertex, column, first, n, head);
            }
        }
        Sync<HardEvent::S_MTE2>();
        columnQueue.FreeTensor(column);
    }

    // One result per 32-byte block, since the results of a head lie `heads` floats apart in global memory.
    __aicore__ inline void OneHead(uint32_t vertex, const LocalTensor<int32_t>& column, uint32_t first, uint32_t n,
                                   uint32_t head)
    {
        LocalTensor<float> piece = pieceBuffer.Get<float>();
        LocalTensor<float> out = outQueue.AllocTensor<float>();
        const int32_t count = static_cast<int32_t>(n * BLOCK_FLOATS);
        Duplicate(out, 0.0f, count);
        for (uint32_t at = 0; at < tiling.headColumns; at += tiling.panelColumns) {
            Piece(piece, vertex, column, n, head * tiling.headColumns + at, 1,
                  Least(tiling.headColumns - at, tiling.panelColumns), BLOCK_FLOATS);
            PipeBarrier<PIPE_V>();
            Add(out, out, piece, count);
            PipeBarrier<PIPE_V>();
        }
        outQueue.EnQue(out);
        out = outQueue.DeQue<float>();
        DataCopyPad(outGm[static_cast<uint64_t>(first) * tiling.heads + head], out,
                    DataCopyExtParams(Narrow<uint16_t>(n), sizeof(float), 0,
                                      (tiling.heads - 1) * sizeof(float), 0));
        outQueue.FreeTensor(out);
    }

    // result[(i * heads + h) * stride] = sum over c < width of a[at + h * width + c] * b[i, at + h * width + c]
    __aicore__ inline void Piece(const LocalTensor<float>& result, uint32_t vertex, const LocalTensor<int32_t>& column,
                                 uint32_t n, uint32_t at, uint32_t heads, uint32_t width, uint32_t stride)
    {
        const uint32_t total = heads * width;
        LocalTensor<float> left = aBuffer.Get<float>();
        LocalTensor<float> product = productBuffer.Get<float>();
        LocalTensor<half> row = aQueue.AllocTensor<half>();
        DataCopy(row, aGm[static_cast<uint64_t>(vertex) * tiling.ldy + at], total);
        aQueue.EnQue(row);
        // The vertex's row once, and the rows of all its entries of this batch; the cast of the first runs while the
        // others are copied.
        LocalTensor<half> rows = bQueue.AllocTensor<half>();
        for (uint32_t i = 0; i < n; ++i) {
            DataCopy(rows[i * total], bGm[static_cast<uint64_t>(column.GetValue(i)) * tiling.ldx + at], total);
        }
        bQueue.EnQue(rows);
        row = aQueue.DeQue<half>();
        PipeBarrier<PIPE_V>();
        Cast(left, row, RoundMode::CAST_NONE, total);
        aQueue.FreeTensor(row);
        rows = bQueue.DeQue<half>();
        Cast(product, rows, RoundMode::CAST_NONE, n * total);
        bQueue.FreeTensor(rows);
        PipeBarrier<PIPE_V>();
        // Products, 64 columns of all entries at a time: a repeat for each entry, the vertex's row standing still.
        const uint8_t rowBlocks = Narrow<uint8_t>(total / BLOCK_FLOATS);
        for (uint32_t c = 0; c < total; c += LANES) {
            Mul(product[c], product[c], left[c], static_cast<uint64_t>(Least(total - c, LANES)),
                Narrow<uint8_t>(n), BinaryRepeatParams(1, 1, 1, rowBlocks, rowBlocks, 0));
        }
        PipeBarrier<PIPE_V>();
        // Fold each head onto its first 64 columns, then one reduction gives all results: a repeat for each entry and
        // head.
        const uint8_t headBlocks = Narrow<uint8_t>(width / BLOCK_FLOATS);
        const uint8_t sums = Narrow<uint8_t>(n * heads);
        for (uint32_t c = LANES; c < width; c += LANES) {
            Add(product, product, product[c], static_cast<uint64_t>(Least(width - c, LANES)), sums,
                BinaryRepeatParams(1, 1, 1, headBlocks, headBlocks, headBlocks));
            PipeBarrier<PIPE_V>();
        }
        WholeReduceSum(result, product, static_cast<int32_t>(Least(width, LANES)), sums, static_cast<int32_t>(stride),
                       1, headBlocks);
    }

    TPipe pipe;
    TQue<TPosition::VECIN, 1> columnQueue, aQueue, bQueue;
    TQue<TPosition::VECOUT, 1> outQueue;
    TBuf<TPosition::VECCALC> aBuffer, productBuffer, pieceBuffer;
    GlobalTensor<half> aGm, bGm;
    GlobalTensor<float> outGm;
    GlobalTensor<int32_t> verticesGm, columnsGm, planGm;
    RowsTiling tiling;
    uint32_t results;
    bool together;
};

extern "C" __global__ __aicore__ void edge_products(GM_ADDR a, GM_ADDR b, GM_ADDR vertices, GM_ADDR columns,
                                                    GM_ADDR plan, GM_ADDR out, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    RowsTiling tiling;
    LoadTiling(tiling, tilingGm);
    EdgeProducts op;
    op.Init(a, b, vertices, columns, plan, out, tiling);
    op.Process();
}
