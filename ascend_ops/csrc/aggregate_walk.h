// The order in which a block takes its work: row block, panel of columns, tile. The cube core and both vector cores
// of a block walk alike, each by itself, so that a step number is all they have to agree on.
#ifndef LIGHTNING_GNN_AGGREGATE_WALK_H
#define LIGHTNING_GNN_AGGREGATE_WALK_H

#include "load_tiling.h"

namespace lightning_gnn {

class AggregateWalk {
public:
    __aicore__ inline AggregateWalk() {}

    __aicore__ inline void Init(GM_ADDR plan, GM_ADDR rowBlocks, GM_ADDR tiles, const AggregateTiling& tiling,
                                uint32_t block)
    {
        planGm.SetGlobalBuffer((__gm__ int32_t*)plan);
        rowBlocksGm.SetGlobalBuffer((__gm__ int32_t*)rowBlocks);
        tilesGm.SetGlobalBuffer((__gm__ int32_t*)tiles);
        panelOffset = tiling.panelOffset;
        step = 0;
        rowBlock = rowBlockEnd = panelBegin = panelEnd = 0;
        if (block >= tiling.groups * tiling.members) {
            return;
        }
        // A group's blocks are neighbours: they share the columns, so rows that one brought to L2 serve the others.
        const uint32_t group = block / tiling.members;
        panelBegin = planGm.GetValue(group);
        panelEnd = planGm.GetValue(group + 1);
        if (panelBegin == panelEnd) {
            return;  // more groups than blocks of 16 columns: this one has none
        }
        const uint32_t at = tiling.rangeOffset + block % tiling.members;
        rowBlock = planGm.GetValue(at);
        rowBlockEnd = planGm.GetValue(at + 1);
        if (Valid()) {
            OpenRowBlock();
        }
    }

    __aicore__ inline bool Valid() const { return rowBlock < rowBlockEnd; }
    __aicore__ inline bool First() const { return tile == tileBegin; }
    __aicore__ inline bool Last() const { return tile + 1 == tileEnd; }

    __aicore__ inline void Next()
    {
        // Tiles are innermost, so that the sums of a row block and panel are finished before others begin.
        ++step;
        if (++tile < tileEnd) {
            OpenTile();
        } else if (++panel < panelEnd) {
            OpenPanel();
        } else if (++rowBlock < rowBlockEnd) {
            OpenRowBlock();
        }
    }

    uint32_t step;                    // tiles done by this block; the workspace slot is step % 2
    uint32_t rows, runBegin, runEnd;  // of the row block
    uint32_t column, width, head;     // of the panel
    uint32_t columnBegin, columns;    // of the tile
    uint32_t entryBegin[2], entryCount[2];

private:
    __aicore__ inline void OpenRowBlock()
    {
        const uint32_t at = rowBlock * ROW_BLOCK_FIELDS;
        tileBegin = rowBlocksGm.GetValue(at);
        tileEnd = rowBlocksGm.GetValue(at + 1);
        rows = rowBlocksGm.GetValue(at + 2);
        runBegin = rowBlocksGm.GetValue(at + 3);
        runEnd = rowBlocksGm.GetValue(at + 4);
        panel = panelBegin;
        OpenPanel();
    }

    __aicore__ inline void OpenPanel()
    {
        const uint32_t at = panelOffset + panel * PANEL_FIELDS;
        column = planGm.GetValue(at);
        width = planGm.GetValue(at + 1);
        head = planGm.GetValue(at + 2);
        tile = tileBegin;
        OpenTile();
    }

    __aicore__ inline void OpenTile()
    {
        const uint64_t at = static_cast<uint64_t>(tile) * TILE_FIELDS;
        columnBegin = tilesGm.GetValue(at);
        columns = tilesGm.GetValue(at + 1);
        entryBegin[0] = tilesGm.GetValue(at + 2);
        entryCount[0] = tilesGm.GetValue(at + 3);
        entryBegin[1] = tilesGm.GetValue(at + 4);
        entryCount[1] = tilesGm.GetValue(at + 5);
    }

    AscendC::GlobalTensor<int32_t> planGm, rowBlocksGm, tilesGm;
    uint32_t panelOffset, panelBegin, panelEnd, rowBlock, rowBlockEnd, panel, tile, tileBegin, tileEnd;
};

// Flags between the cores of a block; 11 to 14 belong to SyncAll. READY and FREE have one per workspace slot.
constexpr uint16_t FLAG_READY = 0;
constexpr uint16_t FLAG_FREE = 2;
constexpr uint16_t FLAG_DONE = 4;

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_AGGREGATE_WALK_H
