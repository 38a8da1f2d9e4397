// Reductions: of the first `count` elements to one, of every repeat to one, of every block to one.
#ifndef TWIN_VECTOR_REDUCE_H
#define TWIN_VECTOR_REDUCE_H
#include "twin/vector_repeat.h"

namespace AscendC {
namespace twin {
inline int64_t DivUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Passes over the data: every repeat of 256 bytes leaves one value (and its index), until one is left.
inline int64_t ReduceSteps(int64_t count, int64_t perRepeat)
{
    int64_t steps = 1;
    for (int64_t left = DivUp(count, perRepeat); left > 1; left = DivUp(left, perRepeat)) {
        ++steps;
    }
    return steps;
}

// A pairwise sum in float of one repeat, as the chip's tree; the repeats' sums are added in order.
template <typename T> inline float TreeSum(const T* values, int64_t count)
{
    if (count == 1) return static_cast<float>(values[0]);
    const int64_t middle = (count + 1) / 2;
    return TreeSum(values, middle) + TreeSum(values + middle, count - middle);
}

template <typename T> inline T SumOf(const T* values, int64_t count)
{
    const int64_t perRepeat = ONE_REPEAT_BYTE_SIZE / int64_t(sizeof(T));
    float total = 0;
    for (int64_t i = 0; i < count; i += perRepeat) {
        const float part = TreeSum(values + i, std::min(perRepeat, count - i));
        total = static_cast<float>(static_cast<T>(total + static_cast<float>(static_cast<T>(part))));
    }
    return static_cast<T>(total);
}

template <typename T, typename F>
inline void ReduceExtreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src,
    const LocalTensor<T>& work, int64_t count, bool index, Loc loc, F better)
{
    Instr in(PIPE_V, name, loc);
    if (Empty(in, count)) {
        return;
    }
    const int64_t size = sizeof(T), perRepeat = ONE_REPEAT_BYTE_SIZE / size, perBlock = 32 / size;
    const T* s = reinterpret_cast<const T*>(in.Read(src.ref(), 0, count * size));
    // each repeat leaves a value and an index in the work buffer
    const int64_t need = DivUp(DivUp(count, perRepeat) * 2, perBlock) * perBlock * size;
    if (work.ref().bytes < need) {
        in.Fail("work buffer", "%s of %lld elements needs a work buffer of %lld bytes, it has %u", name,
            static_cast<long long>(count), static_cast<long long>(need), work.ref().bytes);
    }
    in.Write(work.ref(), 0, need);
    in.Undefine(work.ref(), 0, need);
    int64_t best = 0;
    for (int64_t i = 1; i < count; ++i) {
        const float a = static_cast<float>(s[i]), b = static_cast<float>(s[best]);
        if (b == b && (better(a, b) || a != a)) best = i; // the first of equals; a NaN wins and stays visible
    }
    const T value = s[best];
    T* d = reinterpret_cast<T*>(in.Write(dst.ref(), 0, (index ? 2 : 1) * size, size));
    d[0] = value;
    if (index) {
        std::memset(&d[1], 0, sizeof(T));
        std::memcpy(&d[1], &best, sizeof(T)); // the index is an integer in the bits of an element
    }
    Book(in, Kind::Reduce, count, size, count * size, size);
    in.work.steps = ReduceSteps(count, perRepeat);
}
} // namespace twin

template <typename T>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
    const int32_t count, bool calIndex = 0, twin::Loc loc = twin::Loc::Here())
{
    twin::ReduceExtreme("ReduceMax", dst, src, work, count, calIndex, loc, [](float a, float b) { return a > b; });
}

template <typename T>
inline void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
    const int32_t count, bool calIndex = 0, twin::Loc loc = twin::Loc::Here())
{
    twin::ReduceExtreme("ReduceMin", dst, src, work, count, calIndex, loc, [](float a, float b) { return a < b; });
}

// On c220 this form keeps its partial sums in the unit; the work buffer is not touched.
template <typename T>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, const int32_t count,
    twin::Loc loc = twin::Loc::Here())
{
    twin::Instr in(PIPE_V, "ReduceSum", loc);
    if (twin::Empty(in, count)) {
        return;
    }
    const int64_t size = sizeof(T);
    const T* s = reinterpret_cast<const T*>(in.Read(src.ref(), 0, count * size));
    const T total = twin::SumOf(s, count);
    *reinterpret_cast<T*>(in.Write(dst.ref(), 0, size, size)) = total;
    twin::Book(in, twin::Kind::Reduce, count, size, count * size, size);
    in.work.steps = twin::ReduceSteps(count, ONE_REPEAT_BYTE_SIZE / size);
}

