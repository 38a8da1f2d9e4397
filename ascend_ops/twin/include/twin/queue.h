// TPipe, TQueBind, TQue and TBuf. The state of every buffer goes FREE -> OCCUPIED -> ENQUE -> DEQUE -> FREE; EnQue and
// FreeTensor set the queue's events, DeQue and AllocTensor wait for them.
#ifndef TWIN_QUEUE_H
#define TWIN_QUEUE_H
#include <deque>
#include <memory>
#include <vector>

#include "twin/tensor.h"

namespace AscendC {
namespace twin {
struct Buffer {
    uint32_t address = 0, bytes = 0, generation = 0;
    TBufState state = TBufState::FREE;
    HardEvent enqueueEvent = HardEvent::MAX;
    int enqueId = -1, freeId = -1;
    Loc allocated{"", 0};
    struct Queue* queue = nullptr;
};

struct TWIN_API Queue {
    TPosition source, target, position;
    int depth;
    Hardware hardware;
    HardEvent enqueueEvent, freeEvent;
    std::deque<Buffer> buffers; // a deque: tensors keep pointers to its elements
    std::deque<Buffer*> waiting; // EnQue'd and not yet DeQue'd
    size_t cursor = 0;
    int64_t passes = 0; // EnQues in all: a queue used once need not be double
    Loc declared{"", 0};

