# Settings of every target: language level, warnings, sanitizers, compiler cache.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # the libraries end up inside the Python module
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)    # clang-tidy and editors read it

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# The warnings for the project's own code. Third-party headers are included as system headers, without warnings.
add_library(tensorferry_warnings INTERFACE)
target_compile_options(tensorferry_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow
  $<$<BOOL:${TENSORFERRY_WERROR}>:-Werror>)

if(TENSORFERRY_SANITIZE)
  add_compile_options(-fsanitize=${TENSORFERRY_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${TENSORFERRY_SANITIZE})
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=lld TENSORFERRY_HAS_LLD)
  if(TENSORFERRY_HAS_LLD)  # links a test in a quarter of the time of GNU ld
    add_link_options(-fuse-ld=lld)
  endif()
endif()
if(TENSORFERRY_SANITIZE MATCHES thread)
  # Tests skip cases that ThreadSanitizer does not support: a forked child that ends or starts threads.
  add_compile_definitions(TENSORFERRY_UNDER_TSAN)
endif()
if(TENSORFERRY_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "TENSORFERRY_FUZZERS needs clang: -DCMAKE_CXX_COMPILER=clang++-16")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# Build folders and clones share one cache for sources without torch, because ccache hashes paths inside the tree
# relative to it. Precompiled headers contain absolute paths and need the sloppiness settings of ccache's manual.
find_program(TENSORFERRY_CCACHE ccache)
if(TENSORFERRY_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_ABSSTDERR=1 ${TENSORFERRY_CCACHE})
  set(TENSORFERRY_PCH_LAUNCHER env CCACHE_SLOPPINESS=pch_defines,time_macros ${TENSORFERRY_CCACHE})
endif()
