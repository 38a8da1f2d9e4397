// host_tiling.h for callers that are not C++, such as the tests that compare it with its Python mirror.
#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <string>

#include "host_tiling.h"

namespace {

using Bytes = std::map<std::string, std::string>;

template <typename T>
std::string Copy(const T* data, size_t count)
{
    return std::string(reinterpret_cast<const char*>(data), count * sizeof(T));
}

template <typename T>
std::string Copy(const std::vector<T>& values) { return Copy(values.data(), values.size()); }

// Runs make; on an error writes its message and returns null.
template <typename Make>
void* Guard(char* error, uint64_t room, Make make)
{
    try {
        return new Bytes(make());
    } catch (const std::exception& problem) {
        const std::string text = problem.what();
        const size_t size = std::min<size_t>(text.size(), room - 1);
        std::memcpy(error, text.data(), size);
        error[size] = 0;
        return nullptr;
    }
}

lightning_gnn::Ranges Pairs(const int64_t* bounds, int64_t count)
{
    lightning_gnn::Ranges ranges;
    for (int64_t i = 0; i < count; ++i) {
        ranges.emplace_back(bounds[2 * i], bounds[2 * i + 1]);
    }
    return ranges;
}

}  // namespace

extern "C" {

void* lgnn_cube_tables(const int32_t* rows, const int64_t* rowPtr, const int64_t* indptr, const int32_t* local,
                       const int32_t* columns, const int64_t* columnPtr, int64_t numChunks, const int64_t* ranges,
                       int64_t numRanges, uint32_t groups, uint32_t numColumns, uint32_t heads, uint32_t tileRows,
                       uint32_t tileColumns, uint32_t panel, char* error, uint64_t room)
{
    return Guard(error, room, [&] {
        const lightning_gnn::ChunksView chunks = {rows, rowPtr, indptr, local, columns, columnPtr, numChunks};
        const auto t = lightning_gnn::MakeCubeTables(chunks, Pairs(ranges, numRanges), groups, numColumns, heads,
                                                     tileRows, tileColumns, panel);
        const uint64_t sizes[] = {t.numParts, t.numBlocks, t.workspaceBytes};
        return Bytes{{"tiling", Copy(&t.tiling, 1)},      {"plan", Copy(t.plan)},
                     {"row_blocks", Copy(t.rowBlocks)},   {"tiles", Copy(t.tiles)},
                     {"columns", Copy(t.columns)},        {"positions", Copy(t.positions)},
                     {"slots", Copy(t.slots)},            {"runs", Copy(t.runs)},
                     {"splits", Copy(t.splits)},          {"sizes", Copy(sizes, 3)}};
    });
}

void* lgnn_row_tables(const int32_t* rows, const int64_t* rowPtr, const int64_t* indptr, const int32_t* local,
                      const int32_t* columns, const int64_t* columnPtr, int64_t numChunks, const int64_t* ranges,
                      int64_t numRanges, uint32_t members, uint32_t groups, uint32_t numColumns, uint32_t heads,
                      uint32_t stride, uint32_t weighted, char* error, uint64_t room)
{
    return Guard(error, room, [&] {
        const lightning_gnn::ChunksView chunks = {rows, rowPtr, indptr, local, columns, columnPtr, numChunks};
        const lightning_gnn::Ranges pairs = Pairs(ranges, numRanges);
        const auto t = lightning_gnn::MakeRowTables(chunks, ranges == nullptr ? nullptr : &pairs, members, groups,
                                                    numColumns, heads);
        const auto tiling = lightning_gnn::AggregateVectorTiling(
            t, stride, static_cast<uint32_t>(t.columns.size()), weighted != 0);
        return Bytes{{"plan", Copy(t.plan)},
                     {"vertices", Copy(t.vertices)},
                     {"columns", Copy(t.columns)},
                     {"tiling", Copy(&tiling, 1)}};
    });
}

void* lgnn_struct(const char* name, const uint32_t* a, char* error, uint64_t room)
{
    return Guard(error, room, [&] {
        const std::string which = name;
        if (which == "softmax") {
            float slope;
            std::memcpy(&slope, a + 3, sizeof(slope));
            const auto t = lightning_gnn::SoftmaxTiling(a[0], a[1], a[2], slope);
            return Bytes{{"tiling", Copy(&t, 1)}};
        }
        if (which == "products") {
            const auto t = lightning_gnn::ProductsTiling(a[0], a[1], a[2], a[3]);
            return Bytes{{"tiling", Copy(&t, 1)}};
        }
        if (which == "combine") {
            const auto t = lightning_gnn::MakeCombineTiling(a[0], a[1], a[2], a[3] != 0);
            return Bytes{{"tiling", Copy(&t, 1)}};
        }
        if (which == "gather") {
            const auto t = lightning_gnn::MakeGatherTiling(a[0], a[1], a[2]);
            return Bytes{{"tiling", Copy(&t, 1)}};
        }
        const auto t = lightning_gnn::MakeUpdateTiling(a[0], a[1], a[2], a[3], a[4], a[5] != 0, a[6] != 0, a[7] != 0,
                                                       a[8] != 0, a[9] != 0, a[10]);
        return Bytes{{"tiling", Copy(&t, 1)}};
    });
}

const void* lgnn_tables_get(const void* tables, const char* name, uint64_t* bytes)
{
    const std::string& found = static_cast<const Bytes*>(tables)->at(name);
    *bytes = found.size();
    return found.data();
}

void lgnn_tables_free(void* tables) { delete static_cast<Bytes*>(tables); }

}  // extern "C"
