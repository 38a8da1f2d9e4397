// Queues and pipes: buffer states, events of EnQue and FreeTensor, capacities of the local memories.
#include "core.h"

#include <exception>

namespace AscendC {
namespace twin {
Queue::Queue(TPosition from, TPosition to, int d) : source(from), target(to), depth(d)
{
    const Hardware a = GetPhyType(from), b = GetPhyType(to);
    // a buffer lies where data arrives; results (to global memory) lie where they are made
    position = b == Hardware::GM ? from : to;
    hardware = GetPhyType(position);
    enqueueEvent = GetQueEvt(a, b, true);
    freeEvent = GetQueEvt(a, b, false);
}

const char* Queue::Name() const { return NameOf(position); }

LocalRef Queue::RefOf(Buffer& buffer) const
{
    LocalRef ref;
    ref.hardware = hardware;
    ref.address = buffer.address;
    ref.bytes = buffer.bytes;
    ref.buffer = &buffer;
    ref.generation = buffer.generation;
    ref.position = position;
    return ref;
}

LocalRef Queue::Alloc(Loc loc)
{
    Core& core = Current();
    core.last = loc;
    if (buffers.empty()) {
        Fail(loc, "queue state", "AllocTensor of a %s queue without InitBuffer", Name());
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
        Buffer& buffer = buffers[cursor];
        cursor = (cursor + 1) % buffers.size();
        if (buffer.state != TBufState::FREE) {
            continue;
        }
        if (buffer.freeId >= 0) {
            WaitFlagImpl(freeEvent, buffer.freeId, loc);
            core.pipe->Release(freeEvent, buffer.freeId, loc);
            buffer.freeId = -1;
        }
        buffer.state = TBufState::OCCUPIED;
        buffer.allocated = loc;
        ++buffer.generation;
        return RefOf(buffer);
    }
    Fail(loc, "queue state", "AllocTensor: all %zu buffers of the %s queue (line %d) are in use, the last was allocated at "
        "line %d: FreeTensor is missing", buffers.size(), Name(), declared.line, buffers.back().allocated.line);
}

static Buffer& Own(Queue& queue, const LocalRef& ref, const char* call, Loc loc)
{
    Current().last = loc;
    if (!ref.buffer || ref.buffer->queue != &queue) {
        Fail(loc, "queue state", "%s of a tensor that this %s queue (line %d) has not allocated", call, queue.Name(),
            queue.declared.line);
    }
    return *ref.buffer;
}

void Queue::EnQue(const LocalRef& ref, HardEvent event, Loc loc)
{
    Buffer& buffer = Own(*this, ref, "EnQue", loc);
    const bool live = buffer.generation == ref.generation;
    if (!live || (buffer.state != TBufState::OCCUPIED && buffer.state != TBufState::DEQUE)) {
        Fail(loc, "queue state", "EnQue of a tensor of the %s queue (line %d) that is %s: it must come from AllocTensor or "
            "DeQue", Name(), declared.line, live ? NameOf(buffer.state) : "freed");
    }
    if (static_cast<int>(waiting.size()) >= std::max(depth, 1)) {
        Fail(loc, "queue depth", "EnQue: the %s queue (line %d) has depth %d and already holds %zu tensors", Name(),
            declared.line, depth, waiting.size());
    }
    Core& core = Current();
    buffer.enqueueEvent = event;
    buffer.enqueId = core.pipe->Acquire(event, true, loc);
    SetFlagImpl(event, buffer.enqueId, loc);
    buffer.state = TBufState::ENQUE;
    waiting.push_back(&buffer);
    ++passes;
}

LocalRef Queue::DeQue(HardEvent event, Loc loc)
{
    Current().last = loc;
    if (waiting.empty()) {
        Fail(loc, "queue state", "DeQue of the empty %s queue (line %d): EnQue is missing", Name(), declared.line);
    }
    Buffer& buffer = *waiting.front();
    waiting.pop_front();
    if (buffer.enqueueEvent != event) {
        Fail(loc, "queue state", "DeQue of the %s queue (line %d) for %s, but the tensor was EnQue'd for %s", Name(),
            declared.line, NameOf(event), NameOf(buffer.enqueueEvent));
    }
    WaitFlagImpl(event, buffer.enqueId, loc);
    Current().pipe->Release(event, buffer.enqueId, loc);
    buffer.enqueId = -1;
    buffer.state = TBufState::DEQUE;
    return RefOf(buffer);
}

void Queue::Free(const LocalRef& ref, Loc loc)
{
    Buffer& buffer = Own(*this, ref, "FreeTensor", loc);
    if (buffer.state == TBufState::FREE || buffer.generation != ref.generation) {
        Fail(loc, "queue state", "FreeTensor: the tensor of the %s queue (line %d) is already free", Name(), declared.line);
    }
    if (buffer.state == TBufState::ENQUE) {
        Fail(loc, "queue state", "FreeTensor of a tensor that is still in the %s queue (line %d): DeQue is missing", Name(),
            declared.line);
    }
    buffer.freeId = Current().pipe->Acquire(freeEvent, true, loc);
    SetFlagImpl(freeEvent, buffer.freeId, loc);
    buffer.state = TBufState::FREE;
}

// ---- TPipe ----------------------------------------------------------------------------------------------------------
constexpr int CUBE_RESERVED = 3; // ids of M_MTE1 that TPipe keeps for the Matmul API on the cube core

Pipe::Pipe()
{
    Core& core = Current();
    RefuseProbe();
    if (core.pipe) {
        Fail(core.last, "TPipe", "a second TPipe while the first of this core is alive");
    }
    core.pipe = this;
    if (core.kind == CoreKind::Cube) {
        occupied_[static_cast<int>(HardEvent::M_MTE1)] = (1U << CUBE_RESERVED) - 1;
    }
}

Pipe::~Pipe()
{
    if (!destroyed_) Destroy();
}

uint32_t Pipe::Reserve(Hardware hardware, int64_t bytes, TPosition position, Loc loc)
{
    Core& core = Current();
    core.last = loc;
    const int h = static_cast<int>(hardware);
    if (hardware == Hardware::GM || hardware >= Hardware::MAX) {
        Fail(loc, "local memory", "InitBuffer: position %s has no local memory", NameOf(position));
    }
    const int64_t capacity = core.memory[h].capacity;
    if (capacity == 0) {
        Fail(loc, "core separation", "InitBuffer of %s: %s has no %s", NameOf(position), core.Name().c_str(), NameOf(hardware));
    }
    if (++buffers_ > 64) {
        Fail(loc, "local memory", "InitBuffer: a TPipe holds at most 64 buffers");
    }
    if (bytes <= 0) {
        Fail(loc, "local memory", "InitBuffer of %s with %lld bytes", NameOf(position), static_cast<long long>(bytes));
    }
    const int64_t rounded = (bytes + 31) / 32 * 32, start = used_[h];
    if (start + rounded > capacity) {
        Fail(loc, "local memory", "%s overflow: InitBuffer of %s needs %lld bytes, %lld are taken, %s has %lld", NameOf(hardware),
            NameOf(position), static_cast<long long>(rounded), static_cast<long long>(start), NameOf(hardware),
            static_cast<long long>(capacity));
    }
    used_[h] = static_cast<uint32_t>(start + rounded);
    return static_cast<uint32_t>(start);
}

void Pipe::Init(const std::shared_ptr<Queue>& shared, int64_t count, int64_t bytes, Loc loc)
{
    Queue& queue = *shared;
    if (!queue.buffers.empty()) {
        Fail(loc, "queue state", "InitBuffer of a %s queue that has buffers already (line %d)", queue.Name(), queue.declared.line);
    }
    if (count < 1) {
        Fail(loc, "queue state", "InitBuffer of a %s queue with %lld buffers", queue.Name(), static_cast<long long>(count));
    }
    queue.declared = loc;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t address = Reserve(queue.hardware, bytes, queue.position, loc);
        queue.buffers.emplace_back();
        Buffer& buffer = queue.buffers.back();
        buffer.address = address;
        buffer.bytes = static_cast<uint32_t>((bytes + 31) / 32 * 32);
        buffer.queue = &queue;
    }
    queues_.push_back(shared);
}

LocalRef Pipe::Init(TPosition position, int64_t bytes, Loc loc)
{
    LocalRef ref;
    ref.hardware = GetPhyType(position);
    ref.address = Reserve(ref.hardware, bytes, position, loc);
    ref.bytes = static_cast<uint32_t>((bytes + 31) / 32 * 32);
    ref.position = position;
    return ref;
}

int Pipe::Acquire(HardEvent event, bool occupy, Loc loc)
{
    Current().last = loc;
    if (event >= HardEvent::MAX) {
        Fail(loc, "event id", "this pair of memories has no event");
    }
    uint32_t& taken = occupied_[static_cast<int>(event)];
    for (int id = 0; id < launch->chip->eventIds; ++id) {
        if (!(taken & (1U << id))) {
            if (occupy) taken |= 1U << id;
            return id;
        }
    }
    Fail(loc, "event id", "all %d ids of %s are in use: fewer queues or buffers may be pending at once",
        launch->chip->eventIds, NameOf(event));
}

void Pipe::Release(HardEvent event, int64_t id, Loc loc)
{
    uint32_t& taken = occupied_[static_cast<int>(event)];
    if (id < 0 || id >= launch->chip->eventIds || !(taken & (1U << id))) {
        Fail(loc, "event id", "ReleaseEventID<%s>(%lld): the id is not allocated", NameOf(event), static_cast<long long>(id));
    }
    taken &= ~(1U << id);
}

void Pipe::Reset(Loc loc)
{
    for (const auto& queue : queues_) {
        for (Buffer& buffer : queue->buffers) {
            if (buffer.freeId >= 0) {
                WaitFlagImpl(queue->freeEvent, buffer.freeId, loc);
                Release(queue->freeEvent, buffer.freeId, loc);
            }
        }
        queue->buffers.clear();
        queue->waiting.clear();
    }
    queues_.clear();
    for (uint32_t& used : used_) used = 0;
    buffers_ = 0;
}

// The end of the kernel: every tensor must be back, every flag waited for. A destructor must not throw, so the first
// violation is kept and found when the core returns.
void Pipe::Destroy()
{
    destroyed_ = true;
    Core& core = Current();
    core.pipe = nullptr;
    if (std::uncaught_exceptions() > 0 || launch->failed) {
        return;
    }
    for (const auto& queue : queues_) {
        for (Buffer& buffer : queue->buffers) {
            if (buffer.state == TBufState::ENQUE) {
                ReportViolation(buffer.allocated, "queue state", Format("a tensor is still in the %s queue (line %d) at the end "
                    "of the kernel: DeQue is missing", queue->Name(), queue->declared.line));
            } else if (buffer.state != TBufState::FREE) {
                ReportViolation(buffer.allocated, "queue state", Format("a tensor of the %s queue (line %d) was never freed",
                    queue->Name(), queue->declared.line));
            } else if (buffer.freeId >= 0) {
                core.flags[static_cast<int>(queue->freeEvent)][buffer.freeId].set = false; // TPipe waits for it here
            }
        }
        if (queue->buffers.size() == 1 && queue->passes > 1) {
            const EventPipes pipes = PipesOf(queue->enqueueEvent);
            const std::string text = Format("the %s queue has one buffer (InitBuffer at line %d) and %lld passes: %s and %s never "
                "overlap; give it two", queue->Name(), queue->declared.line, static_cast<long long>(queue->passes),
                NameOf(pipes.source), NameOf(pipes.target));
            if (launch->options.requireDoubleBuffer) {
                ReportViolation(queue->declared, "double buffer", text);
            } else {
                Violation lint;
                lint.rule = "double buffer";
                lint.message = text;
                lint.line = queue->declared.line;
                lint.file = queue->declared.file;
                bool known = false;
                for (const Violation& v : launch->lints) known = known || (v.line == lint.line && v.file == lint.file);
                if (!known) launch->lints.push_back(lint);
            }
        }
    }
}

int64_t UbLeft()
{
    const Core& core = Current();
    return core.memory[static_cast<int>(Hardware::UB)].capacity - (core.pipe ? core.pipe->Used(Hardware::UB) : 0);
}

void* CurrentPipe(Loc loc)
{
    Core& core = Current();
    if (!core.pipe) {
        Fail(loc, "TPipe", "GetTPipePtr: this core has no TPipe yet");
    }
    return core.pipe;
}
} // namespace twin
} // namespace AscendC
