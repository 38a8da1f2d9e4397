// The tables of aggregate_gathered: those of aggregate_cube, cut into waves, and whole rows to gather.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "host_tiling.h"

namespace lightning_gnn {

namespace {

// Roughly the cycles of a copy's start, of 32 bytes from global memory and of an entry's store: only shares follow.
constexpr uint64_t COPY_START = 40, BYTES_A_CYCLE = 32, PART_START = 300;

uint64_t Up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t FractalsOf(uint64_t rows, uint64_t columns) { return rows * columns / (CUBE_EDGE * CUBE_EDGE); }

// Bounds of `shares` ranges of about the same sum of costs: an item belongs to the share in which its middle lies.
void Share(const std::vector<uint64_t>& costs, uint64_t first, uint64_t shares, std::vector<int32_t>& bounds)
{
    uint64_t total = 0, before = 0;
    for (const uint64_t cost : costs) {
        total += cost;
    }
    size_t item = 0;
    bounds.push_back(static_cast<int32_t>(first));
    for (uint64_t share = 1; share <= shares; ++share) {
        while (item < costs.size() && (share == shares || (2 * before + costs[item]) * shares < 2 * total * share)) {
            before += costs[item++];
        }
        bounds.push_back(static_cast<int32_t>(first + item));
    }
}

class WaveBuilder {
public:
    WaveBuilder(GatheredTables& tables, uint32_t heads, bool kept) : t_(tables), heads_(heads), kept_(kept) {}

    // The row blocks of the wave; appends it to the plan.
    void Wave(uint64_t begin, uint64_t end)
    {
        std::vector<int32_t>& plan = t_.cube.plan;
        const uint64_t first = begin < end ? BlockField(begin, 0) : 0;
        const uint64_t last = begin < end ? BlockField(end - 1, 1) : first;
        std::vector<uint64_t> blocks, batches, parts;
        heights_.clear();
        for (uint64_t block = begin; block < end; ++block) {
            const uint64_t height = Up(BlockField(block, 2), CUBE_EDGE);
            uint64_t columns = 0;
            for (uint64_t tile = BlockField(block, 0); tile < BlockField(block, 1); ++tile) {
                columns += Up(Tile(tile)[1], CUBE_EDGE);
                heights_.push_back(height);
            }
            blocks.push_back(columns * (height + CUBE_EDGE));
        }
        plan.push_back(static_cast<int32_t>(first));
        plan.push_back(static_cast<int32_t>(last));
        Share(blocks, begin, t_.cube.tiling.members, plan);
        const uint64_t firstBatch = t_.batches.size() / BATCH_FIELDS;
        Rows(first, last, batches);
        Dense(first, last, parts);
        const uint64_t cores = 2ULL * t_.cube.tiling.groups * t_.cube.tiling.members;
        Share(batches, firstBatch, cores, plan);
        Share(parts, 0, cores, plan);
    }

    uint64_t mostRows = 0, mostFractals = 0, fractals = 0;  // of a wave, of a wave, and of all kept so far

private:
    uint64_t BlockField(uint64_t block, uint64_t field) const
    {
        return static_cast<uint64_t>(t_.cube.rowBlocks[block * ROW_BLOCK_FIELDS + field]);
    }

    int32_t* Tile(uint64_t tile) { return &t_.cube.tiles[tile * TILE_FIELDS]; }

