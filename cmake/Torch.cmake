# Makes torch imported targets of the project, from the answers of the chosen Python about its torch.
# Does not use find_package(Torch), which for a CUDA torch fails if no CUDA toolkit is installed.
#
#   tensorferry::libtorch         libtorch for C++: c10, torch_cpu, torch (and c10_cuda, torch_cuda with CUDA)
#   tensorferry::libtorch_python  the same plus libtorch_python, Python's headers and torch's own pybind11
#   TENSORFERRY_TORCH_VERSION, TENSORFERRY_TORCH_CUDA   such as 2.15.0+cu132 and 13.2 (empty: a CPU torch)

if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
set(Python_FIND_VIRTUALENV FIRST)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/torch_info.py"
  OUTPUT_VARIABLE torch_info RESULT_VARIABLE torch_result OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch. Pass -DPython_EXECUTABLE= one that has, "
                      "or -DTENSORFERRY_TORCH=OFF for the parts that need none")
endif()
list(GET torch_info 0 TENSORFERRY_TORCH_VERSION)
list(GET torch_info 1 torch_root)
list(GET torch_info 2 torch_cxx11_abi)
list(GET torch_info 3 TENSORFERRY_TORCH_CUDA)
if(TENSORFERRY_TORCH_CUDA STREQUAL none)
  set(TENSORFERRY_TORCH_CUDA "")
endif()
# Configures again if another torch is installed in the same place.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${torch_root}/version.py")
message(STATUS "torch ${TENSORFERRY_TORCH_VERSION} (CUDA: ${TENSORFERRY_TORCH_CUDA}) in ${torch_root}")
string(REGEX MATCH "^[0-9]+[.][0-9]+" TENSORFERRY_TORCH_MINOR "${TENSORFERRY_TORCH_VERSION}")
if(TENSORFERRY_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${TENSORFERRY_TORCH_VERSION} is too old: 2.11 to 2.15 are supported")
endif()

include(LibTorch)
tensorferry_import_libtorch("${torch_root}" ${torch_cxx11_abi})
add_library(tensorferry::lib_torch_python SHARED IMPORTED)
set_target_properties(tensorferry::lib_torch_python PROPERTIES
  IMPORTED_LOCATION "${torch_root}/lib/libtorch_python.so")

add_library(tensorferry_libtorch_python INTERFACE)
add_library(tensorferry::libtorch_python ALIAS tensorferry_libtorch_python)
target_link_libraries(tensorferry_libtorch_python INTERFACE
  tensorferry::libtorch tensorferry::lib_torch_python Python::Module)

# torch's headers take most of the compile time of each source that includes them. They are parsed once for all sources,
# and once more with Python's headers.
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/pch/empty.cpp" CONTENT "")
add_library(tensorferry_torch_pch OBJECT EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/pch/empty.cpp")
target_link_libraries(tensorferry_torch_pch PRIVATE tensorferry::libtorch tensorferry_warnings)
if(TENSORFERRY_PCH_LAUNCHER)
  set_target_properties(tensorferry_torch_pch PROPERTIES CXX_COMPILER_LAUNCHER "${TENSORFERRY_PCH_LAUNCHER}")
endif()
target_precompile_headers(tensorferry_torch_pch PRIVATE <ATen/ATen.h> <functional> <memory> <optional> <string> <vector>)
