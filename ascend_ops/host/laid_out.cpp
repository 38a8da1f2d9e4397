#include "laid_out.h"

#include <ATen/Functions.h>

#include "cache.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace lightning_gnn {

namespace {

int64_t Address(const void* pointer) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer)); }

// Values that know what they are made for: as long as they are kept, no other tables can be at that address.
template <typename Value>
struct For {
    at::Tensor slots;
    Value value;
};

template <typename Value, typename Make>
Value Once(const at::Tensor& slots, const at::Tensor& weight, Scaling scaling, Make make)
{
    if (weight.is_inference()) {
        return make();  // it has no version
    }
    Key key = {Address(slots.unsafeGetTensorImpl()), Address(c10_npu::getCurrentNPUStream().stream(false)),
               scaling.exponent, scaling.rescale, weight.storage_offset(), static_cast<int64_t>(weight.scalar_type())};
    key.insert(key.end(), weight.sizes().begin(), weight.sizes().end());
    key.insert(key.end(), weight.strides().begin(), weight.strides().end());
    const auto owner = weight.storage().getWeakStorageImpl().lock();
    return TheCache<For<Value>, c10::StorageImpl>()
        .Get(owner, static_cast<int64_t>(weight._version()), key, [&] { return For<Value>{slots, make()}; })
        ->value;
}

}  // namespace

Half LaidOut(const CubeOnDevice& tables, const at::Tensor& weight, Scaling scaling)
{
    if (!weight.defined()) {
        return {tables.ones, {}};
    }
    return Once<Half>(tables.slots, weight, scaling,
                      [&] { return HalfValues(weight, tables.slots, tables.valueStride, scaling); });
}

Tiles LaidOutTiles(const GatheredOnDevice& tables, const at::Tensor& weight, Scaling scaling, const Half& values)
{
    const at::Tensor owner = weight.defined() ? weight : tables.cube.ones;
    return Once<Tiles>(tables.cube.slots, owner, scaling, [&] {
        const at::Tensor given = values.values.view({-1, tables.cube.valueStride}), finite = at::isfinite(given);
        // One place more, for fillers.
        at::Tensor dense = at::zeros({given.size(0), tables.denseHalves + 1}, given.options());
        dense.index_copy_(1, tables.places, given.masked_fill(finite.logical_not(), 0));
        return Tiles{dense.narrow(1, 0, tables.denseHalves).contiguous(),
                     finite.logical_not().any().to(at::kInt).expand({8}).contiguous()};
    });
}

}  // namespace lightning_gnn
