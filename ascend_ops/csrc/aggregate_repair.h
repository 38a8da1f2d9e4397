// What non-finite features and weights contribute, after the cube core's results are in global memory.
//
// The producers put 0 in their place. For every entry whose weight or some feature is not finite, the non-finite
// elements of weight * row (and 0 for the finite ones, which are in the result already) are added to the row of the
// entry, atomically. A core that met such a value does this for all entries of the block; if both cores did, each
// element is added twice, which changes nothing: inf + inf = inf, NaN stays NaN. No other row is touched, and the
// order of the additions cannot be seen. It goes entry by entry, since it is rare: diverged training, or a broken row.
#ifndef LIGHTNING_GNN_AGGREGATE_REPAIR_H
#define LIGHTNING_GNN_AGGREGATE_REPAIR_H

#include "aggregate_walk.h"

namespace lightning_gnn {

constexpr float FLOAT_MAX = 3.4028234663852886e38f;
constexpr uint32_t COMPARE_FLOATS = 64;  // a comparison works on 256 bytes

class AggregateRepair {
public:
    __aicore__ inline AggregateRepair() {}

    __aicore__ inline void Init(AscendC::TPipe& pipe, GM_ADDR x, GM_ADDR columns, GM_ADDR positions, GM_ADDR values,
                                GM_ADDR runs, GM_ADDR y, GM_ADDR parts, const AggregateTiling& t)
    {
        tiling = t;
        xGm.SetGlobalBuffer((__gm__ half*)x);
        columnsGm.SetGlobalBuffer((__gm__ int32_t*)columns);
        positionsGm.SetGlobalBuffer((__gm__ uint16_t*)positions);
        valuesGm.SetGlobalBuffer((__gm__ half*)values);
        runsGm.SetGlobalBuffer((__gm__ int32_t*)runs);
        yGm.SetGlobalBuffer((__gm__ half*)y);
        partsGm.SetGlobalBuffer((__gm__ float*)parts);
        room = UpTo(tiling.panelColumns, COMPARE_FLOATS);
        pipe.InitBuffer(rowQueue, 1, tiling.panelColumns * sizeof(half));
        pipe.InitBuffer(outQueue, 1, room * sizeof(float));
        pipe.InitBuffer(productBuffer, 2 * room * sizeof(float));
        pipe.InitBuffer(maskBuffer, 2 * UpTo(room / 8, 32));
    }

    __aicore__ inline void Run(AggregateWalk& walk)
    {
        for (; walk.Valid(); walk.Next()) {
            for (uint32_t part = 0; part < 2; ++part) {
                Half(walk, part);
            }
        }
    }

private:
    __aicore__ inline void Half(const AggregateWalk& walk, uint32_t part)
    {
        const uint32_t k = Up16(walk.columns), cells = Up16(walk.rows) / 2 * k;
        for (uint32_t i = 0; i < walk.entryCount[part]; ++i) {
            const uint32_t at = walk.entryBegin[part] + i;
            // Straight from global memory, entry by entry: slow, and no buffer has to be planned for what hardly ever
            // happens.
            const uint32_t place = positionsGm.GetValue(at);
            if (place >= cells) {
                return;  // only fillers are left
            }
            const half weight = valuesGm.GetValue(static_cast<uint64_t>(walk.head) * tiling.valueStride + at);
            Entry(walk, place / k + part * (Up16(walk.rows) / 2), columnsGm.GetValue(walk.columnBegin + place % k),
                  static_cast<float>(weight));
        }
    }

