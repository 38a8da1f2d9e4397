// Stands in for torch_npu's header: only what the binding uses.
#pragma once

#include "acl/acl_base.h"

namespace c10_npu {

class NPUStream {
public:
    aclrtStream stream(bool) const { return handle; }
    aclrtStream handle;
};

// The stream of this thread, as with torch_npu; the test sets it.
inline thread_local aclrtStream currentStream = nullptr;
extern "C" __attribute__((visibility("default"))) inline void set_stream(aclrtStream stream) { currentStream = stream; }
inline NPUStream getCurrentNPUStream() { return {currentStream}; }

}  // namespace c10_npu
