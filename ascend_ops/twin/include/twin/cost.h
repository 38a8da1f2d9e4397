// The cost model's seam: what one instruction did (`Work`), the machine's numbers (`Parameters`) and the cycles one
// instruction occupies its pipe (`Cycles`). The runtime makes the timeline: an instruction starts when its pipe is free,
// it has been issued and every flag its pipe waited for is set; its pipe is free again `Cycles` later, and it has ended,
// which is what flags tell, another `Latency` later: until then it is in flight, beside others of its pipe.
#ifndef TWIN_COST_H
#define TWIN_COST_H
#include <cstdint>

namespace AscendC {
namespace twin {
enum class Kind : uint8_t { Scalar, Copy, Vector, Exp, Reduce, LoadData, Mmad, Fixpipe, Sync };

// Paths between memories; the timeline and the totals report bytes by path. What is read from global memory counts as
// L2_READ; the part that was not in L2 yet also as HBM_READ, in whole sectors.
enum class Path : uint8_t {
    HBM_READ, L2_READ, GM_WRITE, GM_TO_UB, GM_TO_L1, UB_TO_GM, L0C_TO_GM, L1_TO_L0A, L1_TO_L0B, UB_READ, UB_WRITE,
    SCALAR_GM, COUNT,
};

struct Work {
    Kind kind = Kind::Scalar;
    int64_t bytes[static_cast<int>(Path::COUNT)] = {};
    int64_t elements = 0; // vector: elements processed
    int64_t element_bytes = 0; // vector: size of the widest element
    int64_t bursts = 0; // copies: separate runs of bytes in global memory
    int64_t fractals = 0; // cube: 16x16x16 products; LoadData: fractals moved
    int64_t steps = 1; // instructions the call expands to (a reduction is several)
    int64_t stalls = 0; // vector: further accesses to a bank group of UB in one repeat, see banks.cpp
    int64_t lines = 0; // scalar: lines that its cache had to get

    int64_t& operator[](Path path) { return bytes[static_cast<int>(path)]; }
    int64_t operator[](Path path) const { return bytes[static_cast<int>(path)]; }
};

// name, default value (Atlas A2, 910B), unit and meaning
#define TWIN_PARAMETERS(X)                                                                                             \
    X(clock_mhz, 1850, "MHz")                                                                                          \
    X(cube_macs, 1, "fractal products a cycle")                                                                        \
    X(cube_head, 21, "cycles before the first product")                                                                \
    X(vector_bytes, 256, "bytes a cycle of plain vector instructions")                                                 \
    X(vector_exp_bytes, 128, "bytes a cycle of Exp, Ln, Div, Sqrt")                                                    \
    X(vector_head, 23, "cycles before the first result")                                                               \
    X(bank_cycles, 1, "cycles for every further access to a bank group of UB in one repeat")                           \
    X(scalar_cycles, 1, "cycles a scalar access to UB")                                                                \
    X(scalar_gm_cycles, 20, "cycles a scalar access to global memory, cached")                                         \
    X(dcache_bytes, 16384, "capacity of the scalar unit's cache in bytes")                                             \
    X(issue_cycles, 1, "cycles of the scalar unit to issue an instruction")                                            \
    X(hbm_bytes, 32, "bytes a cycle a core from HBM")                                                                  \
    X(l2_read_bytes, 110, "bytes a cycle a core read from L2")                                                         \
    X(l2_write_bytes, 86, "bytes a cycle a core written to L2")                                                        \
    X(ub_to_gm_bytes, 64, "bytes a cycle from UB")                                                                     \
    X(l0c_to_gm_bytes, 64, "bytes a cycle from L0C")                                                                   \
    X(l2_read_latency, 241, "cycles from a read of L2 to its end, beside which others of the pipe go on")              \
    X(l2_write_latency, 96, "cycles from a write to L2 to its end")                                                    \
    X(copies_in_flight, 16, "copies of a pipe that have begun and not ended, at most")                                 \
    X(mte_head, 13, "cycles of a copy with global memory beside those of its bytes")                                   \
    X(burst_cycles, 0.8, "cycles for every further run of bytes in a copy")                                            \
    X(l1_to_l0a_bytes, 256, "bytes a cycle")                                                                           \
    X(l1_to_l0b_bytes, 128, "bytes a cycle")                                                                           \
    X(load_head, 28, "cycles before the first fractal")                                                                \
    X(flag_cycles, 2, "cycles of SetFlag and WaitFlag")                                                                \
    X(cross_flag_cycles, 100, "cycles from CrossCoreSetFlag to the waiting core")                                      \
    X(sync_all_cycles, 500, "cycles of SyncAll")                                                                       \
    X(launch_cycles, 0, "cycles to start the cores")                                                                   \
    X(gm_share, 1, "factor on global-memory time for cores that share the bandwidth")                                  \
    X(l2_bytes, 201326592, "capacity of L2 in bytes")

struct Parameters {
#define TWIN_FIELD(name, value, unit) double name = value;
    TWIN_PARAMETERS(TWIN_FIELD)
#undef TWIN_FIELD
};

double Cycles(const Work& work, const Parameters& p);
double Latency(const Work& work, const Parameters& p);
} // namespace twin
} // namespace AscendC
#endif
