#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "aclrtlaunch_aggregate_max.h"
#include "aclrtlaunch_aggregate_max_backward.h"
#include "aclrtlaunch_aggregate_update.h"
#include "aclrtlaunch_combine_parts.h"
#include "aclrtlaunch_gather_rows.h"
#include "aclrtlaunch_update.h"
#include "launch.h"
#include "ops.h"

namespace lightning_gnn {

void LaunchKernel(std::string_view kernel, int64_t blocks, at::TensorList in, at::TensorList out,
                  const at::Tensor& tiling)
{
    const c10::OptionalDeviceGuard guard(tiling.device());
    for (const auto& tensors : {in, out}) {
        for (const at::Tensor& tensor : tensors) {
            TORCH_CHECK_VALUE(tensor.is_contiguous(), kernel, " takes contiguous tensors, but one is ", tensor.sizes(),
                              " with strides ", tensor.strides());
        }
    }
    const auto takes = [&](std::string_view name, size_t inputs, size_t outputs) {
        if (kernel != name) {
            return false;
        }
        TORCH_CHECK_VALUE(in.size() == inputs && out.size() == outputs, name, " takes ", inputs, " inputs and ",
                          outputs, " outputs, but got ", in.size(), " and ", out.size());
        return true;
    };
    if (takes("aggregate_update", 6, 2)) {
        Launch("aggregate_update", aclrtlaunch_aggregate_update, blocks, in[0], in[1], in[2], in[3], in[4], in[5],
               out[0], out[1], tiling);
    } else if (takes("aggregate_max", 6, 2)) {
        Launch("aggregate_max", aclrtlaunch_aggregate_max, blocks, in[0], in[1], in[2], in[3], in[4], in[5], out[0],
               out[1], tiling);
    } else if (takes("aggregate_max_backward", 7, 1)) {
        Launch("aggregate_max_backward", aclrtlaunch_aggregate_max_backward, blocks, in[0], in[1], in[2], in[3], in[4],
               in[5], in[6], out[0], tiling);
    } else if (takes("update", 4, 1)) {
        Launch("update", aclrtlaunch_update, blocks, in[0], in[1], in[2], in[3], out[0], tiling);
    } else if (takes("combine_parts", 2, 1)) {
        Launch("combine_parts", aclrtlaunch_combine_parts, blocks, in[0], in[1], out[0], tiling);
    } else if (takes("gather_rows", 3, 1)) {
        Launch("gather_rows", aclrtlaunch_gather_rows, blocks, in[0], in[1], in[2], out[0], tiling);
    } else {
        TORCH_CHECK_VALUE(false, "unknown kernel ", kernel);
    }
}

}  // namespace lightning_gnn
