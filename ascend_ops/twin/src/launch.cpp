// Kernels by name, global memory of a launch, and the C interface that Python calls.
#include "core.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace AscendC {
namespace twin {
namespace {
constexpr int64_t GUARD_BYTES = 4096; // around every array: an address beyond it belongs to no array

std::map<std::string, KernelEntry>& Kernels()
{
    static std::map<std::string, KernelEntry> kernels;
    return kernels;
}
std::unique_ptr<Launch> last; // kept until the next one, since its cores refer to it while they end
std::vector<std::unique_ptr<Allocation>> allocations;
std::string reply;

struct Arena {
    std::vector<void*> blocks;
    ~Arena()
    {
        for (void* block : blocks) std::free(block);
    }
    uint8_t* Take(int64_t bytes)
    {
        const int64_t rounded = (bytes + 511) / 512 * 512;
        void* block = std::aligned_alloc(512, static_cast<size_t>(rounded + 2 * GUARD_BYTES));
        if (!block) return nullptr;
        blocks.push_back(block);
        return static_cast<uint8_t*>(block) + GUARD_BYTES;
    }
};

std::string Quote(const std::string& text)
{
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        if (static_cast<unsigned char>(c) < 32) {
            out += ' ';
        } else {
            out += c;
        }
    }
    return out + "\"";
}

std::string ToJson(const Violation& v)
{
    return Format("{\"rule\": %s, \"message\": %s, \"kernel\": %s, \"block\": %d, \"core\": %s, \"file\": %s, \"line\": %d}",
        Quote(v.rule).c_str(), Quote(v.message).c_str(), Quote(v.kernel).c_str(), v.block, Quote(v.core).c_str(),
        Quote(v.file).c_str(), v.line);
}

void AddCore(Launch& l, int block, int sub, int blockIndex, CoreKind kind)
{
    auto core = std::make_unique<Core>();
    core->id = static_cast<int>(l.cores.size());
    core->block = block;
    core->sub = sub;
    core->blockIndex = blockIndex;
    core->kind = kind;
    core->state = block < ResidentBlocks() ? CoreState::Ready : CoreState::Queued;
    core->time[0] = l.parameters.launch_cycles;
    l.cores.push_back(std::move(core));
}

bool MakeCores(Launch& l)
{
    for (int b = 0; b < l.options.blocks; ++b) {
        if (l.chip->unified) {
            if (l.type == KERNEL_TYPE_MIX_AIC_1_1 || l.type == KERNEL_TYPE_MIX_AIC_1_2) {
                ReportViolation(Loc{"", 0}, "task type", "a kernel for split cube and vector cores does not run on this chip");
                return false;
            }
            AddCore(l, b, 0, b, CoreKind::Unified);
            continue;
        }
        switch (l.type) {
            case KERNEL_TYPE_AIV_ONLY:
            case KERNEL_TYPE_MIX_AIV_1_0: AddCore(l, b, 0, b, CoreKind::Vector); break;
            case KERNEL_TYPE_AIC_ONLY:
            case KERNEL_TYPE_MIX_AIC_1_0: AddCore(l, b, 0, b, CoreKind::Cube); break;
            case KERNEL_TYPE_MIX_AIC_1_1:
                AddCore(l, b, 0, b, CoreKind::Cube);
                AddCore(l, b, 0, b, CoreKind::Vector);
                break;
            case KERNEL_TYPE_MIX_AIC_1_2:
                AddCore(l, b, 0, b, CoreKind::Cube);
                AddCore(l, b, 0, 2 * b, CoreKind::Vector);
                AddCore(l, b, 1, 2 * b + 1, CoreKind::Vector);
                break;
            default:
                ReportViolation(Loc{"", 0}, "task type", "this kernel type does not exist on dav-c220");
                return false;
        }
    }
    return true;
}

// Calls the kernel once, on no core, until it names its type.
void FindType(Launch& l)
{
    l.cores.push_back(std::make_unique<Core>());
    l.current = l.cores[0].get();
    l.probing = true;
    try {
        l.kernel->call(l.arguments.data());
        ReportViolation(Loc{"", 0}, "task type", "the kernel never calls KERNEL_TASK_TYPE_DEFAULT");
    } catch (const Probe& probe) {
        l.type = probe.type;
    } catch (const Stop&) {
    }
    l.probing = false;
    l.current = nullptr;
    l.cores.clear();
}

std::string Totals(const Launch& l)
{
    static const char* const paths[] = {"hbm_read", "l2_read", "gm_write", "gm_to_ub", "gm_to_l1", "ub_to_gm", "l0c_to_gm",
        "l1_to_l0a", "l1_to_l0b", "ub_read", "ub_write", "scalar_gm"};
    static_assert(sizeof(paths) / sizeof(paths[0]) == static_cast<size_t>(Path::COUNT), "a name for every path");
    std::string text = "{";
    for (int i = 0; i < static_cast<int>(Path::COUNT); ++i) {
        text += Format("%s\"%s\": %.17g", i ? ", " : "", paths[i], l.totals[i]);
    }
    return text + "}";
}

std::string CoresJson(const Launch& l)
{
    static const char* const units[] = {"scalar", "vector", "cube", "mte1", "mte2", "mte3", "", "fix"};
    std::string text = "[";
    for (const auto& core : l.cores) {
        double end = 0;
        std::string busy;
        for (int p = 0; p < PIPES; ++p) {
            end = std::max(end, core->Ended(p));
            if (p != 6) busy += Format(", \"%s\": %.17g", units[p], core->busy[p]);
        }
        const char* kind = core->kind == CoreKind::Cube ? "cube" : core->kind == CoreKind::Vector ? "vector" : "unified";
        text += Format("%s{\"block\": %d, \"kind\": \"%s\", \"sub\": %d, \"end\": %.17g%s}", text.size() > 1 ? ", " : "",
            core->block, kind, core->sub, end, busy.c_str());
    }
    return text + "]";
}

std::string Reply(const Launch& l)
{
    double makespan = 0;
    for (const auto& core : l.cores) {
        for (int p = 0; p < PIPES; ++p) makespan = std::max(makespan, core->Ended(p));
    }
    std::string lints = "[";
    for (const Violation& v : l.lints) lints += (lints.size() > 1 ? ", " : "") + ToJson(v);
    return Format("{\"violation\": %s, \"lints\": %s], \"makespan\": %.17g, \"instructions\": %lld, \"fractals\": %.17g, "
        "\"elements\": %.17g, \"bytes\": %s, \"cores\": %s}", l.failed ? ToJson(l.violation).c_str() : "null", lints.c_str(),
        makespan, static_cast<long long>(l.instructions), l.fractals, l.elements, Totals(l).c_str(), CoresJson(l).c_str());
}
} // namespace