namespace twin {
// One result for every repeat. `width` is the number of elements a result takes (value, or value and index).
template <typename T, typename F>
inline void ReduceRepeats(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, Lanes mask,
    int64_t repeats, int64_t dstStride, int64_t blockStride, int64_t repeatStride, int64_t width, Loc loc, F reduce)
{
    Instr in(PIPE_V, name, loc);
    const int64_t size = sizeof(T), lanes = ONE_REPEAT_BYTE_SIZE / size;
    if (!mask.Prepare(in, lanes, repeats)) {
        return;
    }
    in.Range("dstRepStride", dstStride, 0, 65535);
    in.Range("srcBlkStride", blockStride, 0, 65535);
    in.Range("srcRepStride", repeatStride, 0, 65535);
    if (src.ref().address % 32 != 0) {
        in.Fail("alignment", "the source starts at byte %u of UB, which is not a multiple of 32", src.ref().address);
    }
    const Strided<T> from{src.ref(), blockStride, repeatStride};
    int64_t active = 0;
    for (int64_t r = 0; r < repeats; ++r) {
        in.Repeat();
        T values[128];
        int64_t places[128], n = 0;
        EachRun(mask, lanes, 32 / size, [&](int64_t lane, int64_t run) {
            const T* s = from.Read(in, r, lane, run);
            for (int64_t i = 0; i < run; ++i) {
                values[n] = s[i];
                places[n++] = lane + i;
            }
        });
        active += n;
        T* d = reinterpret_cast<T*>(in.Write(dst.ref(), r * dstStride * width * size, width * size, width * size));
        reduce(d, values, places, n);
    }
    Book(in, Kind::Vector, active, size, active * size, repeats * width * size);
}

template <typename T, bool largest>
inline void BestOf(T* out, const T* values, const int64_t* places, int64_t n, ReduceOrder order)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i) {
        const float a = static_cast<float>(values[i]), b = static_cast<float>(values[best]);
        if (b == b && ((largest ? a > b : a < b) || a != a)) best = i;
    }
    const int64_t at = order == ReduceOrder::ORDER_INDEX_VALUE ? 1 : 0;
    out[at] = values[best];
    if (order != ReduceOrder::ORDER_ONLY_VALUE) {
        std::memcpy(&out[1 - at], &places[best], sizeof(T));
    }
}
} // namespace twin

template <typename T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::Lanes mask,
    twin::U8 repeatTimes, const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
    twin::Loc loc = twin::Loc::Here())
{
    twin::ReduceRepeats("WholeReduceSum", dst, src, mask, repeatTimes, dstRepStride, srcBlkStride,
        srcRepStride, 1, loc, [](T* d, const T* v, const int64_t*, int64_t n) { *d = static_cast<T>(twin::TreeSum(v, n)); });
}

#define TWIN_WHOLE(Name, largest)                                                                                      \
    template <typename T, bool isSetMask = true>                                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::Lanes mask, twin::U8 repeatTimes,     \
        const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,                            \
        ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, twin::Loc loc = twin::Loc::Here())                         \
    {                                                                                                                  \
        if (order == ReduceOrder::ORDER_ONLY_INDEX) {                                                                  \
            twin::Fail(loc, "not modelled", "ORDER_ONLY_INDEX is not modelled by the twin");                           \
        }                                                                                                              \
        twin::ReduceRepeats(#Name, dst, src, mask, repeatTimes, dstRepStride, srcBlkStride,                            \
            srcRepStride, order == ReduceOrder::ORDER_ONLY_VALUE ? 1 : 2, loc,                                         \
            [order](T* d, const T* v, const int64_t* at, int64_t n) { twin::BestOf<T, largest>(d, v, at, n, order); });\
    }
TWIN_WHOLE(WholeReduceMax, true)
TWIN_WHOLE(WholeReduceMin, false)
#undef TWIN_WHOLE

namespace twin {
// One result for every block of 32 bytes: 8 for a repeat; dstStride counts those 8.
template <typename T, typename F>
inline void ReduceBlocks(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeats,
    int64_t mask, int64_t dstStride, int64_t blockStride, int64_t repeatStride, Loc loc, F reduce)
{
    Instr in(PIPE_V, name, loc);
    const int64_t size = sizeof(T), perBlock = 32 / size, lanes = ONE_REPEAT_BYTE_SIZE / size;
    Lanes all(static_cast<uint64_t>(mask));
    if (!all.Prepare(in, lanes, repeats)) {
        return;
    }
    const Strided<T> from{src.ref(), blockStride, repeatStride};
    for (int64_t r = 0; r < repeats; ++r) {
        in.Repeat();
        EachRun(all, lanes, perBlock, [&](int64_t lane, int64_t n) {
            const T* s = from.Read(in, r, lane, n);
            const T value = reduce(s, n);
            *reinterpret_cast<T*>(in.Write(dst.ref(), (r * dstStride * 8 + lane / perBlock) * size, size, size)) = value;
        });
    }
    Book(in, Kind::Vector, repeats * mask, size, repeats * mask * size, repeats * 8 * size);
}
} // namespace twin

template <typename T, bool isSetMask = true>
inline void BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::U8 repeat, const int32_t mask,
    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, twin::Loc loc = twin::Loc::Here())
{
    twin::ReduceBlocks("BlockReduceMax", dst, src, repeat, mask, dstRepStride, srcBlkStride, srcRepStride, loc,
        [](const T* v, int64_t n) {
            int64_t place[32] = {};
            T best[2];
            twin::BestOf<T, true>(best, v, place, n, ReduceOrder::ORDER_ONLY_VALUE);
            return best[0];
        });
}
} // namespace AscendC
#endif
