# The functions that the folders' CMakeLists.txt call. cmake/README.md has an example of each.

# Adds a folder. Skips a folder without a CMakeLists.txt.
function(tensorferry_add_folder folder)
  if(EXISTS "${PROJECT_SOURCE_DIR}/${folder}/CMakeLists.txt")
    add_subdirectory("${PROJECT_SOURCE_DIR}/${folder}" "${PROJECT_BINARY_DIR}/${folder}")
  endif()
endfunction()

function(tensorferry_cache_precompiled_headers name)
  if(TENSORFERRY_PCH_LAUNCHER)
    set_target_properties(${name} PROPERTIES CXX_COMPILER_LAUNCHER "${TENSORFERRY_PCH_LAUNCHER}")
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      target_compile_options(${name} PRIVATE -fpch-preprocess)
    else()
      target_compile_options(${name} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
    endif()
  endif()
endfunction()

# Sets the properties of every target of the project: the repository as include root, warnings as errors, and torch's
# precompiled headers if TORCH is given.
function(tensorferry_target name torch)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE tensorferry_warnings)
  if(torch)
    tensorferry_cache_precompiled_headers(${name})
    # The flags must equal those of the precompiled header: -fPIC, even for an executable, which would have -fPIE.
    target_precompile_headers(${name} REUSE_FROM tensorferry_torch_pch)
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE -fPIC)
  endif()
endfunction()

# tensorferry_library(NAME [TORCH] [SOURCES ...] [HEADERS ...] [LINK ...])
# A static library, or without SOURCES a header-only one. LINK is public. TORCH adds tensorferry::libtorch.
function(tensorferry_library name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;HEADERS;LINK" ${ARGN})
  if(arg_TORCH)
    list(APPEND arg_LINK tensorferry::libtorch)
  endif()
  if(NOT arg_SOURCES)
    add_library(${name} INTERFACE ${arg_HEADERS})
    target_include_directories(${name} INTERFACE "${PROJECT_SOURCE_DIR}")
    target_link_libraries(${name} INTERFACE ${arg_LINK})
    return()
  endif()
  add_library(${name} STATIC ${arg_SOURCES} ${arg_HEADERS})
  target_include_directories(${name} INTERFACE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PUBLIC ${arg_LINK})
  tensorferry_target(${name} ${arg_TORCH})
endfunction()

# tensorferry_executable(NAME [TORCH] SOURCES ... LINK ...)
function(tensorferry_executable name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;LINK" ${ARGN})
  if(arg_TORCH)
    list(APPEND arg_LINK tensorferry::libtorch)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINK})
  tensorferry_target(${name} ${arg_TORCH})
endfunction()

# Sets what the torch-free tests and their precompiled header must have in common.
function(tensorferry_compile_as_test name)
  # Compiles in two thirds of the time. Under clang's sanitizers -O0 takes less than half of the time of -O1.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1> $<$<CONFIG:Debug>:-O0>)
endfunction()