void Register(const KernelEntry& entry) { Kernels()[entry.name] = entry; }

void TaskType(KernelMetaType type)
{
    if (launch->probing) {
        throw Probe{type};
    }
}

void RefuseProbe()
{
    if (launch->probing) {
        Fail(Current().last, "task type", "KERNEL_TASK_TYPE_DEFAULT must be the kernel's first statement");
    }
}

Allocation* FindAllocation(const void* pointer, int64_t* left, Loc loc)
{
    RefuseProbe();
    const auto* address = static_cast<const uint8_t*>(pointer);
    for (auto& allocation : allocations) {
        if (address >= allocation->data && address <= allocation->data + allocation->bytes) {
            *left = allocation->data + allocation->bytes - address;
            return allocation.get();
        }
    }
    Fail(loc, "global bounds", "SetGlobalBuffer: the address belongs to none of the kernel's arrays");
}
} // namespace twin
} // namespace AscendC

using namespace AscendC::twin;

// How an argument is passed.
enum Mode { BY_VALUE = 0, READ_WRITE = 1, READ_ONLY = 2, SCRATCH = 3 };

struct TwinArgument {
    void* data;
    int64_t bytes;
    int32_t mode, unit;
    const char* name;
};

struct TwinOptions {
    const char* chip;
    int64_t blocks, seed, max_instructions;
    int32_t require_double_buffer, nan_allowed;
    const double* parameters; // in the order of twin_parameters, or null
};

