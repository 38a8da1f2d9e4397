// Violations: the first one of a launch is kept, with kernel, block, core, source line and rule.
#include "core.h"

#include <cstdio>
#include <cstring>
#include <map>

namespace AscendC {
namespace twin {
Launch* launch = nullptr;

Core& Current() { return *launch->current; }

void AssertionFailed(const char* condition, const char* file, int line)
{
    const Loc last = Current().last;
    Fail(Loc{file, line}, "assertion", "%s does not hold; the last instruction before it is at line %d of %s", condition,
        last.line, last.file ? last.file : "?");
}

std::string Format(const char* format, va_list arguments)
{
    va_list copy;
    va_copy(copy, arguments);
    const int length = std::vsnprintf(nullptr, 0, format, copy);
    va_end(copy);
    std::string text(static_cast<size_t>(length) + 1, '\0');
    std::vsnprintf(&text[0], text.size(), format, arguments);
    text.pop_back();
    return text;
}

std::string Format(const char* format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    std::string text = Format(format, arguments);
    va_end(arguments);
    return text;
}

// Source lines by a 16-bit number, to keep the shadow of the memories small.
static std::vector<Loc> lines(1, Loc{"", 0});

uint16_t LineOf(Loc loc)
{
    static std::map<std::pair<const char*, int>, uint16_t> numbers;
    static Loc last{nullptr, 0};
    static uint16_t lastNumber = 0;
    if (loc.file == last.file && loc.line == last.line) {
        return lastNumber;
    }
    const auto found = numbers.emplace(std::make_pair(loc.file, loc.line), static_cast<uint16_t>(lines.size()));
    if (found.second) {
        if (lines.size() == 65535) {
            lines.resize(1);
            numbers.clear();
            return 0;
        }
        lines.push_back(loc);
    }
    last = loc;
    return lastNumber = found.first->second;
}

Loc LocOf(uint16_t line) { return line < lines.size() ? lines[line] : lines[0]; }

void ReportViolation(Loc loc, const char* rule, const std::string& message)
{
    if (launch->failed) {
        return;
    }
    launch->failed = true;
    Violation& v = launch->violation;
    v.rule = rule;
    v.message = message;
    v.kernel = launch->kernel ? launch->kernel->name : "";
    v.file = loc.file;
    v.line = loc.line;
    if (launch->current) {
        v.block = launch->current->block;
        v.core = launch->current->Name();
    }
}

void Fail(Loc loc, const char* rule, const char* format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const std::string text = Format(format, arguments);
    va_end(arguments);
    ReportViolation(loc, rule, text);
    throw Stop();
}

void Instr::Fail(const char* rule, const char* format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const std::string text = std::string(name_) + ": " + Format(format, arguments);
    va_end(arguments);
    ReportViolation(loc_, rule, text);
    throw Stop();
}

void Instr::Range(const char* field, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high) {
        Fail("parameter range", "%s is %lld, it must be from %lld to %lld", field, static_cast<long long>(value),
            static_cast<long long>(low), static_cast<long long>(high));
    }
}
} // namespace twin
} // namespace AscendC
