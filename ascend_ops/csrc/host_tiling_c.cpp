// host_tiling.h for callers that are not C++ (ascend_ops/tiling.py): one function that makes a set of named arrays.
#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>

#include "host_tiling.h"

namespace lightning_gnn {

namespace {

using Arrays = std::map<std::string, std::string>;  // name -> bytes

template <typename T>
std::string Copy(const std::vector<T>& values)
{
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename Struct>
Arrays Words(const Struct& tiling)
{
    return {{"tiling", std::string(reinterpret_cast<const char*>(&tiling), sizeof(tiling))}};
}

// a: the numbers of `what`, in the order in which ascend_ops/tiling.py gives them.
Arrays Make(const std::string& what, const ChunksView* chunks, const Ranges* ranges, const uint32_t* a)
{
    if (what == "cube tables") {
        const CubeTables t = MakeCubeTables(*chunks, *ranges, a[0], a[1], a[2], a[3], a[4], a[5]);
        Arrays arrays = Words(t.tiling);
        arrays.insert({{"plan", Copy(t.plan)},
                       {"row_blocks", Copy(t.rowBlocks)},
                       {"tiles", Copy(t.tiles)},
                       {"columns", Copy(t.columns)},
                       {"positions", Copy(t.positions)},
                       {"slots", Copy(t.slots)},
                       {"runs", Copy(t.runs)},
                       {"splits", Copy(t.splits)},
                       {"sizes", Copy<uint64_t>({t.numParts, t.numBlocks, t.workspaceBytes})}});
        return arrays;
    }
    if (what == "row tables") {
        const RowTables t = MakeRowTables(*chunks, ranges, a[0], a[1], a[2], a[3], a[4]);
        return {{"plan", Copy(t.plan)},
                {"vertices", Copy(t.vertices)},
                {"columns", Copy(t.columns)},
                {"sizes", Copy<uint64_t>({t.rangeOffset, t.panelOffset, t.groups, t.members, t.panelColumns})}};
    }
    if (what == "panels") {
        const Panels p = CutPanels(a[0], a[1], a[2], a[3]);
        return {{"first", Copy(p.first)}, {"panels", Copy(p.table)}, {"sizes", Copy<uint64_t>({p.widest})}};
    }
    if (what == "aggregate_vector" || what == "aggregate_max") {
        RowTables t{};
        t.rangeOffset = a[0], t.panelOffset = a[1], t.groups = a[2], t.members = a[3], t.panelColumns = a[4];
        const auto make = what == "aggregate_max" ? MaxTiling : AggregateVectorTiling;
        return Words(make(t, a[5], a[6], a[7] != 0));
    }
    if (what == "edge_softmax") {
        float slope;
        std::memcpy(&slope, a + 3, sizeof(slope));
        return Words(SoftmaxTiling(a[0], a[1], a[2], slope));
    }
    if (what == "edge_products") {
        return Words(ProductsTiling(a[0], a[1], a[2], a[3]));
    }
    if (what == "combine_parts") {
        return Words(MakeCombineTiling(a[0], a[1], a[2], a[3] != 0));
    }
    if (what == "gather_rows") {
        return Words(MakeGatherTiling(a[0], a[1], a[2], a[3]));
    }
    if (what == "update") {
        return Words(MakeUpdateTiling(a[0], a[1], a[2], a[3], a[4], a[5] != 0, a[6] != 0, a[7] != 0, a[8] != 0,
                                      a[9] != 0, a[10]));
    }
    if (what == "aggregate_update") {
        return Words(MakeAggregateUpdateTiling(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7] != 0, a[8] != 0,
                                               a[9] != 0));
    }
    throw std::invalid_argument("unknown tiling: " + what);
}

}  // namespace

}  // namespace lightning_gnn

extern "C" {

// chunks and ranges (pairs, numRanges of them) are null where `what` takes none. On an error it returns null and writes
// the message to `error`, which has `room` bytes.
void* lgnn_tiling(const char* what, const lightning_gnn::ChunksView* chunks, const int64_t* ranges, int64_t numRanges,
                  const uint32_t* numbers, char* error, uint64_t room)
{
    try {
        lightning_gnn::Ranges pairs;
        for (int64_t i = 0; i < numRanges; ++i) {
            pairs.emplace_back(ranges[2 * i], ranges[2 * i + 1]);
        }
        return new lightning_gnn::Arrays(
            lightning_gnn::Make(what, chunks, ranges == nullptr ? nullptr : &pairs, numbers));
    } catch (const std::exception& problem) {
        const std::string text = problem.what();
        const size_t size = std::min<size_t>(text.size(), room - 1);
        std::memcpy(error, text.data(), size);
        error[size] = 0;
        return nullptr;
    }
}

const void* lgnn_array(const void* arrays, const char* name, uint64_t* bytes)
{
    const std::string& found = static_cast<const lightning_gnn::Arrays*>(arrays)->at(name);
    *bytes = found.size();
    return found.data();
}

void lgnn_free(void* arrays) { delete static_cast<lightning_gnn::Arrays*>(arrays); }

}  // extern "C"
