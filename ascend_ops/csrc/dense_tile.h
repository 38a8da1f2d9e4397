// Half a tile of the graph made dense by a vector core, in one of two ways.
//
// Scatter stores the entries one by one, since this architecture has no vector scatter. It is kept short: positions are
// 16 bit and sorted, so one 64-bit load brings four and another their weights, and lists are filled up to whole blocks
// (no rest loop, fillers go to a cell behind the tile).
//
// Pick has a table that says for each cell where its value is, and lets the vector unit gather them: eight cells a cycle
// whatever they hold, which is less work where many hold something.
#ifndef LIGHTNING_GNN_DENSE_TILE_H
#define LIGHTNING_GNN_DENSE_TILE_H

#include "finite_filter.h"

namespace lightning_gnn {

constexpr uint32_t PICKED = 2048;  // cells gathered at once

class DenseTile {
public:
    __aicore__ inline DenseTile() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR positions, GM_ADDR values, const AggregateTiling& tiling)
    {
        positionsGm.SetGlobalBuffer((__gm__ uint16_t*)positions);
        valuesGm.SetGlobalBuffer((__gm__ half*)values);
        entryBatch = tiling.entryBatch;
        valueStride = tiling.valueStride;
        // The dense tile has one block more than its cells, into which the fillers of the entries are written.
        most = tiling.tileRows / 2 * tiling.tileColumns;
        pipe.InitBuffer(entryQueue, BUFFER_NUM, entryBatch * 2 * sizeof(half));
        pipe.InitBuffer(denseQueue, BUFFER_NUM, (most + ENTRY_ALIGN) * sizeof(half));
        strangeWeights = 0;
    }

    // What Pick needs besides.
    __aicore__ inline void InitPick(AscendC::TPipe& pipe, GM_ADDR cells)
    {
        cellsGm.SetGlobalBuffer((__gm__ int16_t*)cells);
        const uint32_t room = UpTo(most, COMPARE_HALVES) + CELL_BASE / sizeof(half);
        pipe.InitBuffer(valueQueue, 1, room * sizeof(half));  // read once a tile, before a long gathering
        pipe.InitBuffer(pickBuffer, room * sizeof(half));
        pipe.InitBuffer(cellQueue, BUFFER_NUM, PICKED * sizeof(int16_t));
        pipe.InitBuffer(wideBuffer, PICKED * sizeof(float));
        pipe.InitBuffer(offsetBuffer, PICKED * sizeof(int32_t));
        finite.Init(pipe, UpTo(most, COMPARE_HALVES));
        // What empty cells point to.
        AscendC::Duplicate(pickBuffer.Get<half>(), static_cast<half>(0.0f), CELL_BASE / sizeof(half));
        picks = true;
    }

    // Whether a weight was not finite.
    __aicore__ inline bool Met() { return strangeWeights != 0 || (picks && finite.Met()); }

    // Bring the first of these entries, so that they are there when Scatter comes.
    __aicore__ inline void Fetch(uint32_t begin, uint32_t count, uint32_t head)
    {
        if (count > 0) {
            Bring(begin, Least(count, entryBatch), head);
        }
    }

    // fetched: the scalar unit has waited for what Fetch brought.
    __aicore__ inline AscendC::LocalTensor<half> Scatter(uint32_t begin, uint32_t count, uint32_t head, uint32_t cells,
                                                         bool fetched)
    {
        AscendC::LocalTensor<half> dense = denseQueue.AllocTensor<half>();
        // Only the vector unit clears fast; then the scalar unit writes into what it cleared.
        AscendC::Duplicate(dense, static_cast<half>(0.0f), static_cast<int32_t>(cells + ENTRY_ALIGN));
        Sync<AscendC::HardEvent::V_S>();
        AscendC::LocalTensor<uint16_t> cell = dense.template ReinterpretCast<uint16_t>();
        for (uint32_t done = 0; done < count; done += entryBatch) {
            const uint32_t n = Least(count - done, entryBatch);
            if (done > 0) {
                Bring(begin + done, n, head);
            }
            AscendC::LocalTensor<half> entries = entryQueue.DeQue<half>();
            if (done > 0 || !fetched) {
                Sync<AscendC::HardEvent::MTE2_S>();
            }
            Store(cell, entries, n);
            Sync<AscendC::HardEvent::S_MTE2>();
            entryQueue.FreeTensor(entries);
        }
        // MTE3 copies the tile out: after the last scalar write.
        Sync<AscendC::HardEvent::S_MTE3>();
        return dense;
    }

