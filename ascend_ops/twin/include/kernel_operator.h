// Stand-in for CANN's kernel_operator.h: kernels written in Ascend C are compiled with g++ against this header and run
// on the CPU by the twin's runtime. Names and signatures follow CANN 8; every call also checks what the chip demands.
#ifndef TWIN_KERNEL_OPERATOR_H
#define TWIN_KERNEL_OPERATOR_H
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "twin/macros.h"

#include "twin/half.h"

#include "twin/types.h"

#include "twin/params.h"

#include "twin/runtime.h"

#include "twin/tensor.h"

#include "twin/queue.h"

#include "twin/sync.h"

#include "twin/copy.h"

#include "twin/vector.h"
#include "twin/vector_repeat.h"
#include "twin/vector_reduce.h"
#include "twin/vector_select.h"

#include "twin/cube.h"

#include "twin/launch.h"
#endif
