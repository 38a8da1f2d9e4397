// Stands in for torch_npu's header: only what the binding uses. The real one queues the call; here it runs at once.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace at_npu {
namespace native {

class OpCommand {
public:
    static void RunOpApi(const std::string& name, std::function<int()> call, bool = false)
    {
        if (call() != 0) {
            throw std::runtime_error("launch of " + name + " failed");
        }
    }
};

}  // namespace native
}  // namespace at_npu
