// y[row] = sum of the row's float parts, first to last, so the result does not depend on who wrote them when.
// Parts come from vertices whose rows lie in several chunks (aggregate_cube) and from a product cut along k (update).
//
// Launch: any number of vector-core blocks; they take rows in turn.
#include "load_tiling.h"

using namespace AscendC;
using namespace lightning_gnn;

class CombineParts {
public:
    __aicore__ inline CombineParts() {}

    __aicore__ inline void Init(GM_ADDR parts, GM_ADDR list, GM_ADDR y, const CombineTiling& t)
    {
        tiling = t;
        partsGm.SetGlobalBuffer((__gm__ float*)parts);
        listGm.SetGlobalBuffer((__gm__ int32_t*)list);
        halfGm.SetGlobalBuffer((__gm__ half*)y);
        floatGm.SetGlobalBuffer((__gm__ float*)y);
        pipe.InitBuffer(partQueue, BUFFER_NUM, tiling.piece * sizeof(float));
        pipe.InitBuffer(outQueue, BUFFER_NUM, tiling.piece * sizeof(float));
        pipe.InitBuffer(sumBuffer, tiling.piece * sizeof(float));
    }

    __aicore__ inline void Process()
    {
        for (uint32_t i = GetBlockIdx(); i < tiling.numVertices; i += GetBlockNum()) {
            // Parts of a cut product are numbered evenly; those of split vertices are listed.
            uint32_t row = i, begin = i * tiling.partsPerRow, end = begin + tiling.partsPerRow;
            if (tiling.partsPerRow == 0) {
                row = listGm.GetValue(i * SPLIT_FIELDS);
                begin = listGm.GetValue(i * SPLIT_FIELDS + 1);
                end = listGm.GetValue(i * SPLIT_FIELDS + 2);
            }
            for (uint32_t column = 0; column < tiling.numColumns; column += tiling.piece) {
                Piece(row, begin, end, column, Least(tiling.numColumns - column, tiling.piece));
            }
        }
    }

private:
    __aicore__ inline void CopyIn(uint32_t part, uint32_t column, uint32_t n)
    {
        LocalTensor<float> values = partQueue.AllocTensor<float>();
        DataCopy(values, partsGm[static_cast<uint64_t>(part) * tiling.ldParts + column], n);
        partQueue.EnQue(values);
    }

    __aicore__ inline void Piece(uint32_t row, uint32_t begin, uint32_t end, uint32_t column, uint32_t n)
    {
        const int32_t count = static_cast<int32_t>(n);
        LocalTensor<float> sum = sumBuffer.Get<float>();
        Duplicate(sum, 0.0f, count);
        // The next part is on its way while this one is added, always in the same order.
        CopyIn(begin, column, n);
        for (uint32_t part = begin; part < end; ++part) {
            if (part + 1 < end) {
                CopyIn(part + 1, column, n);
            }
            LocalTensor<float> values = partQueue.DeQue<float>();
            PipeBarrier<PIPE_V>();
            Add(sum, sum, values, count);
            partQueue.FreeTensor(values);
        }
        PipeBarrier<PIPE_V>();
        const uint64_t at = static_cast<uint64_t>(row) * tiling.ldy + column;
        if (tiling.floatOut != 0) {
            LocalTensor<float> out = outQueue.AllocTensor<float>();
            // A move to the queue's buffer, which the copy out takes over.
            Muls(out, sum, 1.0f, count);
            outQueue.EnQue(out);
            out = outQueue.DeQue<float>();
            DataCopy(floatGm[at], out, n);
            outQueue.FreeTensor(out);
        } else {
            LocalTensor<half> out = outQueue.AllocTensor<half>();
            Cast(out, sum, RoundMode::CAST_RINT, n);
            outQueue.EnQue(out);
            out = outQueue.DeQue<half>();
            DataCopy(halfGm[at], out, n);
            outQueue.FreeTensor(out);
        }
        PipeBarrier<PIPE_V>();
    }

    TPipe pipe;
    TQue<TPosition::VECIN, BUFFER_NUM> partQueue;  // depth 2: two EnQue without a DeQue between them
    TQue<TPosition::VECOUT, 1> outQueue;
    TBuf<TPosition::VECCALC> sumBuffer;
    GlobalTensor<float> partsGm, floatGm;
    GlobalTensor<half> halfGm;
    GlobalTensor<int32_t> listGm;
    CombineTiling tiling;
};

extern "C" __global__ __aicore__ void combine_parts(GM_ADDR parts, GM_ADDR list, GM_ADDR y, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    CombineTiling tiling;
    LoadTiling(tiling, tilingGm);
    CombineParts op;
    op.Init(parts, list, y, tiling);
    op.Process();
}
