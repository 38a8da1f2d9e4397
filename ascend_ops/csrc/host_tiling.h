// The host's part of the tiling: from chunks and a plan to the tables of tiling.h, and from sizes to the structs.
// No CANN and no torch here, so that any compiler builds it: the binding for the NPU links it, and ascend_ops/tiling.py
// calls it through host_tiling_c.cpp.
#ifndef LIGHTNING_GNN_HOST_TILING_H
#define LIGHTNING_GNN_HOST_TILING_H

#include <cstdint>
#include <utility>
#include <vector>

#include "tiling.h"

namespace lightning_gnn {

constexpr uint32_t MAX_PANEL = 256;
constexpr uint32_t ENTRY_BATCH = 1024;
constexpr uint32_t VECTOR_PANEL = 2048;
constexpr uint32_t SUM_BATCH = 1024;      // edges that aggregate_vector and aggregate_update list at once
constexpr uint32_t ROWS_AT_ONCE = 16;     // that they ask for at once, where UB has room
constexpr uint32_t PRODUCTS_PANEL = 1024;
constexpr uint32_t MAX_KERNEL_PANEL = 512;
constexpr uint32_t MAX_KERNEL_FLOATS = 4096;  // of a batch of rows
constexpr uint32_t HEADS_AT_ONCE = 64;
constexpr uint32_t HEAD_FLOATS = 6144;

struct Limits {  // bytes; Select keeps 8 KiB of UB for itself
    uint64_t ub, l1, l0a, l0b, l0c;
};
constexpr Limits DAV_C220 = {196608 - 8192, 524288, 65536, 65536, 131072};

// One direction of a graph (lightning_gnn/graph/chunks.py); nothing is owned.
struct ChunksView {
    const int32_t* rows;
    const int64_t* rowPtr;
    const int64_t* indptr;
    const int32_t* local;
    const int32_t* columns;
    const int64_t* columnPtr;
    int64_t numChunks;
};

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

struct CubeTables {
    AggregateTiling tiling;
    std::vector<int32_t> plan, rowBlocks, tiles, columns, slots, runs, splits;
    std::vector<uint16_t> positions;
    uint64_t numParts, numBlocks, workspaceBytes;
};

struct RowTables {
    std::vector<int32_t> plan, vertices, columns;
    uint32_t rangeOffset, panelOffset, groups, members, panelColumns;
};

struct Panels {
    std::vector<int32_t> first;  // of each group
    std::vector<int32_t> table;  // [.., PANEL_FIELDS]
    uint32_t widest = 0;
};

// All of these throw std::invalid_argument.
// Columns go to groups in blocks of 16, one block more to the last groups (to the first, where there are fewer blocks
// than groups); a slice is cut where a head ends and into panels of about the same width.
Panels CutPanels(uint32_t heads, uint32_t numColumns, uint32_t groups, uint32_t maxPanel);

void CheckSizes(uint32_t tileRows, uint32_t tileColumns, uint32_t panel, const Limits& limits = DAV_C220);

CubeTables MakeCubeTables(const ChunksView& chunks, const Ranges& ranges, uint32_t groups, uint32_t numColumns,
                          uint32_t heads = 1, uint32_t tileRows = 128, uint32_t tileColumns = 128,
                          uint32_t panel = MAX_PANEL, const Limits& limits = DAV_C220);

// ranges null: shares of about as many entries each.
RowTables MakeRowTables(const ChunksView& chunks, const Ranges* ranges, uint32_t members, uint32_t groups = 1,
                        uint32_t numColumns = 1, uint32_t heads = 1, uint32_t maxPanel = VECTOR_PANEL);

RowsTiling AggregateVectorTiling(const RowTables& tables, uint32_t stride, uint32_t numEdges, bool weighted);
RowsTiling MaxTiling(const RowTables& tables, uint32_t stride, uint32_t numEdges, bool weighted);
RowsTiling SoftmaxTiling(uint32_t members, uint32_t rangeOffset, uint32_t heads, float slope);
RowsTiling ProductsTiling(uint32_t members, uint32_t rangeOffset, uint32_t heads, uint32_t numColumns);
CombineTiling MakeCombineTiling(uint32_t numVertices, uint32_t numColumns, uint32_t partsPerRow, bool floatOut);
GatherTiling MakeGatherTiling(uint32_t numRows, uint32_t rowBytes, uint32_t tableStride, uint32_t tableRows);
UpdateTiling MakeUpdateTiling(uint32_t m, uint32_t k, uint32_t n, uint32_t lda, uint32_t ldb, bool transposeA,
                              bool transposeB, bool bias, bool relu, bool floatOut, uint32_t splitK);
AggregateUpdateTiling MakeAggregateUpdateTiling(uint32_t rows, uint32_t k, uint32_t n, uint32_t ldx, uint32_t ldb,
                                                uint32_t ownRows, uint32_t ownOffset, bool weighted, bool mean,
                                                bool transposeB);

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_HOST_TILING_H
