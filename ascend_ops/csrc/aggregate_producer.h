// What a vector core does in aggregate_cube: its half of the dense tile and its half of the gathered rows, into a
// slot of the workspace.
//
// Densifying is scalar work, since this architecture has no vector scatter. It is kept short: positions are 16 bit and
// sorted, so one 64-bit load brings four and another their weights, lists are filled up to whole blocks (no rest loop,
// fillers go to a cell behind the tile), and it runs while the copies of the rows, issued before, are on their way.
//
// Not-a-number and infinity: 0 * NaN is NaN, so one such feature would reach every row of its tile, neighbour or not,
// and the documents of Mmad warn of exceptions on NaN. Non-finite features and weights are therefore replaced by 0
// here and noticed; if there were any, aggregate_repair.h adds what they contribute, to their own rows only.
#ifndef LIGHTNING_GNN_AGGREGATE_PRODUCER_H
#define LIGHTNING_GNN_AGGREGATE_PRODUCER_H

#include "aggregate_walk.h"

namespace lightning_gnn {

constexpr float HALF_MAX = 65504.0f;

class AggregateProducer {
public:
    __aicore__ inline AggregateProducer() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR x, GM_ADDR columns, GM_ADDR positions, GM_ADDR values,
                                const AscendC::GlobalTensor<half>& workspace, const AggregateTiling& t, uint32_t which)
    {
        tiling = t;
        sub = which;
        wsGm = workspace;
        xGm.SetGlobalBuffer((__gm__ half*)x);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        positionsGm.SetGlobalBuffer((__gm__ uint16_t*)positions);
        valuesGm.SetGlobalBuffer((__gm__ half*)values);
        // Two buffers to every queue: a copy fills or empties one while the other is worked on. The dense tile has one
        // block more than its cells, into which the fillers of the entries are written.
        const uint32_t cells = tiling.tileRows / 2 * tiling.tileColumns;
        const uint32_t features = tiling.tileColumns / 2 * tiling.panelColumns;
        pipe.InitBuffer(indexQueue, BUFFER_NUM, tiling.tileColumns / 2 * sizeof(int32_t));
        pipe.InitBuffer(entryQueue, BUFFER_NUM, tiling.entryBatch * 2 * sizeof(half));
        pipe.InitBuffer(denseQueue, BUFFER_NUM, (cells + ENTRY_ALIGN) * sizeof(half));
        pipe.InitBuffer(rowsQueue, BUFFER_NUM, features * sizeof(half));
        pipe.InitBuffer(cleanQueue, BUFFER_NUM, features * sizeof(half));
        maskBytes = UpTo(features / 8, 32);
        pipe.InitBuffer(maskBuffer, 3 * maskBytes);
        strangeWeights = 0;
    }

    __aicore__ inline void Run(AggregateWalk& walk)
    {
        // A bit for each place of a gathered row, set for as long as all that was seen there was finite: so a tile
        // costs one And, and the scalar unit looks once, at the end.
        AscendC::LocalTensor<uint16_t> finite = maskBuffer.Get<uint16_t>()[maskBytes];  // the third mask
        AscendC::Duplicate(finite, static_cast<uint16_t>(0xFFFF), static_cast<int32_t>(maskBytes / 2));
        // One step ahead: the lists of the next tile are on their way while this one is made.
        Fetch(walk);
        while (walk.Valid()) {
            Step(walk);
        }
        // Leave every counter at zero for the next kernel.
        const uint32_t left = Least(walk.step, 2);
        for (uint32_t i = 0; i < left; ++i) {
            AscendC::CrossCoreWaitFlag(FLAG_FREE + ((walk.step - left + i) & 1U));
        }
    }

