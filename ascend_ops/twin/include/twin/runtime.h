// What the API headers need of the runtime: where a call came from, how to report a violation, and `Instr`, one issued
// instruction, through which every access to memory is checked.
#ifndef TWIN_RUNTIME_H
#define TWIN_RUNTIME_H
#include <cstdarg>
#include <cstddef>
#include <cstdint>

#include "twin/cost.h"
#include "twin/types.h"

namespace AscendC {
namespace twin {
// A default argument `Loc loc = Loc::Here()` is evaluated where the kernel calls the API.
struct Loc {
    const char* file;
    int line;
    static constexpr Loc Here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return Loc{f, l}; }
};

// Reports a violation of `rule` and leaves the kernel. `format` is printf's.
[[noreturn]] TWIN_API void Fail(Loc loc, const char* rule, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

struct Buffer; // one buffer of a queue, see queue.h
struct Allocation;

// A piece of a local memory: addresses in bytes from the start of the memory of this core.
struct LocalRef {
    Hardware hardware = Hardware::MAX;
    uint32_t address = 0;
    uint32_t bytes = 0; // left in the buffer from `address`
    Buffer* buffer = nullptr; // null for a TBuf
    uint32_t generation = 0;
    TPosition position = TPosition::MAX;
};

struct GlobalRef {
    uint8_t* data = nullptr;
    int64_t bytes = 0; // declared by SetGlobalBuffer, or up to the end of the allocation; from `data`
    int64_t before = 0; // bytes between the start of the declared range and `data`
    Allocation* allocation = nullptr;
};

enum class Gm { Plain, Atomic };

// One instruction on one pipe. Declare it, read operands, write results, set `work`; the destructor books its time.
class TWIN_API Instr {
public:
    Instr(pipe_t pipe, const char* name, Loc loc);
    ~Instr();
    Instr(const Instr&) = delete;
    Instr& operator=(const Instr&) = delete;

    // Check bounds, alignment, queue state, initialisation, order; return where the bytes are.
    const uint8_t* Read(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t align = 32);
    uint8_t* Write(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t align = 32);
    const uint8_t* Read(const GlobalRef& ref, int64_t offset, int64_t bytes);
    uint8_t* Write(const GlobalRef& ref, int64_t offset, int64_t bytes, Gm mode = Gm::Plain);

    // The accesses to UB that follow are those of the next repeat; without it, operands are read and written from their
    // beginning on, as much in every repeat.
    void Repeat();
    // Bytes a write covers but does not define (padding that the chip leaves open).
    void Undefine(const LocalRef& ref, int64_t offset, int64_t bytes);
    [[noreturn]] void Fail(const char* rule, const char* format, ...) __attribute__((format(printf, 3, 4)));
    void Range(const char* field, int64_t value, int64_t low, int64_t high);

    Loc where() const { return loc_; }
    const char* name() const { return name_; }

    Work work;

private:
    void CheckTensor(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t align, bool write);
    void CheckGlobal(const GlobalRef& ref, int64_t offset, int64_t bytes, bool write);
    pipe_t pipe_;
    const char* name_;
    Loc loc_;
    int exceptions_;
};

// Atomic mode of the stores of this core.
enum class AtomicOp { None, Add };
enum class Element : uint8_t { Other, F32, F16, S32, S16, S8, BF16 };
struct AtomicMode {
    AtomicOp op = AtomicOp::None;
    Element element = Element::Other;
};
TWIN_API AtomicMode GetAtomic();
TWIN_API void SetAtomic(AtomicOp op, Element element, Loc loc);

TWIN_API Allocation* FindAllocation(const void* pointer, int64_t* left, Loc loc);
TWIN_API uint8_t* LocalData(const LocalRef& ref);
TWIN_API void CleanDataCache(const GlobalRef& ref, bool all); // the scalar unit forgets a line, or all
TWIN_API int64_t UbLeft(); // bytes of UB that no buffer takes

// Synchronisation, see sync.h.
TWIN_API void SetFlagImpl(HardEvent event, int64_t id, Loc loc);
TWIN_API void WaitFlagImpl(HardEvent event, int64_t id, Loc loc);
TWIN_API void PipeBarrierImpl(pipe_t pipe, Loc loc);
TWIN_API void CrossSet(int mode, pipe_t pipe, int64_t id, Loc loc);
TWIN_API void CrossWait(int64_t id, Loc loc);
TWIN_API void SyncAllImpl(bool vectorOnly, Loc loc);
TWIN_API int64_t BlockIdx();
TWIN_API int64_t BlockNum();
TWIN_API int64_t SubBlockIdx();
TWIN_API bool MmadNanAllowed();

// Where the fractals of L0A and L0B came from, so that Mmad can tell a wrong stride. Addresses are in L1.
struct FractalTag {
    int64_t source = -1; // byte address in L1
    int64_t column = 0;  // bytes between two columns of fractals of the NZ matrix it was cut from
    int64_t matrix = -1; // first byte of the L1 buffer
    bool transposed = false;
};
TWIN_API void TagNz(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t columnBytes);
TWIN_API FractalTag TagOf(const LocalRef& l1, int64_t offset);
TWIN_API void SetFractal(const LocalRef& l0, int64_t offset, const FractalTag& tag);
TWIN_API FractalTag GetFractal(const LocalRef& l0, int64_t offset);
// L0C: whether the pending result of an earlier Mmad needs PipeBarrier<PIPE_M> before it is added to.
TWIN_API bool PendingMmad(const LocalRef& ref, int64_t bytes);
} // namespace twin
} // namespace AscendC
#endif
