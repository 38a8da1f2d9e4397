#include "device_tables.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cache.h"

namespace lightning_gnn {

namespace {

// By what they were made for, of one graph, which is known by its tensor `local`.
template <typename Tables>
auto& OfGraphs()
{
    return TheCache<Tables, c10::TensorImpl>();
}

c10::intrusive_ptr<c10::TensorImpl> Owner(const at::Tensor& local) { return local.getIntrusivePtr(); }

template <typename T>
at::Tensor Upload(const std::vector<T>& values, at::ScalarType dtype, const at::Tensor& like)
{
    if (values.empty()) {
        return at::zeros({1}, like.options().dtype(dtype));  // never read, but an address
    }
    const auto size = static_cast<int64_t>(values.size());
    return at::from_blob(const_cast<T*>(values.data()), {size}, at::TensorOptions().dtype(dtype)).clone().to(
        like.device());
}

template <typename Struct>
at::Tensor UploadWords(const Struct& words, const at::Tensor& like)
{
    std::vector<int32_t> copy(sizeof(words) / sizeof(int32_t));
    std::memcpy(copy.data(), &words, sizeof(words));
    return Upload(copy, at::kInt, like);
}

// Chunks on the host, for as long as their tables are made.
class HostChunks {
public:
    explicit HostChunks(at::TensorList chunks)
    {
        TORCH_CHECK(chunks.size() == 6, "chunks must be six tensors, but are ", chunks.size());
        for (const at::Tensor& tensor : chunks) {
            tensors_.push_back(tensor.cpu().contiguous());
        }
    }

    ChunksView View() const
    {
        return {tensors_[0].const_data_ptr<int32_t>(), tensors_[1].const_data_ptr<int64_t>(),
                tensors_[2].const_data_ptr<int64_t>(), tensors_[3].const_data_ptr<int32_t>(),
                tensors_[4].const_data_ptr<int32_t>(), tensors_[5].const_data_ptr<int64_t>(),
                tensors_[1].numel() - 1};
    }

    std::vector<float> Degrees(int64_t numRows) const
    {
        const ChunksView view = View();
        std::vector<float> degrees(static_cast<size_t>(numRows), 0.0f);
        for (int64_t i = 0; i < tensors_[0].numel(); ++i) {
            degrees[view.rows[i]] += static_cast<float>(view.indptr[i + 1] - view.indptr[i]);
        }
        return degrees;
    }

private:
    std::vector<at::Tensor> tensors_;
};

Ranges Pairs(at::IntArrayRef bounds)
{
    Ranges pairs;
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
        pairs.emplace_back(bounds[i], bounds[i + 1]);
    }
    return pairs;
}

template <typename Tables>
void SetDegrees(const HostChunks& host, int64_t numRows, const at::Tensor& like, Tables& device)
{
    std::vector<float> degrees = host.Degrees(numRows);
    float most = 1.0f;
    for (float& degree : degrees) {
        most = std::max(most, degree);
        degree = std::max(degree, 1.0f);
    }
    device.degrees = Upload(degrees, at::kFloat, like);
    while (static_cast<float>(1LL << device.sumExponent) < most) {
        ++device.sumExponent;
    }
}

CubeOnDevice MakeCube(at::TensorList chunks, int64_t numRows, int64_t heads, int64_t columns, int64_t groups,
                      at::IntArrayRef ranges)
{
    const HostChunks host(chunks);
    const CubeTables tables = MakeCubeTables(host.View(), Pairs(ranges), static_cast<uint32_t>(groups),
                                             static_cast<uint32_t>(columns), static_cast<uint32_t>(heads));
    const at::Tensor& like = chunks[3];
    CubeOnDevice device{};
    device.tiling = UploadWords(tables.tiling, like);
    device.plan = Upload(tables.plan, at::kInt, like);
    device.rowBlocks = Upload(tables.rowBlocks, at::kInt, like);
    device.tiles = Upload(tables.tiles, at::kInt, like);
    device.columns = Upload(tables.columns, at::kInt, like);
    device.positions = Upload(tables.positions, at::kShort, like);  // uint16, by its bits
    device.slots = Upload(tables.slots, at::kInt, like);
    device.runs = Upload(tables.runs, at::kInt, like);
    device.splits = Upload(tables.splits, at::kInt, like);
    device.numParts = static_cast<int64_t>(tables.numParts);
    device.numBlocks = static_cast<int64_t>(tables.numBlocks);
    device.numSplits = static_cast<int64_t>(tables.splits.size() / SPLIT_FIELDS);
    device.workspaceBytes = static_cast<int64_t>(tables.workspaceBytes);
    device.valueStride = static_cast<int64_t>(tables.positions.size());

    std::vector<float> ones(tables.positions.size(), 0.0f);
    for (const int32_t slot : tables.slots) {
        ones[slot] += 1.0f;
    }
    device.ones = Upload(ones, at::kFloat, like).to(at::kHalf);
    SetDegrees(host, numRows, like, device);
    const CombineTiling combine = MakeCombineTiling(static_cast<uint32_t>(device.numSplits), tables.tiling.ldy, 0,
                                                    false);
    device.combineTiling = UploadWords(combine, like);
    return device;
}

VectorOnDevice MakeVector(at::TensorList chunks, int64_t numRows, int64_t heads, int64_t columns, int64_t groups,
                          at::IntArrayRef ranges)
{
    const HostChunks host(chunks);
    const at::Tensor& like = chunks[3];
    const Ranges pairs = Pairs(ranges);
    const RowTables tables = MakeRowTables(host.View(), &pairs, 1, static_cast<uint32_t>(groups),
                                           static_cast<uint32_t>(columns), static_cast<uint32_t>(heads));
    const auto stride = static_cast<uint32_t>(heads * ((columns + CUBE_EDGE - 1) / CUBE_EDGE * CUBE_EDGE));
    const auto numEdges = static_cast<uint32_t>(tables.columns.size());
    VectorOnDevice device{};
    device.plan = Upload(tables.plan, at::kInt, like);
    device.vertices = Upload(tables.vertices, at::kInt, like);
    device.columns = Upload(tables.columns, at::kInt, like);
    device.weighted = UploadWords(AggregateVectorTiling(tables, stride, numEdges, true), like);
    device.unweighted = UploadWords(AggregateVectorTiling(tables, stride, numEdges, false), like);
    device.numBlocks = static_cast<int64_t>(tables.groups) * tables.members;
    SetDegrees(host, numRows, like, device);
    return device;
}

RowsOnDevice MakeRows(at::TensorList chunks, uint32_t members)
{
    const HostChunks host(chunks);
    const RowTables tables = MakeRowTables(host.View(), nullptr, members);
    return {Upload(tables.plan, at::kInt, chunks[3]), Upload(tables.vertices, at::kInt, chunks[3]),
            Upload(tables.columns, at::kInt, chunks[3]), members, tables.rangeOffset};
}

// The host tiling knows no torch and throws what any C++ throws.
template <typename Make>
auto Checked(Make make) -> decltype(make())
{
    try {
        return make();
    } catch (const std::invalid_argument& problem) {
        TORCH_CHECK_VALUE(false, problem.what());
    }
}

}  // namespace

