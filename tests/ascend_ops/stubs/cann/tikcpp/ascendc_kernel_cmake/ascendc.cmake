# Stands in for CANN's CMake functions: a kernel's launch function calls back into the test instead of the chip. As in
# CANN, each kernel gets a header aclrtlaunch_<kernel>.h with a function of that name: blocks, stream, its parameters.
set(STUB_DIR ${CMAKE_CURRENT_LIST_DIR})

function(ascendc_library target type)
    set(include ${CMAKE_BINARY_DIR}/include/${target})
    set(sources ${STUB_DIR}/launcher.cpp)
    foreach(source ${ARGN})
        file(READ ${source} text)
        string(REGEX MATCH "extern \"C\" __global__ __aicore__ void ([a-z_]+)\\(([^)]*)\\)" found "${text}")
        if(NOT found)
            message(FATAL_ERROR "no kernel in ${source}")
        endif()
        set(name ${CMAKE_MATCH_1})
        string(REGEX REPLACE "[ \n]+" " " parameters "${CMAKE_MATCH_2}")
        string(REPLACE "GM_ADDR" "void*" parameters "${parameters}")
        string(REPLACE "void* " "" names "${parameters}")
        string(REGEX MATCHALL "," commas "${names}")
        list(LENGTH commas count)
        math(EXPR count "${count} + 1")
        set(signature "extern \"C\" uint32_t aclrtlaunch_${name}(uint32_t blockDim, aclrtStream stream, ${parameters})")
        file(WRITE ${include}/aclrtlaunch_${name}.h "#pragma once\n#include \"acl/acl_base.h\"\n${signature};\n")
        set(written ${CMAKE_BINARY_DIR}/${target}_${name}.cpp)
        file(WRITE ${written}
            "#include \"aclrtlaunch_${name}.h\"\n"
            "int Launched(const char*, uint32_t, uint32_t, void**, void*);\n"
            "${signature}\n{\n    void* all[] = {${names}};\n"
            "    return Launched(\"${name}\", blockDim, ${count}, all, stream);\n}\n")
        list(APPEND sources ${written})
    endforeach()
    add_library(${target} ${type} ${sources})
    target_include_directories(${target} PUBLIC ${include} ${ASCEND_CANN_PACKAGE_PATH}/include)
endfunction()

function(ascendc_include_directories target scope)
endfunction()
