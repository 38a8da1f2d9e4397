// Launches a kernel on torch's current NPU stream.
#ifndef LIGHTNING_GNN_LAUNCH_H
#define LIGHTNING_GNN_LAUNCH_H

#include <ATen/core/Tensor.h>

#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace lightning_gnn {

// kernel is an aclrtlaunch_<name> of CANN's generated header; its tensors follow in the order of its parameters.
// torch_npu may queue the call and run it later, in order with its own operators: it holds the tensors until then. From
// then on the stream's order protects their memory, as that of any operator's temporaries.
template <typename Kernel, typename... Tensors>
void Launch(const char* name, Kernel kernel, uint64_t blocks, const Tensors&... tensors)
{
    const aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
    const uint32_t blockDim = static_cast<uint32_t>(blocks);
    at_npu::native::OpCommand::RunOpApi(name, [=]() -> int {
        return static_cast<int>(kernel(blockDim, stream, tensors.data_ptr()...));
    });
}

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_LAUNCH_H
