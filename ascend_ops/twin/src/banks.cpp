// Banks of UB: 16 groups of three (910: four), a group for every 32 bytes in turn, a bank of a group for every 64 KB.
// In a repeat the vector unit reads and writes one block of 32 bytes of each group, and a bank does one of the two; more
// of them wait. A result is written one repeat later where its blocks lie in the banks of an operand's, one by one, which
// is how an instruction in place goes without waiting.
#include "core.h"

namespace AscendC {
namespace twin {
namespace {
constexpr int BLOCK = 32, GROUPS = 16, REPEAT = 256;
constexpr size_t OPERANDS = 4, MOST_BLOCKS = 9;

struct Operand { // a tensor that is read or written
    int64_t base = 0, start = 0, bytes = 0; // base tells one from another, where it is touched in pieces
    bool write = false;
    size_t count = 0;
    int64_t blocks[MOST_BLOCKS] = {}; // different ones in this repeat
};

std::vector<Operand> operands;
bool repeats, tooMany; // told one by one; more operands than one can say of what is read and written together
int64_t stalls;

uint64_t BankOf(int64_t block) { return static_cast<uint64_t>(block % GROUPS + GROUPS * (block * BLOCK / 65536)); }

void Add(Operand& operand, int64_t start, int64_t bytes)
{
    for (int64_t block = start / BLOCK; block * BLOCK < start + bytes; ++block) {
        bool known = operand.count == MOST_BLOCKS;
        for (size_t i = 0; i < operand.count; ++i) known = known || operand.blocks[i] == block;
        if (!known) operand.blocks[operand.count++] = block; // what is read again in a repeat is read once
    }
}

// Cycles that the operands' blocks take in one repeat beyond the first.
int64_t StallsOfRepeat()
{
    int reads[GROUPS] = {}, writes[GROUPS] = {}, most = 1;
    uint64_t read = 0, written = 0;
    for (size_t o = 0; o < operands.size(); ++o) {
        const Operand& operand = operands[o];
        for (size_t i = 0; i < operand.count; ++i) {
            const int64_t block = operand.blocks[i];
            bool before = false; // by another operand: the same block is read once
            for (size_t p = 0; p < o && !operand.write; ++p) {
                for (size_t j = 0; j < operands[p].count; ++j) {
                    before = before || (!operands[p].write && operands[p].blocks[j] == block);
                }
            }
            (operand.write ? written : read) |= uint64_t(1) << BankOf(block);
            if (!before) most = std::max(most, ++(operand.write ? writes : reads)[block % GROUPS]);
        }
    }
    bool late = false;
    for (const Operand& result : operands) {
        for (const Operand& operand : operands) {
            bool alike = result.write && !operand.write && result.count == operand.count;
            for (size_t i = 0; alike && i < result.count; ++i) {
                alike = BankOf(result.blocks[i]) == BankOf(operand.blocks[i]);
            }
            late = late || alike;
        }
    }
    return most - 1 + (!late && (read & written) != 0);
}

void EndRepeat()
{
    stalls += StallsOfRepeat();
    for (Operand& operand : operands) operand.count = 0;
}
} // namespace

void BeginBanks()
{
    operands.clear();
    repeats = tooMany = false;
    stalls = 0;
}

void TouchBank(const LocalRef& ref, int64_t offset, int64_t bytes, bool write)
{
    if (tooMany) return;
    const int64_t start = static_cast<int64_t>(ref.address) + offset;
    if (repeats) {
        for (Operand& operand : operands) {
            if (operand.base == ref.address && operand.write == write) return Add(operand, start, bytes);
        }
    }
    tooMany = operands.size() == OPERANDS;
    if (tooMany) return;
    Operand operand;
    operand.base = ref.address;
    operand.start = start;
    operand.bytes = bytes;
    operand.write = write;
    if (repeats) Add(operand, start, bytes);
    operands.push_back(operand);
}

void Instr::Repeat()
{
    if (repeats) EndRepeat();
    repeats = true;
}

int64_t BankStalls(const Work& work)
{
    if (tooMany || operands.empty()) return 0;
    if (repeats) {
        EndRepeat();
        return stalls;
    }
    const int64_t size = work.elements * work.element_bytes, count = (size + REPEAT - 1) / REPEAT;
    for (int64_t r = 0; r < count; ++r) {
        for (Operand& operand : operands) {
            const int64_t from = operand.bytes * r * REPEAT / size;
            const int64_t to = std::min(operand.bytes, operand.bytes * (r + 1) * REPEAT / size);
            Add(operand, operand.start + from, to - from);
        }
        EndRepeat();
    }
    return stalls;
}
} // namespace twin
} // namespace AscendC
