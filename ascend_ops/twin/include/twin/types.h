// Enumerations of CANN 8 and the maps between logical positions, memories, pipes and events.
#ifndef TWIN_TYPES_H
#define TWIN_TYPES_H
#include <cstdint>

#include "twin/macros.h"

namespace AscendC {
enum class TPosition : uint8_t {
    GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM = VECCALC, SPM, SHM = SPM, TSCM, C2PIPE2GM,
    C2PIPE2LOCAL, MAX,
};
using QuePosition = TPosition;

enum class Hardware : uint8_t { GM, UB, L1, L0A, L0B, L0C, BIAS, FIXBUF, MAX };

enum class HardEvent : uint8_t {
    MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, MTE2_V, V_MTE2, MTE3_V, V_MTE3, M_V, V_M, V_V, MTE3_MTE1, MTE1_MTE3, MTE1_V,
    MTE2_M, M_MTE2, V_MTE1, M_FIX, FIX_M, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, MTE2_FIX,
    FIX_MTE2, FIX_S, M_S, FIX_MTE3, MTE1_FIX, FIX_MTE1, FIX_FIX, MAX,
};

enum class RoundMode : uint8_t {
    CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD,
};
enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
enum class TBufState : uint8_t { FREE = 0, OCCUPIED, ENQUE, DEQUE };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };
enum class CacheMode { CACHE_MODE_DISABLE = 0, CACHE_MODE_NORMAL = 1 };
enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR, COLUMN_MAJOR };
enum class BlockMode : uint8_t {
    BLOCK_MODE_NORMAL = 0, BLOCK_MODE_MATRIX, BLOCK_MODE_VECTOR, BLOCK_MODE_SMALL_CHANNEL, BLOCK_MODE_DEPTHWISE,
};

using TEventID = int8_t;
using TBufHandle = void*;
template <typename T> using PrimT = T;

// Level-0 vector calls: a repeat is 256 bytes, a data block 32.
constexpr uint32_t ONE_BLK_SIZE = 32;
constexpr uint32_t ONE_REPEAT_BYTE_SIZE = 256;
constexpr uint32_t DEFAULT_BLK_NUM = 8;
constexpr uint32_t DEFAULT_C0_SIZE = 32;

constexpr Hardware GetPhyType(TPosition position)
{
    switch (position) {
        case TPosition::A1:
        case TPosition::B1:
        case TPosition::C1:
        case TPosition::TSCM: return Hardware::L1;
        case TPosition::A2: return Hardware::L0A;
        case TPosition::B2: return Hardware::L0B;
        case TPosition::CO1: return Hardware::L0C;
        case TPosition::C2: return Hardware::BIAS;
        case TPosition::C2PIPE2GM: return Hardware::FIXBUF;
        case TPosition::VECIN:
        case TPosition::VECOUT:
        case TPosition::VECCALC:
        case TPosition::SPM: return Hardware::UB;
        case TPosition::GM:
        case TPosition::CO2: return Hardware::GM; // c220: results leave L0C for global memory directly
        default: return Hardware::MAX;
    }
}

// The two ends of TQue<position>: a VECIN queue goes from GM to VECIN.
constexpr TPosition GetBufferLogicPos(TPosition position, bool source)
{
    switch (position) {
        case TPosition::A1:
        case TPosition::B1:
        case TPosition::C1:
        case TPosition::VECIN: return source ? TPosition::GM : position;
        case TPosition::A2: return source ? TPosition::A1 : position;
        case TPosition::B2: return source ? TPosition::B1 : position;
        case TPosition::C2: return source ? TPosition::C1 : position;
        case TPosition::CO1: return source ? position : TPosition::CO2;
        case TPosition::CO2:
        case TPosition::VECOUT: return source ? position : TPosition::GM;
        default: return TPosition::MAX;
    }
}

