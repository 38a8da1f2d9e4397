// The compiler's own words in Ascend C: qualifiers, pipes, event ids and the task type of a kernel.
#ifndef TWIN_MACROS_H
#define TWIN_MACROS_H
#include <cstdint>

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __sync_alias__
#define GM_ADDR __gm__ uint8_t*

// Kernels are built with hidden symbols, so that two of them may use one class name; the runtime's are visible.
#define TWIN_API __attribute__((visibility("default")))

// Values as on the chip; PIPE_FIX has its own number there too.
enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX = 10 };

enum event_t { EVENT_ID0 = 0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

enum KernelMetaType {
    KERNEL_TYPE_AIV_ONLY,
    KERNEL_TYPE_AIC_ONLY,
    KERNEL_TYPE_MIX_AIV_1_0,
    KERNEL_TYPE_MIX_AIC_1_0,
    KERNEL_TYPE_MIX_AIC_1_1,
    KERNEL_TYPE_MIX_AIC_1_2,
    KERNEL_TYPE_AICORE,
    KERNEL_TYPE_VECTORCORE,
    KERNEL_TYPE_MIX_AICORE,
    KERNEL_TYPE_MIX_VECTOR_CORE,
    KERNEL_TYPE_MAX,
};

namespace AscendC {
namespace twin {
TWIN_API void TaskType(KernelMetaType type);
TWIN_API bool IsCube();
TWIN_API bool IsVector();
[[noreturn]] TWIN_API void AssertionFailed(const char* condition, const char* file, int line);
} // namespace twin
} // namespace AscendC

// The chip's compiler reads the type at compile time; here the first call tells the launcher which cores to start.
#define KERNEL_TASK_TYPE_DEFAULT(value) ::AscendC::twin::TaskType(value)
#define KERNEL_TASK_TYPE(key, value) ::AscendC::twin::TaskType(value)

// Kernels write `if ASCEND_IS_AIC {`, without parentheses of their own.
#define ASCEND_IS_AIC (::AscendC::twin::IsCube())
#define ASCEND_IS_AIV (::AscendC::twin::IsVector())
// The second argument says what is logged on the chip; here the violation tells the condition.
#define ASCENDC_ASSERT(cond, ...)                                                                                      \
    do {                                                                                                               \
        if (!(cond)) ::AscendC::twin::AssertionFailed(#cond, __FILE__, __LINE__);                                      \
    } while (0)
#endif
