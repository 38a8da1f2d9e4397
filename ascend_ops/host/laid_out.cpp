#include "laid_out.h"

#include "cache.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace lightning_gnn {

namespace {

int64_t Address(const void* pointer) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer)); }

// Values that know what they are made for: as long as they are kept, no other tables can be at that address.
struct For {
    at::Tensor slots;
    Half values;
};

}  // namespace

Half LaidOut(const CubeOnDevice& tables, const at::Tensor& weight, Scaling scaling)
{
    if (!weight.defined()) {
        return {tables.ones, {}};
    }
    const auto make = [&] { return HalfValues(weight, tables.slots, tables.valueStride, scaling); };
    if (weight.is_inference()) {
        return make();  // it has no version
    }
    const at::Tensor& slots = tables.slots;
    Key key = {Address(slots.unsafeGetTensorImpl()), Address(c10_npu::getCurrentNPUStream().stream(false)),
               scaling.exponent, scaling.rescale, weight.storage_offset(), static_cast<int64_t>(weight.scalar_type())};
    key.insert(key.end(), weight.sizes().begin(), weight.sizes().end());
    key.insert(key.end(), weight.strides().begin(), weight.strides().end());
    const auto owner = weight.storage().getWeakStorageImpl().lock();
    return TheCache<For, c10::StorageImpl>()
        .Get(owner, static_cast<int64_t>(weight._version()), key, [&] { return For{slots, make()}; })
        ->values;
}

}  // namespace lightning_gnn
