// Copies between global and local memories: DataCopy (contiguous, strided, ND to NZ) and DataCopyPad.
#ifndef TWIN_COPY_H
#define TWIN_COPY_H
#include "twin/sync.h"

namespace AscendC {
namespace twin {
template <typename T> inline void CheckAtomicType(Instr& in)
{
    const AtomicMode mode = GetAtomic();
    if (mode.op != AtomicOp::None && mode.element != ElementOf<T>()) {
        in.Fail("atomic type", "the store is atomic for another element type than the tensor's: SetAtomicAdd<T> must name "
            "the type that is stored (%zu bytes here)", sizeof(T));
    }
}

// A run of bytes to global memory, combined with what is there if the core's stores are atomic.
template <typename T>
inline void Store(Instr& in, const GlobalRef& target, int64_t offset, const uint8_t* bytes, int64_t count)
{
    const AtomicMode mode = GetAtomic();
    if (mode.op == AtomicOp::None) {
        std::memcpy(in.Write(target, offset, count), bytes, static_cast<size_t>(count));
        return;
    }
    uint8_t* data = in.Write(target, offset, count, Gm::Atomic);
    for (int64_t i = 0; i + static_cast<int64_t>(sizeof(T)) <= count; i += sizeof(T)) {
        T old, value;
        std::memcpy(&old, data + i, sizeof(T));
        std::memcpy(&value, bytes + i, sizeof(T));
        value = static_cast<T>(old + value);
        std::memcpy(data + i, &value, sizeof(T));
    }
}

inline Path PathFromGm(Hardware hardware) { return hardware == Hardware::L1 ? Path::GM_TO_L1 : Path::GM_TO_UB; }

inline void CopyTarget(Instr& in, const LocalRef& ref, bool fromGlobal)
{
    if (ref.hardware != Hardware::UB && ref.hardware != Hardware::L1) {
        in.Fail("data path", "%s moves data between global memory and UB or L1, not %s%s", in.name(),
            fromGlobal ? "to " : "from ", NameOf(ref.hardware));
    }
}

// blockCount blocks of blockLen bytes; strides are the gaps between the end of one block and the start of the next.
template <typename T>
inline void CopyIn(Instr& in, const LocalRef& target, const GlobalRef& source, int64_t count, int64_t length,
    int64_t sourceGap, int64_t targetGap)
{
    in.work.kind = Kind::Copy;
    in.work.bursts = sourceGap == 0 ? 1 : count;
    for (int64_t b = 0; b < count; ++b) {
        const uint8_t* bytes = in.Read(source, b * (length + sourceGap), length);
        std::memcpy(in.Write(target, b * (length + targetGap), length), bytes, static_cast<size_t>(length));
    }
    in.work[PathFromGm(target.hardware)] += count * length;
}

template <typename T>
inline void CopyOut(Instr& in, const GlobalRef& target, const LocalRef& source, int64_t count, int64_t length,
    int64_t sourceGap, int64_t targetGap)
{
    CheckAtomicType<T>(in);
    in.work.kind = Kind::Copy;
    in.work.bursts = targetGap == 0 ? 1 : count;
    for (int64_t b = 0; b < count; ++b) {
        const uint8_t* bytes = in.Read(source, b * (length + sourceGap), length);
        Store<T>(in, target, b * (length + targetGap), bytes, length);
    }
    in.work[Path::UB_TO_GM] += count * length;
}

inline void CheckWholeBlocks(Instr& in, int64_t count, size_t size)
{
    const int64_t bytes = count * static_cast<int64_t>(size);
    if (count <= 0 || bytes % ONE_BLK_SIZE != 0) {
        in.Fail("alignment", "DataCopy moves whole 32-byte blocks, but %lld elements are %lld bytes: use DataCopyPad",
            static_cast<long long>(count), static_cast<long long>(bytes));
    }
}

inline void CheckStrided(Instr& in, const DataCopyParams& p)
{
    in.Range("blockCount", p.blockCount, 1, 4095);
    in.Range("blockLen", p.blockLen, 1, 65535);
    in.Range("srcStride", p.srcStride, 0, 65535);
    in.Range("dstStride", p.dstStride, 0, 65535);
}

inline void CheckPad(Instr& in, int64_t count, int64_t length, int64_t source, int64_t target, int64_t limit)
{
    in.Range("blockCount", count, 1, 4095);
    in.Range("blockLen", length, 1, limit);
    in.Range("srcStride", source, 0, U32::Limit());
    in.Range("dstStride", target, 0, U32::Limit());
}

template <typename T>
inline void PadIn(const LocalRef& target, const GlobalRef& source, int64_t count, int64_t length, int64_t sourceGap,
    int64_t targetGap, bool pad, int64_t left, int64_t right, T value, int64_t limit, Loc loc)
{
    Instr in(PIPE_MTE2, "DataCopyPad", loc);
    CheckPad(in, count, length, sourceGap, targetGap, limit);
    if (target.hardware != Hardware::UB) {
        in.Fail("data path", "DataCopyPad from global memory goes to UB, not to %s", NameOf(target.hardware));
    }
    const int64_t size = sizeof(T);
    in.Range("leftPadding bytes", left * size, 0, 32);
    in.Range("rightPadding bytes", right * size, 0, 32);
    const int64_t filled = (left + right) * size + length, rounded = (filled + 31) / 32 * 32;
    in.work.kind = Kind::Copy;
    in.work.bursts = sourceGap == 0 ? 1 : count;
    for (int64_t b = 0; b < count; ++b) {
        const uint8_t* bytes = in.Read(source, b * (length + sourceGap), length);
        const int64_t at = b * (rounded + targetGap * 32);
        uint8_t* data = in.Write(target, at, rounded);
        std::memcpy(data + left * size, bytes, static_cast<size_t>(length));
        if (pad) {
            for (int64_t i = 0; i < left; ++i) {
                std::memcpy(data + i * size, &value, sizeof(T));
            }
            for (int64_t i = 0; i < right; ++i) {
                std::memcpy(data + left * size + length + i * size, &value, sizeof(T));
            }
            in.Undefine(target, at + filled, rounded - filled);
        } else {
            in.Undefine(target, at, left * size);
            in.Undefine(target, at + left * size + length, rounded - left * size - length);
        }
    }
    in.work[Path::GM_TO_UB] += count * length;
}

template <typename T>
inline void PadOut(const GlobalRef& target, const LocalRef& source, int64_t count, int64_t length, int64_t sourceGap,
    int64_t targetGap, int64_t limit, Loc loc)
{
    Instr in(PIPE_MTE3, "DataCopyPad", loc);
    CheckPad(in, count, length, sourceGap, targetGap, limit);
    if (source.hardware != Hardware::UB) {
        in.Fail("data path", "DataCopyPad to global memory starts in UB, not in %s", NameOf(source.hardware));
    }
    const int64_t rounded = (length + 31) / 32 * 32;
    CheckAtomicType<T>(in);
    in.work.kind = Kind::Copy;
    in.work.bursts = targetGap == 0 ? 1 : count;
    for (int64_t b = 0; b < count; ++b) {
        const uint8_t* bytes = in.Read(source, b * (rounded + sourceGap * 32), length);
        Store<T>(in, target, b * (length + targetGap), bytes, length);
    }
    in.work[Path::UB_TO_GM] += count * length;
}
constexpr int64_t PAD_LIMIT = 65535, PAD_LIMIT_EXT = 2097151;
} // namespace twin

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_MTE2, "DataCopy", loc);
    twin::CopyTarget(in, dst.ref(), true);
    twin::CheckStrided(in, p);
    twin::CopyIn<T>(in, dst.ref(), src.ref(), p.blockCount, p.blockLen * 32, p.srcStride * 32, p.dstStride * 32);
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_MTE3, "DataCopy", loc);
    twin::CopyTarget(in, src.ref(), false);
    twin::CheckStrided(in, p);
    twin::CopyOut<T>(in, dst.ref(), src.ref(), p.blockCount, p.blockLen * 32, p.srcStride * 32, p.dstStride * 32);
}

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, int64_t calCount,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_MTE2, "DataCopy", loc);
    twin::CopyTarget(in, dst.ref(), true);
    twin::CheckWholeBlocks(in, calCount, sizeof(T));
    twin::CopyIn<T>(in, dst.ref(), src.ref(), 1, calCount * int64_t(sizeof(T)), 0, 0);
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, int64_t calCount,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_MTE3, "DataCopy", loc);
    twin::CopyTarget(in, src.ref(), false);
    twin::CheckWholeBlocks(in, calCount, sizeof(T));
    twin::CopyOut<T>(in, dst.ref(), src.ref(), 1, calCount * int64_t(sizeof(T)), 0, 0);
}

