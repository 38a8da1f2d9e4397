// The gathered scores of a vertex's entries: source[column of the entry] + target[vertex], one row of heads each.
#ifndef LIGHTNING_GNN_EDGE_SCORES_H
#define LIGHTNING_GNN_EDGE_SCORES_H

#include "head_rows.h"

namespace lightning_gnn {

class EdgeScores {
public:
    __aicore__ inline EdgeScores() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR source, GM_ADDR target, GM_ADDR columns,
                                uint32_t batchRows, uint32_t floats)
    {
        sourceGm.SetGlobalBuffer((__gm__ float*)source);
        targetGm.SetGlobalBuffer((__gm__ float*)target);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        pipe.InitBuffer(columnQueue, BUFFER_NUM, UpTo(batchRows * sizeof(int32_t), 32));
        pipe.InitBuffer(sourceQueue, BUFFER_NUM, floats * sizeof(float));
        pipe.InitBuffer(targetQueue, 1, HEAD_BLOCK * sizeof(float));
        pipe.InitBuffer(targetBuffer, HEAD_BLOCK * sizeof(float));
    }

    // Keep the target's row for the batches that follow.
    __aicore__ inline void OpenVertex(const HeadRows& rows, uint32_t vertex)
    {
        AscendC::LocalTensor<float> row = targetQueue.AllocTensor<float>();
        rows.CopyRow(row, targetGm, vertex);
        targetQueue.EnQue(row);
        row = targetQueue.DeQue<float>();
        // Into a buffer of its own, which outlives the queue's: the row is needed for all batches of the vertex.
        AscendC::Adds(targetBuffer.Get<float>(), row, 0.0f, static_cast<int32_t>(rows.lanes));
        targetQueue.FreeTensor(row);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // scores[i] = source[columns[first + i]] + target, for n entries.
    __aicore__ inline void Gather(const HeadRows& rows, const AscendC::LocalTensor<float>& scores, uint32_t first,
                                  uint32_t n)
    {
        AscendC::LocalTensor<int32_t> column = columnQueue.AllocTensor<int32_t>();
        AscendC::DataCopyPad(column, columnsGm[first], AscendC::DataCopyExtParams(1, n * sizeof(int32_t), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        columnQueue.EnQue(column);
        // The queue orders MTE2 before V, but it is the scalar unit that reads the indices.
        column = columnQueue.DeQue<int32_t>();
        Sync<AscendC::HardEvent::MTE2_S>();
        AscendC::LocalTensor<float> source = sourceQueue.AllocTensor<float>();
        for (uint32_t i = 0; i < n; ++i) {
            rows.CopyRow(source[i * rows.lanes], sourceGm, column.GetValue(i));
        }
        Sync<AscendC::HardEvent::S_MTE2>();
        columnQueue.FreeTensor(column);
        sourceQueue.EnQue(source);
        source = sourceQueue.DeQue<float>();
        // One instruction for all entries: a repeat for each, the target's row standing still.
        AscendC::Add(scores, source, targetBuffer.Get<float>(), static_cast<uint64_t>(rows.lanes),
                     Narrow<uint8_t>(n), rows.OneToAll());
        sourceQueue.FreeTensor(source);
        AscendC::PipeBarrier<PIPE_V>();
    }

private:
    AscendC::TQue<AscendC::TPosition::VECIN, 1> columnQueue, sourceQueue, targetQueue;
    AscendC::TBuf<AscendC::TPosition::VECCALC> targetBuffer;
    AscendC::GlobalTensor<float> sourceGm, targetGm;
    AscendC::GlobalTensor<int32_t> columnsGm;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_EDGE_SCORES_H
