// Comparisons to bit masks, selection by a bit mask.
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

} // namespace AscendC
#endif
