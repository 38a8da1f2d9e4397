// fp16 with IEEE rounding to nearest even. Hardware conversion where the compiler may use it, bits by hand elsewhere.
#ifndef TWIN_HALF_H
#define TWIN_HALF_H
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace AscendC {
namespace twin {
inline uint32_t Bits(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float FromBits(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t FloatToHalf(float value)
{
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t bits = Bits(value), sign = (bits >> 16) & 0x8000U, absolute = bits & 0x7FFFFFFFU;
    if (absolute > 0x7F800000U) {
        return static_cast<uint16_t>(sign | 0x7E00U | ((absolute >> 13) & 0x1FFU));
    }
    if (absolute >= 0x477FF000U) { // rounds to more than 65504
        return static_cast<uint16_t>(sign | 0x7C00U);
    }
    if (absolute < 0x38800000U) { // subnormal: let the float adder round at the right place
        const float shifted = FromBits(absolute) + FromBits(0x3F000000U);
        return static_cast<uint16_t>(sign | (Bits(shifted) - 0x3F000000U));
    }
    const uint32_t odd = (absolute >> 13) & 1U;
    return static_cast<uint16_t>(sign | ((absolute - 0x38000000U + 0xFFFU + odd) >> 13));
#endif
}

inline float HalfToFloat(uint16_t half)
{
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t sign = (half & 0x8000U) << 16, magnitude = half & 0x7FFFU;
    if (magnitude >= 0x7C00U) {
        return FromBits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
    }
    if (magnitude < 0x400U) {
        const float value = static_cast<float>(magnitude) * (1.0f / 16777216.0f);
        return sign ? -value : value;
    }
    return FromBits(sign | ((magnitude + 0x1C000U) << 13));
#endif
}
} // namespace twin
} // namespace AscendC

struct half {
    uint16_t bits;

    half() = default;
    template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
    half(T value) : bits(AscendC::twin::FloatToHalf(static_cast<float>(value)))
    {}
    operator float() const { return AscendC::twin::HalfToFloat(bits); }
};
static_assert(sizeof(half) == 2, "half is two bytes");
#endif
