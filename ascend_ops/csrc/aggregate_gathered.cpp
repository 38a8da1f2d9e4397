// y[row, slice] = sum over the entries of a row of weight * x[column, slice], on the cube core, with rows gathered once.
// In aggregate_cube each group of columns, and each panel of a wide row, gathers its own slices of the rows of a tile and
// makes the tile dense again. Here the vector cores of all blocks gather whole rows into a buffer that all cube cores
// read, wave by wave: of two buffers, small enough for L2, one is filled while the other is multiplied. Dense tiles lie
// beside them, made once for all groups, or are given where the weights never change. Tables and layouts: tiling.h.
//
// Launch: blocks = groups * members (more are idle), at most as many as the chip has cubes. Workspace: two slots and a
// block of 32 bytes for each vector core. note: not 0 where a weight of the given tiles is not finite. y must hold zeros
// in rows without entries, which belong to no row block.
#include "aggregate_consumer.h"
#include "aggregate_gatherer.h"
#include "aggregate_repair.h"

using namespace AscendC;
using namespace lightning_gnn;

// The tiles of a wave, which SyncAll says are there.
class WaveTiles {
public:
    __aicore__ inline WaveTiles() {}

    __aicore__ inline void Init(GM_ADDR dense, GM_ADDR workspace, const AggregateTiling& t, const WaveTiling& w)
    {
        tiling = t;
        waves = w;
        wsGm.SetGlobalBuffer((__gm__ half*)workspace);
        denseGm.SetGlobalBuffer((__gm__ half*)dense);
    }

    __aicore__ inline void Open(uint32_t wave) { base = static_cast<uint64_t>(wave & 1U) * tiling.slotHalves; }

    __aicore__ inline void Load(const AggregateWalk& walk, const LocalTensor<half>& a1, const LocalTensor<half>& b1)
    {
        const uint32_t m = Up16(walk.rows), k = Up16(walk.columns);
        const uint64_t fractal = static_cast<uint64_t>(walk.head) * waves.denseStride + walk.firstFractal;
        if (waves.kept != 0) {
            LoadNz(a1, denseGm[fractal * FRACTAL], m, k, k, m);
        } else {
            LoadNz(a1, wsGm[base + waves.rowHalves + fractal * FRACTAL], m, k, k, m);
        }
        // The slice of the panel, of rows that lie whole: one copy, strided.
        LoadNz(b1, wsGm[base + static_cast<uint64_t>(walk.firstRow) * tiling.ldx + walk.column], k, walk.width,
               tiling.ldx, k);
    }

private:
    GlobalTensor<half> wsGm, denseGm;
    AggregateTiling tiling;
    WaveTiling waves;
    uint64_t base;
};

// Where the plan has a member's row blocks of a wave.
__aicore__ inline uint32_t BoundsAt(const AggregateTiling& tiling, const WaveTiling& waves, uint32_t block,
                                    uint32_t wave)
{
    const uint32_t stride = WAVE_FIELDS + tiling.members + 1 + 2 * (2 * tiling.groups * tiling.members + 1);
    return waves.waveOffset + wave * stride + WAVE_FIELDS + block % tiling.members;
}

extern "C" __global__ __aicore__ void aggregate_gathered(GM_ADDR x, GM_ADDR plan, GM_ADDR rowBlocks, GM_ADDR tiles,
                                                         GM_ADDR columns, GM_ADDR positions, GM_ADDR values,
                                                         GM_ADDR runs, GM_ADDR batches, GM_ADDR sources, GM_ADDR dense,
                                                         GM_ADDR shapes, GM_ADDR cells, GM_ADDR note, GM_ADDR y,
                                                         GM_ADDR parts, GM_ADDR workspace, GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AggregateTiling tiling;
    LoadTiling(tiling, tilingGm);
    WaveTiling waves;
    LoadTiling(waves, (GM_ADDR)((__gm__ uint8_t*)tilingGm + sizeof(AggregateTiling)));
    uint32_t block = GetBlockIdx();
    if ASCEND_IS_AIV {
        block = GetBlockIdx() / 2;
    }
    AggregateWalk walk;
    walk.Init(plan, rowBlocks, tiles, tiling, block);
    TPipe pipe;
    if ASCEND_IS_AIC {
        AggregateConsumer<WaveTiles> consumer;
        consumer.Init(pipe, runs, y, parts, tiling);
        consumer.tiles.Init(dense, workspace, tiling, waves);
        for (uint32_t wave = 0; wave < tiling.waves; ++wave) {
            // All has been gathered for this wave, and the wave before has been multiplied: its buffer is free.
            SyncAll<false>();
            consumer.tiles.Open(wave);
            walk.Open(BoundsAt(tiling, waves, block, wave));
            consumer.Run(walk);
        }
        consumer.Finish();
    }
    if ASCEND_IS_AIV {
        AggregateGatherer gatherer;
        gatherer.Init(pipe, x, plan, tiles, positions, values, batches, sources, shapes, cells, workspace, tiling,
                      waves);
        AggregateRepair repair;
        repair.Init(pipe, x, columns, positions, values, runs, y, parts, tiling);
        GlobalTensor<int32_t> noteGm;
        noteGm.SetGlobalBuffer((__gm__ int32_t*)note);
        for (uint32_t wave = 0; wave < tiling.waves; ++wave) {
            gatherer.Wave(wave);
            if (wave + 1 == tiling.waves) {
                gatherer.Note(noteGm.GetValue(0) != 0);
            }
            SyncAll<false>();
        }
        CrossCoreWaitFlag(FLAG_DONE);
        if (gatherer.Noted()) {
            for (uint32_t wave = 0; wave < tiling.waves; ++wave) {
                walk.Open(BoundsAt(tiling, waves, block, wave));
                repair.Run(walk);
            }
        }
    }
}
