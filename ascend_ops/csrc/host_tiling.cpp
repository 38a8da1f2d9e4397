// The tables of aggregate_cube and of the vertex-by-vertex kernels.
#include "host_tiling.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace lightning_gnn {

namespace {

uint64_t Up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Panels CutPanels(uint32_t heads, uint32_t numColumns, uint32_t groups, uint32_t maxPanel)
{
    if (numColumns < 1 || heads < 1 || groups < 1) {
        throw std::invalid_argument("num_columns=" + std::to_string(numColumns) + ", heads=" + std::to_string(heads) +
                                    " and num_groups=" + std::to_string(groups) + " must be at least 1");
    }
    const uint32_t headColumns = static_cast<uint32_t>(Up(numColumns, CUBE_EDGE));
    const uint32_t blocks = heads * headColumns / CUBE_EDGE, perHead = headColumns / CUBE_EDGE;
    const uint32_t widest = maxPanel / CUBE_EDGE, share = blocks / groups, rest = blocks % groups;
    Panels panels;
    panels.first.push_back(0);
    uint32_t start = 0;
    for (uint32_t group = 0; group < groups; ++group) {
        const bool more = share > 0 ? group >= groups - rest : group < rest;
        const uint32_t stop = start + share + (more ? 1 : 0);
        while (start < stop) {
            const uint32_t head = start / perHead;
            const uint32_t end = std::min(stop, (head + 1) * perHead);
            const uint32_t pieces = (end - start + widest - 1) / widest;
            const uint32_t width = (end - start) / pieces, wider = (end - start) % pieces;
            for (uint32_t piece = 0; piece < pieces; ++piece) {
                const uint32_t step = width + (piece < wider ? 1 : 0);
                for (const uint32_t field : {start * CUBE_EDGE, step * CUBE_EDGE, head, 0U}) {
                    panels.table.push_back(static_cast<int32_t>(field));
                }
                panels.widest = std::max(panels.widest, step * CUBE_EDGE);
                start += step;
            }
        }
        panels.first.push_back(static_cast<int32_t>(panels.table.size() / PANEL_FIELDS));
    }
    return panels;
}

namespace {

void CheckRanges(const Ranges& ranges, int64_t numChunks)
{
    int64_t at = 0;
    bool good = !ranges.empty();
    for (const auto& range : ranges) {
        good = good && range.first == at && range.second >= range.first;
        at = range.second;
    }
    if (!good || at != numChunks) {
        throw std::invalid_argument("chunk ranges must follow each other from 0 to " + std::to_string(numChunks));
    }
}

std::vector<int32_t> Concatenate(const Panels& panels, const std::vector<int32_t>& ranges)
{
    std::vector<int32_t> plan(panels.first);
    plan.insert(plan.end(), ranges.begin(), ranges.end());
    plan.insert(plan.end(), panels.table.begin(), panels.table.end());
    return plan;
}

// One row block after the other, with the buffers kept between them.
class CubeBuilder {
public:
    CubeBuilder(const ChunksView& chunks, uint32_t tileRows, uint32_t tileColumns, CubeTables& tables)
        : chunks_(chunks), tileRows_(tileRows), tileColumns_(tileColumns), tables_(tables)
    {
        tables_.slots.resize(chunks.indptr[chunks.rowPtr[chunks.numChunks]]);
        Destinations();
    }

    void Chunk(int64_t chunk)
    {
        std::vector<int64_t> block;
        for (int64_t row = chunks_.rowPtr[chunk]; row < chunks_.rowPtr[chunk + 1]; ++row) {
            if (chunks_.indptr[row + 1] > chunks_.indptr[row]) {
                block.push_back(row);
            }
            if (block.size() == tileRows_) {
                RowBlock(chunk, block);
                block.clear();
            }
        }
        if (!block.empty()) {
            RowBlock(chunk, block);
        }
    }

private:
    struct Entry {
        uint64_t key;  // half of a tile, then place in it
        int64_t edge;
    };

    void RowBlock(int64_t chunk, const std::vector<int64_t>& rows)
    {
        const int32_t* columns = chunks_.columns + chunks_.columnPtr[chunk];
        vertices_.clear();
        for (const int64_t row : rows) {
            for (int64_t e = chunks_.indptr[row]; e < chunks_.indptr[row + 1]; ++e) {
                vertices_.push_back(columns[chunks_.local[e]]);
            }
        }
        std::vector<int32_t> distinct(vertices_);
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());