# GoogleTest's headers take half of the compile time of a small test. clang parses them once for all torch-free tests.
# GCC 12 warns of its own library then, because it no longer takes what the header includes for a system header.
if(TENSORFERRY_TESTS AND CMAKE_CXX_COMPILER_ID MATCHES Clang)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/pch/empty_test.cpp" CONTENT "")
  add_library(tensorferry_test_pch OBJECT EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/pch/empty_test.cpp")
  target_link_libraries(tensorferry_test_pch PRIVATE GTest::gtest GTest::gmock tensorferry_warnings)
  set_target_properties(tensorferry_test_pch PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(tensorferry_test_pch PRIVATE -fPIE)  # as executables have
  tensorferry_compile_as_test(tensorferry_test_pch)
  tensorferry_cache_precompiled_headers(tensorferry_test_pch)
  target_precompile_headers(tensorferry_test_pch PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
endif()

# tensorferry_test(NAME [NEEDS_TORCH] SOURCES ... LINK ... [LABELS ...] [TIMEOUT seconds] [RESOURCE_LOCK names ...]
#                  [OWN_PROCESS suites ...] [ONE_PROCESS] [TOGETHER suites ...] [LONG] [ALONE] [COMPUTES])
# A GoogleTest binary. Each of its suites is a CTest with its own process; list_suites.cmake, which runs after the build,
# splits suites of many cases into several. A case has 180 s, or TIMEOUT, so that a call without an answer ends first,
# after 60 s, and says why, and each further case of the process adds 10 s; half an hour under make soak. Except:
#   NEEDS_TORCH, ONE_PROCESS   all cases share one process
#   OWN_PROCESS                each case of the suites whose name matches one of these regular expressions has its own
#                              process, because it forks, which a process may do only before it has other threads, or
#                              changes what the process cannot take back
# Tests that need a GPU (label gpu or gpu2) have a process for each case, because page-locked memory of an earlier case may
# be unlocked, which waits for all kernels; those of the suites TOGETHER share one.
# LONG: starts before others, so that it does not end alone. ALONE: no other test runs at the same time.
# COMPUTES: compiled with optimisation. NEEDS_TORCH: not built with TENSORFERRY_TORCH=OFF.
function(tensorferry_test name)
  cmake_parse_arguments(arg "NEEDS_TORCH;ONE_PROCESS;LONG;ALONE;COMPUTES" "TIMEOUT"
    "SOURCES;LINK;LABELS;RESOURCE_LOCK;OWN_PROCESS;TOGETHER" ${ARGN})
  if(NOT TENSORFERRY_TESTS OR (arg_NEEDS_TORCH AND NOT TENSORFERRY_TORCH))
    return()
  endif()
  set(torch)
  if(arg_NEEDS_TORCH)
    set(torch TORCH)
  endif()
  tensorferry_executable(${name} ${torch} SOURCES ${arg_SOURCES} LINK ${arg_LINK} GTest::gtest GTest::gmock GTest::gtest_main)
  if(NOT torch AND NOT arg_COMPUTES)
    tensorferry_compile_as_test(${name})
    if(TARGET tensorferry_test_pch)
      tensorferry_cache_precompiled_headers(${name})
      target_precompile_headers(${name} REUSE_FROM tensorferry_test_pch)
    endif()
  endif()

  set(timeout 180)
  if(arg_TIMEOUT)
    set(timeout ${arg_TIMEOUT})
  endif()
  # Tests that share a lock run one after the other, so they start first: a chain that starts late ends alone. The other
  # tests start in the order of what they took last time, which CTest keeps in the build folder.
  set(properties "LABELS \"${arg_LABELS}\" RESOURCE_LOCK \"${arg_RESOURCE_LOCK}\" RUN_SERIAL ${arg_ALONE}")
  if(arg_RESOURCE_LOCK OR arg_LONG)
    string(APPEND properties " COST 1000")
  endif()
  if(arg_NEEDS_TORCH OR arg_ONE_PROCESS)
    add_test(NAME ${name} COMMAND ${name})
    cmake_language(EVAL CODE "set_tests_properties(${name} PROPERTIES TIMEOUT ${timeout} ${properties})")
    return()
  endif()
  if(arg_LABELS MATCHES "(^|;)gpu2?(;|$)")
    set(arg_OWN_PROCESS .)
  endif()
  list(JOIN arg_OWN_PROCESS "|" own_process)
  set(file "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/list_suites.cmake")
  add_custom_command(TARGET ${name} POST_BUILD BYPRODUCTS "${file}"
    COMMAND ${CMAKE_COMMAND} -D "BINARY=$<TARGET_FILE:${name}>" -D "NAME=${name}" -D "LIST=${file}"
            -D "OWN_PROCESS=${own_process}" -D "TOGETHER=${arg_TOGETHER}" -D "TIMEOUT=${timeout}"
            -D "PROPERTIES=${properties}" -D "EMULATOR=${CMAKE_CROSSCOMPILING_EMULATOR}" -P "${PROJECT_SOURCE_DIR}/cmake/list_suites.cmake"
    VERBATIM)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.cmake" "if(EXISTS \"${file}\")\n  include(\"${file}\")\n"
    "else()\n  add_test(${name}.NOT_BUILT ${name}.NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.cmake")
endfunction()

# tensorferry_test_emulated(NAME FILTERS ... [TIMEOUT seconds])
# Runs tests that need a GPU on the emulated GPUs of tests/emulated_gpu. Each filter has its own process.
function(tensorferry_test_emulated name)
  cmake_parse_arguments(arg "" "TIMEOUT" "FILTERS" ${ARGN})
  if(NOT TENSORFERRY_TESTS)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)  # a sanitizer watches the kernels of up to 8 ranks, on few cores
  endif()
  add_dependencies(${name} tensorferry_emulated_gpu tensorferry_emulated_nvrtc tensorferry_emulated_nvml)
  foreach(filter IN LISTS arg_FILTERS)
    add_test(NAME "emulated.${name}.${filter}" COMMAND ${name} "--gtest_filter=${filter}")
    set_tests_properties("emulated.${name}.${filter}" PROPERTIES
      FAIL_REGULAR_EXPRESSION "Running 0 tests;SKIPPED" TIMEOUT ${arg_TIMEOUT} LABELS emulated
      ENVIRONMENT_MODIFICATION "LD_LIBRARY_PATH=path_list_prepend:${PROJECT_BINARY_DIR}/tests/emulated_gpu/lib")
  endforeach()
endfunction()

# tensorferry_test_on_emulated_cards(NAME FILTERS ... [GPU] [TIMEOUT seconds] [ENVIRONMENT NAME=VALUE ...])
# Runs tests on the emulated RDMA cards of tests/emulated_verbs. Each filter has its own process. GPU: with the emulated
# GPUs of tests/emulated_gpu, and once more, with the label gpu, with the machine's own.
function(tensorferry_test_on_emulated_cards name)
  cmake_parse_arguments(arg "GPU" "TIMEOUT" "FILTERS;ENVIRONMENT" ${ARGN})
  if(NOT TENSORFERRY_TESTS OR NOT TENSORFERRY_HAS_RDMA)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  set(environment "TENSORFERRY_LIBIBVERBS=${PROJECT_BINARY_DIR}/tests/emulated_verbs/lib/libibverbs.so.1;${arg_ENVIRONMENT}")
  add_dependencies(${name} tensorferry_emulated_verbs)
  if(arg_GPU)
    add_dependencies(${name} tensorferry_emulated_gpu tensorferry_emulated_nvrtc tensorferry_emulated_nvml)
  endif()
  foreach(filter IN LISTS arg_FILTERS)
    add_test(NAME "cards.${name}.${filter}" COMMAND ${name} "--gtest_filter=${filter}")
    set_tests_properties("cards.${name}.${filter}" PROPERTIES
      FAIL_REGULAR_EXPRESSION "Running 0 tests;SKIPPED" TIMEOUT ${arg_TIMEOUT} LABELS cards ENVIRONMENT "${environment}")
    if(arg_GPU)
      set_tests_properties("cards.${name}.${filter}" PROPERTIES
        ENVIRONMENT_MODIFICATION "LD_LIBRARY_PATH=path_list_prepend:${PROJECT_BINARY_DIR}/tests/emulated_gpu/lib")
      add_test(NAME "gpu.${name}.${filter}" COMMAND ${name} "--gtest_filter=${filter}")
      set_tests_properties("gpu.${name}.${filter}" PROPERTIES
        FAIL_REGULAR_EXPRESSION "Running 0 tests" TIMEOUT ${arg_TIMEOUT} LABELS gpu ENVIRONMENT "${environment}")
    endif()
  endforeach()
endfunction()

# tensorferry_fuzzer(NAME SOURCES ... LINK ...)
# A libFuzzer binary, built only with TENSORFERRY_FUZZERS. scripts/fuzz.sh runs it on the seeds in
# tests/fuzz/corpus/NAME. The test corpus.NAME runs each seed once.
function(tensorferry_fuzzer name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  if(NOT TENSORFERRY_FUZZERS)
    return()
  endif()
  tensorferry_executable(${name} SOURCES ${arg_SOURCES} LINK ${arg_LINK})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/fuzzers")
  if(EXISTS "${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${name}")
    add_test(NAME corpus.${name} COMMAND ${name} -runs=0 "${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${name}")
    set_tests_properties(corpus.${name} PROPERTIES TIMEOUT 300 LABELS corpus)
  endif()
endfunction()

# tensorferry_python_extension(NAME MODULE SOURCES ... LINK ...)
# Builds the extension module tensorferry.MODULE. The first one of a build has the precompiled header of all.
function(tensorferry_python_extension name module)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  Python_add_library(${name} MODULE WITH_SOABI ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINK} tensorferry::libtorch_python)
  tensorferry_target(${name} OFF)
  tensorferry_cache_precompiled_headers(${name})
  if(name STREQUAL tensorferry_python)
    target_precompile_headers(${name} PRIVATE <torch/csrc/utils/pybind.h> <ATen/ATen.h>)
  else()
    target_precompile_headers(${name} REUSE_FROM tensorferry_python)
  endif()
  # The macros of one module for all, because those of the precompiled header must be the same.
  target_compile_definitions(${name} PRIVATE TORCH_EXTENSION_NAME=_C)
  set_target_properties(${name} PROPERTIES DEFINE_SYMBOL tensorferry_python_EXPORTS)
  # Hides pybind11's types and the symbols of the static libraries, Boost's above all.
  set_target_properties(${name} PROPERTIES
    OUTPUT_NAME ${module} CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/python/tensorferry" INSTALL_RPATH "$ORIGIN/../torch/lib")
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL)
  # For the wheel alone: `cmake --install` installs the C++ package.
  install(TARGETS ${name} LIBRARY DESTINATION tensorferry COMPONENT python EXCLUDE_FROM_ALL)
endfunction()

# tensorferry_python_module(SOURCES ... LINK ...)
# Builds tensorferry._C and its types, _C.pyi, and the Python package around it in ${build}/python, ready for PYTHONPATH.
function(tensorferry_python_module)
  set(package "${PROJECT_BINARY_DIR}/python/tensorferry")
  tensorferry_python_extension(tensorferry_python _C ${ARGN})

  configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.py.in" "${package}/_build_info.py" @ONLY)
  add_custom_target(tensorferry_python_package ALL
    COMMAND ${CMAKE_COMMAND} -DFROM=${PROJECT_SOURCE_DIR}/python/tensorferry -DTO=${package}
            -P "${PROJECT_SOURCE_DIR}/cmake/link_package.cmake"
    COMMENT "" VERBATIM)
  # The module that torch loads by an entry point stands beside the package.
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/python/tensorferry_autoload.py"
    "${PROJECT_BINARY_DIR}/python/tensorferry_autoload.py" SYMBOLIC)
  # Without pybind11-stubgen, write_stub.py prints that, and writes no file.
  add_custom_command(OUTPUT "${package}/_C.pyi"
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/write_stub.py" "${package}"
    DEPENDS tensorferry_python "${PROJECT_SOURCE_DIR}/cmake/write_stub.py"
    COMMENT "Writing the types of tensorferry._C" VERBATIM)
  add_custom_target(tensorferry_python_stub ALL DEPENDS "${package}/_C.pyi")
  install(FILES "${PROJECT_SOURCE_DIR}/python/tensorferry_autoload.py" DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES "${package}/_build_info.py" DESTINATION tensorferry COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES "${package}/_C.pyi" DESTINATION tensorferry COMPONENT python EXCLUDE_FROM_ALL OPTIONAL)
endfunction()
