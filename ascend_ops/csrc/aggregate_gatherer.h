// What a vector core does in aggregate_gathered: its share of the rows of a wave, and of the tiles that are not kept.
//
// Rows are gathered whole, those of neighbouring vertices by one copy, and lie in the wave's buffer tile after tile: a
// group of columns reads its slice of a tile's rows by one strided copy. Shares are of about equal work over all vector
// cores, whatever rows or columns their cube cores multiply.
#ifndef LIGHTNING_GNN_AGGREGATE_GATHERER_H
#define LIGHTNING_GNN_AGGREGATE_GATHERER_H

#include "aggregate_walk.h"
#include "dense_tile.h"

namespace lightning_gnn {

constexpr uint32_t NOTE_WORDS = 8;  // a note is a 32-byte block

class AggregateGatherer {
public:
    __aicore__ inline AggregateGatherer() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR x, GM_ADDR plan, GM_ADDR tiles, GM_ADDR positions,
                                GM_ADDR values, GM_ADDR batches, GM_ADDR sources, GM_ADDR shapes, GM_ADDR cells,
                                GM_ADDR workspace, const AggregateTiling& t, const WaveTiling& w)
    {
        tiling = t;
        waves = w;
        core = AscendC::GetBlockIdx();
        cores = 2 * tiling.groups * tiling.members;
        xGm.SetGlobalBuffer((__gm__ half*)x);
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        tilesGm.SetGlobalBuffer((__gm__ int32_t*)tiles);
        batchesGm.SetGlobalBuffer((__gm__ int32_t*)batches);
        sourcesGm.SetGlobalBuffer((__gm__ int32_t*)sources);
        shapesGm.SetGlobalBuffer((__gm__ int32_t*)shapes);
        wsGm.SetGlobalBuffer((__gm__ half*)workspace);
        notesGm.SetGlobalBuffer((__gm__ int32_t*)((__gm__ half*)workspace + waves.noteOffset));
        sourceRoom = UpTo(waves.batchRows * SOURCE_FIELDS, NOTE_WORDS);
        pipe.InitBuffer(sourceBuffer, BUFFER_NUM * sourceRoom * sizeof(int32_t));
        pipe.InitBuffer(rowsQueue, BUFFER_NUM, waves.batchHalves * sizeof(half));
        pipe.InitBuffer(cleanQueue, BUFFER_NUM, waves.batchHalves * sizeof(half));
        pipe.InitBuffer(noteBuffer, cores * NOTE_WORDS * sizeof(int32_t));
        finite.Init(pipe, waves.batchHalves);
        if (waves.kept == 0) {
            tile.Init(pipe, positions, values, tiling);
            tile.InitPick(pipe, cells);
        }
        listed[0] = pipe.AllocEventID<AscendC::HardEvent::MTE2_S>();
        listed[1] = pipe.AllocEventID<AscendC::HardEvent::MTE2_S>();
    }

    __aicore__ inline void Wave(uint32_t wave)
    {
        if (core >= cores) {
            return;  // more blocks than the plan has
        }
        const uint32_t stride = WAVE_FIELDS + tiling.members + 1 + 2 * (cores + 1);
        const uint32_t at = waves.waveOffset + wave * stride, shares = at + WAVE_FIELDS + tiling.members + 1 + core;
        base = static_cast<uint64_t>(wave & 1U) * tiling.slotHalves;
        Rows(planGm.GetValue(shares), planGm.GetValue(shares + 1));
        if (waves.kept == 0) {
            const uint32_t first = planGm.GetValue(at), count = planGm.GetValue(at + 1) - first;
            const uint32_t end = planGm.GetValue(shares + cores + 2);
            for (uint32_t part = planGm.GetValue(shares + cores + 1); part < end; ++part) {
                Part(first + part / 2 % count, part & 1U, part / 2 / count);
            }
        }
    }

    // Tell the other cores whether this one met something that is not finite.
    __aicore__ inline void Note(bool known)
    {
        if (core < cores) {
            const bool met = known || finite.Met() || (waves.kept == 0 && tile.Met());
            AscendC::LocalTensor<int32_t> note = noteBuffer.Get<int32_t>();
            AscendC::Duplicate(note, static_cast<int32_t>(met ? 1 : 0), static_cast<int32_t>(NOTE_WORDS));
            Sync<AscendC::HardEvent::V_MTE3>();
            AscendC::DataCopy(notesGm[core * NOTE_WORDS], note, NOTE_WORDS);
        }
    }

    // Whether any did; after all have written their notes.
    __aicore__ inline bool Noted()
    {
        AscendC::LocalTensor<int32_t> notes = noteBuffer.Get<int32_t>();
        AscendC::DataCopy(notes, notesGm, cores * NOTE_WORDS);
        Sync<AscendC::HardEvent::MTE2_S>();
        int32_t any = 0;
        for (uint32_t i = 0; i < cores; ++i) {
            any |= notes.GetValue(i * NOTE_WORDS);
        }
        return any != 0;
    }

private:
    __aicore__ inline void Rows(uint32_t begin, uint32_t end)
    {
        if (begin < end) {
            Fetch(begin);
        }
        for (uint32_t batch = begin; batch < end; ++batch) {
            // The list of the next batch is asked for before the rows of this one: the scalar unit then has it early.
            if (batch + 1 < end) {
                Fetch(batch + 1);
            }
            const uint32_t at = batch * BATCH_FIELDS;
            CopyRows(batch, batchesGm.GetValue(at + 1));
            const uint32_t row = batchesGm.GetValue(at + 2), halves = batchesGm.GetValue(at + 3) * tiling.ldx;
            AscendC::LocalTensor<half> clean = CleanRows(halves);
            AscendC::DataCopy(wsGm[base + static_cast<uint64_t>(row) * tiling.ldx], clean, halves);
            cleanQueue.FreeTensor(clean);
        }
    }