    // Whether this core met a feature or weight that is not finite.
    __aicore__ inline bool MetNonFinite()
    {
        AscendC::LocalTensor<uint64_t> finite =
            maskBuffer.Get<uint16_t>()[maskBytes].template ReinterpretCast<uint64_t>();
        Sync<AscendC::HardEvent::V_S>();
        uint64_t all = ~0ULL;
        for (uint32_t i = 0; i < maskBytes / sizeof(uint64_t); ++i) {
            all &= finite.GetValue(i);
        }
        return strangeWeights != 0 || all != ~0ULL;
    }

private:
    __aicore__ inline void Step(AggregateWalk& walk)
    {
        const uint32_t slot = walk.step & 1U;
        const uint64_t base = static_cast<uint64_t>(slot) * tiling.slotHalves;
        const uint32_t k = Up16(walk.columns), m = Up16(walk.rows), width = walk.width;
        const uint32_t cells = m / 2 * k, features = k / 2 * width;
        const uint32_t valid = Mine(walk.columns, k);
        const bool waits = walk.step >= 2;

        // MTE2 gathers the rows while the scalar unit scatters the weights: neither waits for the other.
        CopyRows(walk, valid);
        AscendC::LocalTensor<half> dense = Densify(walk, cells);
        walk.Next();
        if (walk.Valid()) {
            Fetch(walk);
        }
        if (waits) {
            AscendC::CrossCoreWaitFlag(FLAG_FREE + slot);  // the cube core has read what was in this slot
        }
        // A slot holds the dense tile, then the rows; each vector core writes its half of both. The queue orders V
        // before MTE3; that the scalar unit is through, Densify has waited for.
        denseQueue.EnQue(dense);
        dense = denseQueue.DeQue<half>();
        AscendC::DataCopy(wsGm[base + sub * cells], dense, cells);
        denseQueue.FreeTensor(dense);
        AscendC::LocalTensor<half> clean = CleanRows(valid * width, features);
        AscendC::DataCopy(wsGm[base + tiling.tileRows * tiling.tileColumns + sub * features], clean, features);
        cleanQueue.FreeTensor(clean);
        // Raised once this core's writes are done; the cube core goes on when both vector cores have raised it.
        AscendC::CrossCoreSetFlag<0x2, PIPE_MTE3>(FLAG_READY + slot);
    }

    // Real columns in this core's half of k, the rest are fillers at the end.
    __aicore__ inline uint32_t Mine(uint32_t columns, uint32_t k) const
    {
        const uint32_t begin = sub * (k / 2);
        return columns > begin ? Least(columns - begin, k / 2) : 0;
    }

    // Bring the lists of a step, so that they are there when its turn comes.
    __aicore__ inline void Fetch(const AggregateWalk& walk)
    {
        const uint32_t k = Up16(walk.columns);
        AscendC::LocalTensor<int32_t> index = indexQueue.AllocTensor<int32_t>();
        AscendC::DataCopy(index, columnsGm[walk.columnBegin + sub * (k / 2)], k / 2);
        indexQueue.EnQue(index);
        if (walk.entryCount[sub] > 0) {
            FetchEntries(walk.entryBegin[sub], Least(walk.entryCount[sub], tiling.entryBatch), walk.head);
        }
    }

    __aicore__ inline void FetchEntries(uint32_t begin, uint32_t count, uint32_t head)
    {
        // One buffer for both lists, places in front and weights behind: one AllocTensor and one event for the two.
        AscendC::LocalTensor<half> entries = entryQueue.AllocTensor<half>();
        AscendC::DataCopy(entries.template ReinterpretCast<uint16_t>(), positionsGm[begin], count);
        AscendC::DataCopy(entries[tiling.entryBatch],
                          valuesGm[static_cast<uint64_t>(head) * tiling.valueStride + begin], count);
        entryQueue.EnQue(entries);
    }

    __aicore__ inline void CopyRows(const AggregateWalk& walk, uint32_t valid)
    {
        AscendC::LocalTensor<int32_t> index = indexQueue.DeQue<int32_t>();
        AscendC::LocalTensor<half> rows = rowsQueue.AllocTensor<half>();
        Sync<AscendC::HardEvent::MTE2_S>();  // the queue orders MTE2 -> V, but the scalar unit reads here
        // One copy for each column of the tile: a panel's width is a multiple of 16 halves, so rows are whole 32-byte
        // blocks both in global memory and in UB.
        for (uint32_t i = 0; i < valid; ++i) {
            const uint64_t row = static_cast<uint64_t>(index.GetValue(i)) * tiling.ldx + walk.column;
            AscendC::DataCopy(rows[i * walk.width], xGm[row], walk.width);
        }
        // The buffer of the list is filled by MTE2 again: not before the scalar unit has read it.
        Sync<AscendC::HardEvent::S_MTE2>();
        indexQueue.FreeTensor(index);
        rowsQueue.EnQue(rows);
    }

    __aicore__ inline AscendC::LocalTensor<half> Densify(const AggregateWalk& walk, uint32_t cells)
    {
        AscendC::LocalTensor<half> dense = denseQueue.AllocTensor<half>();
        // Only the vector unit clears fast; then the scalar unit writes into what it cleared.
        AscendC::Duplicate(dense, static_cast<half>(0.0f), static_cast<int32_t>(cells + ENTRY_ALIGN));
        Sync<AscendC::HardEvent::V_S>();
        AscendC::LocalTensor<uint16_t> cell = dense.template ReinterpretCast<uint16_t>();
        const uint32_t count = walk.entryCount[sub];
        for (uint32_t done = 0; done < count; done += tiling.entryBatch) {
            const uint32_t n = Least(count - done, tiling.entryBatch);
            if (done > 0) {
                FetchEntries(walk.entryBegin[sub] + done, n, walk.head);
            }
            AscendC::LocalTensor<half> entries = entryQueue.DeQue<half>();
            if (done > 0) {
                // The first batch came with the index, which CopyRows waited for. Waiting here as well would mean
                // waiting for the rows, whose copies are meant to run during the scatter.
                Sync<AscendC::HardEvent::MTE2_S>();
            }
            Scatter(cell, entries, n);
            Sync<AscendC::HardEvent::S_MTE2>();
            entryQueue.FreeTensor(entries);
        }
        // MTE3 copies the tile out: after the last scalar write.
        Sync<AscendC::HardEvent::S_MTE3>();
        return dense;
    }

