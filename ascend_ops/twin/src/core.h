// The runtime's own structures: a core with its memories, clocks and flags, and the launch that holds all cores.
#ifndef TWIN_CORE_H
#define TWIN_CORE_H
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "twin/launch.h"
#include "twin/queue.h"

namespace AscendC {
namespace twin {
constexpr int MEMORIES = static_cast<int>(Hardware::MAX);
constexpr int EVENTS = static_cast<int>(HardEvent::MAX);
constexpr int CROSS_FLAGS = 16;
constexpr int GRANULE = 32;
constexpr int64_t L2_LINE = 512, DATA_LINE = 64; // bytes; the second of the scalar unit's cache

// ---- order: who has finished before whom --------------------------------------------------------------------------
// Instruction number `count` of a pipe; a pipe's global id is core * PIPES + pipe.
struct Epoch {
    uint32_t count = 0; // 0: none
    uint16_t pipe = 0;
    uint16_t line = 0;
};

// What is known to have finished: own[q] instructions of pipe q of this core, (*others)[id] of all other cores.
struct Clock {
    uint32_t own[PIPES] = {};
    std::shared_ptr<const std::vector<uint32_t>> others;
};

struct Snapshot { // a clock sent along a flag, with the time at which the flag is set
    Clock clock;
    double time = 0;
    Loc loc{"", 0};
};

// ---- local memory ---------------------------------------------------------------------------------------------------
struct LocalGranule {
    uint32_t writer = 0; // instruction count
    uint8_t writerPipe = 0;
    uint16_t writerLine = 0;
    uint32_t readers[PIPES] = {};
    uint16_t readerLines[PIPES] = {};
};

struct LocalMemory {
    uint32_t capacity = 0;
    std::unique_ptr<uint8_t[]> storage;
    uint8_t* data = nullptr; // 512-byte aligned
    std::vector<uint8_t> defined;
    std::vector<LocalGranule> granules;
    std::vector<int64_t> columns; // L1, L0C: bytes between columns of the NZ matrix, per 32-byte block
    std::vector<FractalTag> fractals; // L0A, L0B
    void Create(uint32_t bytes, Hardware hardware);
};

// ---- global memory --------------------------------------------------------------------------------------------------
struct GlobalGranule {
    Epoch writer, reader;
    uint32_t more = 0;  // index + 1 of further readers and atomic writers
    uint32_t split = 0; // index + 1 of the units
};

struct Further {
    std::vector<Epoch> readers, atomics;
};

struct Allocation {
    std::string name;
    uint8_t* data = nullptr;
    int64_t bytes = 0;
    int unit = 1; // bytes of an element: the finest piece that order is tracked for
    bool readOnly = false;
    std::vector<uint8_t> defined; // empty: all bytes are
    std::vector<GlobalGranule> granules; // empty until written or read when not read-only
    std::vector<std::vector<GlobalGranule>> splits;
    std::vector<Further> further;
    int index = 0;
    std::vector<uint8_t> inL2; // per line
};

// ---- cores ----------------------------------------------------------------------------------------------------------
enum class CoreKind { Cube, Vector, Unified };

struct Flag {
    bool set = false;
    Snapshot snapshot;
};

struct CrossFlag {
    int mode = -1;
    std::vector<std::deque<Snapshot>> sources; // by index in the group that must all set it
};

enum class CoreState { Queued, Ready, Waiting, Finished, Stopped }; // Queued: no physical core is free yet

struct Core {
    int id = 0, block = 0, sub = 0, blockIndex = 0;
    CoreKind kind = CoreKind::Vector;
    LocalMemory memory[MEMORIES];
    Clock clock[PIPES];
    uint32_t count[PIPES] = {};
    double time[PIPES] = {}; // when each pipe takes its next instruction
    double ended[PIPES] = {}; // when all that it was given have ended
    std::deque<double> flying[PIPES]; // when the last copies end, at most as many as may be in flight
    double busy[PIPES] = {};
    std::unordered_set<int64_t> dataLines; // lines in the scalar unit's cache
    std::deque<int64_t> dataQueue; // the same in the order of their arrival
    Flag flags[EVENTS][8];
    CrossFlag cross[CROSS_FLAGS];
    AtomicMode atomic;
    Pipe* pipe = nullptr;
    Loc last{"", 0};
    // scheduling
    CoreState state = CoreState::Ready;
    bool started = false, cancelled = false;
    int waitingFlag = -1; // id of the cross-core flag, or -2 for SyncAll
    Loc waitingLoc{"", 0};
    ucontext_t context;
    void* stack = nullptr;
    void* fake = nullptr; // the address sanitizer's shadow of the stack
    std::string Name() const;
    void CreateMemories();
    double Ended(int pipe) const { return std::max(time[pipe], ended[pipe]); }
};

struct Chip {
    const char* name;
    uint32_t capacity[MEMORIES];
    bool unified;
    int eventIds, cubeCores, vectorCores;
};
const Chip* FindChip(const char* name);

struct Options {
    int64_t blocks = 1;
    uint64_t seed = 0; // 0: blocks in order
    bool requireDoubleBuffer = false, nanAllowed = true;
    int64_t maxInstructions = int64_t(1) << 40;
};

struct Violation {
    std::string rule, message, kernel, core, file;
    int block = -1, line = 0;
};

struct Stop {}; // thrown through a kernel that broke a rule
struct Cancel {}; // thrown through the other kernels of that launch
struct Probe { // thrown by KERNEL_TASK_TYPE_DEFAULT when only the type is asked for
    KernelMetaType type;
};

struct Launch {
    const KernelEntry* kernel = nullptr;
    const Chip* chip = nullptr;
    Options options;
    Parameters parameters;
    KernelMetaType type = KERNEL_TYPE_MAX;
    std::vector<const void*> arguments;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<std::unique_ptr<Allocation>>* allocations = nullptr;
    Core* current = nullptr;
    ucontext_t scheduler;
    void* schedulerFake = nullptr;
    bool probing = false, failed = false;
    Violation violation;
    std::vector<Violation> lints;
    int64_t instructions = 0;
    double totals[static_cast<int>(Path::COUNT)] = {};
    double fractals = 0, elements = 0, l2Used = 0;
    std::vector<std::pair<Allocation*, int64_t>> l2Queue; // lines in L2, in order of arrival
    size_t l2Head = 0;
    std::vector<double> freeCores; // times at which blocks that have finished left their cores
    // SyncAll
    int syncArrived = 0, syncGeneration = 0;
    Snapshot syncPending, syncDone;
    uint64_t random = 0;
};

extern Launch* launch; // the one that runs; the twin is not reentrant
Core& Current();
uint16_t LineOf(Loc loc);
Loc LocOf(uint16_t line);
void ReportViolation(Loc loc, const char* rule, const std::string& message); // keeps the first
std::string Format(const char* format, va_list arguments);
std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

// order.cpp
bool Finished(const Core& core, int pipe, const Epoch& epoch);
void Join(Clock& clock, const Core& core, const Clock& other, const Core& from);
void JoinOwn(Clock& clock, const Clock& other);
Clock Completed(const Core& core, int pipe);
std::string Describe(const Epoch& epoch);

// scheduler.cpp
int64_t ResidentBlocks(); // blocks that run at once
void Block(Core& core, int flag, Loc loc);
void RunCores();

// local.cpp
void CheckLocal(Core& core, int pipe, const LocalRef& ref, int64_t offset, int64_t bytes, bool write, Loc loc,
    const char* name);
// global.cpp
void CheckGlobalOrder(Core& core, int pipe, const GlobalRef& ref, int64_t offset, int64_t bytes, bool write, bool atomic,
    Loc loc, const char* name);
int64_t TouchL2(Allocation& allocation, int64_t start, int64_t bytes);
int64_t TouchDataCache(Core& core, const Allocation& allocation, int64_t start, int64_t bytes);
// banks.cpp
void BeginBanks();
void TouchBank(const LocalRef& ref, int64_t offset, int64_t bytes, bool write);
int64_t BankStalls(const Work& work);
// finish.cpp
void CheckEnd(Core& core);
void CheckCounters();
// launch.cpp
void RefuseProbe(); // before KERNEL_TASK_TYPE_DEFAULT nothing may run
} // namespace twin
} // namespace AscendC
#endif
