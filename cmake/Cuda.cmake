# Sets TENSORFERRY_HAS_CUDA: ON if there is a CUDA toolkit and, if torch is used, a torch built for CUDA. Only headers of
# the toolkit are needed: without one, those serve that pip installs beside torch, with the package nvidia-cuda-crt.
# To build without the CUDA parts: -DTENSORFERRY_CUDA=OFF.

# Looks for the headers beside torch, and sets the variables of FindCUDAToolkit that this project reads.
macro(tensorferry_find_cuda_beside_torch)
  cmake_path(APPEND torch_root ../nvidia/cu13/include OUTPUT_VARIABLE cuda_beside_torch)
  cmake_path(NORMAL_PATH cuda_beside_torch)
  if(EXISTS "${cuda_beside_torch}/cuda.h" AND EXISTS "${cuda_beside_torch}/crt/host_defines.h")
    file(STRINGS "${cuda_beside_torch}/cuda.h" cuda_version REGEX "^#define CUDA_VERSION [0-9]+") # 13020 is 13.2
    string(REGEX REPLACE ".* ([0-9][0-9])0?([0-9]+)0$" "\\1.\\2" CUDAToolkit_VERSION "${cuda_version}")
    set(CUDAToolkit_VERSION_MAJOR 13)
    set(CUDAToolkit_INCLUDE_DIRS "${cuda_beside_torch}")
    set(CUDAToolkit_FOUND TRUE)
  endif()
endmacro()

set(TENSORFERRY_HAS_CUDA OFF)
if(NOT TENSORFERRY_CUDA STREQUAL OFF)
  find_package(CUDAToolkit 13 QUIET)
  if(NOT CUDAToolkit_FOUND AND TENSORFERRY_TORCH AND TENSORFERRY_TORCH_CUDA)
    tensorferry_find_cuda_beside_torch()
  endif()
  if(NOT CUDAToolkit_FOUND)
    set(cuda_reason "no CUDA toolkit >= 13 found; with a CUDA torch, its headers do: pip install nvidia-cuda-crt")
  elseif(TENSORFERRY_TORCH AND NOT TENSORFERRY_TORCH_CUDA)
    set(cuda_reason "torch ${TENSORFERRY_TORCH_VERSION} was built without CUDA")
  else()
    set(TENSORFERRY_HAS_CUDA ON)
  endif()
  if(TENSORFERRY_CUDA STREQUAL ON AND NOT TENSORFERRY_HAS_CUDA)
    message(FATAL_ERROR "TENSORFERRY_CUDA=ON, but ${cuda_reason}")
  endif()
else()
  set(cuda_reason "TENSORFERRY_CUDA=OFF")
endif()
if(TENSORFERRY_HAS_CUDA)
  message(STATUS "CUDA parts: on (${CUDAToolkit_VERSION}, ${CUDAToolkit_INCLUDE_DIRS})")
else()
  message(STATUS "CUDA parts: off (${cuda_reason})")
endif()

# tensorferry::torch_cuda: torch's C++ library for GPUs (its allocator and streams), and the CUDA runtime library that
# torch was built with. The runtime is the one installed beside torch, because the toolkit's may be too old for torch.
if(TENSORFERRY_HAS_CUDA AND TENSORFERRY_TORCH)
  find_file(TENSORFERRY_CUDART libcudart.so.13
    PATHS "${torch_root}/../nvidia/cu13/lib" "${torch_root}/lib" "${CUDAToolkit_LIBRARY_DIR}" NO_DEFAULT_PATH REQUIRED)
  add_library(tensorferry::lib_cudart SHARED IMPORTED)
  set_target_properties(tensorferry::lib_cudart PROPERTIES IMPORTED_LOCATION "${TENSORFERRY_CUDART}")
  add_library(tensorferry::lib_c10_cuda SHARED IMPORTED)
  set_target_properties(tensorferry::lib_c10_cuda PROPERTIES IMPORTED_LOCATION "${torch_root}/lib/libc10_cuda.so")
  add_library(tensorferry_torch_cuda INTERFACE)
  add_library(tensorferry::torch_cuda ALIAS tensorferry_torch_cuda)
  target_include_directories(tensorferry_torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(tensorferry_torch_cuda INTERFACE
    tensorferry::libtorch tensorferry::lib_c10_cuda tensorferry::lib_cudart)
  tensorferry_import_libtorch_cuda("${torch_root}" "${TENSORFERRY_CUDART}")
  add_library(tensorferry_torch_cuda_loaded INTERFACE)
  add_library(tensorferry::torch_cuda_loaded ALIAS tensorferry_torch_cuda_loaded)
  target_link_libraries(tensorferry_torch_cuda_loaded INTERFACE tensorferry::libtorch_cuda tensorferry::torch_cuda)
endif()
