// Happens-before: vector clocks of (core, pipe). An instruction is ordered after another only if flags, queues, barriers
// or the scalar unit's own waiting say so. Instructions of one pipe start in order but overlap, so a pipe knows its own
// earlier instructions finished only after a barrier (or a flag's round trip).
#include "core.h"

namespace AscendC {
namespace twin {
bool Finished(const Core& core, int pipe, const Epoch& epoch)
{
    const int source = epoch.pipe % PIPES, owner = epoch.pipe / PIPES;
    if (owner == core.id) {
        return core.clock[pipe].own[source] >= epoch.count;
    }
    const auto& others = core.clock[pipe].others;
    return others && (*others)[epoch.pipe] >= epoch.count;
}

void JoinOwn(Clock& clock, const Clock& other)
{
    for (int q = 0; q < PIPES; ++q) {
        clock.own[q] = std::max(clock.own[q], other.own[q]);
    }
    if (!other.others || other.others == clock.others) {
        return;
    }
    if (!clock.others) {
        clock.others = other.others;
        return;
    }
    auto merged = std::make_shared<std::vector<uint32_t>>(*clock.others);
    bool grew = false, covers = true;
    for (size_t i = 0; i < merged->size(); ++i) {
        const uint32_t theirs = (*other.others)[i];
        covers = covers && theirs >= (*merged)[i];
        if (theirs > (*merged)[i]) {
            (*merged)[i] = theirs;
            grew = true;
        }
    }
    if (covers) {
        clock.others = other.others; // share one vector: comparing pointers is what makes joins cheap
    } else if (grew) {
        clock.others = merged;
    }
}

// A clock of another core: its own part becomes one of the others here.
void Join(Clock& clock, const Core& core, const Clock& other, const Core& from)
{
    if (core.id == from.id) {
        JoinOwn(clock, other);
        return;
    }
    const size_t size = launch->cores.size() * PIPES;
    auto full = std::make_shared<std::vector<uint32_t>>(
        other.others ? *other.others : std::vector<uint32_t>(size, 0));
    for (int q = 0; q < PIPES; ++q) {
        uint32_t& entry = (*full)[from.id * PIPES + q];
        entry = std::max(entry, other.own[q]);
    }
    Clock converted;
    for (int q = 0; q < PIPES; ++q) {
        converted.own[q] = (*full)[core.id * PIPES + q];
    }
    converted.others = full;
    JoinOwn(clock, converted);
}

// What is finished once all instructions issued so far to `pipe` are.
Clock Completed(const Core& core, int pipe)
{
    Clock clock = core.clock[pipe];
    clock.own[pipe] = core.count[pipe];
    return clock;
}

std::string Describe(const Epoch& epoch)
{
    const Core& core = *launch->cores[epoch.pipe / PIPES];
    const int index = epoch.pipe % PIPES;
    const Loc loc = LocOf(epoch.line);
    std::string text = NameOf(index == 7 ? PIPE_FIX : static_cast<pipe_t>(index));
    if (launch->current && launch->current->id != core.id) {
        text += Format(" of block %d, %s", core.block, core.Name().c_str());
    }
    return text + Format(" (line %d)", loc.line);
}
} // namespace twin
} // namespace AscendC