    Queue(TPosition source, TPosition target, int depth);
    LocalRef Alloc(Loc loc);
    void EnQue(const LocalRef& ref, HardEvent event, Loc loc);
    LocalRef DeQue(HardEvent event, Loc loc);
    void Free(const LocalRef& ref, Loc loc);
    LocalRef RefOf(Buffer& buffer) const;
    const char* Name() const;
};

class TWIN_API Pipe {
public:
    Pipe();
    ~Pipe();
    Pipe(const Pipe&) = delete;
    void Init(const std::shared_ptr<Queue>& queue, int64_t count, int64_t bytes, Loc loc);
    LocalRef Init(TPosition position, int64_t bytes, Loc loc);
    int Acquire(HardEvent event, bool occupy, Loc loc);
    void Release(HardEvent event, int64_t id, Loc loc);
    void Reset(Loc loc);
    void Destroy();
    int64_t Used(Hardware hardware) const { return used_[static_cast<int>(hardware)]; }

private:
    uint32_t Reserve(Hardware hardware, int64_t bytes, TPosition position, Loc loc);
    std::vector<std::shared_ptr<Queue>> queues_; // shared: a kernel's queues die before its TPipe
    uint32_t used_[static_cast<int>(Hardware::MAX)] = {};
    uint32_t occupied_[static_cast<int>(HardEvent::MAX)] = {};
    int buffers_ = 0;
    bool destroyed_ = false;
};
} // namespace twin

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0> class TQueBind {
public:
    TQueBind() : queue_(std::make_shared<twin::Queue>(src, dst, depth)) {}

    template <typename T> LocalTensor<T> AllocTensor(twin::Loc loc = twin::Loc::Here())
    {
        return LocalTensor<T>(queue_->Alloc(loc));
    }
    template <typename T> void FreeTensor(LocalTensor<T>& tensor, twin::Loc loc = twin::Loc::Here())
    {
        queue_->Free(tensor.ref(), loc);
    }
    template <typename T> bool EnQue(const LocalTensor<T>& tensor, twin::Loc loc = twin::Loc::Here())
    {
        queue_->EnQue(tensor.ref(), queue_->enqueueEvent, loc);
        return true;
    }
    template <TPosition from, TPosition to, typename T>
    bool EnQue(const LocalTensor<T>& tensor, twin::Loc loc = twin::Loc::Here())
    {
        queue_->EnQue(tensor.ref(), GetQueEvt(GetPhyType(from), GetPhyType(to), true), loc);
        return true;
    }
    template <typename T> LocalTensor<T> DeQue(twin::Loc loc = twin::Loc::Here())
    {
        return LocalTensor<T>(queue_->DeQue(queue_->enqueueEvent, loc));
    }
    template <TPosition from, TPosition to, typename T> LocalTensor<T> DeQue(twin::Loc loc = twin::Loc::Here())
    {
        return LocalTensor<T>(queue_->DeQue(GetQueEvt(GetPhyType(from), GetPhyType(to), true), loc));
    }
    bool VacantInQue() { return static_cast<int>(queue_->waiting.size()) < depth; }
    bool HasTensorInQue() { return !queue_->waiting.empty(); }
    int32_t GetTensorCountInQue() { return static_cast<int32_t>(queue_->waiting.size()); }
    bool HasIdleBuffer()
    {
        for (const auto& buffer : queue_->buffers) {
            if (buffer.state == TBufState::FREE) {
                return true;
            }
        }
        return false;
    }
    template <typename T> TBufState GetState(const LocalTensor<T>& tensor) const { return tensor.ref().buffer->state; }

protected:
    friend class TPipe;
    std::shared_ptr<twin::Queue> queue_;
};

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue : public TQueBind<GetBufferLogicPos(pos, true), GetBufferLogicPos(pos, false), depth, mask> {
    static_assert(GetBufferLogicPos(pos, true) != TPosition::MAX, "TQue of this position does not exist: use TBuf");
};

template <TPosition pos = TPosition::VECCALC> class TBuf {
public:
    template <typename T> LocalTensor<T> Get() { return LocalTensor<T>(ref_); }
    template <typename T> LocalTensor<T> Get(uint32_t length, twin::Loc loc = twin::Loc::Here())
    {
        return GetWithOffset<T>(length, 0, loc);
    }
    template <typename T>
    LocalTensor<T> GetWithOffset(uint32_t size, uint32_t offset, twin::Loc loc = twin::Loc::Here())
    {
        if (uint64_t(offset) + uint64_t(size) * sizeof(T) > ref_.bytes) {
            twin::Fail(loc, "local bounds", "TBuf::Get of %u elements of %zu bytes at byte %u, but the buffer has %u bytes",
                size, sizeof(T), offset, ref_.bytes);
        }
        twin::LocalRef part = ref_;
        part.address += offset;
        part.bytes = static_cast<uint32_t>(size * sizeof(T));
        return LocalTensor<T>(part);
    }

private:
    friend class TPipe;
    twin::LocalRef ref_;
};

class TPipe {
public:
    template <TPosition src, TPosition dst, int32_t depth, auto mask>
    bool InitBuffer(TQueBind<src, dst, depth, mask>& que, int64_t num, int64_t len, twin::Loc loc = twin::Loc::Here())
    {
        pipe_.Init(que.queue_, num, len, loc);
        return true;
    }
    template <TPosition pos> bool InitBuffer(TBuf<pos>& buf, int64_t len, twin::Loc loc = twin::Loc::Here())
    {
        buf.ref_ = pipe_.Init(pos, len, loc);
        return true;
    }
    template <HardEvent evt> TEventID AllocEventID(twin::Loc loc = twin::Loc::Here())
    {
        return static_cast<TEventID>(pipe_.Acquire(evt, true, loc));
    }
    template <HardEvent evt> void ReleaseEventID(TEventID id, twin::Loc loc = twin::Loc::Here())
    {
        pipe_.Release(evt, id, loc);
    }
    template <HardEvent evt> TEventID FetchEventID(twin::Loc loc = twin::Loc::Here())
    {
        return static_cast<TEventID>(pipe_.Acquire(evt, false, loc));
    }
    TEventID FetchEventID(HardEvent evt, twin::Loc loc = twin::Loc::Here())
    {
        return static_cast<TEventID>(pipe_.Acquire(evt, false, loc));
    }
    void Reset(twin::Loc loc = twin::Loc::Here()) { pipe_.Reset(loc); }
    void Destroy() { pipe_.Destroy(); }
    void Init() {}

private:
    twin::Pipe pipe_;
};

namespace twin {
TWIN_API void* CurrentPipe(Loc loc);
}
} // namespace AscendC

// TPipe holds its twin::Pipe first, so the pointer that the runtime knows is the TPipe's.
inline AscendC::TPipe* GetTPipePtr(AscendC::twin::Loc loc = AscendC::twin::Loc::Here())
{
    static_assert(sizeof(AscendC::TPipe) == sizeof(AscendC::twin::Pipe), "TPipe is its twin::Pipe");
    return static_cast<AscendC::TPipe*>(AscendC::twin::CurrentPipe(loc));
}
#endif
