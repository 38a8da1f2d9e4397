// One instruction: core separation, issue order, the checks of every access, and its place on the timeline.
#include "core.h"

#include <exception>

namespace AscendC {
namespace twin {
Instr::Instr(pipe_t pipe, const char* name, Loc loc)
    : pipe_(pipe), name_(name), loc_(loc), exceptions_(std::uncaught_exceptions())
{
    Core& core = Current();
    core.last = loc;
    RefuseProbe();
    if (++launch->instructions > launch->options.maxInstructions) {
        Fail("endless loop", "more than %lld instructions: the kernel does not seem to end",
            static_cast<long long>(launch->options.maxInstructions));
    }
    if (core.kind == CoreKind::Cube && pipe == PIPE_V) {
        Fail("core separation", "a vector instruction on the cube core: guard it with `if ASCEND_IS_AIV {`");
    }
    if (core.kind == CoreKind::Vector && (pipe == PIPE_M || pipe == PIPE_MTE1 || pipe == PIPE_FIX)) {
        Fail("core separation", "a cube instruction on a vector core: guard it with `if ASCEND_IS_AIC {`");
    }
    const int p = PipeIndex(pipe);
    if (pipe == PIPE_V) BeginBanks();
    if (pipe != PIPE_S) {
        JoinOwn(core.clock[p], core.clock[0]); // issued by the scalar unit, so after all that it has waited for
    }
    ++core.count[p];
}

Instr::~Instr()
{
    if (std::uncaught_exceptions() > exceptions_) {
        return;
    }
    Core& core = Current();
    Launch& l = *launch;
    const int p = PipeIndex(pipe_);
    if (pipe_ == PIPE_V) work.stalls = BankStalls(work);
    const double cycles = Cycles(work, l.parameters), latency = Latency(work, l.parameters);
    double start = std::max(core.time[p], core.time[0]);
    std::deque<double>& flying = core.flying[p];
    if (latency > 0 && flying.size() >= l.parameters.copies_in_flight) {
        start = std::max(start, flying.front()); // the next place is free once the oldest copy has ended
        flying.pop_front();
    }
    core.time[p] = start + cycles;
    core.ended[p] = std::max(core.ended[p], start + cycles + latency); // instructions of a pipe end in order
    if (latency > 0) flying.push_back(core.ended[p]);
    core.busy[p] += cycles;
    if (pipe_ != PIPE_S) {
        core.time[0] += l.parameters.issue_cycles;
        core.busy[0] += l.parameters.issue_cycles;
    }
    for (int i = 0; i < static_cast<int>(Path::COUNT); ++i) {
        l.totals[i] += static_cast<double>(work.bytes[i]);
    }
    if (work.kind == Kind::Mmad) l.fractals += static_cast<double>(work.fractals);
    l.elements += static_cast<double>(work.elements);
}

void Instr::CheckTensor(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t align, bool write)
{
    const char* verb = write ? "writes" : "reads";
    if (ref.hardware == Hardware::MAX) {
        Fail("queue state", "%s a LocalTensor that was never allocated", verb);
    }
    if (ref.buffer) {
        const Buffer& buffer = *ref.buffer;
        const char* queue = buffer.queue->Name();
        if (buffer.generation != ref.generation || buffer.state == TBufState::FREE) {
            Fail("queue state", "%s a tensor of the %s queue (line %d) after FreeTensor", verb, queue,
                buffer.queue->declared.line);
        }
        if (buffer.state == TBufState::ENQUE) {
            Fail("queue state", "%s a tensor of the %s queue (line %d) between EnQue and DeQue: use the tensor that DeQue "
                "returns", verb, queue, buffer.queue->declared.line);
        }
    }
    if (offset < 0 || bytes < 0 || offset + bytes > static_cast<int64_t>(ref.bytes)) {
        Fail("local bounds", "%s bytes %lld to %lld of a tensor of %u bytes in %s", verb, static_cast<long long>(offset),
            static_cast<long long>(offset + bytes), ref.bytes, NameOf(ref.hardware));
    }
    if ((static_cast<int64_t>(ref.address) + offset) % align != 0) {
        Fail("alignment", "%s %s at byte %lld, which is not a multiple of %lld", verb, NameOf(ref.hardware),
            static_cast<long long>(ref.address + offset), static_cast<long long>(align));
    }
}

const uint8_t* Instr::Read(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t align)
{
    CheckTensor(ref, offset, bytes, align, false);
    CheckLocal(Current(), PipeIndex(pipe_), ref, offset, bytes, false, loc_, name_);
    if (pipe_ == PIPE_V) TouchBank(ref, offset, bytes, false);
    return LocalData(ref) + offset;
}

uint8_t* Instr::Write(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t align)
{
    CheckTensor(ref, offset, bytes, align, true);
    CheckLocal(Current(), PipeIndex(pipe_), ref, offset, bytes, true, loc_, name_);
    if (pipe_ == PIPE_V) TouchBank(ref, offset, bytes, true);
    return LocalData(ref) + offset;
}

void Instr::CheckGlobal(const GlobalRef& ref, int64_t offset, int64_t bytes, bool write)
{
    const char* verb = write ? "writes" : "reads";
    if (!ref.allocation) {
        Fail("global bounds", "%s a GlobalTensor that has no buffer: call SetGlobalBuffer first", verb);
    }
    const Allocation& allocation = *ref.allocation;
    const int64_t start = offset + ref.before, unit = allocation.unit, size = ref.before + ref.bytes;
    if (start < 0 || offset + bytes > ref.bytes) {
        Fail("global bounds", "%s elements %lld to %lld of '%s', whose GlobalTensor has %lld elements of %lld bytes", verb,
            static_cast<long long>(start / unit), static_cast<long long>((start + bytes + unit - 1) / unit),
            allocation.name.c_str(), static_cast<long long>(size / unit), static_cast<long long>(unit));
    }
    if (write && allocation.readOnly) {
        Fail("global bounds", "writes '%s', which was passed as a read-only input", allocation.name.c_str());
    }
}

const uint8_t* Instr::Read(const GlobalRef& ref, int64_t offset, int64_t bytes)
{
    CheckGlobal(ref, offset, bytes, false);
    CheckGlobalOrder(Current(), PipeIndex(pipe_), ref, offset, bytes, false, false, loc_, name_);
    if (pipe_ == PIPE_S) {
        work[Path::SCALAR_GM] += bytes;
        work.lines += TouchDataCache(Current(), *ref.allocation, ref.data + offset - ref.allocation->data, bytes);
    } else {
        const int64_t start = ref.data + offset - ref.allocation->data;
        work[Path::HBM_READ] += TouchL2(*ref.allocation, start, bytes);
        work[Path::L2_READ] += bytes; // everything comes through L2
    }
    return ref.data + offset;
}

uint8_t* Instr::Write(const GlobalRef& ref, int64_t offset, int64_t bytes, Gm mode)
{
    CheckGlobal(ref, offset, bytes, true);
    CheckGlobalOrder(Current(), PipeIndex(pipe_), ref, offset, bytes, true, mode == Gm::Atomic, loc_, name_);
    if (pipe_ == PIPE_S) {
        work[Path::SCALAR_GM] += bytes;
        work.lines += TouchDataCache(Current(), *ref.allocation, ref.data + offset - ref.allocation->data, bytes);
    } else {
        TouchL2(*ref.allocation, ref.data + offset - ref.allocation->data, bytes);
        work[Path::GM_WRITE] += bytes;
    }
    return ref.data + offset;
}
} // namespace twin
} // namespace AscendC
