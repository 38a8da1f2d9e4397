// Cycles one instruction occupies its pipe, and how much later it has ended.
#include "twin/cost.h"

#include <algorithm>

namespace AscendC {
namespace twin {
double Cycles(const Work& work, const Parameters& p)
{
    const auto bytes = [&work](Path path) { return static_cast<double>(work[path]); };
    const double stalls = static_cast<double>(work.stalls) * p.bank_cycles;
    switch (work.kind) {
        case Kind::Scalar:
            return work[Path::SCALAR_GM] ? p.scalar_gm_cycles + static_cast<double>(work.lines) * p.l2_read_latency
                                         : p.scalar_cycles;
        case Kind::Copy: {
            const double global = std::max(bytes(Path::HBM_READ) / p.hbm_bytes, bytes(Path::L2_READ) / p.l2_read_bytes) +
                bytes(Path::GM_WRITE) / p.l2_write_bytes;
            const double local = bytes(Path::UB_TO_GM) / p.ub_to_gm_bytes;
            return p.mte_head + std::max(0.0, static_cast<double>(work.bursts - 1)) * p.burst_cycles +
                std::max(global * p.gm_share, local);
        }
        case Kind::Fixpipe:
            return p.mte_head + static_cast<double>(work.bursts - 1) * p.burst_cycles +
                std::max(bytes(Path::GM_WRITE) / p.l2_write_bytes * p.gm_share, bytes(Path::L0C_TO_GM) / p.l0c_to_gm_bytes);
        case Kind::Vector:
            return p.vector_head + static_cast<double>(work.elements * work.element_bytes) / p.vector_bytes + stalls;
        case Kind::Exp:
            return p.vector_head + static_cast<double>(work.elements * work.element_bytes) / p.vector_exp_bytes + stalls;
        case Kind::Reduce:
            return p.vector_head * static_cast<double>(work.steps) +
                static_cast<double>(work.elements * work.element_bytes) / p.vector_bytes + stalls;
        case Kind::LoadData:
            return p.load_head + bytes(Path::L1_TO_L0A) / p.l1_to_l0a_bytes + bytes(Path::L1_TO_L0B) / p.l1_to_l0b_bytes;
        case Kind::Mmad:
            return p.cube_head + static_cast<double>(work.fractals) / p.cube_macs;
        default:
            return 0;
    }
}

double Latency(const Work& work, const Parameters& p)
{
    if (work.kind != Kind::Copy && work.kind != Kind::Fixpipe) return 0;
    return work[Path::L2_READ] ? p.l2_read_latency : work[Path::GM_WRITE] ? p.l2_write_latency : 0;
}
} // namespace twin
} // namespace AscendC