        const uint64_t halfRows = Up(rows.size(), CUBE_EDGE) / 2, cells = tileRows_ / 2 * tileColumns_;
        const uint64_t numTiles = (distinct.size() + tileColumns_ - 1) / tileColumns_;
        entries_.clear();
        size_t next = 0;
        for (size_t r = 0; r < rows.size(); ++r) {
            const uint64_t half = r >= halfRows ? 1 : 0;
            for (int64_t e = chunks_.indptr[rows[r]]; e < chunks_.indptr[rows[r] + 1]; ++e, ++next) {
                const uint64_t rank = std::lower_bound(distinct.begin(), distinct.end(), vertices_[next]) -
                                      distinct.begin();
                const uint64_t tile = rank / tileColumns_;
                const uint64_t k = Width(distinct.size(), tile);
                const uint64_t cell = (r - half * halfRows) * k + rank % tileColumns_;
                entries_.push_back({(2 * tile + half) * cells + cell, e});
            }
        }
        std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });

        const int32_t firstTile = static_cast<int32_t>(tables_.tiles.size() / TILE_FIELDS);
        size_t at = 0;
        for (uint64_t tile = 0; tile < numTiles; ++tile) {
            const uint64_t first = tile * tileColumns_;
            const uint64_t count = std::min<uint64_t>(tileColumns_, distinct.size() - first);
            const uint64_t k = Width(distinct.size(), tile);
            std::vector<int64_t> fields = {static_cast<int64_t>(tables_.columns.size()), static_cast<int64_t>(count)};
            for (uint64_t half = 0; half < 2; ++half) {
                const size_t begin = tables_.positions.size();
                at = Half((2 * tile + half) * cells, cells, at);
                tables_.positions.resize(Up(tables_.positions.size(), ENTRY_ALIGN),
                                         static_cast<uint16_t>(halfRows * k));
                fields.push_back(static_cast<int64_t>(begin));
                fields.push_back(static_cast<int64_t>(tables_.positions.size() - begin));
            }
            tables_.tiles.insert(tables_.tiles.end(), fields.begin(), fields.end());
            tables_.tiles.resize(Up(tables_.tiles.size(), TILE_FIELDS), 0);
            tables_.columns.insert(tables_.columns.end(), distinct.begin() + first, distinct.begin() + first + count);
            tables_.columns.resize(tables_.columns.size() + k - count, -1);
        }
        if (tables_.positions.size() >= (1ULL << 31)) {
            throw std::invalid_argument(std::to_string(tables_.positions.size()) +
                                        " entries are too many for 32-bit tables; use more devices");
        }
        const int32_t firstRun = static_cast<int32_t>(tables_.runs.size() / RUN_FIELDS);
        Runs(rows);
        for (const int32_t field :
             {firstTile, static_cast<int32_t>(tables_.tiles.size() / TILE_FIELDS), static_cast<int32_t>(rows.size()),
              firstRun, static_cast<int32_t>(tables_.runs.size() / RUN_FIELDS), 0, 0, 0}) {
            tables_.rowBlocks.push_back(field);
        }
    }

    uint64_t Width(uint64_t distinct, uint64_t tile) const
    {
        return Up(std::min<uint64_t>(tileColumns_, distinct - tile * tileColumns_), CUBE_EDGE);
    }

    // The entries of one half of a tile; parallel edges share a place.
    size_t Half(uint64_t first, uint64_t cells, size_t at)
    {
        uint64_t last = ~0ULL;
        for (; at < entries_.size() && entries_[at].key < first + cells; ++at) {
            if (entries_[at].key != last) {
                last = entries_[at].key;
                tables_.positions.push_back(static_cast<uint16_t>(last - first));
            }
            tables_.slots[entries_[at].edge] = static_cast<int32_t>(tables_.positions.size() - 1);
        }
        return at;
    }

    // A row's result goes to y, or to the float parts where its vertex has several rows: those of a vertex one after
    // the other, in the order of vertices.
    void Destinations()
    {
        const int64_t numRows = chunks_.rowPtr[chunks_.numChunks];
        std::vector<int64_t> order;
        for (int64_t row = 0; row < numRows; ++row) {
            if (chunks_.indptr[row + 1] > chunks_.indptr[row]) {
                order.push_back(row);
            }
        }
        std::stable_sort(order.begin(), order.end(),
                         [this](int64_t a, int64_t b) { return chunks_.rows[a] < chunks_.rows[b]; });
        target_.assign(chunks_.rows, chunks_.rows + numRows);
        int32_t part = 0;
        for (size_t i = 0; i < order.size();) {
            size_t end = i + 1;
            while (end < order.size() && chunks_.rows[order[end]] == chunks_.rows[order[i]]) {
                ++end;
            }
            if (end - i > 1) {
                const int32_t first = part;
                for (size_t j = i; j < end; ++j) {
                    target_[order[j]] = -1 - part++;
                }
                for (const int32_t field : {chunks_.rows[order[i]], first, part, 0}) {
                    tables_.splits.push_back(field);
                }
            }
            i = end;
        }
        tables_.numParts = part;
    }

    void Runs(const std::vector<int64_t>& rows)
    {
        for (size_t r = 0; r < rows.size(); ++r) {
            const int32_t target = target_[rows[r]];
            if (r > 0) {
                const int32_t before = target_[rows[r - 1]];
                if (before >= 0 ? target == before + 1 : (target == before - 1 && target < 0)) {
                    ++tables_.runs[tables_.runs.size() - RUN_FIELDS + 1];
                    continue;
                }
            }
            for (const int32_t field : {static_cast<int32_t>(r), 1, target, 0}) {
                tables_.runs.push_back(field);
            }
        }
    }

    const ChunksView& chunks_;
    const uint64_t tileRows_, tileColumns_;
    CubeTables& tables_;
    std::vector<int32_t> vertices_, target_;
    std::vector<Entry> entries_;
};

}  // namespace

