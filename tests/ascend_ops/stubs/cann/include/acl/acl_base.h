// Stands in for CANN's header: only what the binding uses.
#pragma once

#include <cstdint>

typedef void* aclrtStream;
