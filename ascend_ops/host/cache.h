// What is made once of a tensor or a storage and kept as long as that lives.
#ifndef LIGHTNING_GNN_CACHE_H
#define LIGHTNING_GNN_CACHE_H

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace lightning_gnn {

using Key = std::vector<int64_t>;

// Values by owner, which is held weakly, and by key. A new version of the owner makes those of the last one void.
template <typename Value, typename Impl>
class Cache {
public:
    template <typename Make>
    std::shared_ptr<const Value> Get(const c10::intrusive_ptr<Impl>& owner, int64_t version, const Key& key, Make make)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto found = owners_.find(owner.get());
        // Another owner may be at the address of one that is gone.
        if (found != owners_.end() && (found->second.owner.expired() || found->second.version != version)) {
            owners_.erase(found);
            found = owners_.end();
        }
        if (found == owners_.end()) {
            for (auto it = owners_.begin(); it != owners_.end();) {
                it = it->second.owner.expired() ? owners_.erase(it) : std::next(it);
            }
            found = owners_.emplace(owner.get(), Owned{Weak(owner), version, {}}).first;
        }
        auto& value = found->second.values[key];
        if (value == nullptr) {
            value = std::make_shared<const Value>(make());
        }
        return value;
    }

private:
    using Weak = decltype(c10::weak_intrusive_ptr(std::declval<const c10::intrusive_ptr<Impl>&>()));
    struct Owned {
        Weak owner;
        int64_t version;
        std::map<Key, std::shared_ptr<const Value>> values;
    };
    std::mutex mutex_;
    std::unordered_map<Impl*, Owned> owners_;
};

// Never destroyed: at exit the device's runtime may be gone before this would free its memory.
template <typename Value, typename Impl>
Cache<Value, Impl>& TheCache()
{
    static auto* const cache = new Cache<Value, Impl>();
    return *cache;
}

}  // namespace lightning_gnn

#endif  // LIGHTNING_GNN_CACHE_H
