// What the cube core does in aggregate_cube: tiles -> L1 -> L0A and L0B -> product, summed up in L0C over the tiles of a
// row block, and out by one Fixpipe per run of consecutive rows.
//
// Rows of a chunk are arbitrary vertices. Sending them out run by run costs one instruction a run, once per row block
// and panel, and needs no second pass over the results; graphs in an order with locality have long runs.
#ifndef LIGHTNING_GNN_AGGREGATE_CONSUMER_H
#define LIGHTNING_GNN_AGGREGATE_CONSUMER_H

#include "aggregate_walk.h"
#include "cube_blocks.h"

namespace lightning_gnn {

class AggregateConsumer {
public:
    __aicore__ inline AggregateConsumer() {}

    // workspace: two slots, which the vector cores of the block fill.
    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR runs, GM_ADDR y, GM_ADDR parts,
                                const AscendC::GlobalTensor<half>& workspace, const AggregateTiling& t)
    {
        tiling = t;
        wsGm = workspace;
        runsGm.SetGlobalBuffer((__gm__ int32_t*)runs);
        yGm.SetGlobalBuffer((__gm__ half*)y);
        partsGm.SetGlobalBuffer((__gm__ float*)parts);
        // L1 and L0 have two buffers each, so that three tiles are under way: one comes from the slot, one moves from
        // L1 to L0, one is multiplied. L0B holds 128 columns at a time: two such buffers fill it.
        const uint32_t dense = tiling.tileRows * tiling.tileColumns * sizeof(half);
        pipe.InitBuffer(a1Queue, BUFFER_NUM, dense);
        pipe.InitBuffer(b1Queue, BUFFER_NUM, tiling.tileColumns * tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(a2Queue, BUFFER_NUM, dense);
        pipe.InitBuffer(b2Queue, BUFFER_NUM,
                        tiling.tileColumns * Least(tiling.panelColumns, CUBE_COLUMNS) * sizeof(half));
        pipe.InitBuffer(sumQueue, tiling.accumulators, tiling.tileRows * tiling.panelColumns * sizeof(float));
    }

    __aicore__ inline void Run(AggregateWalk& walk)
    {
        AscendC::LocalTensor<float> sum;
        for (; walk.Valid(); walk.Next()) {
            // The sums of a row block and panel stay in L0C, in float32, over all of its tiles.
            if (walk.First()) {
                sum = sumQueue.AllocTensor<float>();
            }
            Load(walk);
            Product(walk, sum);
            if (walk.Last()) {
                // The queue lets Fixpipe wait for the last product; with a second accumulator the next row block starts
                // meanwhile.
                sumQueue.EnQue(sum);
                sum = sumQueue.DeQue<float>();
                Store(walk, sum);
                sumQueue.FreeTensor(sum);
            }
        }
    }

    // Every result of this block is in global memory.
    __aicore__ inline void Finish() { AscendC::CrossCoreSetFlag<0x2, PIPE_FIX>(FLAG_DONE); }

private:
    __aicore__ inline void Load(const AggregateWalk& walk)
    {
        const uint32_t slot = walk.step & 1U;
        const uint64_t base = static_cast<uint64_t>(slot) * tiling.slotHalves;
        const uint32_t m = Up16(walk.rows), k = Up16(walk.columns);
        AscendC::LocalTensor<half> a1 = a1Queue.AllocTensor<half>();
        AscendC::LocalTensor<half> b1 = b1Queue.AllocTensor<half>();
        // Both vector cores have written the slot. The rows of the tile lie row by row; the copy to L1 makes fractals
        // of them.
        AscendC::CrossCoreWaitFlag(FLAG_READY + slot);
        LoadNz(a1, wsGm[base], m, k, k, m);
        LoadNz(b1, wsGm[base + tiling.tileRows * tiling.tileColumns], k, walk.width, walk.width, k);
        // Raised by MTE2, so after the copies: from L1 on, nobody needs the slot.
        AscendC::CrossCoreSetFlag<0x2, PIPE_MTE2>(FLAG_FREE + slot);
        a1Queue.EnQue(a1);
        b1Queue.EnQue(b1);
    }

    __aicore__ inline void Product(const AggregateWalk& walk, const AscendC::LocalTensor<float>& sum)
    {
        const uint32_t m = Up16(walk.rows), k = Up16(walk.columns);
        AscendC::LocalTensor<half> a1 = a1Queue.DeQue<half>();
        AscendC::LocalTensor<half> b1 = b1Queue.DeQue<half>();
        AscendC::LocalTensor<half> a2 = a2Queue.AllocTensor<half>();
        LoadA(a2, a1, m, k);
        a1Queue.FreeTensor(a1);
        a2Queue.EnQue(a2);
        a2 = a2Queue.DeQue<half>();
        // The dense tile stays in L0A; the features pass by, 128 columns at a time. In NZ, columns [column, column + n)
        // of B and of the sums are one piece of memory each.
        for (uint32_t column = 0; column < walk.width; column += CUBE_COLUMNS) {
            const uint32_t n = Least(walk.width - column, CUBE_COLUMNS);
            AscendC::LocalTensor<half> b2 = b2Queue.AllocTensor<half>();
            LoadB(b2, b1[column * k], k, n);
            b2Queue.EnQue(b2);
            b2 = b2Queue.DeQue<half>();
            Multiply(sum[column * m], a2, b2, m, k, n, walk.First());
            b2Queue.FreeTensor(b2);
        }
        a2Queue.FreeTensor(a2);
        b1Queue.FreeTensor(b1);
    }

    __aicore__ inline void Store(const AggregateWalk& walk, const AscendC::LocalTensor<float>& sum)
    {
        const uint32_t m = Up16(walk.rows);
        for (uint32_t run = walk.runBegin; run < walk.runEnd; ++run) {
            // sum[row * 16] is row `row` of the first 16 columns; Fixpipe finds the others by the stride m, writes
            // plain rows, and rounds to float16 on the way where y is meant.
            const uint32_t row = runsGm.GetValue(run * RUN_FIELDS);
            const uint32_t count = runsGm.GetValue(run * RUN_FIELDS + 1);
            const int32_t target = runsGm.GetValue(run * RUN_FIELDS + 2);
            if (target >= 0) {
                StoreRows(yGm[static_cast<uint64_t>(target) * tiling.ldy + walk.column], sum[row * CUBE_EDGE], m,
                          count, walk.width, tiling.ldy, false);
            } else {
                StoreRows(partsGm[static_cast<uint64_t>(-1 - target) * tiling.ldParts + walk.column],
                          sum[row * CUBE_EDGE], m, count, walk.width, tiling.ldParts, false);
            }
        }
    }

    AscendC::TQue<AscendC::TPosition::A1, 1> a1Queue;
    AscendC::TQue<AscendC::TPosition::B1, 1> b1Queue;
    AscendC::TQue<AscendC::TPosition::A2, 1> a2Queue;
    AscendC::TQue<AscendC::TPosition::B2, 1> b2Queue;
    AscendC::TQue<AscendC::TPosition::CO1, 1> sumQueue;
    AscendC::GlobalTensor<half> wsGm, yGm;
    AscendC::GlobalTensor<float> partsGm;
    AscendC::GlobalTensor<int32_t> runsGm;
    AggregateTiling tiling;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_AGGREGATE_CONSUMER_H