    __aicore__ inline void Scatter(const AscendC::LocalTensor<uint16_t>& cell,
                                   const AscendC::LocalTensor<half>& entries, uint32_t count)
    {
        constexpr uint64_t exponents = 0x7C007C007C007C00ULL, one = 0x0400040004000400ULL;
        constexpr uint64_t lowest = 0x0001000100010001ULL;
        AscendC::LocalTensor<uint64_t> places = entries.template ReinterpretCast<uint64_t>();
        AscendC::LocalTensor<uint64_t> weights = entries[tiling.entryBatch].template ReinterpretCast<uint64_t>();
        for (uint32_t i = 0; i < count / 4; ++i) {
            // Four places and their four weights, in 16-bit lanes of a register each.
            const uint64_t place = places.GetValue(i);
            uint64_t weight = weights.GetValue(i);
            // An exponent of all ones (not finite) carries into the top bit of its 16-bit lane.
            const uint64_t strange = (((weight & exponents) + one) >> 15) & lowest;
            strangeWeights |= strange;
            // 0 for what is not finite; the lanes of `strange` hold 1 or 0.
            weight &= ~(strange * 0xFFFFULL);
            cell.SetValue(place & 0xFFFF, static_cast<uint16_t>(weight & 0xFFFF));
            cell.SetValue((place >> 16) & 0xFFFF, static_cast<uint16_t>((weight >> 16) & 0xFFFF));
            cell.SetValue((place >> 32) & 0xFFFF, static_cast<uint16_t>((weight >> 32) & 0xFFFF));
            cell.SetValue(place >> 48, static_cast<uint16_t>(weight >> 48));
        }
    }

    // The gathered rows with zeros for what is not finite and for the fillers; a filler's stale NaN would do the same.
    __aicore__ inline AscendC::LocalTensor<half> CleanRows(uint32_t valid, uint32_t features)
    {
        AscendC::LocalTensor<uint8_t> below = maskBuffer.Get<uint8_t>();
        AscendC::LocalTensor<uint8_t> above = below[maskBytes];
        AscendC::LocalTensor<uint16_t> finite = maskBuffer.Get<uint16_t>()[maskBytes];
        AscendC::LocalTensor<uint16_t> mask = below.template ReinterpretCast<uint16_t>();
        AscendC::LocalTensor<half> rows = rowsQueue.DeQue<half>();
        AscendC::LocalTensor<half> clean = cleanQueue.AllocTensor<half>();
        // Columns that fill the tile up were not copied: their rows hold what an earlier tile left.
        if (valid < features) {
            AscendC::Duplicate(rows[valid], static_cast<half>(0.0f), static_cast<int32_t>(features - valid));
            AscendC::PipeBarrier<PIPE_V>();
        }
        // features is a multiple of 8 rows x 16 columns, the 256 bytes that a comparison works on
        AscendC::CompareScalar(below, rows, static_cast<half>(HALF_MAX), AscendC::CMPMODE::LE, features);
        AscendC::CompareScalar(above, rows, static_cast<half>(-HALF_MAX), AscendC::CMPMODE::GE, features);
        AscendC::PipeBarrier<PIPE_V>();
        const int32_t words = static_cast<int32_t>(features / 16);
        // Finite is what is neither above the largest half nor below the least; a comparison with NaN is false.
        AscendC::And(mask, mask, above.template ReinterpretCast<uint16_t>(), words);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::And(finite, finite, mask, words);
        AscendC::Select(clean, below, rows, static_cast<half>(0.0f), AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE,
                        features);
        AscendC::PipeBarrier<PIPE_V>();
        rowsQueue.FreeTensor(rows);
        cleanQueue.EnQue(clean);
        return cleanQueue.DeQue<half>();
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 1> indexQueue, entryQueue, rowsQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> denseQueue, cleanQueue;
    AscendC::TBuf<AscendC::TPosition::VECCALC> maskBuffer;
    AscendC::GlobalTensor<half> xGm, valuesGm, wsGm;
    AscendC::GlobalTensor<int32_t> columnsGm;
    AscendC::GlobalTensor<uint16_t> positionsGm;
    AggregateTiling tiling;
    uint64_t strangeWeights;
    uint32_t sub, maskBytes;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_AGGREGATE_PRODUCER_H