    __aicore__ inline void Fetch(uint32_t batch)
    {
        const uint32_t first = batchesGm.GetValue(batch * BATCH_FIELDS);
        const uint32_t runs = batchesGm.GetValue(batch * BATCH_FIELDS + 1);
        const AscendC::DataCopyExtParams words(1, runs * SOURCE_FIELDS * sizeof(int32_t), 0, 0, 0);
        AscendC::DataCopyPad(sourceBuffer.Get<int32_t>()[(batch & 1U) * sourceRoom],
                             sourcesGm[static_cast<uint64_t>(first) * SOURCE_FIELDS], words,
                             AscendC::DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(listed[batch & 1U]);
    }

    __aicore__ inline void CopyRows(uint32_t batch, uint32_t runs)
    {
        AscendC::LocalTensor<half> rows = rowsQueue.AllocTensor<half>();
        AscendC::LocalTensor<int32_t> list = sourceBuffer.Get<int32_t>()[(batch & 1U) * sourceRoom];
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(listed[batch & 1U]);
        uint32_t at = 0;
        for (uint32_t run = 0; run < runs; ++run) {
            const int32_t vertex = list.GetValue(run * SOURCE_FIELDS);
            const uint32_t halves = list.GetValue(run * SOURCE_FIELDS + 1) * tiling.ldx;
            if (vertex >= 0) {
                AscendC::DataCopy(rows[at], xGm[static_cast<uint64_t>(vertex) * tiling.ldx], halves);
            } else {
                AscendC::Duplicate(rows[at], static_cast<half>(0.0f), static_cast<int32_t>(halves));
            }
            at += halves;
        }
        // MTE2 fills the list's buffer again: not before the scalar unit has read it.
        Sync<AscendC::HardEvent::S_MTE2>();
        rowsQueue.EnQue(rows);
    }

    __aicore__ inline AscendC::LocalTensor<half> CleanRows(uint32_t halves)
    {
        AscendC::LocalTensor<half> rows = rowsQueue.DeQue<half>();
        AscendC::LocalTensor<half> clean = cleanQueue.AllocTensor<half>();
        const uint32_t compared = UpTo(halves, 128);  // a comparison works on 256 bytes
        if (halves < compared) {
            AscendC::Duplicate(rows[halves], static_cast<half>(0.0f), static_cast<int32_t>(compared - halves));
        }
        AscendC::PipeBarrier<PIPE_V>();
        finite.Clean(clean, rows, compared);
        rowsQueue.FreeTensor(rows);
        cleanQueue.EnQue(clean);
        return cleanQueue.DeQue<half>();
    }

    __aicore__ inline void Part(uint32_t tileIndex, uint32_t part, uint32_t head)
    {
        const uint64_t at = static_cast<uint64_t>(tileIndex) * TILE_FIELDS;
        const uint32_t cells = shapesGm.GetValue(tileIndex * SHAPE_FIELDS) / 2 * Up16(tilesGm.GetValue(at + 1));
        const uint32_t begin = tilesGm.GetValue(at + 2 + 2 * part), count = tilesGm.GetValue(at + 3 + 2 * part);
        const uint32_t fractal = head * waves.denseStride + static_cast<uint32_t>(tilesGm.GetValue(at + 7));
        const uint32_t table = shapesGm.GetValue(tileIndex * SHAPE_FIELDS + 1);
        const AscendC::GlobalTensor<half> target =
            wsGm[base + waves.rowHalves + static_cast<uint64_t>(fractal) * CUBE_EDGE * CUBE_EDGE + part * cells];
        if (table > 0) {
            tile.Pick(target, static_cast<uint64_t>(table - 1) * ENTRY_ALIGN + part * cells, begin, count, head, cells);
        } else {
            tile.Fetch(begin, count, head);
            tile.Send(target, tile.Scatter(begin, count, head, cells, false), cells);
        }
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 1> rowsQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> cleanQueue;
    AscendC::TBuf<AscendC::TPosition::VECCALC> sourceBuffer, noteBuffer;
    AscendC::GlobalTensor<half> xGm, wsGm;
    AscendC::GlobalTensor<int32_t> planGm, tilesGm, batchesGm, sourcesGm, shapesGm, notesGm;
    FiniteFilter finite;
    DenseTile tile;
    AggregateTiling tiling;
    WaveTiling waves;
    uint64_t base;
    AscendC::TEventID listed[2];
    uint32_t core, cores, sourceRoom;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_AGGREGATE_GATHERER_H
