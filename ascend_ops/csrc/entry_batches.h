// The entries of a block's vertices in batches, whichever vertices they belong to, for kernels that work on float rows:
// as many rows are on their way at once where every vertex has few entries as where one has all. And what these kernels
// do with rows in UB, `lanes` floats each: the columns of a panel, filled up to the 64 of a vector instruction.
#ifndef LIGHTNING_GNN_ENTRY_BATCHES_H
#define LIGHTNING_GNN_ENTRY_BATCHES_H

#include "vertex_range.h"

namespace lightning_gnn {

constexpr uint32_t FLOAT_LANES = 64;  // floats in one vector instruction
constexpr uint32_t FLOAT_BLOCK = 8;   // floats in 32 bytes

// A vertex and its entries.
struct VertexCursor {
    uint32_t vertex;  // place in the list of vertices
    uint32_t begin, end;
};

class EntryBatches {
public:
    __aicore__ inline EntryBatches() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR vertices, GM_ADDR columns, GM_ADDR values,
                                const RowsTiling& t)
    {
        tiling = t;
        room = UpTo(tiling.batch, FLOAT_BLOCK);
        verticesGm.SetGlobalBuffer((__gm__ int32_t*)vertices);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        valuesGm.SetGlobalBuffer((__gm__ float*)values);
        pipe.InitBuffer(listBuffer, 2 * room * sizeof(int32_t));
        pipe.InitBuffer(weightBuffer, room * FLOAT_BLOCK * sizeof(float));
        for (uint32_t i = 0; i < 2; ++i) {
            listed[i] = pipe.AllocEventID<AscendC::HardEvent::MTE2_S>();
        }
    }

    // Floats behind the rows of a batch, for its weights.
    __aicore__ inline uint32_t WeightRoom() const { return room; }

    // The entries of a range of vertices, `first` to `last`.
    __aicore__ inline void Begin(const VertexRange& range)
    {
        stop = range.end;
        first = last = 0;
        if (range.begin < range.end) {
            first = verticesGm.GetValue(range.begin * VERTEX_FIELDS + 1);
            last = verticesGm.GetValue((range.end - 1) * VERTEX_FIELDS + 2);
        }
        if (first < last) {
            Fetch(first);
        }
    }

    __aicore__ inline uint32_t First() const { return first; }
    __aicore__ inline uint32_t Last() const { return last; }
    __aicore__ inline uint32_t Count(uint32_t at) const { return Least(last - at, tiling.batch); }

    // The list of the batch that begins at an entry. That of the next is asked for before: the scalar unit then has it
    // early, and need not wait for the rows of this one.
    __aicore__ inline AscendC::LocalTensor<int32_t> Open(uint32_t at)
    {
        if (at + Count(at) < last) {
            Fetch(at + Count(at));
        }
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(listed[Slot(at)]);
        return listBuffer.Get<int32_t>()[Slot(at) * room];
    }

    // MTE2 fills a list's buffer again: not before the scalar unit has read it.
    __aicore__ inline void Close() { Sync<AscendC::HardEvent::S_MTE2>(); }

    __aicore__ inline uint32_t Name(uint32_t vertex) const { return verticesGm.GetValue(vertex * VERTEX_FIELDS); }

    // To the first vertex from `vertex` on that has entries.
    __aicore__ inline VertexCursor Find(uint32_t vertex) const
    {
        VertexCursor cursor = {vertex, 0, 0};
        for (; cursor.vertex < stop; ++cursor.vertex) {
            cursor.begin = verticesGm.GetValue(cursor.vertex * VERTEX_FIELDS + 1);
            cursor.end = verticesGm.GetValue(cursor.vertex * VERTEX_FIELDS + 2);
            if (cursor.begin < cursor.end) {
                break;
            }
        }
        return cursor;
    }

    // The weights of a batch, behind its rows.
    __aicore__ inline void CopyWeights(const AscendC::LocalTensor<float>& target, uint32_t head, uint32_t at)
    {
        const uint32_t n = Count(at);
        AscendC::DataCopyPad(
            target, valuesGm[static_cast<uint64_t>(head) * tiling.valueStride + at],
            AscendC::DataCopyExtParams(1, n * sizeof(float), 0, 0, 0),
            AscendC::DataCopyPadExtParams<float>(true, 0, Narrow<uint8_t>(UpTo(n, FLOAT_BLOCK) - n), 0.0f));
    }

