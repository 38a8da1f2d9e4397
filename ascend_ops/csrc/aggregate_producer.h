// What a vector core does in aggregate_cube: its half of the dense tile and its half of the gathered rows, into a
// slot of the workspace.
//
// The tile is made dense (dense_tile.h) while the copies of the rows, issued before, are on their way.
#ifndef LIGHTNING_GNN_AGGREGATE_PRODUCER_H
#define LIGHTNING_GNN_AGGREGATE_PRODUCER_H

#include "aggregate_walk.h"
#include "dense_tile.h"
#include "finite_filter.h"

namespace lightning_gnn {

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
        // Two buffers to every queue: a copy fills or empties one while the other is worked on.
        const uint32_t features = tiling.tileColumns / 2 * tiling.panelColumns;
        pipe.InitBuffer(indexQueue, BUFFER_NUM, tiling.tileColumns / 2 * sizeof(int32_t));
        tile.Init(pipe, positions, values, tiling);
        pipe.InitBuffer(rowsQueue, BUFFER_NUM, features * sizeof(half));
        pipe.InitBuffer(cleanQueue, BUFFER_NUM, features * sizeof(half));
        finite.Init(pipe, features);
    }

    __aicore__ inline void Run(AggregateWalk& walk)
    {
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
    __aicore__ inline bool MetNonFinite() { return finite.Met() || tile.Met(); }

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
        // The lists came with the index, which CopyRows waited for. Waiting here as well would mean waiting for the rows.
        AscendC::LocalTensor<half> dense =
            tile.Scatter(walk.entryBegin[sub], walk.entryCount[sub], walk.head, cells);
        walk.Next();
        if (walk.Valid()) {
            Fetch(walk);
        }
        if (waits) {
            AscendC::CrossCoreWaitFlag(FLAG_FREE + slot);  // the cube core has read what was in this slot
        }
        // A slot holds the dense tile, then the rows; each vector core writes its half of both. The queue orders V
        // before MTE3; that the scalar unit is through, Scatter has waited for.
        tile.Send(wsGm[base + sub * cells], dense, cells);
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
        tile.Fetch(walk.entryBegin[sub], walk.entryCount[sub], walk.head);
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

    // The gathered rows with zeros for what is not finite and for the fillers; a filler's stale NaN would do the same.
    __aicore__ inline AscendC::LocalTensor<half> CleanRows(uint32_t valid, uint32_t features)
    {
        AscendC::LocalTensor<half> rows = rowsQueue.DeQue<half>();
        AscendC::LocalTensor<half> clean = cleanQueue.AllocTensor<half>();
        // Columns that fill the tile up were not copied: their rows hold what an earlier tile left.
        if (valid < features) {
            AscendC::Duplicate(rows[valid], static_cast<half>(0.0f), static_cast<int32_t>(features - valid));
            AscendC::PipeBarrier<PIPE_V>();
        }
        // features is a multiple of 8 rows x 16 columns, the 256 bytes that a comparison works on
        finite.Clean(clean, rows, features);
        AscendC::PipeBarrier<PIPE_V>();
        rowsQueue.FreeTensor(rows);
        cleanQueue.EnQue(clean);
        return cleanQueue.DeQue<half>();
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 1> indexQueue, rowsQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> cleanQueue;
    AscendC::GlobalTensor<half> xGm, wsGm;
    AscendC::GlobalTensor<int32_t> columnsGm;
    FiniteFilter finite;
    DenseTile tile;
    AggregateTiling tiling;
    uint32_t sub;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_AGGREGATE_PRODUCER_H
