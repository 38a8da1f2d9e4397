// The forms of vector instructions with mask, repeats and strides: a repeat works on 8 blocks of 32 bytes, strides count
// blocks, the mask picks lanes (a number: the first ones; an array of two words: bit by bit).
#ifndef TWIN_VECTOR_REPEAT_H
#define TWIN_VECTOR_REPEAT_H
#include "twin/vector.h"

namespace AscendC {
namespace twin {
struct Lanes {
    uint64_t bits[2];
    bool counted;
    int64_t count;

    Lanes(uint64_t first) : bits{0, 0}, counted(true), count(static_cast<int64_t>(first)) {}
    Lanes(const uint64_t mask[]) : bits{mask[0], mask[1]}, counted(false), count(0) {}
    bool Has(int64_t lane) const { return counted ? lane < count : (bits[lane / 64] >> (lane % 64)) & 1U; }

    // Checks against the lanes there are; false: nothing to do.
    bool Prepare(Instr& in, int64_t lanes, int64_t repeats)
    {
        in.Range("repeatTimes", repeats, 0, 255);
        if (counted) {
            in.Range("mask", count, 0, lanes);
            return count > 0 && repeats > 0;
        }
        if (lanes == 64 && bits[1] != 0) {
            in.Fail("parameter range", "mask[1] must be 0: elements of 4 bytes have 64 lanes");
        }
        return (bits[0] || bits[1]) && repeats > 0;
    }
};

// Runs of active lanes that do not cross a multiple of `run`.
template <typename F> inline int64_t EachRun(const Lanes& mask, int64_t lanes, int64_t run, F f)
{
    int64_t active = 0;
    for (int64_t start = 0; start < lanes; start += run) {
        int64_t lane = start;
        while (lane < start + run) {
            while (lane < start + run && !mask.Has(lane)) ++lane;
            int64_t end = lane;
            while (end < start + run && mask.Has(end)) ++end;
            if (end > lane) f(lane, end - lane);
            active += end - lane;
            lane = end;
        }
    }
    return active;
}

template <typename T> struct Strided {
    const LocalRef& ref;
    int64_t block, repeat;
    int64_t At(int64_t r, int64_t lane) const
    {
        constexpr int64_t perBlock = 32 / int64_t(sizeof(T));
        return r * repeat * 32 + (lane / perBlock) * block * 32 + (lane % perBlock) * int64_t(sizeof(T));
    }
    const T* Read(Instr& in, int64_t r, int64_t lane, int64_t n) const
    {
        return reinterpret_cast<const T*>(in.Read(ref, At(r, lane), n * int64_t(sizeof(T)), sizeof(T)));
    }
    T* Write(Instr& in, int64_t r, int64_t lane, int64_t n) const
    {
        return reinterpret_cast<T*>(in.Write(ref, At(r, lane), n * int64_t(sizeof(T)), sizeof(T)));
    }
    void Check(Instr& in, int64_t limit) const
    {
        in.Range("block stride", block, 0, limit);
        in.Range("repeat stride", repeat, 0, 255);
        if (ref.address % 32 != 0) {
            in.Fail("alignment", "an operand starts at byte %u of UB, which is not a multiple of 32", ref.address);
        }
    }
};

template <typename D, typename S, typename F>
inline void UnaryRepeat(const char* name, Kind kind, const LocalTensor<D>& dst, const LocalTensor<S>& src, Lanes mask,
    int64_t repeats, const UnaryRepeatParams& p, bool accumulate, Loc loc, F f)
{
    Instr in(PIPE_V, name, loc);
    const int64_t wide = std::max(sizeof(D), sizeof(S)), lanes = 256 / wide;
    if (!mask.Prepare(in, lanes, repeats)) {
        return;
    }
    const Strided<D> to{dst.ref(), p.dstBlkStride, p.dstRepStride};
    const Strided<S> from{src.ref(), p.srcBlkStride, p.srcRepStride};
    to.Check(in, 65535);
    from.Check(in, 65535);
    int64_t active = 0;
    for (int64_t r = 0; r < repeats; ++r) {
        in.Repeat();
        active += EachRun(mask, lanes, 32 / wide, [&](int64_t lane, int64_t n) {
            const S* s = from.Read(in, r, lane, n);
            if (accumulate) to.Read(in, r, lane, n);
            D* d = to.Write(in, r, lane, n);
            for (int64_t i = 0; i < n; ++i) d[i] = f(s[i], d[i]);
        });
    }
    Book(in, kind, active, wide, active * int64_t(sizeof(S)), active * int64_t(sizeof(D)));
}

template <typename D, typename S, typename F>
inline void BinaryRepeat(const char* name, Kind kind, const LocalTensor<D>& dst, const LocalTensor<S>& a,
    const LocalTensor<S>& b, Lanes mask, int64_t repeats, const BinaryRepeatParams& p, bool accumulate, Loc loc, F f)
{
    Instr in(PIPE_V, name, loc);
    const int64_t wide = std::max(sizeof(D), sizeof(S)), lanes = 256 / wide;
    if (!mask.Prepare(in, lanes, repeats)) {
        return;
    }
    const Strided<D> to{dst.ref(), p.dstBlkStride, p.dstRepStride};
    const Strided<S> first{a.ref(), p.src0BlkStride, p.src0RepStride}, second{b.ref(), p.src1BlkStride, p.src1RepStride};
    to.Check(in, 255);
    first.Check(in, 255);
    second.Check(in, 255);
    int64_t active = 0;
    for (int64_t r = 0; r < repeats; ++r) {
        in.Repeat();
        active += EachRun(mask, lanes, 32 / wide, [&](int64_t lane, int64_t n) {
            const S* x = first.Read(in, r, lane, n);
            const S* y = second.Read(in, r, lane, n);
            if (accumulate) to.Read(in, r, lane, n);
            D* d = to.Write(in, r, lane, n);
            for (int64_t i = 0; i < n; ++i) d[i] = f(x[i], y[i], d[i]);
        });
    }
    Book(in, kind, active, wide, 2 * active * int64_t(sizeof(S)), active * int64_t(sizeof(D)));
}
} // namespace twin

// `twin::Lanes mask` takes both kinds of mask that CANN overloads these calls for.
#define TWIN_UNARY(Name, Cost)                                                                                         \
    template <typename T, bool isSetMask = true>                                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::Lanes mask, twin::U8 repeatTimes,     \
        const UnaryRepeatParams& repeatParams, twin::Loc loc = twin::Loc::Here())                                      \
    {                                                                                                                  \
        static_assert(isSetMask, "the twin models masks that the call sets");                                          \
        using C = twin::Compute<T>;                                                                                    \
        twin::UnaryRepeat(#Name, Cost, dst, src, mask, repeatTimes, repeatParams, false, loc,                          \
            [](T v, T) { return static_cast<T>(twin::Op##Name<C>(static_cast<C>(v))); });                              \
    }
TWIN_EACH_UNARY(TWIN_UNARY)
#undef TWIN_UNARY

#define TWIN_BINARY(Name, Cost, Function)                                                                              \
    template <typename T, bool isSetMask = true>                                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,                \
        twin::Lanes mask, twin::U8 repeatTimes, const BinaryRepeatParams& repeatParams,                                \
        twin::Loc loc = twin::Loc::Here())                                                                             \
    {                                                                                                                  \
        static_assert(isSetMask, "the twin models masks that the call sets");                                          \
        using C = twin::Compute<T>;                                                                                    \
        twin::BinaryRepeat(#Name, Cost, dst, src0, src1, mask, repeatTimes, repeatParams, false, loc, [](T a, T b, T) {\
            return static_cast<T>(twin::Function<C>(static_cast<C>(a), static_cast<C>(b)));                            \
        });                                                                                                            \
    }
TWIN_EACH_BINARY(TWIN_BINARY)
#undef TWIN_BINARY

#define TWIN_SCALAR(Name, Function)                                                                                    \
    template <typename T, bool isSetMask = true>                                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, twin::Lanes mask,     \
        twin::U8 repeatTimes, const UnaryRepeatParams& repeatParams, twin::Loc loc = twin::Loc::Here())                \
    {                                                                                                                  \
        static_assert(isSetMask, "the twin models masks that the call sets");                                          \
        using C = twin::Compute<T>;                                                                                    \
        const C c = static_cast<C>(scalarValue);                                                                       \
        twin::UnaryRepeat(#Name, twin::Kind::Vector, dst, src, mask, repeatTimes, repeatParams, false, loc,            \
            [c](T v, T) { return static_cast<T>(twin::Function<C>(static_cast<C>(v), c)); });                          \
    }
