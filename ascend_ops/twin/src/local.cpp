// Local memories: storage, shadow of initialised bytes, shadow of the last writer and readers of every 32 bytes.
#include "core.h"

#include <cstring>

namespace AscendC {
namespace twin {
void LocalMemory::Create(uint32_t bytes, Hardware hardware)
{
    capacity = bytes;
    if (bytes == 0) {
        return;
    }
    storage.reset(new uint8_t[bytes + 512]);
    data = storage.get() + (512 - reinterpret_cast<uintptr_t>(storage.get()) % 512) % 512;
    std::memset(data, 0xFF, bytes); // NaN in fp16 and fp32: what was never written should not look like a number
    defined.assign(bytes, 0);
    granules.resize((bytes + GRANULE - 1) / GRANULE);
    if (hardware == Hardware::L1 || hardware == Hardware::L0C) columns.assign(bytes / 32, 0);
    if (hardware == Hardware::L0A || hardware == Hardware::L0B) fractals.resize(bytes / 512);
}

void Core::CreateMemories()
{
    for (int h = 1; h < MEMORIES; ++h) {
        const auto hardware = static_cast<Hardware>(h);
        const bool here = kind == CoreKind::Unified || (hardware == Hardware::UB) == (kind == CoreKind::Vector);
        memory[h].Create(here ? launch->chip->capacity[h] : 0, hardware);
    }
}

uint8_t* LocalData(const LocalRef& ref) { return Current().memory[static_cast<int>(ref.hardware)].data + ref.address; }

static std::string EventName(int source, int target)
{
    for (int e = 0; e < EVENTS; ++e) {
        const EventPipes pipes = PipesOf(static_cast<HardEvent>(e));
        if (PipeIndex(pipes.source) == source && PipeIndex(pipes.target) == target) {
            return NameOf(static_cast<HardEvent>(e));
        }
    }
    return "none";
}

[[noreturn]] static void Race(const LocalRef& ref, int pipe, bool write, int otherPipe, bool otherWrote,
    uint16_t otherLine, int64_t start, Loc loc, const char* name)
{
    const auto unit = [](int p) { return NameOf(p == 7 ? PIPE_FIX : static_cast<pipe_t>(p)); };
    std::string text = Format("%s: %s %s %s at byte %lld, which %s %s at line %d, and nothing orders the two: ", name,
        unit(pipe), write ? "writes" : "reads", NameOf(ref.hardware), static_cast<long long>(start), unit(otherPipe),
        otherWrote ? "wrote" : "reads", LocOf(otherLine).line);
    if (pipe == otherPipe) {
        static const char* const pipes[] = {"PIPE_S", "PIPE_V", "PIPE_M", "PIPE_MTE1", "PIPE_MTE2", "PIPE_MTE3", "", "PIPE_FIX"};
        text += Format("PipeBarrier<%s> is missing between them", pipes[pipe]);
    } else {
        text += Format("SetFlag and WaitFlag<HardEvent::%s> are missing", EventName(otherPipe, pipe).c_str());
    }
    if (ref.buffer) {
        text += Format(", or EnQue and DeQue of the %s queue (line %d, state %s)", ref.buffer->queue->Name(),
            ref.buffer->queue->declared.line, NameOf(ref.buffer->state));
    }
    Fail(loc, "race", "%s", text.c_str());
}

void CheckLocal(Core& core, int pipe, const LocalRef& ref, int64_t offset, int64_t bytes, bool write, Loc loc,
    const char* name)
{
    if (bytes == 0) {
        return;
    }
    LocalMemory& memory = core.memory[static_cast<int>(ref.hardware)];
    const int64_t start = ref.address + offset, end = start + bytes;
    if (!write) {
        const void* hole = std::memchr(memory.defined.data() + start, 0, static_cast<size_t>(bytes));
        if (hole) {
            Fail(loc, "uninitialised read", "%s: reads %s at byte %lld, which nothing has written", name,
                NameOf(ref.hardware), static_cast<long long>(static_cast<const uint8_t*>(hole) - memory.defined.data()));
        }
    }
    const uint32_t now = core.count[pipe];
    const uint16_t line = LineOf(loc);
    const Clock& clock = core.clock[pipe];
    // The cube adds to L0C in order by itself; Mmad checks the exception (small tiles) on its own.
    const bool inOrder = pipe == 0 || (pipe == PipeIndex(PIPE_M) && ref.hardware == Hardware::L0C);
    for (int64_t g = start / GRANULE; g <= (end - 1) / GRANULE; ++g) {
        LocalGranule& granule = memory.granules[static_cast<size_t>(g)];
        if (granule.writer != 0) {
            const bool same = granule.writerPipe == pipe;
            if (!(same && (inOrder || granule.writer == now)) && clock.own[granule.writerPipe] < granule.writer) {
                Race(ref, pipe, write, granule.writerPipe, true, granule.writerLine, std::max(start, g * GRANULE), loc, name);
            }
        }
        if (write) {
            for (int q = 0; q < PIPES; ++q) { // a pipe reads its operands in order, so its own reads are safe
                if (q != pipe && granule.readers[q] > clock.own[q]) {
                    Race(ref, pipe, true, q, false, granule.readerLines[q], std::max(start, g * GRANULE), loc, name);
                }
                granule.readers[q] = 0;
            }
            granule.writer = now;
            granule.writerPipe = static_cast<uint8_t>(pipe);
            granule.writerLine = line;
        } else {
            granule.readers[pipe] = now;
            granule.readerLines[pipe] = line;
        }
    }
    if (write) {
        std::memset(memory.defined.data() + start, 1, static_cast<size_t>(bytes));
        if (!memory.columns.empty()) {
            std::fill(memory.columns.begin() + start / 32, memory.columns.begin() + (end + 31) / 32, 0);
        }
    }
}

void Instr::Undefine(const LocalRef& ref, int64_t offset, int64_t bytes)
{
    if (bytes > 0) {
        LocalMemory& memory = Current().memory[static_cast<int>(ref.hardware)];
        std::memset(memory.defined.data() + ref.address + offset, 0, static_cast<size_t>(bytes));
        std::memset(memory.data + ref.address + offset, 0xFF, static_cast<size_t>(bytes));
    }
}

void TagNz(const LocalRef& ref, int64_t offset, int64_t bytes, int64_t columnBytes)
{
    LocalMemory& memory = Current().memory[static_cast<int>(ref.hardware)];
    for (int64_t b = (ref.address + offset) / 32; b < (ref.address + offset + bytes) / 32; ++b) {
        memory.columns[static_cast<size_t>(b)] = columnBytes;
    }
}

FractalTag TagOf(const LocalRef& l1, int64_t offset)
{
    LocalMemory& memory = Current().memory[static_cast<int>(l1.hardware)];
    FractalTag tag;
    const int64_t source = l1.address + offset, column = memory.columns[static_cast<size_t>(source / 32)];
    if (column != 0) {
        tag.source = source;
        tag.column = column;
        tag.matrix = l1.buffer ? l1.buffer->address : -2;
    }
    return tag;
}

void SetFractal(const LocalRef& l0, int64_t offset, const FractalTag& tag)
{
    LocalMemory& memory = Current().memory[static_cast<int>(l0.hardware)];
    memory.fractals[static_cast<size_t>((l0.address + offset) / 512)] = tag;
}

FractalTag GetFractal(const LocalRef& l0, int64_t offset)
{
    const LocalMemory& memory = Current().memory[static_cast<int>(l0.hardware)];
    return memory.fractals[static_cast<size_t>((l0.address + offset) / 512)];
}

bool PendingMmad(const LocalRef& ref, int64_t bytes)
{
    Core& core = Current();
    const int pipe = PipeIndex(PIPE_M);
    const LocalMemory& memory = core.memory[static_cast<int>(ref.hardware)];
    for (int64_t g = ref.address / GRANULE; g < (ref.address + bytes) / GRANULE && g < int64_t(memory.granules.size()); ++g) {
        const LocalGranule& granule = memory.granules[static_cast<size_t>(g)];
        if (granule.writer != 0 && granule.writerPipe == pipe && core.clock[pipe].own[pipe] < granule.writer) {
            return true;
        }
    }
    return false;
}
} // namespace twin
} // namespace AscendC