// The event that a queue sets on EnQue (forward) and on FreeTensor (backward).
constexpr HardEvent GetQueEvt(Hardware source, Hardware target, bool forward)
{
    switch (source) {
        case Hardware::GM:
            if (target == Hardware::UB) return forward ? HardEvent::MTE2_V : HardEvent::V_MTE2;
            if (target == Hardware::L1) return forward ? HardEvent::MTE2_MTE1 : HardEvent::MTE1_MTE2;
            return forward ? HardEvent::MTE2_M : HardEvent::M_MTE2;
        case Hardware::UB:
            if (target == Hardware::GM) return forward ? HardEvent::V_MTE3 : HardEvent::MTE3_V;
            if (target == Hardware::L1) return forward ? HardEvent::MTE3_MTE1 : HardEvent::MTE1_MTE3;
            return forward ? HardEvent::MTE2_MTE3 : HardEvent::MTE3_MTE2;
        case Hardware::L1: return forward ? HardEvent::MTE1_M : HardEvent::M_MTE1;
        case Hardware::L0C: return forward ? HardEvent::M_FIX : HardEvent::FIX_M;
        default: return HardEvent::MAX;
    }
}

namespace twin {
constexpr int PIPES = 8; // S V M MTE1 MTE2 MTE3 (unused) FIX, by PipeIndex

constexpr int PipeIndex(pipe_t pipe) { return pipe == PIPE_FIX ? 7 : static_cast<int>(pipe); }

struct EventPipes {
    pipe_t source, target;
};

constexpr EventPipes PipesOf(HardEvent event)
{
    constexpr EventPipes table[] = {
        {PIPE_MTE2, PIPE_MTE1}, {PIPE_MTE1, PIPE_MTE2}, {PIPE_MTE1, PIPE_M}, {PIPE_M, PIPE_MTE1}, {PIPE_MTE2, PIPE_V},
        {PIPE_V, PIPE_MTE2}, {PIPE_MTE3, PIPE_V}, {PIPE_V, PIPE_MTE3}, {PIPE_M, PIPE_V}, {PIPE_V, PIPE_M},
        {PIPE_V, PIPE_V}, {PIPE_MTE3, PIPE_MTE1}, {PIPE_MTE1, PIPE_MTE3}, {PIPE_MTE1, PIPE_V}, {PIPE_MTE2, PIPE_M},
        {PIPE_M, PIPE_MTE2}, {PIPE_V, PIPE_MTE1}, {PIPE_M, PIPE_FIX}, {PIPE_FIX, PIPE_M}, {PIPE_MTE3, PIPE_MTE2},
        {PIPE_MTE2, PIPE_MTE3}, {PIPE_S, PIPE_V}, {PIPE_V, PIPE_S}, {PIPE_S, PIPE_MTE2}, {PIPE_MTE2, PIPE_S},
        {PIPE_S, PIPE_MTE3}, {PIPE_MTE3, PIPE_S}, {PIPE_MTE2, PIPE_FIX}, {PIPE_FIX, PIPE_MTE2}, {PIPE_FIX, PIPE_S},
        {PIPE_M, PIPE_S}, {PIPE_FIX, PIPE_MTE3}, {PIPE_MTE1, PIPE_FIX}, {PIPE_FIX, PIPE_MTE1}, {PIPE_FIX, PIPE_FIX},
    };
    return table[static_cast<int>(event)];
}

TWIN_API const char* NameOf(pipe_t pipe);
TWIN_API const char* NameOf(Hardware hardware);
TWIN_API const char* NameOf(TPosition position);
TWIN_API const char* NameOf(HardEvent event);
TWIN_API const char* NameOf(TBufState state);
} // namespace twin
} // namespace AscendC

enum QuantMode_t {
    NoQuant = 0, F322F16 = 1, F322BF16 = 16, DEQF16 = 5, VDEQF16 = 4, QF322B8_PRE = 24, VQF322B8_PRE = 23, REQ8 = 3,
    VREQ8 = 2,
};
namespace AscendC {
struct FixpipeConfig {
    CO2Layout format;
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};
constexpr FixpipeConfig CFG_COLUMN_MAJOR = {CO2Layout::COLUMN_MAJOR};
} // namespace AscendC
#endif
