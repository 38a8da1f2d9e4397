// LocalTensor and GlobalTensor: typed views of a local memory and of global memory, with scalar access.
#ifndef TWIN_TENSOR_H
#define TWIN_TENSOR_H
#include "twin/half.h"
#include "twin/runtime.h"

namespace AscendC {
template <typename T> class LocalTensor {
public:
    using PrimType = T;
    LocalTensor() = default;
    explicit LocalTensor(const twin::LocalRef& ref) : ref_(ref) {}

    // The scalar unit reads and writes UB; it is ordered with the other units by flags alone.
    T GetValue(uint32_t offset, twin::Loc loc = twin::Loc::Here()) const
    {
        twin::Instr in(PIPE_S, "LocalTensor::GetValue", loc);
        T value;
        std::memcpy(&value, in.Read(ref_, int64_t(offset) * sizeof(T), sizeof(T), sizeof(T)), sizeof(T));
        return value;
    }

    template <typename V> void SetValue(uint32_t index, V value, twin::Loc loc = twin::Loc::Here()) const
    {
        twin::Instr in(PIPE_S, "LocalTensor::SetValue", loc);
        const T stored = static_cast<T>(value);
        std::memcpy(in.Write(ref_, int64_t(index) * sizeof(T), sizeof(T), sizeof(T)), &stored, sizeof(T));
    }

    LocalTensor operator[](uint32_t offset) const
    {
        LocalTensor moved(*this);
        const uint64_t bytes = uint64_t(offset) * sizeof(T);
        if (bytes > ref_.bytes) { // an empty view: any use of it reports the address
            moved.ref_.address += ref_.bytes;
            moved.ref_.bytes = 0;
            return moved;
        }
        moved.ref_.address += static_cast<uint32_t>(bytes);
        moved.ref_.bytes -= static_cast<uint32_t>(bytes);
        return moved;
    }

    template <typename U> LocalTensor<U> ReinterpretCast() const { return LocalTensor<U>(ref_); }
    uint32_t GetSize() const { return ref_.bytes / sizeof(T); }
    void SetSize(uint32_t size)
    {
        if (size * sizeof(T) <= ref_.bytes) {
            ref_.bytes = size * sizeof(T);
        }
    }
    int32_t GetPosition() const { return static_cast<int32_t>(ref_.position); }
    uint64_t GetPhyAddr() const { return ref_.address; }
    void SetUserTag(int32_t tag) { tag_ = tag; }
    int32_t GetUserTag() const { return tag_; }
    const twin::LocalRef& ref() const { return ref_; }

private:
    twin::LocalRef ref_;
    int32_t tag_ = -1;
};

template <typename T> class GlobalTensor {
public:
    using PrimType = T;

    void SetGlobalBuffer(__gm__ T* buffer, uint64_t size, twin::Loc loc = twin::Loc::Here())
    {
        int64_t left = 0;
        ref_.data = reinterpret_cast<uint8_t*>(buffer);
        ref_.allocation = twin::FindAllocation(buffer, &left, loc);
        ref_.before = 0;
        ref_.bytes = static_cast<int64_t>(size * sizeof(T));
        if (ref_.bytes > left) {
            twin::Fail(loc, "global bounds", "SetGlobalBuffer declares %llu elements of %zu bytes, but the allocation has "
                "only %lld bytes left from there", static_cast<unsigned long long>(size), sizeof(T),
                static_cast<long long>(left));
        }
    }

    void SetGlobalBuffer(__gm__ T* buffer, twin::Loc loc = twin::Loc::Here())
    {
        ref_.data = reinterpret_cast<uint8_t*>(buffer);
        ref_.before = 0;
        ref_.allocation = twin::FindAllocation(buffer, &ref_.bytes, loc);
    }

    T GetValue(uint64_t offset, twin::Loc loc = twin::Loc::Here()) const
    {
        twin::Instr in(PIPE_S, "GlobalTensor::GetValue", loc);
        T value;
        std::memcpy(&value, in.Read(ref_, Bytes(offset), sizeof(T)), sizeof(T));
        return value;
    }

    void SetValue(uint64_t offset, T value, twin::Loc loc = twin::Loc::Here())
    {
        twin::Instr in(PIPE_S, "GlobalTensor::SetValue", loc);
        std::memcpy(in.Write(ref_, Bytes(offset), sizeof(T)), &value, sizeof(T));
    }

    // May point outside (a negative step back is legal arithmetic); bounds are checked when bytes are touched.
    GlobalTensor operator[](uint64_t offset) const
    {
        GlobalTensor moved(*this);
        const int64_t bytes = Bytes(offset);
        moved.ref_.data = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(ref_.data) + bytes);
        moved.ref_.bytes -= bytes;
        moved.ref_.before += bytes;
        return moved;
    }

    uint64_t GetSize() const { return ref_.bytes / sizeof(T); }
    const __gm__ T* GetPhyAddr() const { return reinterpret_cast<const T*>(ref_.data); }
    __gm__ T* GetPhyAddr(uint64_t offset) const
    {
        return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(ref_.data) + Bytes(offset));
    }
    void SetL2CacheHint(CacheMode) {}
    const twin::GlobalRef& ref() const { return ref_; }

private:
    static int64_t Bytes(uint64_t elements) { return static_cast<int64_t>(elements) * static_cast<int64_t>(sizeof(T)); }
    twin::GlobalRef ref_;
};

namespace twin {
template <typename T> constexpr Element ElementOf()
{
    if (std::is_same<T, float>::value) return Element::F32;
    if (std::is_same<T, half>::value) return Element::F16;
    if (std::is_same<T, int32_t>::value) return Element::S32;
    if (std::is_same<T, int16_t>::value) return Element::S16;
    if (std::is_same<T, int8_t>::value) return Element::S8;
    return Element::Other;
}
} // namespace twin
} // namespace AscendC
#endif