extern "C" {
TWIN_API const char* twin_kernels()
{
    reply = "{";
    for (const auto& item : Kernels()) {
        reply += (reply.size() > 1 ? ", " : "") + Quote(item.first) + ": [";
        for (int i = 0; i < item.second.count; ++i) {
            const Argument& a = item.second.arguments[i];
            reply += Format("%s[\"%c\", %d]", i ? ", " : "", a.kind, a.size);
        }
        reply += "]";
    }
    reply += "}";
    return reply.c_str();
}

TWIN_API const char* twin_parameters()
{
    reply = "[";
#define TWIN_ROW(name, value, unit)                                                                                    \
    reply += Format("%s[\"%s\", %.17g, %s]", reply.size() > 1 ? ", " : "", #name, double(value), Quote(unit).c_str());
    TWIN_PARAMETERS(TWIN_ROW)
#undef TWIN_ROW
    reply += "]";
    return reply.c_str();
}

TWIN_API const char* twin_launch(const char* kernel, const TwinArgument* arguments, int32_t count, const TwinOptions* options)
{
    last = std::make_unique<Launch>();
    Launch& l = *last;
    launch = &l;
    allocations.clear();
    l.kernel = &Kernels().at(kernel);
    l.chip = FindChip(options->chip);
    l.options.blocks = options->blocks;
    l.options.seed = static_cast<uint64_t>(options->seed);
    l.options.maxInstructions = options->max_instructions;
    l.options.requireDoubleBuffer = options->require_double_buffer != 0;
    l.options.nanAllowed = options->nan_allowed != 0;
    if (options->parameters) {
        const double* value = options->parameters;
#define TWIN_READ(name, standard, unit) l.parameters.name = *value++;
        TWIN_PARAMETERS(TWIN_READ)
#undef TWIN_READ
    }
    Arena arena;
    std::vector<uint8_t*> pointers(static_cast<size_t>(count), nullptr);
    for (int32_t i = 0; i < count; ++i) {
        const TwinArgument& a = arguments[i];
        if (a.mode == BY_VALUE) {
            l.arguments.push_back(a.data);
            continue;
        }
        auto allocation = std::make_unique<Allocation>();
        allocation->name = a.name;
        allocation->bytes = a.bytes;
        allocation->unit = a.unit;
        allocation->readOnly = a.mode == READ_ONLY;
        allocation->data = arena.Take(a.bytes);
        if (!allocation->data) {
            ReportViolation(Loc{"", 0}, "memory", Format("no memory for '%s'", a.name));
            return (reply = Reply(l)).c_str();
        }
        if (a.mode == SCRATCH) {
            allocation->defined.assign(static_cast<size_t>(a.bytes), 0);
            std::memset(allocation->data, 0xFF, static_cast<size_t>(a.bytes));
        } else {
            std::memcpy(allocation->data, a.data, static_cast<size_t>(a.bytes));
        }
        allocation->inL2.assign(static_cast<size_t>(a.bytes / L2_LINE + 1), 0);
        allocation->index = i;
        pointers[static_cast<size_t>(i)] = allocation->data;
        l.arguments.push_back(&pointers[static_cast<size_t>(i)]);
        allocations.push_back(std::move(allocation));
    }
    FindType(l);
    if (!l.failed && MakeCores(l)) {
        RunCores();
        CheckCounters();
    }
    size_t index = 0;
    for (int32_t i = 0; i < count; ++i) {
        if (arguments[i].mode == BY_VALUE) continue;
        const Allocation& allocation = *allocations[index++];
        if (!allocation.readOnly) std::memcpy(arguments[i].data, allocation.data, static_cast<size_t>(allocation.bytes));
    }
    reply = Reply(l);
    allocations.clear();
    l.current = nullptr;
    return reply.c_str();
}
}
