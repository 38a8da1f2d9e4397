// Global memory: which instruction last wrote and who has read each piece, so that two cores that touch the same bytes
// without an order between them are caught whatever the schedule. Pieces are 32 bytes, or single elements where cores
// share a granule.
#include "core.h"

#include <cstring>

namespace AscendC {
namespace twin {
namespace {
struct Access {
    Core& core;
    int pipe;
    Epoch now;
    bool write, atomic;
    Loc loc;
    const char* name;
    Allocation& allocation;
    int64_t at;
};

bool Ordered(const Access& a, const Epoch& other, bool otherWrote)
{
    if (other.count == 0) {
        return true;
    }
    if (other.pipe == a.now.pipe && (a.pipe == 0 || other.count == a.now.count || !otherWrote)) {
        return true; // the scalar unit is in order; a pipe's own earlier reads are done when it writes
    }
    return Finished(a.core, a.pipe, other);
}

[[noreturn]] void Race(const Access& a, const Epoch& other, bool otherWrote)
{
    const int64_t element = a.at / a.allocation.unit;
    const bool sameCore = other.pipe / PIPES == a.core.id;
    Fail(a.loc, "race", "%s: %s element %lld of '%s', which %s %s, and nothing orders the two: %s", a.name,
        a.write ? "writes" : "reads", static_cast<long long>(element), a.allocation.name.c_str(), Describe(other).c_str(),
        otherWrote ? "wrote" : "read",
        sameCore ? (other.pipe == a.now.pipe ? "a PipeBarrier is missing" : "SetFlag and WaitFlag between the two pipes are missing")
                 : "two cores share these bytes without a cross-core flag, SyncAll or atomic stores");
}

void Remember(std::vector<Epoch>& list, const Epoch& now)
{
    for (Epoch& e : list) {
        if (e.pipe == now.pipe) {
            e = now;
            return;
        }
    }
    list.push_back(now);
}

Further& More(Allocation& allocation, GlobalGranule& g)
{
    if (g.more == 0) {
        allocation.further.emplace_back();
        g.more = static_cast<uint32_t>(allocation.further.size());
    }
    return allocation.further[g.more - 1];
}

void Touch(const Access& a, GlobalGranule& g)
{
    if (!Ordered(a, g.writer, true)) Race(a, g.writer, true);
    if (g.more && !a.atomic) {
        for (const Epoch& e : a.allocation.further[g.more - 1].atomics) {
            if (!Ordered(a, e, true)) Race(a, e, true);
        }
    }
    if (!a.write) {
        if (g.reader.count == 0 || g.reader.pipe == a.now.pipe || Finished(a.core, a.pipe, g.reader)) {
            g.reader = a.now;
        } else {
            Remember(More(a.allocation, g).readers, a.now);
        }
        return;
    }
    if (!Ordered(a, g.reader, false)) Race(a, g.reader, false);
    if (g.more) {
        for (const Epoch& e : a.allocation.further[g.more - 1].readers) {
            if (!Ordered(a, e, false)) Race(a, e, false);
        }
    }
    if (a.atomic) {
        Remember(More(a.allocation, g).atomics, a.now);
        return;
    }
    g.writer = a.now;
    g.reader = Epoch();
    if (g.more) {
        a.allocation.further[g.more - 1] = Further();
    }
}

std::vector<GlobalGranule>& Split(Allocation& allocation, GlobalGranule& g)
{
    if (g.split == 0) {
        std::vector<GlobalGranule> units(static_cast<size_t>(GRANULE / allocation.unit));
        for (GlobalGranule& unit : units) {
            unit = g;
            unit.more = 0;
            if (g.more) {
                const Further copy = allocation.further[g.more - 1];
                More(allocation, unit) = copy;
            }
        }
        allocation.splits.push_back(std::move(units));
        g.split = static_cast<uint32_t>(allocation.splits.size());
    }
    return allocation.splits[g.split - 1];
}
} // namespace

void CheckGlobalOrder(Core& core, int pipe, const GlobalRef& ref, int64_t offset, int64_t bytes, bool write, bool atomic,
    Loc loc, const char* name)
{
    Allocation& allocation = *ref.allocation;
    const int64_t start = ref.data + offset - allocation.data, end = start + bytes;
    if (bytes == 0) {
        return;
    }
    if (!allocation.defined.empty()) {
        uint8_t* defined = allocation.defined.data() + start;
        if (!write || atomic) {
            if (const void* hole = std::memchr(defined, 0, static_cast<size_t>(bytes))) {
                const int64_t at = start + (static_cast<const uint8_t*>(hole) - defined);
                Fail(loc, "uninitialised read", "%s: %s element %lld of '%s', which nothing has written", name,
                    atomic ? "adds to" : "reads", static_cast<long long>(at / allocation.unit), allocation.name.c_str());
            }
        }
        if (write) std::memset(defined, 1, static_cast<size_t>(bytes));
    }
    if (allocation.readOnly) {
        return;
    }
    if (allocation.granules.empty()) {
        allocation.granules.resize(static_cast<size_t>((allocation.bytes + GRANULE - 1) / GRANULE));
    }
    Access a{core, pipe, {core.count[pipe], static_cast<uint16_t>(core.id * PIPES + pipe), LineOf(loc)}, write, atomic, loc,
        name, allocation, start};
    const int64_t unit = allocation.unit;
    for (int64_t g = start / GRANULE; g <= (end - 1) / GRANULE; ++g) {
        GlobalGranule& granule = allocation.granules[static_cast<size_t>(g)];
        const int64_t from = std::max(start, g * GRANULE), to = std::min(end, (g + 1) * GRANULE);
        // the allocation's last granule may be short: reaching the end counts as covering it
        const bool whole = from == g * GRANULE && (to == (g + 1) * GRANULE || to == allocation.bytes);
        a.at = from;
        if (whole && granule.split == 0) {
            Touch(a, granule);
            continue;
        }
        std::vector<GlobalGranule>& units = Split(allocation, granule);
        for (int64_t u = (from - g * GRANULE) / unit; u * unit < to - g * GRANULE; ++u) {
            a.at = g * GRANULE + u * unit;
            Touch(a, units[static_cast<size_t>(u)]);
        }
        if (whole && write && !atomic) {
            granule = GlobalGranule();
            granule.writer = a.now;
        }
    }
}

// L2 in lines of 512 bytes, oldest out first; returns the bytes that had to come from HBM for this access.
int64_t TouchL2(Allocation& allocation, int64_t start, int64_t bytes)
{
    Launch& l = *launch;
    int64_t missed = 0;
    for (int64_t line = start / L2_LINE; line * L2_LINE < start + bytes; ++line) {
        uint8_t& present = allocation.inL2[static_cast<size_t>(line)];
        if (present) {
            continue;
        }
        present = 1;
        missed += L2_LINE;
        l.l2Queue.emplace_back(&allocation, line);
        l.l2Used += L2_LINE;
        while (l.l2Used > l.parameters.l2_bytes && l.l2Head < l.l2Queue.size()) {
            const auto oldest = l.l2Queue[l.l2Head++];
            oldest.first->inL2[static_cast<size_t>(oldest.second)] = 0;
            l.l2Used -= L2_LINE;
        }
    }
    return missed;
}

// The scalar unit's cache in lines of 64 bytes, oldest out first; returns the lines that had to come for this access.
int64_t TouchDataCache(Core& core, const Allocation& allocation, int64_t start, int64_t bytes)
{
    int64_t missed = 0;
    const size_t room = static_cast<size_t>(launch->parameters.dcache_bytes) / DATA_LINE;
    for (int64_t line = start / DATA_LINE; line * DATA_LINE < start + bytes; ++line) {
        const int64_t key = (static_cast<int64_t>(allocation.index) << 48) + line;
        if (!core.dataLines.insert(key).second) continue;
        ++missed;
        core.dataQueue.push_back(key);
        while (core.dataQueue.size() > room) {
            core.dataLines.erase(core.dataQueue.front());
            core.dataQueue.pop_front();
        }
    }
    return missed;
}

void CleanDataCache(const GlobalRef& ref, bool all)
{
    Core& core = Current();
    if (all) {
        core.dataLines.clear();
        core.dataQueue.clear();
    } else if (ref.allocation) {
        const int64_t key = (static_cast<int64_t>(ref.allocation->index) << 48) + (ref.data - ref.allocation->data) / DATA_LINE;
        if (core.dataLines.erase(key)) {
            core.dataQueue.erase(std::find(core.dataQueue.begin(), core.dataQueue.end(), key));
        }
    }
}
} // namespace twin
} // namespace AscendC
