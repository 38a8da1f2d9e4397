// Vector instructions over the first `calCount` elements. Numerics: fp16 results are the float result rounded once.
#ifndef TWIN_VECTOR_H
#define TWIN_VECTOR_H
#include <limits>

#include "twin/sync.h"

namespace AscendC {
namespace twin {
// fp16 is computed in float and rounded once, which is correct rounding for one operation; integers stay integers.
template <typename T> using Compute = std::conditional_t<std::is_same<T, half>::value, float, T>;

// Operands may be the same tensor or disjoint; a partial overlap is undefined on the chip.
inline void CheckOverlap(Instr& in, const LocalRef& dst, int64_t dstBytes, const LocalRef& src, int64_t srcBytes)
{
    if (dst.hardware == src.hardware && dst.address != src.address && dst.address < src.address + srcBytes &&
        src.address < dst.address + dstBytes) {
        in.Fail("operand overlap", "source (UB bytes %u to %lld) and result (UB bytes %u to %lld) overlap in part",
            src.address, static_cast<long long>(src.address + srcBytes), dst.address,
            static_cast<long long>(dst.address + dstBytes));
    }
}

inline bool Empty(Instr& in, int64_t count)
{
    if (count < 0) {
        in.Fail("count", "calCount is %lld: it must not be negative", static_cast<long long>(count));
    }
    return count == 0; // a count of zero is no operation on c220
}

inline void Book(Instr& in, Kind kind, int64_t count, int64_t size, int64_t read, int64_t written)
{
    in.work.kind = kind;
    in.work.elements += count;
    in.work.element_bytes = size;
    in.work[Path::UB_READ] += read;
    in.work[Path::UB_WRITE] += written;
}

template <typename D, typename S, typename F>
inline void Unary(const char* name, Kind kind, const LocalTensor<D>& dst, const LocalTensor<S>& src, int64_t count,
    Loc loc, F f)
{
    Instr in(PIPE_V, name, loc);
    if (Empty(in, count)) {
        return;
    }
    const int64_t from = count * int64_t(sizeof(S)), to = count * int64_t(sizeof(D));
    CheckOverlap(in, dst.ref(), to, src.ref(), from);
    const S* s = reinterpret_cast<const S*>(in.Read(src.ref(), 0, from));
    D* d = reinterpret_cast<D*>(in.Write(dst.ref(), 0, to));
    if (sizeof(D) > sizeof(S)) { // a cast in place to a wider type must not overtake its input
        for (int64_t i = count; i-- > 0;) d[i] = f(s[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) d[i] = f(s[i]);
    }
    Book(in, kind, count, std::max(sizeof(S), sizeof(D)), from, to);
}

template <typename T, typename F>
inline void Binary(const char* name, Kind kind, const LocalTensor<T>& dst, const LocalTensor<T>& a,
    const LocalTensor<T>& b, int64_t count, Loc loc, F f)
{
    Instr in(PIPE_V, name, loc);
    if (Empty(in, count)) {
        return;
    }
    const int64_t bytes = count * int64_t(sizeof(T));
    CheckOverlap(in, dst.ref(), bytes, a.ref(), bytes);
    CheckOverlap(in, dst.ref(), bytes, b.ref(), bytes);
    const T* x = reinterpret_cast<const T*>(in.Read(a.ref(), 0, bytes));
    const T* y = reinterpret_cast<const T*>(in.Read(b.ref(), 0, bytes));
    T* d = reinterpret_cast<T*>(in.Write(dst.ref(), 0, bytes));
    for (int64_t i = 0; i < count; ++i) d[i] = f(x[i], y[i]);
    Book(in, kind, count, sizeof(T), 2 * bytes, bytes);
}

// Max and Min keep the number if one operand is NaN on some chips and the NaN on others; here a NaN stays visible.
template <typename C> inline C Larger(C a, C b) { return (a > b || a != a) ? a : b; }
template <typename C> inline C Smaller(C a, C b) { return (a < b || a != a) ? a : b; }

template <typename C> inline C OpAdd(C a, C b) { return static_cast<C>(a + b); }
template <typename C> inline C OpSub(C a, C b) { return static_cast<C>(a - b); }
template <typename C> inline C OpMul(C a, C b) { return static_cast<C>(a * b); }
template <typename C> inline C OpDiv(C a, C b) { return static_cast<C>(a / b); }
template <typename C> inline C OpAnd(C a, C b) { return static_cast<C>(a & b); }
template <typename C> inline C OpOr(C a, C b) { return static_cast<C>(a | b); }

template <typename C> inline C OpExp(C a) { return std::exp(a); }
template <typename C> inline C OpLn(C a) { return std::log(a); }
template <typename C> inline C OpAbs(C a) { return std::fabs(a); }
template <typename C> inline C OpSqrt(C a) { return std::sqrt(a); }
template <typename C> inline C OpReciprocal(C a) { return C(1) / a; }
template <typename C> inline C OpRelu(C a) { return Larger<C>(a, C(0)); }
template <typename C> inline C OpLeaky(C a, C slope) { return a >= C(0) ? a : static_cast<C>(a * slope); }

inline float RoundTo(float value, RoundMode mode)
{
    switch (mode) {
        case RoundMode::CAST_FLOOR: return std::floor(value);
        case RoundMode::CAST_CEIL: return std::ceil(value);
        case RoundMode::CAST_ROUND: return std::round(value);
        case RoundMode::CAST_TRUNC: return std::trunc(value);
        default: return std::nearbyint(value);
    }
}

// float to fp16 in the six rounding modes; the neighbours of the nearest value decide the directed ones.
inline half RoundToHalf(float value, RoundMode mode)
{
    const half nearest(value);
    const float back = static_cast<float>(nearest);
    if (back == value || value != value || mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT) {
        return nearest;
    }
    const bool positive = value > 0;
    half inner = nearest;
    if (std::fabs(back) > std::fabs(value)) inner.bits = static_cast<uint16_t>(nearest.bits - 1);
    half outer = inner;
    outer.bits = static_cast<uint16_t>(inner.bits + 1);
    switch (mode) {
        case RoundMode::CAST_FLOOR: return positive ? inner : outer;
        case RoundMode::CAST_CEIL: return positive ? outer : inner;
        case RoundMode::CAST_TRUNC: return inner;
        case RoundMode::CAST_ODD: return (inner.bits & 1U) ? inner : outer;
        default: { // CAST_ROUND: a tie goes away from zero
            const float half_way = (std::fabs(static_cast<float>(inner)) + std::fabs(static_cast<float>(outer))) / 2;
            return std::fabs(value) >= half_way ? outer : inner;
        }
    }
}

template <typename I> inline I Saturate(float value)
{
    if (value != value) return 0;
    if (value >= static_cast<float>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
    if (value <= static_cast<float>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    return static_cast<I>(value);
}

template <typename D, typename S> struct Caster; // only the pairs that c220 has
template <> struct Caster<float, half> {
    static float Do(half v, RoundMode) { return static_cast<float>(v); }
};
template <> struct Caster<half, float> {
    static half Do(float v, RoundMode mode) { return RoundToHalf(v, mode); }
};
template <> struct Caster<float, float> {
    static float Do(float v, RoundMode mode) { return RoundTo(v, mode); }
};
template <> struct Caster<int32_t, float> {
    static int32_t Do(float v, RoundMode mode) { return Saturate<int32_t>(RoundTo(v, mode)); }
};
} // namespace twin

template <typename T>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& calCount,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_V, "Duplicate", loc);
    if (twin::Empty(in, calCount)) {
        return;
    }
    const int64_t bytes = int64_t(calCount) * int64_t(sizeof(T));
    T* d = reinterpret_cast<T*>(in.Write(dst.ref(), 0, bytes));
    std::fill(d, d + calCount, scalarValue);
    twin::Book(in, twin::Kind::Vector, calCount, sizeof(T), 0, bytes);
}

template <typename D, typename S>
inline void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, const uint32_t calCount,
    twin::Loc loc = twin::Loc::Here())
{
    const RoundMode round = mode;
    twin::Unary("Cast", twin::Kind::Vector, dst, src, calCount, loc, [round](S v) { return twin::Caster<D, S>::Do(v, round); });
}

// The operations with a repeat and a count form, each with what it costs or computes.
#define TWIN_EACH_UNARY(Make)                                                                                          \
    Make(Exp, twin::Kind::Exp)                                                                                         \
    Make(Ln, twin::Kind::Exp)                                                                                          \
    Make(Sqrt, twin::Kind::Exp)                                                                                        \
    Make(Reciprocal, twin::Kind::Exp)                                                                                  \
    Make(Abs, twin::Kind::Vector)                                                                                      \
    Make(Relu, twin::Kind::Vector)

#define TWIN_EACH_BINARY(Make)                                                                                         \
    Make(Add, twin::Kind::Vector, OpAdd)                                                                               \
    Make(Sub, twin::Kind::Vector, OpSub)                                                                               \
    Make(Mul, twin::Kind::Vector, OpMul)                                                                               \
    Make(Div, twin::Kind::Exp, OpDiv)                                                                                  \
    Make(Max, twin::Kind::Vector, Larger)                                                                              \
    Make(Min, twin::Kind::Vector, Smaller)                                                                             \
    Make(And, twin::Kind::Vector, OpAnd)                                                                               \
    Make(Or, twin::Kind::Vector, OpOr)

#define TWIN_EACH_SCALAR(Make)                                                                                         \
    Make(Adds, OpAdd)                                                                                                  \
    Make(Muls, OpMul)                                                                                                  \
    Make(Maxs, Larger)                                                                                                 \
    Make(Mins, Smaller)                                                                                                \
    Make(LeakyRelu, OpLeaky)

#define TWIN_UNARY(Name, Cost)                                                                                         \
    template <typename T>                                                                                              \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& calCount,                    \
        twin::Loc loc = twin::Loc::Here())                                                                             \
    {                                                                                                                  \
        using C = twin::Compute<T>;                                                                                    \
        twin::Unary(#Name, Cost, dst, src, calCount, loc,                                                              \
            [](T v) { return static_cast<T>(twin::Op##Name<C>(static_cast<C>(v))); });                                 \
    }
TWIN_EACH_UNARY(TWIN_UNARY)
#undef TWIN_UNARY

#define TWIN_BINARY(Name, Cost, Function)                                                                              \
    template <typename T>                                                                                              \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,                \
        const int32_t& calCount, twin::Loc loc = twin::Loc::Here())                                                    \
    {                                                                                                                  \
        using C = twin::Compute<T>;                                                                                    \
        twin::Binary(#Name, Cost, dst, src0, src1, calCount, loc, [](T a, T b) {                                       \
            return static_cast<T>(twin::Function<C>(static_cast<C>(a), static_cast<C>(b)));                            \
        });                                                                                                            \
    }
TWIN_EACH_BINARY(TWIN_BINARY)
#undef TWIN_BINARY

#define TWIN_SCALAR(Name, Function)                                                                                    \
    template <typename T>                                                                                              \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,                       \
        const int32_t& calCount, twin::Loc loc = twin::Loc::Here())                                                    \
    {                                                                                                                  \
        using C = twin::Compute<T>;                                                                                    \
        const C c = static_cast<C>(scalarValue);                                                                       \
        twin::Unary(#Name, twin::Kind::Vector, dst, src, calCount, loc,                                                \
            [c](T v) { return static_cast<T>(twin::Function<C>(static_cast<C>(v), c)); });                             \
    }
