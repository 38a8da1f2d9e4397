// Every core of every block is a coroutine. A core runs until it waits for another core; which one goes on next is fixed
// by the order of the blocks, or drawn by the launch's seed. If all wait, that is a deadlock and is reported as one.
#include <sys/mman.h>

#include <algorithm>
#include <exception>

#include "core.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SWITCH_START(fake, bottom, size) __sanitizer_start_switch_fiber(fake, bottom, size)
#define SWITCH_FINISH(fake, bottom, size) __sanitizer_finish_switch_fiber(fake, bottom, size)
#else
#define SWITCH_START(fake, bottom, size) ((void)(bottom), (void)(size))
#define SWITCH_FINISH(fake, bottom, size) ((void)(bottom), (void)(size))
#endif

namespace AscendC {
namespace twin {
namespace {
constexpr size_t STACK = 512 * 1024, GUARD = 4096;
std::vector<void*> stacks; // kept from launch to launch
const void* schedulerBottom = nullptr;
size_t schedulerSize = 0;

void* TakeStack()
{
    if (!stacks.empty()) {
        void* stack = stacks.back();
        stacks.pop_back();
        return stack;
    }
    char* memory = static_cast<char*>(
        mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    mprotect(memory, GUARD, PROT_NONE); // a kernel that overruns its stack stops instead of writing elsewhere
    return memory + GUARD;
}

void Entry()
{
    SWITCH_FINISH(nullptr, &schedulerBottom, &schedulerSize);
    Core& core = *launch->current;
    try {
        launch->kernel->call(launch->arguments.data());
        CheckEnd(core);
        core.state = CoreState::Finished;
    } catch (const Stop&) {
        core.state = CoreState::Stopped;
    } catch (const Cancel&) {
        core.state = CoreState::Stopped;
    } catch (const std::exception& error) {
        ReportViolation(core.last, "exception", std::string("the kernel threw: ") + error.what());
        core.state = CoreState::Stopped;
    }
    SWITCH_START(nullptr, schedulerBottom, schedulerSize);
    setcontext(&launch->scheduler);
}

// A block that is done frees its physical cores at the time its slowest core ended.
void LeaveBlock(const Core& core)
{
    double end = 0;
    for (const auto& other : launch->cores) {
        if (other->block != core.block) continue;
        if (other->state != CoreState::Finished) return;
        for (int p = 0; p < PIPES; ++p) end = std::max(end, other->Ended(p));
    }
    launch->freeCores.push_back(end);
}

// The next block takes the cores that became free first.
bool AdmitBlock()
{
    auto& free = launch->freeCores;
    const auto next = std::find_if(launch->cores.begin(), launch->cores.end(),
        [](const auto& core) { return core->state == CoreState::Queued; });
    if (free.empty() || next == launch->cores.end()) {
        return false;
    }
    const auto first = std::min_element(free.begin(), free.end());
    const int block = (*next)->block;
    for (auto& core : launch->cores) {
        if (core->block == block) {
            core->state = CoreState::Ready;
            core->time[0] = *first;
        }
    }
    free.erase(first);
    return true;
}

void Run(Core& core)
{
    Launch& l = *launch;
    l.current = &core;
    if (!core.started) {
        core.started = true;
        core.CreateMemories(); // only while the core runs: a launch may have many more blocks than the chip has cores
        core.stack = TakeStack();
        if (!core.stack) {
            ReportViolation(Loc{"", 0}, "memory", "no memory for the stack of a core");
            core.state = CoreState::Stopped;
            return;
        }
        getcontext(&core.context);
        core.context.uc_stack.ss_sp = core.stack;
        core.context.uc_stack.ss_size = STACK;
        core.context.uc_link = nullptr;
        makecontext(&core.context, Entry, 0);
    }
    SWITCH_START(&l.schedulerFake, core.stack, STACK);
    swapcontext(&l.scheduler, &core.context);
    SWITCH_FINISH(l.schedulerFake, nullptr, nullptr);
    if (core.state == CoreState::Finished || core.state == CoreState::Stopped) {
        stacks.push_back(core.stack);
        core.stack = nullptr;
        for (LocalMemory& memory : core.memory) memory = LocalMemory();
        LeaveBlock(core);
    }
}

uint64_t Random()
{
    uint64_t& x = launch->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

void ReportDeadlock()
{
    std::string text;
    Core* first = nullptr;
    int waiting = 0;
    for (auto& core : launch->cores) {
        if (core->state != CoreState::Waiting) {
            continue;
        }
        if (!first) first = core.get();
        if (++waiting <= 6) {
            text += Format("%sblock %d, %s waits at line %d for %s", waiting > 1 ? "; " : "", core->block,
                core->Name().c_str(), core->waitingLoc.line,
                core->waitingFlag == -2 ? "SyncAll" : Format("cross-core flag %d", core->waitingFlag).c_str());
        }
    }
    if (waiting > 6) text += Format("; and %d more cores", waiting - 6);
    launch->current = first;
    ReportViolation(first->waitingLoc, "deadlock", "no core can go on: " + text);
}

void CancelAll()
{
    for (auto& core : launch->cores) {
        if (core->started && core->state != CoreState::Finished && core->state != CoreState::Stopped) {
            core->cancelled = true; // resumed once more, it unwinds its stack
            Run(*core);
        }
    }
}
} // namespace

void Block(Core& core, int flag, Loc loc)
{
    core.state = CoreState::Waiting;
    core.waitingFlag = flag;
    core.waitingLoc = loc;
    SWITCH_START(&core.fake, schedulerBottom, schedulerSize);
    swapcontext(&core.context, &launch->scheduler);
    SWITCH_FINISH(core.fake, &schedulerBottom, &schedulerSize);
    if (core.cancelled) {
        throw Cancel();
    }
    core.state = CoreState::Ready;
}

int64_t ResidentBlocks()
{
    const Chip& chip = *launch->chip;
    const bool vectorOnly = launch->type == KERNEL_TYPE_AIV_ONLY || launch->type == KERNEL_TYPE_MIX_AIV_1_0;
    return vectorOnly ? chip.vectorCores : chip.cubeCores;
}

void RunCores()
{
    Launch& l = *launch;
    l.random = l.options.seed * 0x9E3779B97F4A7C15ULL + 1;
    std::vector<Core*> ready;
    size_t next = 0;
    while (!l.failed) {
        ready.clear();
        bool waiting = false;
        for (auto& core : l.cores) {
            if (core->state == CoreState::Ready) ready.push_back(core.get());
            waiting = waiting || core->state == CoreState::Waiting;
        }
        if (ready.empty() && !AdmitBlock()) {
            if (waiting) ReportDeadlock();
            break;
        }
        if (ready.empty()) continue;
        Core* chosen = ready[0];
        if (l.options.seed != 0) {
            chosen = ready[Random() % ready.size()];
        } else { // round robin over the cores in order
            for (Core* core : ready) {
                if (core->id >= static_cast<int>(next)) {
                    chosen = core;
                    break;
                }
            }
            next = static_cast<size_t>(chosen->id) + 1;
        }
        Run(*chosen);
    }
    if (l.failed) CancelAll();
    l.current = nullptr;
}
} // namespace twin
} // namespace AscendC
