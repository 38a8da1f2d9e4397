// y[row, slice] = sum over the entries of a row of weight * x[column, slice], on the cube core.
// Atlas A2 (dav-c220): a block is one cube core and two vector cores. The vector cores make a chunk's tile dense and
// gather the rows it needs into one of two workspace slots; the cube core multiplies what is in the other.
// Backward is the same kernel over the transposed chunks. Tables and layouts: tiling.h.
//
// Launch: blocks = groups * members (more are idle). Workspace: blocks * 2 * slotHalves * 2 bytes. y must hold zeros
// in rows without entries, which belong to no row block.
#include "aggregate_consumer.h"
#include "aggregate_producer.h"
#include "aggregate_repair.h"

using namespace AscendC;
using namespace lightning_gnn;

extern "C" __global__ __aicore__ void aggregate_cube(GM_ADDR x, GM_ADDR plan, GM_ADDR rowBlocks, GM_ADDR tiles,
                                                     GM_ADDR columns, GM_ADDR positions, GM_ADDR values, GM_ADDR runs,
                                                     GM_ADDR y, GM_ADDR parts, GM_ADDR workspace, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AggregateTiling tiling;
    LoadTiling(tiling, tilingGm);
    uint32_t block = GetBlockIdx();
    if ASCEND_IS_AIV {
        block = GetBlockIdx() / 2;  // a vector core counts 2 * block + sub-block; the ratio is fixed by the task type
    }
    AggregateWalk walk;
    walk.Init(plan, rowBlocks, tiles, tiling, block);
    if (!walk.Valid()) {
        return;  // all cores of the block alike; there may be no workspace for it
    }
    const uint64_t slots = 2ULL * tiling.slotHalves;
    GlobalTensor<half> slotsGm;
    slotsGm.SetGlobalBuffer((__gm__ half*)workspace + block * slots, slots);
    TPipe pipe;
    if ASCEND_IS_AIC {
        AggregateConsumer consumer;
        consumer.Init(pipe, runs, y, parts, slotsGm, tiling);
        consumer.Run(walk);
        consumer.Finish();
    }
    if ASCEND_IS_AIV {
        AggregateProducer producer;
        producer.Init(pipe, x, columns, positions, values, slotsGm, tiling, GetSubBlockIdx());
        AggregateRepair repair;
        repair.Init(pipe, x, columns, positions, values, runs, y, parts, tiling);
        producer.Run(walk);
        CrossCoreWaitFlag(FLAG_DONE);
        if (producer.MetNonFinite()) {
            walk.Init(plan, rowBlocks, tiles, tiling, block);
            repair.Run(walk);
        }
    }
}