TWIN_EACH_SCALAR(TWIN_SCALAR)
#undef TWIN_SCALAR

namespace twin {
// dst = src * scalar + dst. The multiply and the add are one instruction; fp16 into fp32 accumulates in fp32.
template <typename D, typename S> inline D AxpyOne(D d, S s, S c)
{
    return static_cast<D>(static_cast<float>(s) * static_cast<float>(c) + static_cast<float>(d));
}

template <typename D, typename S, typename F>
inline void Accumulate(const char* name, const LocalTensor<D>& dst, const LocalTensor<S>& a, const LocalTensor<S>* b,
    int64_t count, Loc loc, F f)
{
    Instr in(PIPE_V, name, loc);
    if (Empty(in, count)) {
        return;
    }
    const int64_t from = count * int64_t(sizeof(S)), to = count * int64_t(sizeof(D));
    CheckOverlap(in, dst.ref(), to, a.ref(), from);
    const S* x = reinterpret_cast<const S*>(in.Read(a.ref(), 0, from));
    const S* y = b ? reinterpret_cast<const S*>(in.Read(b->ref(), 0, from)) : x;
    in.Read(dst.ref(), 0, to);
    D* d = reinterpret_cast<D*>(in.Write(dst.ref(), 0, to));
    for (int64_t i = 0; i < count; ++i) d[i] = f(d[i], x[i], y[i]);
    Book(in, Kind::Vector, count, std::max(sizeof(S), sizeof(D)), to + (b ? 2 : 1) * from, to);
}
} // namespace twin

template <typename D, typename S>
inline void Axpy(const LocalTensor<D>& dst, const LocalTensor<S>& src, const S& scalarValue, const int32_t& calCount,
    twin::Loc loc = twin::Loc::Here())
{
    const S c = scalarValue;
    twin::Accumulate<D, S>("Axpy", dst, src, nullptr, calCount, loc, [c](D d, S s, S) { return twin::AxpyOne<D, S>(d, s, c); });
}

template <typename D, typename S>
inline void MulAddDst(const LocalTensor<D>& dst, const LocalTensor<S>& src0, const LocalTensor<S>& src1,
    const int32_t& calCount, twin::Loc loc = twin::Loc::Here())
{
    twin::Accumulate<D, S>("MulAddDst", dst, src0, &src1, calCount, loc,
        [](D d, S a, S b) { return twin::AxpyOne<D, S>(d, a, b); });
}
} // namespace AscendC
#endif