// UB to UB runs on the vector pipe.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_V, "DataCopy", loc);
    if (dst.ref().hardware != Hardware::UB || src.ref().hardware != Hardware::UB) {
        in.Fail("data path", "between local memories c220 copies UB to UB only, not %s to %s",
            twin::NameOf(src.ref().hardware), twin::NameOf(dst.ref().hardware));
    }
    twin::CheckStrided(in, p);
    in.work.kind = twin::Kind::Vector;
    for (int64_t b = 0; b < p.blockCount; ++b) {
        const int64_t length = p.blockLen * 32;
        const uint8_t* from = in.Read(src.ref(), b * (length + p.srcStride * 32), length);
        std::memmove(in.Write(dst.ref(), b * (length + p.dstStride * 32), length), from, static_cast<size_t>(length));
        in.work.elements += length / int64_t(sizeof(T));
    }
    in.work.element_bytes = sizeof(T);
}

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t calCount,
    twin::Loc loc = twin::Loc::Here())
{
    const int64_t bytes = calCount * int64_t(sizeof(T));
    if (bytes <= 0 || bytes % 32 != 0) {
        twin::Fail(loc, "alignment", "DataCopy moves whole 32-byte blocks, but %lld elements are %lld bytes",
            static_cast<long long>(calCount), static_cast<long long>(bytes));
    }
    DataCopy(dst, src, DataCopyParams(1, bytes / 32, 0, 0), loc);
}