    // The rows of all tiles, one after the other, in batches of runs of neighbours.
    void Rows(uint64_t first, uint64_t last, std::vector<uint64_t>& costs)
    {
        const uint64_t most = t_.waves.batchRows, rowBytes = 2ULL * t_.cube.tiling.ldx;
        uint64_t row = 0, inBatch = most;
        for (uint64_t tile = first; tile < last; ++tile) {
            int32_t* fields = Tile(tile);
            fields[6] = static_cast<int32_t>(row);
            const uint64_t columns = Up(static_cast<uint64_t>(fields[1]), CUBE_EDGE);
            for (uint64_t i = 0; i < columns; ++i, ++row, ++inBatch) {
                const int32_t vertex = t_.cube.columns[fields[0] + i];
                if (inBatch == most) {
                    const auto run = static_cast<int32_t>(t_.sources.size() / SOURCE_FIELDS);
                    t_.batches.insert(t_.batches.end(), {run, 0, static_cast<int32_t>(row), 0});
                    costs.push_back(0);
                    inBatch = 0;
                }
                int32_t* batch = &t_.batches[t_.batches.size() - BATCH_FIELDS];
                const int32_t* run = inBatch > 0 ? &t_.sources[t_.sources.size() - SOURCE_FIELDS] : nullptr;
                if (run != nullptr && (vertex < 0 ? run[0] < 0 : run[0] >= 0 && vertex == run[0] + run[1])) {
                    ++t_.sources.back();
                } else {
                    t_.sources.insert(t_.sources.end(), {vertex, 1});
                    ++batch[1];
                    costs.back() += COPY_START;
                }
                ++batch[3];
                costs.back() += rowBytes / BYTES_A_CYCLE;
            }
        }
        mostRows = std::max(mostRows, row);
    }

    void Dense(uint64_t first, uint64_t last, std::vector<uint64_t>& costs)
    {
        uint64_t inWave = 0;
        std::vector<uint64_t> ofHead;
        for (uint64_t tile = first; tile < last; ++tile) {
            int32_t* fields = Tile(tile);
            const uint64_t rows = heights_[tile - first];
            const uint64_t columns = Up(static_cast<uint64_t>(fields[1]), CUBE_EDGE), half = rows / 2 * columns;
            uint64_t& at = kept_ ? fractals : inWave;
            fields[7] = static_cast<int32_t>(at);
            t_.shapes.insert(t_.shapes.end(), {static_cast<int32_t>(rows), 0});
            if (kept_) {
                Places(fields, half, at * CUBE_EDGE * CUBE_EDGE);
            } else {
                const bool pick = PICK_FILL * (static_cast<uint64_t>(fields[3]) + fields[5]) >= 2 * half;
                if (pick) {
                    Cells(fields, half);
                }
                for (const int32_t entries : {fields[3], fields[5]}) {
                    ofHead.push_back(PART_START + (pick ? half / 5 : entries + entries / 2 + half / 128));
                }
            }
            at += FractalsOf(rows, columns);
        }
        for (uint32_t head = 0; head < heads_; ++head) {
            costs.insert(costs.end(), ofHead.begin(), ofHead.end());
        }
        mostFractals = std::max(mostFractals, inWave);
    }

    // Where each value of a tile lies in the kept ones.
    void Places(const int32_t* fields, uint64_t half, uint64_t first)
    {
        for (uint64_t part = 0; part < 2; ++part) {
            for (int32_t i = fields[2 + 2 * part]; i < fields[2 + 2 * part] + fields[3 + 2 * part]; ++i) {
                const uint64_t cell = t_.cube.positions[i];
                t_.places[i] = cell < half ? static_cast<int64_t>(first + part * half + cell) : -1;
            }
        }
    }

    void Cells(const int32_t* fields, uint64_t half)
    {
        const uint64_t first = t_.cells.size();
        t_.shapes.back() = static_cast<int32_t>(first / ENTRY_ALIGN + 1);
        t_.cells.resize(first + 2 * half, 0);
        for (uint64_t part = 0; part < 2; ++part) {
            const int32_t begin = fields[2 + 2 * part];
            for (int32_t i = 0; i < fields[3 + 2 * part]; ++i) {
                const uint64_t cell = t_.cube.positions[begin + i];
                if (cell < half) {
                    t_.cells[first + part * half + cell] = static_cast<uint16_t>(CELL_BASE + 2 * i);
                }
            }
        }
    }