    __aicore__ inline void Entry(const AggregateWalk& walk, uint32_t row, uint32_t vertex, float weight)
    {
        const int32_t width = static_cast<int32_t>(walk.width);
        const uint32_t compared = UpTo(walk.width, COMPARE_FLOATS);
        AscendC::LocalTensor<half> source = rowQueue.AllocTensor<half>();
        AscendC::DataCopy(source, xGm[static_cast<uint64_t>(vertex) * tiling.ldx + walk.column], walk.width);
        rowQueue.EnQue(source);
        source = rowQueue.DeQue<half>();

        // weight * row in float32: in half, a large but finite product would look infinite. The rest of the last 256
        // bytes that are compared is 0, which is finite.
        AscendC::LocalTensor<float> product = productBuffer.Get<float>();
        AscendC::LocalTensor<float> zeros = product[room];
        AscendC::Duplicate(product, 0.0f, static_cast<int32_t>(2 * room));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(product, source, AscendC::RoundMode::CAST_NONE, walk.width);
        rowQueue.FreeTensor(source);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(product, product, weight, width);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<uint8_t> below = maskBuffer.Get<uint8_t>();
        AscendC::LocalTensor<uint8_t> above = below[UpTo(room / 8, 32)];
        // A bit for each element that is finite: both comparisons hold; NaN fails both.
        AscendC::CompareScalar(below, product, FLOAT_MAX, AscendC::CMPMODE::LE, compared);
        AscendC::CompareScalar(above, product, -FLOAT_MAX, AscendC::CMPMODE::GE, compared);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<uint16_t> mask = below.template ReinterpretCast<uint16_t>();
        AscendC::And(mask, mask, above.template ReinterpretCast<uint16_t>(), static_cast<int32_t>(compared / 16));
        Sync<AscendC::HardEvent::V_S>();
        AscendC::LocalTensor<uint64_t> words = below.template ReinterpretCast<uint64_t>();
        // The scalar unit looks whether anything is not finite; most rows of the block end here.
        uint64_t all = ~0ULL;
        for (uint32_t i = 0; i < compared / 64; ++i) {
            all &= words.GetValue(i);
        }
        Sync<AscendC::HardEvent::S_V>();
        if (all != ~0ULL) {
            AscendC::PipeBarrier<PIPE_V>();
            // What is finite is in the result already: add 0 there.
            AscendC::Select(product, below, zeros, product, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, compared);
            AscendC::PipeBarrier<PIPE_V>();
            AddTo(Destination(walk, row), walk, product);
        }
    }

    __aicore__ inline int32_t Destination(const AggregateWalk& walk, uint32_t row)
    {
        for (uint32_t run = walk.runBegin; run < walk.runEnd; ++run) {
            const uint32_t first = runsGm.GetValue(run * RUN_FIELDS);
            if (row < first + runsGm.GetValue(run * RUN_FIELDS + 1)) {
                const int32_t target = runsGm.GetValue(run * RUN_FIELDS + 2);
                const int32_t offset = static_cast<int32_t>(row - first);
                return target >= 0 ? target + offset : target - offset;
            }
        }
        return 0;  // not reached: the runs cover the rows
    }

    __aicore__ inline void AddTo(int32_t target, const AggregateWalk& walk, const AscendC::LocalTensor<float>& product)
    {
        if (target >= 0) {
            AscendC::LocalTensor<half> out = outQueue.AllocTensor<half>();
            // Cast and copy are ordered by the queue; the copy adds in memory, since the block's other core may add to
            // the same row.
            AscendC::Cast(out, product, AscendC::RoundMode::CAST_RINT, walk.width);
            outQueue.EnQue(out);
            out = outQueue.DeQue<half>();
            AscendC::SetAtomicAdd<half>();
            AscendC::DataCopy(yGm[static_cast<uint64_t>(target) * tiling.ldy + walk.column], out, walk.width);
            AscendC::SetAtomicNone();
            outQueue.FreeTensor(out);
        } else {
            AscendC::LocalTensor<float> out = outQueue.AllocTensor<float>();
            AscendC::Muls(out, product, 1.0f, static_cast<int32_t>(walk.width));
            outQueue.EnQue(out);
            out = outQueue.DeQue<float>();
            AscendC::SetAtomicAdd<float>();
            AscendC::DataCopy(partsGm[static_cast<uint64_t>(-1 - target) * tiling.ldParts + walk.column], out,
                              walk.width);
            AscendC::SetAtomicNone();
            outQueue.FreeTensor(out);
        }
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 1> rowQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> outQueue;
    AscendC::TBuf<AscendC::TPosition::VECCALC> productBuffer, maskBuffer;
    AscendC::GlobalTensor<half> xGm, valuesGm, yGm;
    AscendC::GlobalTensor<float> partsGm;
    AscendC::GlobalTensor<int32_t> columnsGm, runsGm;
    AscendC::GlobalTensor<uint16_t> positionsGm;
    AggregateTiling tiling;
    uint32_t room;
};

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_AGGREGATE_REPAIR_H