void CheckSizes(uint32_t tileRows, uint32_t tileColumns, uint32_t panel, const Limits& limits)
{
    const std::pair<const char*, uint32_t> sizes[] = {
        {"tile_rows", tileRows}, {"tile_columns", tileColumns}, {"panel", panel}};
    for (const auto& size : sizes) {
        if (size.second < CUBE_EDGE || size.second % CUBE_EDGE != 0) {
            throw std::invalid_argument(std::string(size.first) + " must be a positive multiple of 16, but is " +
                                        std::to_string(size.second));
        }
    }
    const uint64_t m = tileRows, k = tileColumns, n = panel;
    const uint64_t cells = m / 2 * k, features = k / 2 * n, compared = Up(n, 64);
    // what aggregate_producer.h and aggregate_repair.h put into UB
    const uint64_t ub = 4 * (cells + 16) + 8 * features + 3 * Up(features / 8, 32) + 4 * k + 8 * ENTRY_BATCH + 2 * n +
                        12 * compared + 2 * Up(compared / 8, 32);
    const struct {
        const char* name;
        uint64_t need, limit;
    } needs[] = {{"L0A", 4 * m * k, limits.l0a},
                 {"L0B", 4 * k * std::min<uint64_t>(n, CUBE_COLUMNS), limits.l0b},
                 {"L0C", 4 * m * n, limits.l0c},
                 {"L1", 4 * m * k + 4 * k * n, limits.l1},
                 {"UB", ub, limits.ub}};
    for (const auto& memory : needs) {
        if (memory.need > memory.limit) {
            throw std::invalid_argument("tile_rows=" + std::to_string(m) + ", tile_columns=" + std::to_string(k) +
                                        ", panel=" + std::to_string(n) + " need " + std::to_string(memory.need) +
                                        " bytes of " + memory.name + ", which has " + std::to_string(memory.limit) +
                                        "; make them smaller (128, 128 and 256 fit)");
        }
    }
}

