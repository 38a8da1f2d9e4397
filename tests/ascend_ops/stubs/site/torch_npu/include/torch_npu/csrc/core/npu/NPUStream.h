// Stands in for torch_npu's header: only what the binding uses.
#pragma once

#include "acl/acl_base.h"

namespace c10_npu {

class NPUStream {
public:
    aclrtStream stream(bool) const { return nullptr; }
};

inline NPUStream getCurrentNPUStream() { return {}; }

}  // namespace c10_npu
