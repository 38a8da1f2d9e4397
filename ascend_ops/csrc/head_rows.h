// Values per entry and head, [entries, heads] floats in global memory, as rows of `lanes` floats in UB: heads filled up
// to a 32-byte block. Up to HEAD_BLOCK heads are handled at once, all by the same instructions; a reduction over the
// entries of a vertex folds rows onto rows, so it needs no scalar and no lane ever meets another head.
#ifndef LIGHTNING_GNN_HEAD_ROWS_H
#define LIGHTNING_GNN_HEAD_ROWS_H

#include "load_tiling.h"

namespace lightning_gnn {

constexpr uint32_t HEAD_BLOCK = 64;   // floats in one vector instruction
constexpr uint32_t BLOCK_FLOATS = 8;  // floats in 32 bytes

class HeadRows {
public:
    __aicore__ inline HeadRows() {}

    __aicore__ inline void Set(uint32_t firstHead, uint32_t totalHeads)
    {
        first = firstHead;
        total = totalHeads;
        heads = Least(total - first, HEAD_BLOCK);
        lanes = UpTo(heads, BLOCK_FLOATS);
    }

    // Row `row` of source -> one row of target, fillers 0.
    __aicore__ inline void CopyRow(const AscendC::LocalTensor<float>& target,
                                   const AscendC::GlobalTensor<float>& source, uint64_t row) const
    {
        CopyRows(target, source, row, 1);
    }

    // Consecutive rows.
    __aicore__ inline void CopyRows(const AscendC::LocalTensor<float>& target,
                                    const AscendC::GlobalTensor<float>& source, uint64_t row, uint32_t count) const
    {
        // Each row is padded to whole 32-byte blocks on the way; where there are more heads than fit, those of other
        // passes are skipped in global memory.
        const AscendC::DataCopyExtParams shape(Narrow<uint16_t>(count), heads * sizeof(float),
                                               (total - heads) * sizeof(float), 0, 0);
        const AscendC::DataCopyPadExtParams<float> fill(true, 0, Narrow<uint8_t>(lanes - heads), 0.0f);
        AscendC::DataCopyPad(target, source[row * total + first], shape, fill);
    }

    __aicore__ inline void StoreRows(const AscendC::GlobalTensor<float>& target,
                                     const AscendC::LocalTensor<float>& source, uint64_t row, uint32_t count) const
    {
        // Fillers are left out again.
        const AscendC::DataCopyExtParams shape(Narrow<uint16_t>(count), heads * sizeof(float), 0,
                                               (total - heads) * sizeof(float), 0);
        AscendC::DataCopyPad(target[row * total + first], source, shape);
    }

    // One row against every row: the second operand does not move. At most 255 rows.
    __aicore__ inline AscendC::BinaryRepeatParams OneToAll() const
    {
        const uint8_t blocks = Narrow<uint8_t>(lanes / BLOCK_FLOATS);
        return AscendC::BinaryRepeatParams(1, 1, 1, blocks, blocks, 0);
    }

    // rows[0] = sum (or maximum) of all rows; the others are spoiled.
    __aicore__ inline void FoldSum(const AscendC::LocalTensor<float>& rows, uint32_t count) const
    {
        while (count > 1) {
            // The last half of the rows onto the first, until one is left: log2(count) instructions, in an order that
            // depends on the count alone. An odd row in the middle waits for the next turn.
            const uint32_t half = count / 2;
            count -= half;
            AscendC::Add(rows, rows, rows[count * lanes], static_cast<int32_t>(half * lanes));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    __aicore__ inline void FoldMax(const AscendC::LocalTensor<float>& rows, uint32_t count) const
    {
        while (count > 1) {
            const uint32_t half = count / 2;
            count -= half;
            AscendC::Max(rows, rows, rows[count * lanes], static_cast<int32_t>(half * lanes));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    uint32_t first, heads, lanes, total;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_HEAD_ROWS_H
