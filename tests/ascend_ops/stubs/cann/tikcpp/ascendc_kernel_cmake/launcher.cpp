// Launches of the stub library call a function that the test sets.
#include <cstdint>

using Launcher = int (*)(const char*, uint32_t, uint32_t, void**, void*);
static Launcher current = nullptr;

extern "C" __attribute__((visibility("default"))) void set_launcher(Launcher launcher) { current = launcher; }

int Launched(const char* name, uint32_t blocks, uint32_t count, void** arguments, void* stream)
{
    return current == nullptr ? -1 : current(name, blocks, count, arguments, stream);
}
