# Sets TENSORFERRY_HAS_CUDA: ON if there are headers of CUDA 12.6 or newer and, if torch is used, a torch that was built
# for the same major version. The build needs only headers, and takes the first of these:
#   - the folders in TENSORFERRY_CUDA_INCLUDE
#   - those of the toolkit that CMake finds, if torch was built for its major version
#   - those that pip installs beside torch, with the package nvidia-cuda-crt (of CUDA 12: nvidia-cuda-nvcc-cu12)
# To build without the CUDA parts: -DTENSORFERRY_CUDA=OFF.
set(TENSORFERRY_CUDA_INCLUDE "" CACHE STRING "Folders of the CUDA headers to build with; empty: CMake finds them")

# Sets the variables of FindCUDAToolkit that this project reads, if the folders have the headers.
macro(tensorferry_take_cuda_headers)
  find_file(cuda_header cuda.h PATHS ${ARGV} NO_DEFAULT_PATH NO_CACHE)
  find_file(cuda_crt crt/host_defines.h PATHS ${ARGV} NO_DEFAULT_PATH NO_CACHE) # torch's headers include it
  if(cuda_header AND (cuda_crt OR NOT TENSORFERRY_TORCH))
    file(STRINGS "${cuda_header}" cuda_version REGEX "^#define CUDA_VERSION [0-9]+") # 13020 is 13.2
    string(REGEX REPLACE ".* ([0-9][0-9])0?([0-9]+)0$" "\\1.\\2" CUDAToolkit_VERSION "${cuda_version}")
    string(REGEX MATCH "^[0-9]+" CUDAToolkit_VERSION_MAJOR "${CUDAToolkit_VERSION}")
    set(CUDAToolkit_INCLUDE_DIRS ${ARGV})
    set(CUDAToolkit_FOUND TRUE)
  endif()
endmacro()

# Looks for headers that this torch can be built with, and sets cuda_reason if there are none.
macro(tensorferry_find_cuda_headers)
  set(cuda_pip "")
  if(TENSORFERRY_TORCH)
    string(REGEX MATCH "^[0-9]+" torch_cuda_major "${TENSORFERRY_TORCH_CUDA}")
    cmake_path(SET nvidia_root NORMALIZE "${torch_root}/../nvidia")
    set(cuda_beside_torch "${nvidia_root}/cu${torch_cuda_major}/include")
    set(cuda_pip ": pip install nvidia-cuda-crt")
    if(torch_cuda_major EQUAL 12)
      set(cuda_beside_torch "${nvidia_root}/cuda_runtime/include" "${nvidia_root}/cuda_nvcc/include")
      set(cuda_pip ": pip install nvidia-cuda-nvcc-cu12==${TENSORFERRY_TORCH_CUDA}.*")
    endif()
  endif()
  if(TENSORFERRY_CUDA_INCLUDE)
    tensorferry_take_cuda_headers(${TENSORFERRY_CUDA_INCLUDE})
  else()
    find_package(CUDAToolkit 12.6 QUIET)
    if(TENSORFERRY_TORCH AND NOT (CUDAToolkit_FOUND AND CUDAToolkit_VERSION_MAJOR EQUAL torch_cuda_major))
      tensorferry_take_cuda_headers(${cuda_beside_torch})
    endif()
  endif()
  if(NOT CUDAToolkit_FOUND OR CUDAToolkit_VERSION VERSION_LESS 12.6)
    set(cuda_reason "no CUDA headers of 12.6 or newer found (cuda.h; with torch, crt/host_defines.h)${cuda_pip}")
  elseif(TENSORFERRY_TORCH AND NOT CUDAToolkit_VERSION_MAJOR EQUAL torch_cuda_major)
    string(CONCAT cuda_reason "the CUDA headers found are of ${CUDAToolkit_VERSION}, and torch "
      "${TENSORFERRY_TORCH_VERSION} was built for ${TENSORFERRY_TORCH_CUDA}${cuda_pip}, or pass -DCUDAToolkit_ROOT= "
      "a toolkit of CUDA ${torch_cuda_major}")
  endif()
endmacro()

set(TENSORFERRY_HAS_CUDA OFF)
set(cuda_reason "")
if(TENSORFERRY_CUDA STREQUAL OFF)
  set(cuda_reason "TENSORFERRY_CUDA=OFF")
elseif(TENSORFERRY_TORCH AND NOT TENSORFERRY_TORCH_CUDA)
  set(cuda_reason "torch ${TENSORFERRY_TORCH_VERSION} was built without CUDA")
else()
  tensorferry_find_cuda_headers()
endif()
if(NOT cuda_reason)
  set(TENSORFERRY_HAS_CUDA ON)
  message(STATUS "CUDA parts: on (${CUDAToolkit_VERSION}, ${CUDAToolkit_INCLUDE_DIRS})")
elseif(TENSORFERRY_CUDA STREQUAL ON)
  message(FATAL_ERROR "TENSORFERRY_CUDA=ON, but ${cuda_reason}")
else()
  message(STATUS "CUDA parts: off (${cuda_reason})")
endif()

# tensorferry::torch_cuda: torch's C++ library for GPUs (its allocator and streams), and the CUDA runtime library that
# torch was built with. The runtime is the one installed beside torch, because the toolkit's may be too old for torch.
if(TENSORFERRY_HAS_CUDA AND TENSORFERRY_TORCH)
  find_file(TENSORFERRY_CUDART libcudart.so.${torch_cuda_major} NO_DEFAULT_PATH REQUIRED
    PATHS "${nvidia_root}/cu${torch_cuda_major}/lib" "${nvidia_root}/cuda_runtime/lib" "${torch_root}/lib"
          "${CUDAToolkit_LIBRARY_DIR}")
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
