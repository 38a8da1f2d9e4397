// Parameter structs of the instructions. Names and default values as in CANN 8, but a field keeps the number it was
// given: on the chip 256 in an 8-bit field silently becomes 0, here the instruction that reads it reports the limit.
#ifndef TWIN_PARAMS_H
#define TWIN_PARAMS_H
#include <cstdint>
#include <type_traits>

#include "twin/types.h"

namespace AscendC {
namespace twin {
template <typename T> struct Field {
    int64_t value = 0;

    constexpr Field() = default;
    template <typename V, typename = std::enable_if_t<std::is_arithmetic<V>::value || std::is_enum<V>::value>>
    constexpr Field(V given) : value(static_cast<int64_t>(given))
    {}
    constexpr operator int64_t() const { return value; }
    static constexpr int64_t Limit()
    {
        return std::is_signed<T>::value ? (int64_t(1) << (8 * sizeof(T) - 1)) - 1 : (int64_t(1) << (8 * sizeof(T))) - 1;
    }
};
using U8 = Field<uint8_t>;
using U16 = Field<uint16_t>;
using U32 = Field<uint32_t>;
} // namespace twin

struct DataCopyParams {
    DataCopyParams() {}
    DataCopyParams(twin::U16 count, twin::U16 len, twin::U16 source, twin::U16 target)
        : blockCount(count), blockLen(len), srcStride(source), dstStride(target)
    {}
    twin::U16 blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;
};

struct DataCopyExtParams {
    DataCopyExtParams() {}
    DataCopyExtParams(twin::U16 count, twin::U32 len, twin::U32 source, twin::U32 target, twin::U32 reserved)
        : blockCount(count), blockLen(len), srcStride(source), dstStride(target), rsv(reserved)
    {}
    twin::U16 blockCount = 1;
    twin::U32 blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};

struct DataCopyPadParams {
    DataCopyPadParams() {}
    DataCopyPadParams(bool pad, twin::U8 left, twin::U8 right, uint64_t value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value)
    {}
    bool isPad = false;
    twin::U8 leftPadding = 0, rightPadding = 0;
    uint64_t paddingValue = 0;
};

template <typename T> struct DataCopyPadExtParams {
    DataCopyPadExtParams() {}
    DataCopyPadExtParams(bool pad, twin::U8 left, twin::U8 right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value)
    {}
    bool isPad = false;
    twin::U8 leftPadding = 0, rightPadding = 0;
    T paddingValue = 0;
};

struct Nd2NzParams {
    Nd2NzParams() {}
    Nd2NzParams(twin::U16 count, twin::U16 rows, twin::U16 columns, twin::U16 sourceMatrix, twin::U16 sourceRow,
        twin::U16 c0Stride, twin::U16 nStride, twin::U16 matrixStride)
        : ndNum(count), nValue(rows), dValue(columns), srcNdMatrixStride(sourceMatrix), srcDValue(sourceRow),
          dstNzC0Stride(c0Stride), dstNzNStride(nStride), dstNzMatrixStride(matrixStride)
    {}
    twin::U16 ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0;
    twin::U16 dstNzC0Stride = 0, dstNzNStride = 0, dstNzMatrixStride = 0;
};

struct LoadData2DParams {
    LoadData2DParams() {}
    LoadData2DParams(twin::U16 start, twin::U8 repeats, twin::U16 stride, twin::U8 sidIn, twin::U16 gap, bool transpose,
        twin::U8 mode)
        : startIndex(start), dstGap(gap), srcStride(stride), ifTranspose(transpose), repeatTimes(repeats), sid(sidIn),
          addrMode(mode)
    {}
    twin::U16 startIndex = 0, dstGap = 0, srcStride = 0;
    bool ifTranspose = false;
    twin::U8 repeatTimes = 0, sid = 0, addrMode = 0;
};
using LoadData2dParams = LoadData2DParams;

struct MmadParams {
    MmadParams() {}
    MmadParams(twin::U16 rows, twin::U16 columns, twin::U16 depth, twin::U8 flag, bool source, bool init)
        : m(rows), n(columns), k(depth), unitFlag(flag), cmatrixSource(source), cmatrixInitVal(init)
    {}
    twin::U16 m = 0, n = 0, k = 0;
    bool isBias = false;
    int32_t fmOffset = 0;
    bool enSsparse = false, enWinogradA = false, enWinogradB = false;
    twin::U8 unitFlag = 0;
    bool kDirectionAlign = false;
    bool cmatrixSource = false; // true: C starts from the bias buffer
    bool cmatrixInitVal = true; // true: C starts from zero, false: from what L0C holds
};

struct FixpipeParamsV220 {
    FixpipeParamsV220() {}
    FixpipeParamsV220(twin::U16 columns, twin::U16 rows, twin::U16 source, twin::U32 target, bool relu)
        : nSize(columns), mSize(rows), srcStride(source), dstStride(target), reluEn(relu)
    {}
    FixpipeParamsV220(twin::U16 columns, twin::U16 rows, twin::U16 source, twin::U32 target, bool relu,
        QuantMode_t quant, int64_t scale, twin::U16 count, twin::U16 sourceNd, twin::U16 targetNd, twin::U8 flag)
        : nSize(columns), mSize(rows), srcStride(source), dstStride(target), quantPre(quant), deqScalar(scale),
          ndNum(count), srcNdStride(sourceNd), dstNdStride(targetNd), reluEn(relu), unitFlag(flag)
    {}
    twin::U16 nSize = 0, mSize = 0, srcStride = 0;
    twin::U32 dstStride = 0;
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    uint64_t deqScalar = 0;
    twin::U16 ndNum = 1, srcNdStride = 0, dstNdStride = 0;
    bool reluEn = false;
    twin::U8 unitFlag = 0;
    bool isChannelSplit = false;
};

struct UnaryRepeatParams {
    UnaryRepeatParams() {}
    UnaryRepeatParams(twin::U16 dstBlock, twin::U16 srcBlock, twin::U8 dstRepeat, twin::U8 srcRepeat)
        : dstBlkStride(dstBlock), srcBlkStride(srcBlock), dstRepStride(dstRepeat), srcRepStride(srcRepeat)
    {}
    uint32_t blockNumber = 8;
    twin::U16 dstBlkStride = 1, srcBlkStride = 1;
    twin::U8 dstRepStride = 8, srcRepStride = 8;
    bool repeatStrideMode = false, strideSizeMode = false, halfBlock = false;
};

struct BinaryRepeatParams {
    BinaryRepeatParams() {}
    BinaryRepeatParams(twin::U8 dstBlock, twin::U8 src0Block, twin::U8 src1Block, twin::U8 dstRepeat,
        twin::U8 src0Repeat, twin::U8 src1Repeat)
        : dstBlkStride(dstBlock), src0BlkStride(src0Block), src1BlkStride(src1Block), dstRepStride(dstRepeat),
          src0RepStride(src0Repeat), src1RepStride(src1Repeat)
    {}
    uint32_t blockNumber = 8;
    twin::U8 dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
    twin::U8 dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
    bool repeatStrideMode = false, strideSizeMode = false;
};

struct BrcbRepeatParams {
    BrcbRepeatParams() {}
    BrcbRepeatParams(twin::U16 dstBlock, twin::U16 dstRepeat) : dstBlkStride(dstBlock), dstRepStride(dstRepeat) {}
    twin::U16 dstBlkStride = 1, dstRepStride = 8;
};
} // namespace AscendC
#endif