TWIN_EACH_SCALAR(TWIN_SCALAR)
#undef TWIN_SCALAR

template <typename D, typename S, bool isSetMask = true>
inline void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, twin::Lanes mask,
    twin::U8 repeatTimes, const UnaryRepeatParams& repeatParams, twin::Loc loc = twin::Loc::Here())
{
    static_assert(isSetMask, "the twin models masks that the call sets");
    const RoundMode round = mode;
    twin::UnaryRepeat("Cast", twin::Kind::Vector, dst, src, mask, repeatTimes, repeatParams, false, loc,
        [round](S v, D) { return twin::Caster<D, S>::Do(v, round); });
}

template <typename D, typename S, bool isSetMask = true>
inline void Axpy(const LocalTensor<D>& dst, const LocalTensor<S>& src, const S& scalarValue, twin::Lanes mask,
    twin::U8 repeatTimes, const UnaryRepeatParams& repeatParams, twin::Loc loc = twin::Loc::Here())
{
    static_assert(isSetMask, "the twin models masks that the call sets");
    const S c = scalarValue;
    twin::UnaryRepeat("Axpy", twin::Kind::Vector, dst, src, mask, repeatTimes, repeatParams, true, loc,
        [c](S v, D d) { return twin::AxpyOne<D, S>(d, v, c); });
}

