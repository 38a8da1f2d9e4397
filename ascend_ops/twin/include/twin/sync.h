// Flags inside a core, flags between cores, barriers, block indices, atomic stores.
#ifndef TWIN_SYNC_H
#define TWIN_SYNC_H
#include "twin/queue.h"

namespace AscendC {
template <HardEvent event> inline void SetFlag(int32_t eventID, twin::Loc loc = twin::Loc::Here())
{
    twin::SetFlagImpl(event, eventID, loc);
}
template <HardEvent event> inline void WaitFlag(int32_t eventID, twin::Loc loc = twin::Loc::Here())
{
    twin::WaitFlagImpl(event, eventID, loc);
}
template <pipe_t pipe> inline void PipeBarrier(twin::Loc loc = twin::Loc::Here())
{
    static_assert(pipe != PIPE_S, "the scalar unit orders itself: PipeBarrier<PIPE_S> does not exist");
    twin::PipeBarrierImpl(pipe, loc);
}

template <uint8_t modeId, pipe_t pipe> inline void CrossCoreSetFlag(twin::U16 flagId, twin::Loc loc = twin::Loc::Here())
{
    static_assert(modeId <= 2, "flag modes of c220 are 0, 1 and 2");
    twin::CrossSet(modeId, pipe, flagId, loc);
}
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
inline void CrossCoreWaitFlag(twin::U16 flagId, twin::Loc loc = twin::Loc::Here())
{
    twin::CrossWait(flagId, loc);
}
template <bool isAIVOnly = true> inline void SyncAll(twin::Loc loc = twin::Loc::Here())
{
    twin::SyncAllImpl(isAIVOnly, loc);
}

inline int64_t GetBlockIdx() { return twin::BlockIdx(); }
inline int64_t GetBlockNum() { return twin::BlockNum(); }
inline int64_t GetSubBlockIdx() { return twin::SubBlockIdx(); }

template <typename T> inline void SetAtomicAdd(twin::Loc loc = twin::Loc::Here())
{
    static_assert(twin::ElementOf<T>() != twin::Element::Other, "SetAtomicAdd takes int8, int16, half, int32 or float");
    twin::SetAtomic(twin::AtomicOp::Add, twin::ElementOf<T>(), loc);
}
inline void SetAtomicNone(twin::Loc loc = twin::Loc::Here())
{
    twin::SetAtomic(twin::AtomicOp::None, twin::Element::Other, loc);
}

// The scalar unit's cache holds no data of its own in the twin: its lines only cost time.
template <typename T, CacheLine entire, DcciDst target> inline void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst)
{
    twin::CleanDataCache(dst.ref(), entire == CacheLine::ENTIRE_DATA_CACHE);
}
template <typename T, CacheLine entire> inline void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst)
{
    twin::CleanDataCache(dst.ref(), entire == CacheLine::ENTIRE_DATA_CACHE);
}
} // namespace AscendC
#endif