CubeTables MakeCubeTables(const ChunksView& chunks, const Ranges& ranges, uint32_t groups, uint32_t numColumns,
                          uint32_t heads, uint32_t tileRows, uint32_t tileColumns, uint32_t panel,
                          const Limits& limits)
{
    CheckSizes(tileRows, tileColumns, panel, limits);
    CheckRanges(ranges, chunks.numChunks);
    const Panels panels = CutPanels(heads, numColumns, groups, panel);
    CubeTables tables{};
    CubeBuilder builder(chunks, tileRows, tileColumns, tables);
    std::vector<int32_t> blockOfChunk;
    for (int64_t chunk = 0; chunk < chunks.numChunks; ++chunk) {
        blockOfChunk.push_back(static_cast<int32_t>(tables.rowBlocks.size() / ROW_BLOCK_FIELDS));
        builder.Chunk(chunk);
    }
    blockOfChunk.push_back(static_cast<int32_t>(tables.rowBlocks.size() / ROW_BLOCK_FIELDS));
    std::vector<int32_t> blockRanges = {0};
    for (const auto& range : ranges) {
        blockRanges.push_back(blockOfChunk[range.second]);
    }
    const uint32_t members = static_cast<uint32_t>(ranges.size());
    tables.plan = Concatenate(panels, blockRanges);
    AggregateTiling& t = tables.tiling;
    t.groups = groups;
    t.members = members;
    t.tileRows = tileRows;
    t.tileColumns = tileColumns;
    t.panelColumns = panels.widest;
    t.accumulators = 8ULL * tileRows * panels.widest <= limits.l0c ? 2 : 1;
    t.entryBatch = ENTRY_BATCH;
    t.ldx = t.ldy = t.ldParts = heads * static_cast<uint32_t>(Up(numColumns, CUBE_EDGE));
    t.valueStride = static_cast<uint32_t>(tables.positions.size());
    t.slotHalves = tileRows * tileColumns + tileColumns * panels.widest;
    t.rangeOffset = groups + 1;
    t.panelOffset = t.rangeOffset + members + 1;
    tables.numBlocks = static_cast<uint64_t>(groups) * members;
    tables.workspaceBytes = tables.numBlocks * 2 * t.slotHalves * sizeof(uint16_t);
    return tables;
}

RowTables MakeRowTables(const ChunksView& chunks, const Ranges* ranges, uint32_t members, uint32_t groups,
                        uint32_t numColumns, uint32_t heads, uint32_t maxPanel)
{
    if (members < 1 || maxPanel < CUBE_EDGE) {
        throw std::invalid_argument("num_members=" + std::to_string(members) + " must be at least 1 and max_panel=" +
                                    std::to_string(maxPanel) + " at least 16");
    }
    RowTables tables{};
    const int64_t numEdges = chunks.indptr[chunks.rowPtr[chunks.numChunks]];
    tables.columns.resize(numEdges);
    std::vector<int64_t> chunkOfVertex;
    std::unordered_set<int32_t> seen;
    for (int64_t chunk = 0; chunk < chunks.numChunks; ++chunk) {
        const int32_t* columns = chunks.columns + chunks.columnPtr[chunk];
        for (int64_t row = chunks.rowPtr[chunk]; row < chunks.rowPtr[chunk + 1]; ++row) {
            const int64_t begin = chunks.indptr[row], end = chunks.indptr[row + 1];
            if (begin == end) {
                continue;
            }
            for (int64_t e = begin; e < end; ++e) {
                tables.columns[e] = columns[chunks.local[e]];
            }
            const size_t last = tables.vertices.size();
            if (last > 0 && tables.vertices[last - VERTEX_FIELDS] == chunks.rows[row]) {
                tables.vertices[last - VERTEX_FIELDS + 2] = static_cast<int32_t>(end);
                continue;
            }
            if (!seen.insert(chunks.rows[row]).second) {
                throw std::invalid_argument("the rows of a vertex must lie side by side");
            }
            chunkOfVertex.push_back(chunk);
            for (const int64_t field : {static_cast<int64_t>(chunks.rows[row]), begin, end, int64_t{0}}) {
                tables.vertices.push_back(static_cast<int32_t>(field));
            }
        }
    }
    const int32_t numVertices = static_cast<int32_t>(chunkOfVertex.size());
    std::vector<int32_t> bounds;
    if (ranges != nullptr) {
        CheckRanges(*ranges, chunks.numChunks);
        members = static_cast<uint32_t>(ranges->size());
        bounds.push_back(0);
        for (const auto& range : *ranges) {
            bounds.push_back(static_cast<int32_t>(
                std::lower_bound(chunkOfVertex.begin(), chunkOfVertex.end(), range.second) - chunkOfVertex.begin()));
        }
    } else {
        int32_t vertex = 0;
        for (uint32_t share = 0; share < members; ++share) {
            const int64_t wanted = numEdges * share / members;
            while (vertex < numVertices && tables.vertices[vertex * VERTEX_FIELDS + 1] < wanted) {
                ++vertex;
            }
            bounds.push_back(vertex);
        }
        bounds.push_back(numVertices);
    }
    const Panels panels = CutPanels(heads, numColumns, groups, maxPanel);
    tables.plan = Concatenate(panels, bounds);
    tables.groups = groups;
    tables.members = members;
    tables.rangeOffset = groups + 1;
    tables.panelOffset = tables.rangeOffset + members + 1;
    tables.panelColumns = panels.widest;
    return tables;
}

}  // namespace lightning_gnn
