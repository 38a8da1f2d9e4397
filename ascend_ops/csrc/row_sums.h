// Sums of rows of x along a list of edges, on a vector core; shared by aggregate_vector and aggregate_update. fp16 in,
// fp32 sums, fp16 out, rounded once.
//
// A row alone would be waited for: its copy ends a latency after it begins, which is longer than adding it takes. So rows
// come in groups, all of a group asked for one after the other, and one group is on its way while another is added. A
// whole group becomes float32 by one instruction. Groups and lists go on over the borders of rows of the result, whose
// sums are in the order of their edges, however many rows a group has.
#ifndef LIGHTNING_GNN_ROW_SUMS_H
#define LIGHTNING_GNN_ROW_SUMS_H

#include "load_tiling.h"

namespace lightning_gnn {

constexpr uint32_t BANK_BYTES = 256;  // of UB that half of its 16 groups of banks hold, a repeat of an instruction

class RowSums {
public:
    __aicore__ inline RowSums() {}

    // tiling: batch edges are listed at once, atOnce rows make a group (host_structs.cpp sees to it that UB has room).
    template <typename Tiling>
    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR x, GM_ADDR columns, GM_ADDR values, const Tiling& tiling)
    {
        xGm.SetGlobalBuffer((__gm__ half*)x);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        valuesGm.SetGlobalBuffer((__gm__ float*)values);
        ldx = tiling.ldx;
        weighted = tiling.weighted != 0;
        batch = tiling.batch;
        atOnce = tiling.atOnce;
        // Columns and weights of a list in one buffer.
        pipe.InitBuffer(listQueue, BUFFER_NUM, batch * 2 * sizeof(int32_t));
        pipe.InitBuffer(rowQueue, BUFFER_NUM, atOnce * tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(outQueue, BUFFER_NUM, tiling.panelColumns * sizeof(half));
        // Filled up so that rows of a multiple of 128 columns lie in other groups of UB's banks than the sums that they are
        // added to: neither waits for the other.
        pipe.InitBuffer(sumBuffer, UpTo(tiling.panelColumns * sizeof(float), 2 * BANK_BYTES) + BANK_BYTES);
        pipe.InitBuffer(wideBuffer, atOnce * tiling.panelColumns * sizeof(float));
    }

    // What follows is about these columns of x, with the weights that begin at valueOffset.
    __aicore__ inline void Begin(uint32_t firstColumn, uint32_t columns, uint64_t valueOffset)
    {
        column = firstColumn;
        width = columns;
        weightsAt = valueOffset;
        Clear();
    }

    // Add the rows of x that the edges [begin, end) name. rows.End() is the edge at which the current row of the result
    // ends, and rows.Close() sends it away and goes on to the next one.
    template <typename Rows>
    __aicore__ inline void Add(Rows& rows, uint32_t begin, uint32_t end)
    {
        for (uint32_t e = begin; e < end; e += batch) {
            List(rows, e, Least(end - e, batch));
        }
    }

    __aicore__ inline void Scale(float factor)
    {
        AscendC::LocalTensor<float> sum = sumBuffer.Get<float>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(sum, sum, factor, static_cast<int32_t>(width));
    }

    // Nobody else writes the row and columns that target begins at. The next sums begin at zero.
    __aicore__ inline void Send(const AscendC::GlobalTensor<half>& target)
    {
        AscendC::LocalTensor<half> out = outQueue.AllocTensor<half>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(out, sumBuffer.Get<float>(), AscendC::RoundMode::CAST_RINT, width);
        outQueue.EnQue(out);
        out = outQueue.DeQue<half>();
        AscendC::DataCopy(target, out, width);
        outQueue.FreeTensor(out);
        Clear();
    }

private:
    __aicore__ inline void Clear()
    {
        AscendC::PipeBarrier<PIPE_V>();  // the sums before may still be read
        AscendC::Duplicate(sumBuffer.Get<float>(), 0.0f, static_cast<int32_t>(width));
    }

    template <typename Rows>
    __aicore__ inline void List(Rows& rows, uint32_t first, uint32_t n)
    {
        AscendC::LocalTensor<int32_t> list = listQueue.AllocTensor<int32_t>();
        const AscendC::DataCopyExtParams words(1, n * sizeof(int32_t), 0, 0, 0);  // lists start anywhere
        AscendC::DataCopyPad(list, columnsGm[first], words, AscendC::DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        if (weighted) {
            AscendC::DataCopyPad(list[batch].template ReinterpretCast<float>(), valuesGm[weightsAt + first], words,
                                 AscendC::DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
        }
        listQueue.EnQue(list);
        list = listQueue.DeQue<int32_t>();
        Sync<AscendC::HardEvent::MTE2_S>();
        uint32_t asked = 0;
        for (uint32_t e = 0; e < n; e += atOnce) {
            for (; asked < n && asked < e + BUFFER_NUM * atOnce; asked += atOnce) {
                CopyRows(list, asked, Least(n - asked, atOnce));
            }
            AddRows(rows, list, first, e, Least(n - e, atOnce));
        }
        // The scalar unit has read its list: MTE2 may fill the buffer again.
        Sync<AscendC::HardEvent::S_MTE2>();
        listQueue.FreeTensor(list);
    }

    __aicore__ inline void CopyRows(const AscendC::LocalTensor<int32_t>& list, uint32_t e, uint32_t n)
    {
        AscendC::LocalTensor<half> group = rowQueue.AllocTensor<half>();
        for (uint32_t i = 0; i < n; ++i) {
            const uint64_t vertex = static_cast<uint32_t>(list.GetValue(e + i));
            AscendC::DataCopy(group[i * width], xGm[vertex * ldx + column], width);
        }
        rowQueue.EnQue(group);
    }

    // Edges [first + e, first + e + n), places [e, e + n) of the list.
    template <typename Rows>
    __aicore__ inline void AddRows(Rows& rows, const AscendC::LocalTensor<int32_t>& list, uint32_t first, uint32_t e,
                                   uint32_t n)
    {
        const AscendC::LocalTensor<float> weights = list[batch].template ReinterpretCast<float>();
        AscendC::LocalTensor<float> sum = sumBuffer.Get<float>(), wide = wideBuffer.Get<float>();
        AscendC::LocalTensor<half> group = rowQueue.DeQue<half>();
        AscendC::PipeBarrier<PIPE_V>();
        // To float32 first: thousands of halves would lose the small ones.
        AscendC::Cast(wide, group, AscendC::RoundMode::CAST_NONE, n * width);
        rowQueue.FreeTensor(group);
        for (uint32_t i = 0; i < n; ++i) {
            while (first + e + i >= rows.End()) {
                rows.Close();
            }
            AscendC::PipeBarrier<PIPE_V>();
            if (weighted) {
                AscendC::Axpy(sum, wide[i * width], weights.GetValue(e + i), static_cast<int32_t>(width));
            } else {
                AscendC::Add(sum, sum, wide[i * width], static_cast<int32_t>(width));
            }
        }
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 1> listQueue;
    AscendC::TQue<AscendC::TPosition::VECIN, BUFFER_NUM> rowQueue;  // so many EnQue without a DeQue between them
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> outQueue;
    AscendC::TBuf<AscendC::TPosition::VECCALC> sumBuffer, wideBuffer;
    AscendC::GlobalTensor<half> xGm;
    AscendC::GlobalTensor<float> valuesGm;
    AscendC::GlobalTensor<int32_t> columnsGm;
    uint64_t weightsAt;
    uint32_t ldx, batch, atOnce, column, width;
    bool weighted;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_ROW_SUMS_H