// ND to NZ on the way to L1: column c of row r goes to 32-byte block (c / C0) * dstNzC0Stride + r * dstNzNStride. The
// rest of the last 16-wide column of a row is filled with zeros.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_MTE2, "DataCopy(Nd2Nz)", loc);
    if (dst.ref().hardware != Hardware::L1) {
        in.Fail("data path", "Nd2Nz goes from global memory to L1, not to %s", twin::NameOf(dst.ref().hardware));
    }
    in.Range("ndNum", p.ndNum, 1, 4095);
    in.Range("nValue", p.nValue, 1, 16384);
    in.Range("dValue", p.dValue, 1, 65535);
    in.Range("srcNdMatrixStride", p.srcNdMatrixStride, 0, 65535);
    in.Range("srcDValue", p.srcDValue, 1, 65535);
    in.Range("dstNzC0Stride", p.dstNzC0Stride, 1, 16384);
    in.Range("dstNzNStride", p.dstNzNStride, 1, 16384);
    in.Range("dstNzMatrixStride", p.dstNzMatrixStride, 0, 65535);
    const int64_t size = sizeof(T), c0 = 32 / size;
    in.work.kind = twin::Kind::Copy;
    in.work.bursts = p.srcDValue == p.dValue ? int64_t(p.ndNum) : p.ndNum * p.nValue;
    for (int64_t matrix = 0; matrix < p.ndNum; ++matrix) {
        for (int64_t r = 0; r < p.nValue; ++r) {
            const uint8_t* row = in.Read(src.ref(), (matrix * p.srcNdMatrixStride + r * p.srcDValue) * size,
                p.dValue * size);
            for (int64_t c = 0; c < p.dValue; c += c0) {
                const int64_t here = std::min<int64_t>(c0, p.dValue - c) * size;
                const int64_t at = matrix * p.dstNzMatrixStride * size +
                    ((c / c0) * p.dstNzC0Stride + r * p.dstNzNStride) * 32;
                uint8_t* block = in.Write(dst.ref(), at, 32);
                std::memcpy(block, row + c * size, static_cast<size_t>(here));
                std::memset(block + here, 0, static_cast<size_t>(32 - here));
                twin::TagNz(dst.ref(), at, 32, p.dstNzC0Stride * 32);
            }
        }
    }
    in.work[twin::Path::GM_TO_L1] += p.ndNum * p.nValue * p.dValue * size;
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
    const DataCopyPadExtParams<T>& pad, twin::Loc loc = twin::Loc::Here())
{
    twin::PadIn<T>(dst.ref(), src.ref(), p.blockCount, p.blockLen, p.srcStride, p.dstStride, pad.isPad, pad.leftPadding,
        pad.rightPadding, pad.paddingValue, twin::PAD_LIMIT_EXT, loc);
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p,
    const DataCopyPadParams& pad, twin::Loc loc = twin::Loc::Here())
{
    T value;
    std::memcpy(&value, &pad.paddingValue, sizeof(T));
    twin::PadIn<T>(dst.ref(), src.ref(), p.blockCount, p.blockLen, p.srcStride, p.dstStride, pad.isPad, pad.leftPadding,
        pad.rightPadding, value, twin::PAD_LIMIT, loc);
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::PadOut<T>(dst.ref(), src.ref(), p.blockCount, p.blockLen, p.srcStride, p.dstStride, twin::PAD_LIMIT_EXT, loc);
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::PadOut<T>(dst.ref(), src.ref(), p.blockCount, p.blockLen, p.srcStride, p.dstStride, twin::PAD_LIMIT, loc);
}
} // namespace AscendC
#endif
