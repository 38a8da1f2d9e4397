// out[i] = table[index[i]], for rows of any number of bytes. Where an index is outside the table, all bits of the row are
// ones, which is NaN in any floating type and -1 in any integer: `missing` holds as many such bytes as a piece.
//
// Launch: any number of vector-core blocks, each with an even share of consecutive rows. No workspace.
#include "load_tiling.h"

using namespace AscendC;
using namespace lightning_gnn;

class GatherRows {
public:
    __aicore__ inline GatherRows() {}

    __aicore__ inline void Init(GM_ADDR table, GM_ADDR index, GM_ADDR missing, GM_ADDR out,
                                const GatherTiling& t)
    {
        tiling = t;
        tableGm.SetGlobalBuffer((__gm__ uint8_t*)table);
        indexGm.SetGlobalBuffer((__gm__ int32_t*)index);
        missingGm.SetGlobalBuffer((__gm__ uint8_t*)missing);
        outGm.SetGlobalBuffer((__gm__ uint8_t*)out);
        pipe.InitBuffer(indexQueue, BUFFER_NUM, UpTo(tiling.batch * sizeof(int32_t), 32));
        // Rows only pass through: one queue is filled by MTE2 and emptied by MTE3.
        pipe.InitBuffer(rowsQueue, BUFFER_NUM, tiling.batch * tiling.piece);
    }

    __aicore__ inline void Process()
    {
        const uint64_t blocks = GetBlockNum(), block = GetBlockIdx();
        const uint32_t begin = static_cast<uint32_t>(tiling.numRows * block / blocks);
        const uint32_t end = static_cast<uint32_t>(tiling.numRows * (block + 1) / blocks);
        for (uint32_t i = begin; i < end; i += tiling.batch) {
            Batch(i, Least(end - i, tiling.batch));
        }
    }

private:
    __aicore__ inline void Batch(uint32_t first, uint32_t n)
    {
        LocalTensor<int32_t> index = indexQueue.AllocTensor<int32_t>();
        DataCopyPad(index, indexGm[first], DataCopyExtParams(1, n * sizeof(int32_t), 0, 0, 0),
                    DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        indexQueue.EnQue(index);
        index = indexQueue.DeQue<int32_t>();
        Sync<HardEvent::MTE2_S>();
        // Rows longer than a piece go in pieces, the same piece of all rows of the batch together.
        for (uint32_t at = 0; at < tiling.rowBytes; at += tiling.piece) {
            const uint32_t bytes = Least(tiling.rowBytes - at, tiling.piece), room = UpTo(bytes, 32);
            LocalTensor<uint8_t> rows = rowsQueue.AllocTensor<uint8_t>();
            for (uint32_t i = 0; i < n; ++i) {
                const uint32_t row = static_cast<uint32_t>(index.GetValue(i));  // a negative one is too large
                const GlobalTensor<uint8_t> source =
                    row < tiling.tableRows ? tableGm[static_cast<uint64_t>(row) * tiling.tableStride + at] : missingGm;
                DataCopyPad(rows[i * room], source, DataCopyExtParams(1, bytes, 0, 0, 0),
                            DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
            }
            rowsQueue.EnQue(rows);
            rows = rowsQueue.DeQue<uint8_t>();
            // one copy out: rows are whole 32-byte blocks apart in UB and rowBytes apart in global memory
            DataCopyPad(outGm[static_cast<uint64_t>(first) * tiling.rowBytes + at], rows,
                        DataCopyExtParams(Narrow<uint16_t>(n), bytes, 0, tiling.rowBytes - bytes, 0));
            rowsQueue.FreeTensor(rows);
        }
        // The scalar unit has read the indices: MTE2 may fill their buffer again.
        Sync<HardEvent::S_MTE2>();
        indexQueue.FreeTensor(index);
    }

    TPipe pipe;
    TQue<TPosition::VECIN, 1> indexQueue;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> rowsQueue;
    GlobalTensor<uint8_t> tableGm, missingGm, outGm;
    GlobalTensor<int32_t> indexGm;
    GatherTiling tiling;
};

extern "C" __global__ __aicore__ void gather_rows(GM_ADDR table, GM_ADDR index, GM_ADDR missing, GM_ADDR out,
                                                  GM_ADDR tilingGm)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    GatherTiling tiling;
    LoadTiling(tiling, tilingGm);
    GatherRows op;
    op.Init(table, index, missing, out, tiling);
    op.Process();
}