    // Each weight as a block of its own, for Multiply.
    __aicore__ inline void SpreadWeights(const AscendC::LocalTensor<float>& weights, uint32_t n)
    {
        AscendC::Brcb(weightBuffer.Get<float>(), weights, Narrow<uint8_t>(UpTo(n, FLOAT_BLOCK) / FLOAT_BLOCK),
                      AscendC::BrcbRepeatParams(1, FLOAT_BLOCK));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // target[i] = rows[i] * weight of entry first + i; rows do not move where `one`.
    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& target, const AscendC::LocalTensor<float>& rows,
                                    bool one, uint32_t firstWeight, uint32_t n, uint32_t lanes)
    {
        const uint8_t blocks = Narrow<uint8_t>(lanes / FLOAT_BLOCK), step = one ? 0 : blocks;
        AscendC::LocalTensor<float> weights = weightBuffer.Get<float>()[firstWeight * FLOAT_BLOCK];
        for (uint32_t lane = 0; lane < lanes; lane += FLOAT_LANES) {
            AscendC::Mul(target[lane], rows[lane], weights, static_cast<uint64_t>(FLOAT_LANES), Narrow<uint8_t>(n),
                         AscendC::BinaryRepeatParams(1, 1, 0, blocks, step, 1));
        }
    }

private:
    __aicore__ inline uint32_t Slot(uint32_t at) const { return (at - first) / tiling.batch & 1U; }

    __aicore__ inline void Fetch(uint32_t at)
    {
        AscendC::DataCopyPad(listBuffer.Get<int32_t>()[Slot(at) * room], columnsGm[at],
                             AscendC::DataCopyExtParams(1, Count(at) * sizeof(int32_t), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(listed[Slot(at)]);
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> listBuffer, weightBuffer;
    AscendC::GlobalTensor<int32_t> verticesGm, columnsGm;
    AscendC::GlobalTensor<float> valuesGm;
    RowsTiling tiling;
    AscendC::TEventID listed[2];
    uint32_t room, first, last, stop;
};

// rows[i] = row, n times.
__aicore__ inline void SpreadRow(const AscendC::LocalTensor<float>& rows, const AscendC::LocalTensor<float>& row,
                                 uint32_t n, uint32_t lanes)
{
    const AscendC::UnaryRepeatParams still(1, 1, Narrow<uint8_t>(lanes / FLOAT_BLOCK), 0);
    for (uint32_t lane = 0; lane < lanes; lane += FLOAT_LANES) {
        AscendC::Adds(rows[lane], row[lane], 0.0f, static_cast<uint64_t>(FLOAT_LANES), Narrow<uint8_t>(n), still);
    }
}

// rows[0] = sum of all rows, in an order that depends on their number alone; the others are spoiled.
__aicore__ inline void FoldSum(const AscendC::LocalTensor<float>& rows, uint32_t n, uint32_t lanes)
{
    while (n > 1) {
        const uint32_t half = n / 2;  // an odd row in the middle waits for the next turn
        n -= half;
        AscendC::Add(rows, rows, rows[n * lanes], static_cast<int32_t>(half * lanes));
        AscendC::PipeBarrier<PIPE_V>();
    }
}

// A queue's buffers, in which rows leave lanes beyond their columns as they are.
template <typename Queue>
__aicore__ inline void ClearBuffers(Queue& queue, uint32_t floats)
{
    for (int32_t i = 0; i < BUFFER_NUM; ++i) {
        AscendC::LocalTensor<float> rows = queue.template AllocTensor<float>();
        AscendC::Duplicate(rows, 0.0f, static_cast<int32_t>(floats));
        queue.EnQue(rows);
    }
    for (int32_t i = 0; i < BUFFER_NUM; ++i) {
        AscendC::LocalTensor<float> rows = queue.template DeQue<float>();
        queue.FreeTensor(rows);
    }
}

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_ENTRY_BATCHES_H