std::shared_ptr<const CubeOnDevice> CubeTablesOf(at::TensorList chunks, int64_t numRows, int64_t heads,
                                                 int64_t columns, at::IntArrayRef slices, at::IntArrayRef ranges)
{
    const int64_t groups = static_cast<int64_t>(slices.size()) - 1;
    Key key = {numRows, heads, columns, groups};
    key.insert(key.end(), ranges.begin(), ranges.end());
    return OfGraphs<CubeOnDevice>().Get(Owner(chunks[3]), 0, key, [&] {
        return Checked([&] { return MakeCube(chunks, numRows, heads, columns, groups, ranges); });
    });
}

std::shared_ptr<const VectorOnDevice> VectorTablesOf(at::TensorList chunks, int64_t numRows, int64_t heads,
                                                     int64_t columns, at::IntArrayRef slices, at::IntArrayRef ranges)
{
    const int64_t groups = static_cast<int64_t>(slices.size()) - 1;
    Key key = {numRows, heads, columns, groups};
    key.insert(key.end(), ranges.begin(), ranges.end());
    return OfGraphs<VectorOnDevice>().Get(Owner(chunks[3]), 0, key, [&] {
        return Checked([&] { return MakeVector(chunks, numRows, heads, columns, groups, ranges); });
    });
}

std::shared_ptr<const RowsOnDevice> RowTablesOf(at::TensorList chunks, at::IntArrayRef ranges)
{
    const auto members = static_cast<uint32_t>(2 * (ranges.size() - 1));
    return OfGraphs<RowsOnDevice>().Get(Owner(chunks[3]), 0, {members}, [&] {
        return Checked([&] { return MakeRows(chunks, members); });
    });
}

at::Tensor SoftmaxTilingOf(at::TensorList chunks, const RowsOnDevice& tables, int64_t heads, double slope)
{
    const RowsTiling tiling = SoftmaxTiling(tables.members, tables.rangeOffset, static_cast<uint32_t>(heads),
                                            static_cast<float>(slope));
    return *OfGraphs<at::Tensor>().Get(Owner(chunks[3]), 0, {0, tiling.members, tiling.heads, tiling.slopeBits}, [&] {
        return UploadWords(tiling, chunks[3]);
    });
}

at::Tensor ProductsTilingOf(at::TensorList chunks, const RowsOnDevice& tables, int64_t heads, int64_t columns)
{
    const RowsTiling tiling = ProductsTiling(tables.members, tables.rangeOffset, static_cast<uint32_t>(heads),
                                             static_cast<uint32_t>(columns));
    return *OfGraphs<at::Tensor>().Get(Owner(chunks[3]), 0, {1, tiling.members, tiling.heads, tiling.headColumns}, [&] {
        return UploadWords(tiling, chunks[3]);
    });
}

}  // namespace lightning_gnn