    __aicore__ inline void Send(const AscendC::GlobalTensor<half>& target, AscendC::LocalTensor<half> dense,
                                uint32_t cells)
    {
        denseQueue.EnQue(dense);
        dense = denseQueue.DeQue<half>();
        AscendC::DataCopy(target, dense, cells);
        denseQueue.FreeTensor(dense);
    }

    // table: where the half's cells begin.
    __aicore__ inline void Pick(const AscendC::GlobalTensor<half>& target, uint64_t table, uint32_t begin,
                                uint32_t count, uint32_t head, uint32_t cells)
    {
        AscendC::LocalTensor<half> values = pickBuffer.Get<half>();
        if (count > 0) {
            AscendC::LocalTensor<half> given = valueQueue.AllocTensor<half>();
            AscendC::DataCopy(given, valuesGm[static_cast<uint64_t>(head) * valueStride + begin], count);
            valueQueue.EnQue(given);
            given = valueQueue.DeQue<half>();
            const uint32_t compared = UpTo(count, COMPARE_HALVES);
            if (count < compared) {
                AscendC::Duplicate(given[count], static_cast<half>(0.0f), static_cast<int32_t>(compared - count));
            }
            AscendC::PipeBarrier<PIPE_V>();  // also until the last tile's gathering has read the values
            finite.Clean(values[CELL_BASE / sizeof(half)], given, compared);
            valueQueue.FreeTensor(given);
        }
        AscendC::LocalTensor<float> wide = wideBuffer.Get<float>();
        AscendC::LocalTensor<int32_t> offsets = offsetBuffer.Get<int32_t>();
        for (uint32_t at = 0; at < cells; at += PICKED) {
            const uint32_t n = Least(cells - at, PICKED);
            AscendC::LocalTensor<int16_t> places = cellQueue.AllocTensor<int16_t>();
            AscendC::DataCopy(places, cellsGm[table + at], n);
            cellQueue.EnQue(places);
            places = cellQueue.DeQue<int16_t>();
            // There is no cast from 16 to 32 bits of an integer; in float32 these are exact.
            AscendC::Cast(wide, places, AscendC::RoundMode::CAST_NONE, n);
            cellQueue.FreeTensor(places);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(offsets, wide, AscendC::RoundMode::CAST_RINT, n);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::LocalTensor<half> dense = denseQueue.AllocTensor<half>();
            AscendC::Gather(dense, values, offsets.template ReinterpretCast<uint32_t>(), 0U, n);
            Send(target[at], dense, n);
        }
    }

private:
    static constexpr uint32_t COMPARE_HALVES = 128;  // a comparison works on 256 bytes

    __aicore__ inline void Bring(uint32_t begin, uint32_t count, uint32_t head)
    {
        // One buffer for both lists, places in front and weights behind: one AllocTensor and one event for the two.
        AscendC::LocalTensor<half> entries = entryQueue.AllocTensor<half>();
        AscendC::DataCopy(entries.template ReinterpretCast<uint16_t>(), positionsGm[begin], count);
        AscendC::DataCopy(entries[entryBatch], valuesGm[static_cast<uint64_t>(head) * valueStride + begin], count);
        entryQueue.EnQue(entries);
    }

    __aicore__ inline void Store(const AscendC::LocalTensor<uint16_t>& cell,
                                 const AscendC::LocalTensor<half>& entries, uint32_t count)
    {
        constexpr uint64_t exponents = 0x7C007C007C007C00ULL, one = 0x0400040004000400ULL;
        constexpr uint64_t lowest = 0x0001000100010001ULL;
        AscendC::LocalTensor<uint64_t> places = entries.template ReinterpretCast<uint64_t>();
        AscendC::LocalTensor<uint64_t> weights = entries[entryBatch].template ReinterpretCast<uint64_t>();
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

    AscendC::TQue<AscendC::TPosition::VECIN, 1> entryQueue, valueQueue, cellQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> denseQueue;
    AscendC::TBuf<AscendC::TPosition::VECCALC> pickBuffer, wideBuffer, offsetBuffer;
    AscendC::GlobalTensor<half> valuesGm;
    AscendC::GlobalTensor<int16_t> cellsGm;
    AscendC::GlobalTensor<uint16_t> positionsGm;
    FiniteFilter finite;
    uint64_t strangeWeights;
    uint32_t entryBatch, valueStride, most;
    bool picks = false;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_DENSE_TILE_H
