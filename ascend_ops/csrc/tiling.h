// What host and kernels agree on: one struct per kernel and the layout of the tables that the kernels read.
// Plain data and no CANN include, so that the host, the kernels and the CPU twin are held to the same definition.
// Every field is a uint32_t, alone on its line: the kernels read a struct from global memory word by word
// (load_tiling.h), and ascend_ops/tiling.py takes the fields' names from here.
#ifndef LIGHTNING_GNN_TILING_H
#define LIGHTNING_GNN_TILING_H

#include <cstdint>

namespace lightning_gnn {

constexpr uint32_t CUBE_EDGE = 16;        // rows and columns of a fractal
constexpr uint32_t CUBE_COLUMNS = 128;    // columns of one cube instruction at most: two such tiles fill L0B
constexpr uint32_t ENTRY_ALIGN = 16;      // entries in a 32-byte block of positions or values
constexpr uint32_t ROW_BLOCK_FIELDS = 8;  // tile begin, tile end, rows, run begin, run end, 0, 0, 0
constexpr uint32_t TILE_FIELDS = 8;       // column begin, columns, entry begin and count of half 0, of half 1, 0, 0
constexpr uint32_t RUN_FIELDS = 4;        // first row in the row block, rows, destination, 0
constexpr uint32_t PANEL_FIELDS = 4;      // first column, columns, head, 0
constexpr uint32_t VERTEX_FIELDS = 4;     // vertex, first entry, last entry + 1, 0
constexpr uint32_t SPLIT_FIELDS = 4;      // vertex, first part, last part + 1, 0

// The tables of aggregate_cube. A row block is up to tileRows rows of one chunk; a tile is up to tileColumns of the
// distinct columns that a row block uses, so a hub has many tiles and nothing is too large.
//   plan       int32: group -> first panel [groups + 1]; member -> first row block [members + 1] (at rangeOffset);
//              panels [.., PANEL_FIELDS] (at panelOffset). Block b is member b % members of group b / members.
//   rowBlocks  int32 [numRowBlocks, ROW_BLOCK_FIELDS]; every row block has at least one tile
//   tiles      int32 [numTiles, TILE_FIELDS]
//   columns    int32: vertex of each column of each tile, filled up with -1 to a multiple of 16 per tile
//   positions  uint16: place of each entry in its half of the dense tile, row * Up16(columns) + column, ascending.
//              Half 0 is the first Up16(rows) / 2 rows, half 1 the rest. Each half's list is filled up to a multiple
//              of 16 with the place one past the half, which the kernel has room for.
//   values     half [heads, valueStride], in the order of positions, fillers 0; parallel edges are added up by the
//              host (it knows the place of each edge: `slots`), because the dense tile has one cell for them
//   runs       int32 [.., RUN_FIELDS]: consecutive rows with consecutive destinations, which leave L0C together.
//              Destination d >= 0 is row d of y; d < 0 is row -1 - d of the float parts, for a vertex whose rows lie
//              in several chunks (combine_parts adds them up, in a fixed order)
struct AggregateTiling {
    uint32_t groups;         // M
    uint32_t members;        // G
    uint32_t tileRows;       // multiple of 16
    uint32_t tileColumns;    // multiple of 16
    uint32_t panelColumns;   // widest panel, multiple of 16
    uint32_t accumulators;   // buffers in L0C: 2, or 1 where a wide panel leaves no room for two
    uint32_t entryBatch;     // entries brought to UB at once, multiple of 16
    uint32_t ldx;            // row strides in elements
    uint32_t ldy;
    uint32_t ldParts;
    uint32_t valueStride;    // values per head
    uint32_t slotHalves;     // fp16 elements in one of the two workspace slots of a block
    uint32_t rangeOffset;    // where the tables start in plan
    uint32_t panelOffset;
    uint32_t reserved0;
    uint32_t reserved1;
};

// The vector-core kernels that go vertex by vertex: aggregate_vector, edge_softmax and its backward, edge_products,
// edge_sum. vertices int32 [numVertices, VERTEX_FIELDS]: the vertices that have entries, the parts of a split one
// put together (they are side by side), each beginning where the one before it ends. plan as above, with ranges of
// vertices instead of row blocks.
struct RowsTiling {
    uint32_t groups;
    uint32_t members;
    uint32_t rangeOffset;
    uint32_t panelOffset;
    uint32_t panelColumns;   // widest panel
    uint32_t ldx;
    uint32_t ldy;
    uint32_t heads;
    uint32_t headColumns;    // columns of one head, filled up to a multiple of 16
    uint32_t batch;          // entries handled at once
    uint32_t weighted;       // aggregate_vector: 0 = every weight is 1
    uint32_t valueStride;    // aggregate_vector: weights per head
    uint32_t slopeBits;      // edge_softmax: the slope of the leaky ReLU, a float's bits
    uint32_t atOnce;         // aggregate_vector: rows of x in a group
    uint32_t reserved0;
    uint32_t reserved1;
};

// combine_parts: y[vertex] = sum of parts, in order.
struct CombineTiling {
    uint32_t numVertices;    // rows of the list, or of y where partsPerRow is given
    uint32_t partsPerRow;    // 0: read the list; else row r has the parts [r * partsPerRow, (r + 1) * partsPerRow)
    uint32_t numColumns;     // multiple of 16
    uint32_t ldParts;
    uint32_t ldy;
    uint32_t floatOut;       // y is float, not half
    uint32_t piece;          // columns handled at once, multiple of 16
    uint32_t reserved0;
};

// gather_rows: out[i] = table[index[i]], in bytes.
struct GatherTiling {
    uint32_t numRows;        // of out
    uint32_t rowBytes;
    uint32_t tableStride;    // bytes
    uint32_t batch;          // rows handled at once
    uint32_t piece;          // bytes of a row handled at once, multiple of 32
    uint32_t tableRows;
    uint32_t reserved0;
    uint32_t reserved1;
};

// update: y[m, n] = a[m, k] x b[k, n] (+ bias)(, ReLU).
struct UpdateTiling {
    uint32_t m;
    uint32_t k;
    uint32_t n;              // multiple of 16: y's columns are filled up
    uint32_t lda;            // strides in elements, as stored
    uint32_t ldb;
    uint32_t ldy;
    uint32_t transposeA;     // a is stored [k, m]
    uint32_t transposeB;     // b is stored [n, k], as torch.nn.Linear does
    uint32_t hasBias;
    uint32_t relu;
    uint32_t floatOut;
    uint32_t splitK;         // > 1: k is cut into that many parts, written as float parts (combine_parts adds them up)
    uint32_t tileM;          // multiples of 16
    uint32_t tileN;
    uint32_t tileK;
    uint32_t storedN;        // columns before filling up: rows of b where transposeB
};

// aggregate_update: sums over the edges of each row, times b (+ x times own); see there.
struct AggregateUpdateTiling {
    uint32_t rows;           // of the result
    uint32_t k;              // columns of x
    uint32_t n;              // columns of y, multiple of 16; 0: only sums
    uint32_t storedN;        // columns before filling up: rows of b where transposeB
    uint32_t ldx;            // strides in elements, multiples of 16; sums have that of x
    uint32_t ldb;
    uint32_t ownRows;        // how many of the first rows have a term of their own
    uint32_t ownOffset;      // columns from b to own
    uint32_t weighted;
    uint32_t mean;
    uint32_t transposeB;     // b is stored [n, k], as torch.nn.Linear does
    uint32_t batch;          // edges handled at once
    uint32_t panelColumns;   // columns handled at once, multiple of 16
    uint32_t atOnce;         // rows of x in a group
    uint32_t reserved0;
    uint32_t reserved1;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_TILING_H
