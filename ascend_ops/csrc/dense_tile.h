// Half a tile of the graph made dense by a vector core.
//
// The entries are stored one by one, since this architecture has no vector scatter. It is kept short: positions are
// 16 bit and sorted, so one 64-bit load brings four and another their weights, and lists are filled up to whole blocks
// (no rest loop, fillers go to a cell behind the tile).
#ifndef LIGHTNING_GNN_DENSE_TILE_H
#define LIGHTNING_GNN_DENSE_TILE_H

#include "load_tiling.h"

namespace lightning_gnn {

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
        const uint32_t most = tiling.tileRows / 2 * tiling.tileColumns;
        pipe.InitBuffer(entryQueue, BUFFER_NUM, entryBatch * 2 * sizeof(half));
        pipe.InitBuffer(denseQueue, BUFFER_NUM, (most + ENTRY_ALIGN) * sizeof(half));
        strangeWeights = 0;
    }

    // Whether a weight was not finite.
    __aicore__ inline bool Met() const { return strangeWeights != 0; }

    // Bring the first of these entries, so that they are there when Scatter comes.
    __aicore__ inline void Fetch(uint32_t begin, uint32_t count, uint32_t head)
    {
        if (count > 0) {
            Bring(begin, Least(count, entryBatch), head);
        }
    }

    // The scalar unit has waited for what Fetch brought.
    __aicore__ inline AscendC::LocalTensor<half> Scatter(uint32_t begin, uint32_t count, uint32_t head, uint32_t cells)
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
            if (done > 0) {
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

private:
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

    AscendC::TQue<AscendC::TPosition::VECIN, 1> entryQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> denseQueue;
    AscendC::GlobalTensor<half> valuesGm;
    AscendC::GlobalTensor<uint16_t> positionsGm;
    uint64_t strangeWeights;
    uint32_t entryBatch, valueStride;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_DENSE_TILE_H
