# Tests `cmake --install`: it installs a small archive and only public headers, and CMake and pkg-config find them.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")
set(prefix "${WORK}/prefix")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}")

file(GLOB_RECURSE headers RELATIVE "${prefix}" "${prefix}/*.h")
list(FILTER headers EXCLUDE REGEX "^include/tensorferry/[a-z_]+\\.h$")
if(headers)
  message(FATAL_ERROR "headers were installed that are not public: ${headers}")
endif()

file(GLOB_RECURSE archive "${prefix}/libtensorferry.a")
run("${STRIP}" --strip-unneeded -o stripped.a "${archive}")
file(SIZE "${WORK}/stripped.a" bytes)
message(STATUS "libtensorferry.a, stripped: ${bytes} bytes")
math(EXPR most "3 * 1024 * 1024")
if(bytes GREATER_EQUAL most AND NOT CUDA) # with CUDA, the archive also holds the cuda channels
  message(FATAL_ERROR "libtensorferry.a has ${bytes} bytes when stripped, at least 3 MiB")
endif()

build_example(06-embed-cpp "-DCMAKE_PREFIX_PATH=${prefix}")
expect_few_libraries("${WORK}/06-embed-cpp/embed")

# The prefix also works after a move, and without CMake.
file(RENAME "${prefix}" "${WORK}/moved")
find_program(pkg_config pkg-config REQUIRED)
file(GLOB_RECURSE description "${WORK}/moved/tensorferry.pc")
get_filename_component(folder "${description}" DIRECTORY)
set(ENV{PKG_CONFIG_PATH} "${folder}:$ENV{PKG_CONFIG_PATH}")
run("${pkg_config}" --cflags --libs tensorferry)
separate_arguments(flags UNIX_COMMAND "${output}")
file(READ "${SOURCE}/README.md" text)
if(NOT text MATCHES "```cpp\n([^`]+)```")
  message(FATAL_ERROR "README.md has no example in C++")
endif()
file(WRITE "${WORK}/readme.cpp" "${CMAKE_MATCH_1}")
run("${CXX}" -std=c++20 -Wall -Wextra readme.cpp -o readme ${flags})
expect_few_libraries("${WORK}/readme")
