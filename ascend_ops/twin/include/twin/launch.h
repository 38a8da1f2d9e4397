// Registration of kernels: one line per kernel in a generated file, TWIN_REGISTER(name), after the kernel's source.
#ifndef TWIN_LAUNCH_H
#define TWIN_LAUNCH_H
#include <cstddef>
#include <tuple>
#include <utility>

#include "twin/runtime.h"

namespace AscendC {
namespace twin {
struct Argument {
    char kind; // 'p' pointer, 'i' integer, 'f' floating point, 's' struct by value
    int size;
};

struct KernelEntry {
    const char* name;
    void (*call)(const void* const* arguments);
    const Argument* arguments;
    int count;
};

TWIN_API void Register(const KernelEntry& entry);

template <typename T> constexpr Argument Describe()
{
    if (std::is_pointer<T>::value) return {'p', static_cast<int>(sizeof(T))};
    if (std::is_integral<T>::value) return {'i', static_cast<int>(sizeof(T))};
    if (std::is_floating_point<T>::value) return {'f', static_cast<int>(sizeof(T))};
    return {'s', static_cast<int>(sizeof(T))};
}

template <auto function> struct Launcher;
template <typename... A, void (*function)(A...)> struct Launcher<function> {
    template <size_t... I> static void Unpack(const void* const* arguments, std::index_sequence<I...>)
    {
        function(*static_cast<const std::remove_cv_t<std::remove_reference_t<A>>*>(arguments[I])...);
    }
    static void Call(const void* const* arguments) { Unpack(arguments, std::index_sequence_for<A...>()); }
    static inline const Argument arguments[sizeof...(A) + 1] = {Describe<A>()..., {'.', 0}};
    static constexpr int count = sizeof...(A);
};
} // namespace twin
} // namespace AscendC

#define TWIN_REGISTER(kernel)                                                                                          \
    static const bool twin_registered_##kernel = [] {                                                                  \
        using L = ::AscendC::twin::Launcher<&kernel>;                                                                  \
        ::AscendC::twin::Register({#kernel, &L::Call, L::arguments, L::count});                                        \
        return true;                                                                                                   \
    }();
#endif