    GatheredTables& t_;
    std::vector<uint64_t> heights_;  // of the wave's tiles
    const uint32_t heads_;
    const bool kept_;
};

void CheckMemory(const AggregateTiling& t, const WaveTiling& w, const Limits& limits)
{
    // what aggregate_gatherer.h, dense_tile.h and aggregate_repair.h put into UB
    const uint64_t cells = t.tileRows / 2 * t.tileColumns, picked = Up(cells, 128) + 16, n = t.panelColumns;
    const uint64_t rows = 8ULL * w.batchHalves + 3 * Up(w.batchHalves / 8, 32);
    const uint64_t lists = 2 * 4 * Up(w.batchRows * SOURCE_FIELDS, 8) + 2 * 32ULL * t.groups * t.members;
    const uint64_t dense = w.kept ? 0
                                  : 4 * (cells + 16) + 8 * t.entryBatch + 4 * picked + 12 * 2048 +
                                        3 * Up(Up(cells, 128) / 8, 32);
    const uint64_t repair = 2 * n + 12 * Up(n, 64) + 2 * Up(Up(n, 64) / 8, 32);
    const uint64_t need = rows + lists + dense + repair;
    if (w.batchHalves > MOST_BATCH_HALVES || need > limits.ub) {
        throw std::invalid_argument("rows of " + std::to_string(t.ldx) + " columns, tiles of " +
                                    std::to_string(t.tileRows) + " x " + std::to_string(t.tileColumns) + " and " +
                                    std::to_string(t.groups * t.members) + " cores need " + std::to_string(need) +
                                    " bytes of UB, which has " + std::to_string(limits.ub) +
                                    "; use aggregate_cube, which takes rows in panels");
    }
}

}  // namespace

GatheredTables MakeGatheredTables(const ChunksView& chunks, const Ranges& waves, uint32_t members, uint32_t groups,
                                  uint32_t numColumns, uint32_t heads, bool kept, uint32_t tileRows,
                                  uint32_t tileColumns, uint32_t panel, const Limits& limits)
{
    if (members < 1) {
        throw std::invalid_argument("num_members must be at least 1, but is 0");
    }
    // One range of row blocks for each wave: what MakeCubeTables calls a member.
    GatheredTables tables{MakeCubeTables(chunks, waves, groups, numColumns, heads, tileRows, tileColumns, panel, limits),
                          {}, {}, {}, {}, {}, {}, 0};
    AggregateTiling& t = tables.cube.tiling;
    WaveTiling& w = tables.waves;
    std::vector<int32_t>& plan = tables.cube.plan;
    const std::vector<int32_t> bounds(plan.begin() + t.rangeOffset, plan.begin() + t.panelOffset);
    plan.erase(plan.begin() + t.rangeOffset, plan.begin() + t.panelOffset);
    t.panelOffset = t.rangeOffset;
    t.members = members;
    t.waves = static_cast<uint32_t>(waves.size());
    w.waveOffset = static_cast<uint32_t>(plan.size());
    w.kept = kept ? 1 : 0;
    w.batchHalves = static_cast<uint32_t>(Up(std::max(t.ldx, BATCH_HALVES), 128));
    w.batchRows = std::min(w.batchHalves / t.ldx, BATCH_ROWS);
    CheckMemory(t, w, limits);
    tables.places.resize(kept ? tables.cube.positions.size() : 0);
    WaveBuilder builder(tables, heads, kept);
    for (size_t wave = 0; wave + 1 < bounds.size(); ++wave) {
        builder.Wave(bounds[wave], bounds[wave + 1]);
    }
    tables.denseHalves = builder.fractals * CUBE_EDGE * CUBE_EDGE;
    std::replace(tables.places.begin(), tables.places.end(), int64_t{-1}, static_cast<int64_t>(tables.denseHalves));
    const uint64_t rowHalves = builder.mostRows * t.ldx;
    w.denseStride = static_cast<uint32_t>(kept ? builder.fractals : builder.mostFractals);
    const uint64_t slot = rowHalves + (kept ? 0 : static_cast<uint64_t>(heads) * w.denseStride * CUBE_EDGE * CUBE_EDGE);
    if (2 * slot >= (1ULL << 32) || tables.cells.size() / ENTRY_ALIGN >= (1ULL << 31)) {
        throw std::invalid_argument("a wave of " + std::to_string(slot) +
                                    " numbers is too large for 32-bit tables; use more waves, or aggregate_cube");
    }
    w.rowHalves = static_cast<uint32_t>(rowHalves);
    t.slotHalves = static_cast<uint32_t>(slot);
    w.noteOffset = 2 * t.slotHalves;
    tables.cube.numBlocks = static_cast<uint64_t>(groups) * members;
    tables.cube.workspaceBytes = 2ULL * w.noteOffset + 2 * 32 * tables.cube.numBlocks;
    return tables;
}

}  // namespace lightning_gnn
