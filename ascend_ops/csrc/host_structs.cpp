// From sizes to the structs of the kernels that need no tables of their own.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "host_tiling.h"

namespace lightning_gnn {

namespace {

uint32_t Up(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit * unit; }

// Rows of a group in row_sums.h: as many as UB has room for, two groups in fp16 and one in fp32, beside two lists, two
// results in fp16 and the sums in fp32, filled up.
uint32_t RowsAtOnce(uint32_t panelColumns)
{
    const uint64_t row = 8 * panelColumns, taken = 16 * SUM_BATCH + row + 768;
    return static_cast<uint32_t>(std::min<uint64_t>(ROWS_AT_ONCE, (DAV_C220.ub - taken) / row));
}

}  // namespace

RowsTiling AggregateVectorTiling(const RowTables& tables, uint32_t stride, uint32_t numEdges, bool weighted)
{
    RowsTiling t{};
    t.groups = tables.groups;
    t.members = tables.members;
    t.rangeOffset = tables.rangeOffset;
    t.panelOffset = tables.panelOffset;
    t.panelColumns = tables.panelColumns;
    t.ldx = t.ldy = stride;
    t.batch = SUM_BATCH;
    t.atOnce = RowsAtOnce(t.panelColumns);
    t.weighted = weighted ? 1 : 0;
    t.valueStride = numEdges;
    return t;
}

RowsTiling MaxTiling(const RowTables& tables, uint32_t stride, uint32_t numEdges, bool weighted)
{
    if (tables.panelColumns < 1 || tables.panelColumns > MAX_KERNEL_PANEL) {
        throw std::invalid_argument("panels must have 1 to " + std::to_string(MAX_KERNEL_PANEL) + " columns, but have " +
                                    std::to_string(tables.panelColumns));
    }
    RowsTiling t = AggregateVectorTiling(tables, stride, numEdges, weighted);
    // 255 repeats at most, and whole blocks of weights; more rows than copies may be in flight.
    t.batch = std::min(64U, MAX_KERNEL_FLOATS / Up(tables.panelColumns, 64));
    return t;
}

RowsTiling SoftmaxTiling(uint32_t members, uint32_t rangeOffset, uint32_t heads, float slope)
{
    const uint32_t lanes = Up(std::min(heads, HEADS_AT_ONCE), 8);
    RowsTiling t{};
    t.groups = 1;
    t.members = members;
    t.rangeOffset = rangeOffset;
    t.heads = heads;
    t.batch = std::min(248U, HEAD_FLOATS / lanes / 8 * 8);  // 255 repeats at most, and whole blocks
    std::memcpy(&t.slopeBits, &slope, sizeof(slope));
    return t;
}

RowsTiling ProductsTiling(uint32_t members, uint32_t rangeOffset, uint32_t heads, uint32_t numColumns)
{
    if (heads < 1 || numColumns < 1) {
        throw std::invalid_argument("heads=" + std::to_string(heads) + " and num_columns=" +
                                    std::to_string(numColumns) + " must be at least 1");
    }
    const uint32_t headColumns = Up(numColumns, CUBE_EDGE);
    const bool together = heads * headColumns <= PRODUCTS_PANEL;
    RowsTiling t{};
    t.groups = 1;
    t.members = members;
    t.rangeOffset = rangeOffset;
    t.panelColumns = together ? heads * headColumns : std::min(headColumns, PRODUCTS_PANEL);
    t.ldx = t.ldy = heads * headColumns;
    t.heads = heads;
    t.headColumns = headColumns;
    t.batch = std::min({128U, 16384 / t.panelColumns, together ? 255 / heads : 255U});
    return t;
}

CombineTiling MakeCombineTiling(uint32_t numVertices, uint32_t numColumns, uint32_t partsPerRow, bool floatOut)
{
    CombineTiling t{};
    t.numVertices = numVertices;
    t.partsPerRow = partsPerRow;
    t.numColumns = t.ldParts = t.ldy = numColumns;
    t.floatOut = floatOut ? 1 : 0;
    t.piece = std::min(numColumns, VECTOR_PANEL);
    return t;
}

GatherTiling MakeGatherTiling(uint32_t numRows, uint32_t rowBytes, uint32_t tableStride, uint32_t tableRows)
{
    if (rowBytes < 1) {
        throw std::invalid_argument("row_bytes must be at least 1, but is 0");
    }
    GatherTiling t{};
    t.numRows = numRows;
    t.rowBytes = rowBytes;
    t.tableStride = tableStride;
    t.tableRows = tableRows;
    t.piece = std::min(Up(rowBytes, 32), 16384U);
    t.batch = std::min(1024U, 65536 / t.piece);
    return t;
}

UpdateTiling MakeUpdateTiling(uint32_t m, uint32_t k, uint32_t n, uint32_t lda, uint32_t ldb, bool transposeA,
                              bool transposeB, bool bias, bool relu, bool floatOut, uint32_t splitK)
{
    if (std::min({m, k, n, splitK}) < 1) {
        throw std::invalid_argument("m=" + std::to_string(m) + ", k=" + std::to_string(k) + ", n=" +
                                    std::to_string(n) + " and split_k=" + std::to_string(splitK) +
                                    " must be at least 1");
    }
    const struct {
        const char* name;
        uint32_t stride, width;
    } strides[] = {{"lda", lda, transposeA ? m : k}, {"ldb", ldb, transposeB ? k : n}};
    for (const auto& s : strides) {
        if (s.stride % CUBE_EDGE != 0 || s.stride < s.width) {
            throw std::invalid_argument(std::string(s.name) + " must be a multiple of 16 and at least " +
                                        std::to_string(s.width) + ", but is " + std::to_string(s.stride));
        }
    }
    UpdateTiling t{};
    t.splitK = std::min(splitK, (k + 127) / 128);
    if (t.splitK > 1 && (bias || relu)) {
        throw std::invalid_argument("bias and ReLU need the whole sum: use split_k=1");
    }
    t.m = m;
    t.k = k;
    t.n = t.ldy = Up(n, CUBE_EDGE);
    t.lda = lda;
    t.ldb = ldb;
    t.transposeA = transposeA ? 1 : 0;
    t.transposeB = transposeB ? 1 : 0;
    t.hasBias = bias ? 1 : 0;
    t.relu = relu ? 1 : 0;
    t.floatOut = floatOut || t.splitK > 1 ? 1 : 0;
    t.tileM = t.tileN = t.tileK = 128;
    t.storedN = n;
    return t;
}

AggregateUpdateTiling MakeAggregateUpdateTiling(uint32_t rows, uint32_t k, uint32_t n, uint32_t ldx, uint32_t ldb,
                                                uint32_t ownRows, uint32_t ownOffset, bool weighted, bool mean,
                                                bool transposeB)
{
    if (rows < 1 || k < 1) {
        throw std::invalid_argument("rows=" + std::to_string(rows) + " and k=" + std::to_string(k) +
                                    " must be at least 1");
    }
    const uint32_t width = (ownRows > 0 ? ownOffset : 0) + (transposeB ? k : n);
    if (ldx != Up(k, CUBE_EDGE) || (n > 0 && (ldb % CUBE_EDGE != 0 || ldb < width || ownOffset % CUBE_EDGE != 0))) {
        throw std::invalid_argument("ldx=" + std::to_string(ldx) + " must be k=" + std::to_string(k) +
                                    " filled up to a multiple of 16, ldb=" + std::to_string(ldb) +
                                    " a multiple of 16 and at least " + std::to_string(width));
    }
    AggregateUpdateTiling t{};
    t.rows = rows;
    t.k = k;
    t.n = Up(n, CUBE_EDGE);
    t.storedN = n;
    t.ldx = ldx;
    t.ldb = ldb;
    t.ownRows = std::min(ownRows, rows);
    t.ownOffset = ownOffset;
    t.weighted = weighted ? 1 : 0;
    t.mean = mean ? 1 : 0;
    t.transposeB = transposeB ? 1 : 0;
    t.batch = SUM_BATCH;
    t.panelColumns = std::min(ldx, VECTOR_PANEL);
    t.atOnce = RowsAtOnce(t.panelColumns);
    return t;
}

}  // namespace lightning_gnn
