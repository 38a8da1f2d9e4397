// What must hold when a core leaves the kernel, and when all have left.
#include "core.h"

namespace AscendC {
namespace twin {
void CheckEnd(Core& core)
{
    if (launch->failed) {
        return;
    }
    for (int e = 0; e < EVENTS; ++e) {
        for (int id = 0; id < 8; ++id) {
            const Flag& flag = core.flags[e][id];
            if (flag.set) {
                Fail(flag.snapshot.loc, "flag never waited", "SetFlag<%s>(%d) has no WaitFlag: the next kernel would find it set",
                    NameOf(static_cast<HardEvent>(e)), id);
            }
        }
    }
    if (core.atomic.op != AtomicOp::None) {
        Fail(core.last, "atomic mode", "the kernel ends with atomic stores still on: call SetAtomicNone");
    }
}

void CheckCounters()
{
    for (auto& core : launch->cores) {
        for (int id = 0; id < CROSS_FLAGS; ++id) {
            for (const auto& queue : core->cross[id].sources) {
                if (!queue.empty() && !launch->failed) {
                    launch->current = core.get();
                    ReportViolation(queue.front().loc, "cross-core flag", Format("flag %d is still set %zu times at the end: "
                        "every CrossCoreSetFlag needs its CrossCoreWaitFlag, or the next kernel starts wrong", id, queue.size()));
                }
            }
        }
    }
}

AtomicMode GetAtomic() { return Current().atomic; }

void SetAtomic(AtomicOp op, Element element, Loc loc)
{
    Core& core = Current();
    core.last = loc;
    if (launch->chip->unified && op != AtomicOp::None && element != Element::F32) {
        Fail(loc, "atomic type", "this chip adds atomically in fp32 only");
    }
    core.atomic = {op, element};
}

int64_t BlockIdx() { return Current().blockIndex; }
int64_t BlockNum() { return launch->options.blocks; }
int64_t SubBlockIdx() { return Current().sub; }
bool MmadNanAllowed() { return launch->options.nanAllowed; }
bool IsCube() { return Current().kind != CoreKind::Vector; }
bool IsVector() { return Current().kind != CoreKind::Cube; }
} // namespace twin
} // namespace AscendC
