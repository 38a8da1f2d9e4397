// Names for messages, and the memories of the two chips.
#include <cstring>

#include "core.h"

namespace AscendC {
namespace twin {
const char* NameOf(pipe_t pipe)
{
    switch (pipe) {
        case PIPE_S: return "the scalar unit";
        case PIPE_V: return "the vector unit";
        case PIPE_M: return "the cube unit";
        case PIPE_MTE1: return "MTE1";
        case PIPE_MTE2: return "MTE2";
        case PIPE_MTE3: return "MTE3";
        case PIPE_FIX: return "FIX";
        default: return "all pipes";
    }
}

const char* NameOf(Hardware hardware)
{
    static const char* const names[] = {"global memory", "UB", "L1", "L0A", "L0B", "L0C", "the bias buffer",
        "the fixpipe buffer", "no memory"};
    return names[static_cast<int>(hardware)];
}

const char* NameOf(TPosition position)
{
    static const char* const names[] = {"GM", "A1", "A2", "B1", "B2", "C1", "C2", "CO1", "CO2", "VECIN", "VECOUT",
        "VECCALC", "SPM", "TSCM", "C2PIPE2GM", "C2PIPE2LOCAL", "none"};
    return names[static_cast<int>(position)];
}

const char* NameOf(HardEvent event)
{
    static const char* const names[] = {"MTE2_MTE1", "MTE1_MTE2", "MTE1_M", "M_MTE1", "MTE2_V", "V_MTE2", "MTE3_V",
        "V_MTE3", "M_V", "V_M", "V_V", "MTE3_MTE1", "MTE1_MTE3", "MTE1_V", "MTE2_M", "M_MTE2", "V_MTE1", "M_FIX", "FIX_M",
        "MTE3_MTE2", "MTE2_MTE3", "S_V", "V_S", "S_MTE2", "MTE2_S", "S_MTE3", "MTE3_S", "MTE2_FIX", "FIX_MTE2", "FIX_S",
        "M_S", "FIX_MTE3", "MTE1_FIX", "FIX_MTE1", "FIX_FIX", "none"};
    return names[static_cast<int>(event)];
}

const char* NameOf(TBufState state)
{
    static const char* const names[] = {"FREE", "OCCUPIED", "ENQUE", "DEQUE"};
    return names[static_cast<int>(state)];
}

std::string Core::Name() const
{
    if (kind == CoreKind::Unified) return "core";
    if (kind == CoreKind::Cube) return "cube core";
    return "vector core " + std::to_string(sub);
}

// Sizes in bytes: UB, L1, L0A, L0B, L0C. 910b is Atlas A2 (dav-c220), 910 the unified core (dav-c100).
const Chip* FindChip(const char* name)
{
    constexpr uint32_t K = 1024;
    static const Chip chips[] = {
        {"910b", {0, 192 * K, 512 * K, 64 * K, 64 * K, 128 * K, 1 * K, 2 * K}, false, 8, 24, 48},
        {"910", {0, 256 * K, 1024 * K, 64 * K, 64 * K, 256 * K, 0, 0}, true, 4, 32, 32},
    };
    for (const Chip& chip : chips) {
        if (std::strcmp(chip.name, name) == 0) {
            return &chip;
        }
    }
    return nullptr;
}
} // namespace twin
} // namespace AscendC
