// Flags inside a core, flags between cores and barriers: each passes on a clock (order) and a time (timeline).
#include "core.h"

namespace AscendC {
namespace twin {
static void Spend(Core& core, double cycles)
{
    core.time[0] += cycles;
    core.busy[0] += cycles;
}

static void CheckEvent(HardEvent event, int64_t id, const char* call, Loc loc)
{
    Core& core = Current();
    core.last = loc;
    const int limit = launch->chip->eventIds;
    if (event >= HardEvent::MAX) {
        Fail(loc, "event id", "%s: this pair of memories has no event", call);
    }
    if (id < 0 || id >= limit) {
        Fail(loc, "event id", "%s<%s>: id %lld, but a pair of pipes has ids 0 to %d", call, NameOf(event),
            static_cast<long long>(id), limit - 1);
    }
}

// On the cube core CANN drops flags that name the vector pipe, so a kernel may issue them there.
static bool Dropped(const Core& core, HardEvent event)
{
    const EventPipes pipes = PipesOf(event);
    return core.kind == CoreKind::Cube && (pipes.source == PIPE_V || pipes.target == PIPE_V);
}

void SetFlagImpl(HardEvent event, int64_t id, Loc loc)
{
    CheckEvent(event, id, "SetFlag", loc);
    Core& core = Current();
    if (Dropped(core, event)) {
        return;
    }
    Flag& flag = core.flags[static_cast<int>(event)][id];
    if (flag.set) {
        Fail(loc, "event set twice", "SetFlag<%s>(%lld) again without WaitFlag in between: first set at line %d",
            NameOf(event), static_cast<long long>(id), flag.snapshot.loc.line);
    }
    const int source = PipeIndex(PipesOf(event).source);
    if (source != 0) JoinOwn(core.clock[source], core.clock[0]);
    flag.set = true;
    flag.snapshot.clock = Completed(core, source);
    Spend(core, launch->parameters.flag_cycles);
    flag.snapshot.time = std::max(core.Ended(source), core.time[0]);
    flag.snapshot.loc = loc;
}

void WaitFlagImpl(HardEvent event, int64_t id, Loc loc)
{
    CheckEvent(event, id, "WaitFlag", loc);
    Core& core = Current();
    if (Dropped(core, event)) {
        return;
    }
    Flag& flag = core.flags[static_cast<int>(event)][id];
    if (!flag.set) {
        Fail(loc, "flag never set", "WaitFlag<%s>(%lld) waits for a flag that no SetFlag has set: the core would hang",
            NameOf(event), static_cast<long long>(id));
    }
    const int target = PipeIndex(PipesOf(event).target);
    JoinOwn(core.clock[target], flag.snapshot.clock);
    Spend(core, launch->parameters.flag_cycles);
    core.time[target] = std::max(core.time[target], flag.snapshot.time);
    flag.set = false;
}

void PipeBarrierImpl(pipe_t pipe, Loc loc)
{
    Core& core = Current();
    core.last = loc;
    if (pipe != PIPE_ALL) {
        const int p = PipeIndex(pipe);
        core.clock[p].own[p] = core.count[p];
        core.time[p] = core.Ended(p);
        Spend(core, launch->parameters.issue_cycles);
        return;
    }
    double latest = 0;
    for (int p = 0; p < PIPES; ++p) {
        JoinOwn(core.clock[0], Completed(core, p));
        latest = std::max(latest, core.Ended(p));
    }
    for (int p = 0; p < PIPES; ++p) {
        JoinOwn(core.clock[p], core.clock[0]);
        core.time[p] = latest;
    }
}

// ---- between cores --------------------------------------------------------------------------------------------------
static bool Mixed() { return launch->type != KERNEL_TYPE_AIV_ONLY && launch->type != KERNEL_TYPE_AIC_ONLY; }

static void CheckResident(const char* call, Loc loc)
{
    const int64_t limit = ResidentBlocks();
    if (launch->options.blocks > limit) {
        Fail(loc, "deadlock", "%s between all blocks, but %lld blocks do not run at once on %lld cores: the first ones would "
            "wait for ever", call, static_cast<long long>(launch->options.blocks), static_cast<long long>(limit));
    }
}

static bool IsCubeCore(const Core& core) { return core.kind == CoreKind::Cube; }

void CrossSet(int mode, pipe_t pipe, int64_t id, Loc loc)
{
    Core& core = Current();
    core.last = loc;
    if (!Mixed()) {
        Fail(loc, "cross-core flag", "a kernel of cube cores or vector cores only cannot use CrossCoreSetFlag: use a mixed type");
    }
    if (id < 0 || id >= CROSS_FLAGS) {
        Fail(loc, "cross-core flag", "flag id %lld, but there are ids 0 to 15", static_cast<long long>(id));
    }
    if (id >= 11 && id <= 14) {
        Fail(loc, "cross-core flag", "flag id %lld belongs to SyncAll (11 to 14)", static_cast<long long>(id));
    }
    if (mode == 0) {
        CheckResident("CrossCoreSetFlag<0>", loc);
    }
    const int p = PipeIndex(pipe);
    if (p != 0) JoinOwn(core.clock[p], core.clock[0]);
    Spend(core, launch->parameters.flag_cycles);
    Snapshot sent;
    sent.clock = Completed(core, p);
    sent.time = std::max(core.Ended(p), core.time[0]) + launch->parameters.cross_flag_cycles;
    sent.loc = loc;
    // receivers, and the cores that must all set the flag before one receiver goes on
    std::vector<Core*> group, receivers;
    for (auto& other : launch->cores) {
        const bool alike = IsCubeCore(*other) == IsCubeCore(core), sameBlock = other->block == core.block;
        const bool member = mode == 0 ? alike : alike && sameBlock;
        if (member) group.push_back(other.get());
        if (mode == 2 ? (!alike && sameBlock) : member) receivers.push_back(other.get());
    }
    size_t place = 0;
    while (group[place] != &core) ++place;
    for (Core* receiver : receivers) {
        CrossFlag& flag = receiver->cross[id];
        bool pending = false;
        for (const auto& queue : flag.sources) pending = pending || !queue.empty();
        if (pending && flag.mode != mode) {
            Fail(loc, "cross-core flag", "flag id %lld is set in mode %d while sets of mode %d are still pending",
                static_cast<long long>(id), mode, flag.mode);
        }
        if (flag.mode != mode || flag.sources.size() != group.size()) {
            flag.mode = mode;
            flag.sources.assign(group.size(), {});
        }
        auto& queue = flag.sources[place];
        if (queue.size() >= 15) {
            Fail(loc, "cross-core flag", "flag id %lld is set a 16th time before a wait: the counter holds 15",
                static_cast<long long>(id));
        }
        Snapshot arriving = sent;
        arriving.clock = Clock();
        Join(arriving.clock, *receiver, sent.clock, core);
        queue.push_back(std::move(arriving));
        if (receiver->state == CoreState::Waiting && receiver->waitingFlag == id) {
            receiver->state = CoreState::Ready; // looks again by itself
        }
    }
}

void CrossWait(int64_t id, Loc loc)
{
    Core& core = Current();
    core.last = loc;
    if (!Mixed()) {
        Fail(loc, "cross-core flag", "a kernel of cube cores or vector cores only cannot use CrossCoreWaitFlag: use a mixed type");
    }
    if (id < 0 || id >= CROSS_FLAGS) {
        Fail(loc, "cross-core flag", "flag id %lld, but there are ids 0 to 15", static_cast<long long>(id));
    }
    CrossFlag& flag = core.cross[id];
    const auto ready = [&flag] {
        for (const auto& queue : flag.sources) {
            if (queue.empty()) return false;
        }
        return !flag.sources.empty();
    };
    while (!ready()) {
        Block(core, static_cast<int>(id), loc);
    }
    for (auto& queue : flag.sources) {
        JoinOwn(core.clock[0], queue.front().clock);
        core.time[0] = std::max(core.time[0], queue.front().time);
        queue.pop_front();
    }
    Spend(core, launch->parameters.flag_cycles);
}

void SyncAllImpl(bool vectorOnly, Loc loc)
{
    Core& core = Current();
    Launch& l = *launch;
    core.last = loc;
    CheckResident("SyncAll", loc);
    if (vectorOnly && core.kind == CoreKind::Cube) {
        Fail(loc, "core separation", "SyncAll<true> is a barrier of the vector cores: the cube core needs SyncAll<false>");
    }
    PipeBarrierImpl(PIPE_ALL, loc);
    int members = 0;
    for (const auto& other : l.cores) members += !(vectorOnly && other->kind == CoreKind::Cube);
    for (const auto& other : l.cores) {
        if (other->state == CoreState::Finished && !(vectorOnly && other->kind == CoreKind::Cube)) {
            Fail(loc, "deadlock", "SyncAll waits for block %d, %s, which has already left the kernel", other->block,
                other->Name().c_str());
        }
    }
    // everything that anyone had done before it arrived is done for all who leave
    if (l.syncArrived == 0) l.syncPending = Snapshot();
    const size_t size = l.cores.size() * PIPES;
    auto all = std::make_shared<std::vector<uint32_t>>(
        l.syncPending.clock.others ? *l.syncPending.clock.others : std::vector<uint32_t>(size, 0));
    const Clock& mine = core.clock[0];
    for (size_t i = 0; i < size; ++i) {
        const uint32_t known = static_cast<int>(i / PIPES) == core.id ? core.count[i % PIPES] :
            (mine.others ? (*mine.others)[i] : 0);
        (*all)[i] = std::max((*all)[i], known);
    }
    l.syncPending.clock.others = all;
    l.syncPending.time = std::max(l.syncPending.time, core.time[0]);
    const int generation = l.syncGeneration;
    if (++l.syncArrived == members) {
        l.syncArrived = 0;
        ++l.syncGeneration;
        l.syncDone = l.syncPending;
        for (auto& other : l.cores) {
            if (other->state == CoreState::Waiting && other->waitingFlag == -2) other->state = CoreState::Ready;
        }
    } else {
        while (l.syncGeneration == generation) {
            Block(core, -2, loc);
        }
    }
    for (int p = 0; p < PIPES; ++p) {
        core.clock[p].others = l.syncDone.clock.others;
        for (int q = 0; q < PIPES; ++q) core.clock[p].own[q] = core.count[q];
        core.time[p] = l.syncDone.time + l.parameters.sync_all_cycles;
    }
}
} // namespace twin
} // namespace AscendC