template <typename D, typename S, bool isSetMask = true>
inline void MulAddDst(const LocalTensor<D>& dst, const LocalTensor<S>& src0, const LocalTensor<S>& src1,
    twin::Lanes mask, twin::U8 repeatTimes, const BinaryRepeatParams& repeatParams, twin::Loc loc = twin::Loc::Here())
{
    static_assert(isSetMask, "the twin models masks that the call sets");
    twin::BinaryRepeat("MulAddDst", twin::Kind::Vector, dst, src0, src1, mask, repeatTimes, repeatParams, true, loc,
        [](S a, S b, D d) { return twin::AxpyOne<D, S>(d, a, b); });
}

namespace twin {
template <typename T>
inline void DuplicateRepeat(const LocalTensor<T>& dst, T value, Lanes mask, int64_t repeats, int64_t block,
    int64_t repeat, Loc loc)
{
    Instr in(PIPE_V, "Duplicate", loc);
    const int64_t size = sizeof(T), lanes = 256 / size;
    if (!mask.Prepare(in, lanes, repeats)) {
        return;
    }
    const Strided<T> to{dst.ref(), block, repeat};
    to.Check(in, 65535);
    int64_t active = 0;
    for (int64_t r = 0; r < repeats; ++r) {
        in.Repeat();
        active += EachRun(mask, lanes, 32 / size, [&](int64_t lane, int64_t n) {
            T* d = to.Write(in, r, lane, n);
            std::fill(d, d + n, value);
        });
    }
    Book(in, Kind::Vector, active, size, 0, active * size);
}
} // namespace twin

template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, twin::Lanes mask, twin::U8 repeatTimes,
    twin::U16 dstBlockStride, twin::U8 dstRepeatStride, twin::Loc loc = twin::Loc::Here())
{
    twin::DuplicateRepeat(dst, scalarValue, mask, repeatTimes, dstBlockStride, dstRepeatStride, loc);
}

// Every element of src fills one block of 32 bytes of dst; a repeat takes 8 elements.
template <typename T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::U8 repeatTimes, const BrcbRepeatParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_V, "Brcb", loc);
    in.Range("repeatTimes", repeatTimes, 0, 255);
    const int64_t size = sizeof(T), block = p.dstBlkStride == 0 ? 1 : int64_t(p.dstBlkStride);
    for (int64_t r = 0; r < repeatTimes; ++r) {
        in.Repeat();
        const T* s = reinterpret_cast<const T*>(in.Read(src.ref(), r * 8 * size, 8 * size, size));
        T values[8];
        std::copy(s, s + 8, values);
        for (int64_t j = 0; j < 8; ++j) {
            T* d = reinterpret_cast<T*>(in.Write(dst.ref(), (r * p.dstRepStride + j * block) * 32, 32));
            std::fill(d, d + 32 / size, values[j]);
        }
    }
    twin::Book(in, twin::Kind::Vector, repeatTimes * 8 * (32 / size), size, repeatTimes * 8 * size, repeatTimes * 256);
}
} // namespace AscendC
#endif
