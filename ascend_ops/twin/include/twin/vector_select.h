// Comparisons to bit masks, selection by a bit mask, gathering inside UB, index vectors.
#ifndef TWIN_VECTOR_SELECT_H
#define TWIN_VECTOR_SELECT_H
#include "twin/vector.h"

namespace AscendC {
namespace twin {
constexpr int64_t SELECT_SCRATCH = 8 * 1024;

template <typename C> inline bool Compared(CMPMODE mode, C a, C b)
{
    switch (mode) {
        case CMPMODE::LT: return a < b;
        case CMPMODE::GT: return a > b;
        case CMPMODE::EQ: return a == b;
        case CMPMODE::LE: return a <= b;
        case CMPMODE::GE: return a >= b;
        default: return a != b;
    }
}

template <typename U, typename T, typename F>
inline void CompareBits(const char* name, const LocalTensor<U>& dst, const LocalTensor<T>& a, const LocalTensor<T>* b,
    int64_t count, Loc loc, F f)
{
    static_assert(sizeof(U) == 1, "the mask is a tensor of uint8_t or int8_t");
    Instr in(PIPE_V, name, loc);
    const int64_t bytes = count * int64_t(sizeof(T));
    if (Empty(in, count)) {
        return;
    }
    if (bytes % 256 != 0) {
        in.Fail("count", "%s: %lld elements are %lld bytes, it takes whole repeats of 256 bytes", name,
            static_cast<long long>(count), static_cast<long long>(bytes));
    }
    const T* x = reinterpret_cast<const T*>(in.Read(a.ref(), 0, bytes));
    const T* y = b ? reinterpret_cast<const T*>(in.Read(b->ref(), 0, bytes)) : x;
    uint8_t* d = in.Write(dst.ref(), 0, count / 8);
    for (int64_t i = 0; i < count; i += 8) {
        unsigned bits = 0;
        for (int64_t j = 0; j < 8; ++j) bits |= unsigned(f(x[i + j], y[i + j])) << j;
        d[i / 8] = static_cast<uint8_t>(bits);
    }
    Book(in, Kind::Vector, count, sizeof(T), (b ? 2 : 1) * bytes, count / 8);
}

template <typename T, typename U, typename F>
inline void SelectBits(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& a,
    const LocalTensor<T>* b, int64_t count, Loc loc, F otherwise)
{
    Instr in(PIPE_V, "Select", loc);
    if (Empty(in, count)) {
        return;
    }
    if (UbLeft() < SELECT_SCRATCH) {
        in.Fail("local memory", "UB overflow: Select works in the last 8192 bytes of UB, but the buffers leave only %lld",
            static_cast<long long>(UbLeft()));
    }
    const int64_t bytes = count * int64_t(sizeof(T));
    const uint8_t* m = in.Read(mask.ref(), 0, (count + 7) / 8);
    const T* x = reinterpret_cast<const T*>(in.Read(a.ref(), 0, bytes));
    const T* y = b ? reinterpret_cast<const T*>(in.Read(b->ref(), 0, bytes)) : x;
    T* d = reinterpret_cast<T*>(in.Write(dst.ref(), 0, bytes));
    for (int64_t i = 0; i < count; ++i) d[i] = (m[i / 8] >> (i % 8)) & 1U ? x[i] : otherwise(y[i]);
    Book(in, Kind::Vector, count, sizeof(T), (b ? 2 : 1) * bytes + count / 8, bytes);
}
} // namespace twin

template <typename T, typename U>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
    uint32_t calCount, twin::Loc loc = twin::Loc::Here())
{
    using C = twin::Compute<T>;
    twin::CompareBits("Compare", dst, src0, &src1, calCount, loc,
        [cmpMode](T a, T b) { return twin::Compared<C>(cmpMode, static_cast<C>(a), static_cast<C>(b)); });
}

template <typename T, typename U>
inline void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
    uint32_t calCount, twin::Loc loc = twin::Loc::Here())
{
    using C = twin::Compute<T>;
    const C c = static_cast<C>(src1Scalar);
    twin::CompareBits("CompareScalar", dst, src0, static_cast<const LocalTensor<T>*>(nullptr), calCount, loc,
        [cmpMode, c](T a, T) { return twin::Compared<C>(cmpMode, static_cast<C>(a), c); });
}

template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
    const LocalTensor<T>& src1, SELMODE selMode, uint32_t calCount, twin::Loc loc = twin::Loc::Here())
{
    if (selMode != SELMODE::VSEL_TENSOR_TENSOR_MODE) {
        twin::Fail(loc, "select mode", "Select of two tensors takes SELMODE::VSEL_TENSOR_TENSOR_MODE in the twin");
    }
    twin::SelectBits(dst, selMask, src0, &src1, calCount, loc, [](T v) { return v; });
}

template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
    SELMODE selMode, uint32_t calCount, twin::Loc loc = twin::Loc::Here())
{
    if (selMode != SELMODE::VSEL_TENSOR_SCALAR_MODE) {
        twin::Fail(loc, "select mode", "Select of a tensor and a scalar takes SELMODE::VSEL_TENSOR_SCALAR_MODE");
    }
    twin::SelectBits(dst, selMask, src0, static_cast<const LocalTensor<T>*>(nullptr), calCount, loc,
        [src1](T) { return src1; });
}

// dst[i] = the element of src at byte offset srcOffset[i] + srcBaseAddr.
template <typename T>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
    const uint32_t srcBaseAddr, const uint32_t count, twin::Loc loc = twin::Loc::Here())
{
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather takes elements of 16 or 32 bits on c220");
    twin::Instr in(PIPE_V, "Gather", loc);
    if (twin::Empty(in, count)) {
        return;
    }
    const int64_t size = sizeof(T);
    const uint32_t* offsets = reinterpret_cast<const uint32_t*>(in.Read(srcOffset.ref(), 0, count * int64_t(4)));
    if (dst.ref().address == src.ref().address) {
        in.Fail("operand overlap", "Gather cannot work in place");
    }
    T* d = reinterpret_cast<T*>(in.Write(dst.ref(), 0, count * size));
    for (uint32_t i = 0; i < count; ++i) {
        const int64_t at = int64_t(offsets[i]) + srcBaseAddr;
        if (at % size != 0) {
            in.Fail("alignment", "Gather: offset %lld of element %u is not a multiple of %lld", static_cast<long long>(at), i,
                static_cast<long long>(size));
        }
        d[i] = *reinterpret_cast<const T*>(in.Read(src.ref(), at, size, size));
    }
    twin::Book(in, twin::Kind::Vector, count, 32, count * (size + 4), count * size); // one block of UB for each element
}

template <typename T>
inline void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t calCount, twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_V, "CreateVecIndex", loc);
    if (twin::Empty(in, calCount)) {
        return;
    }
    T* d = reinterpret_cast<T*>(in.Write(dst.ref(), 0, calCount * int64_t(sizeof(T))));
    for (uint32_t i = 0; i < calCount; ++i) d[i] = static_cast<T>(static_cast<float>(firstValue) + static_cast<float>(i));
    twin::Book(in, twin::Kind::Vector, calCount, sizeof(T), 0, calCount * int64_t(sizeof(T)));
}
} // namespace AscendC
#endif
