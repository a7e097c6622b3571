# The package for C++ programs outside this tree: two archives, the public headers, and the files by which CMake and
# pkg-config find them. It is the same in this build folder, in an install prefix, and in the wheel
# (python -m tensorferry.cmake).
#
#   tensorferry::core    libtensorferry.a: agent, channels, typed calls, regions. Needs OpenSSL's libssl, libcrypto.
#   tensorferry::torch   libtensorferry_torch.a: at::Tensor as a value. Only if TENSORFERRY_TORCH is on.
#   tensorferry::c10d    libtensorferry_c10d.a: process groups of torch.distributed, data-parallel training. The same.
#   tensorferry::torch_rpc   libtensorferry_torch_rpc.a: the agent of torch.distributed.rpc. The same.
#   tensorferry::cuda    libtensorferry_cuda.a: at::Tensors on GPUs, for these three. Only if there also are CUDA parts.
#   tensorferry::conformance   sources: the tests that every channel must pass. Needs GoogleTest.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# In the wheel all of it is in a folder of the Python package.
set(root)
if(SKBUILD)
  set(root tensorferry/cpp/)
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
set(headers "${root}${CMAKE_INSTALL_INCLUDEDIR}")
set(libraries "${root}${CMAKE_INSTALL_LIBDIR}")
set(package "${libraries}/cmake/tensorferry")

add_custom_target(tensorferry_archives) # what a build of the wheel makes for C++ programs

# tensorferry_archive(NAME COMPONENT FILE OF targets ... LINK ...)
# Makes an archive of these libraries' objects. Joins them first (prelink.cmake), which halves their size, unless a
# sanitizer is on.
function(tensorferry_archive name component file)
  cmake_parse_arguments(arg "" "" "OF;LINK" ${ARGN})
  list(TRANSFORM arg_OF REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  if(NOT TENSORFERRY_SANITIZE)
    set(joined "${PROJECT_BINARY_DIR}/${file}.o")
    add_custom_command(OUTPUT "${joined}"
      COMMAND ${CMAKE_COMMAND} -DCXX=${CMAKE_CXX_COMPILER} -DNM=${CMAKE_NM} -DOBJCOPY=${CMAKE_OBJCOPY} -DOUT=${joined}
              -DSTRIP=$<NOT:$<CONFIG:Debug>> -P "${PROJECT_SOURCE_DIR}/cmake/prelink.cmake" -- ${objects}
      DEPENDS ${arg_OF} ${objects} cmake/prelink.cmake cmake/prelink.ld
      COMMENT "Joining the objects of lib${file}.a" COMMAND_EXPAND_LISTS VERBATIM)
    set_source_files_properties("${joined}" PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    set(objects "${joined}")
  endif()
  add_library(${name} STATIC ${objects})
  add_library(tensorferry::${component} ALIAS ${name})
  add_dependencies(tensorferry_archives ${name})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME ${file} EXPORT_NAME ${component}
    ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
  target_compile_features(${name} INTERFACE cxx_std_20)
  target_include_directories(${name} INTERFACE
    "$<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>" "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
    "$<INSTALL_INTERFACE:${headers}>")
  target_link_libraries(${name} INTERFACE ${arg_LINK})
  install(TARGETS ${name} EXPORT tensorferry-${component} ARCHIVE DESTINATION "${libraries}" COMPONENT cpp)
  install(EXPORT tensorferry-${component} NAMESPACE tensorferry:: DESTINATION "${package}" COMPONENT cpp)
  export(EXPORT tensorferry-${component} NAMESPACE tensorferry:: FILE "${PROJECT_BINARY_DIR}/tensorferry-${component}.cmake")
endfunction()

tensorferry_archive(tensorferry_core core tensorferry
  OF tensorferry_base tensorferry_channels tensorferry_agent tensorferry_rpc_core tensorferry_member
     tensorferry_regions tensorferry_collectives tensorferry_cpp
  LINK OpenSSL::SSL OpenSSL::Crypto Threads::Threads ${CMAKE_DL_LIBS})
set(components)
set(torch_headers)
if(TENSORFERRY_TORCH)
  list(APPEND components torch c10d torch_rpc)
  tensorferry_archive(tensorferry_with_torch torch tensorferry_torch
    OF tensorferry_host_converters tensorferry_rpc tensorferry_cpp_torch LINK tensorferry_core tensorferry::libtorch)
  tensorferry_archive(tensorferry_with_c10d c10d tensorferry_c10d
    OF tensorferry_collectives_cuda tensorferry_collectives_torch tensorferry_cpp_c10d LINK tensorferry_with_torch)
  tensorferry_archive(tensorferry_with_torch_rpc torch_rpc tensorferry_torch_rpc
    OF tensorferry_torch_rpc tensorferry_cpp_torch_rpc LINK tensorferry_with_torch)
else()
  list(APPEND torch_headers PATTERN "torch.h" EXCLUDE PATTERN "c10d.h" EXCLUDE PATTERN "torch_rpc.h" EXCLUDE
    PATTERN "converter.h" EXCLUDE)
endif()
if(TENSORFERRY_TORCH AND TENSORFERRY_HAS_CUDA)
  list(APPEND components cuda)
  tensorferry_archive(tensorferry_with_cuda cuda tensorferry_cuda
    OF tensorferry_gpu_converter tensorferry_cpp_cuda LINK tensorferry_with_torch tensorferry::libtorch_cuda)
  # Its functions take the places of those that tensorferry::torch has for programs without GPUs. Nothing else refers to
  # them, so the linker is told to take them.
  target_link_options(tensorferry_with_cuda INTERFACE "LINKER:--undefined=tensorferry_with_cuda")
else()
  list(APPEND torch_headers PATTERN "gpus.h" EXCLUDE)
endif()
foreach(component torch c10d torch_rpc cuda)
  if(NOT component IN_LIST components) # left by an earlier configuration of this folder
    file(REMOVE "${PROJECT_BINARY_DIR}/tensorferry-${component}.cmake")
  endif()
endforeach()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${headers}" COMPONENT cpp FILES_MATCHING PATTERN "*.h"
  PATTERN "channel.h" EXCLUDE ${torch_headers})

# The headers that channels are written with, and the conformance suite, as copies whose includes begin with
# tensorferry/, because "base/" and "channels/" may be folders of the program too.
set(published include/tensorferry/channel.h
  base/bytes.h base/file_descriptor.h base/function.h base/status.h base/text.h
  channels/buffer.h channels/channel.h channels/completion.h channels/registry.h channels/shared_state.h)
foreach(name channel_suite child device_memory lane outcome wire_pair)
  list(APPEND published tests/conformance/${name}.h)
endforeach()
foreach(name channel_suite device_memory ending_cases lane process_cases transfer_cases wire_pair)
  list(APPEND published tests/conformance/${name}.cpp)
endforeach()
set(copies)
set(from_tensorferry
  "s,^#include \"(include/tensorferry/|tests/)?(base/|channels/|conformance/|device|error_codes),#include \"tensorferry/\\2,")
foreach(file IN LISTS published)
  string(REGEX REPLACE "^(include/tensorferry|tests)/" "" copy "${file}")
  set(copy "${PROJECT_BINARY_DIR}/include/tensorferry/${copy}")
  get_filename_component(folder "${copy}" DIRECTORY)
  file(MAKE_DIRECTORY "${folder}")
  add_custom_command(OUTPUT "${copy}"
    COMMAND sed -E "${from_tensorferry}" "${PROJECT_SOURCE_DIR}/${file}" > "${copy}"
    DEPENDS "${PROJECT_SOURCE_DIR}/${file}" VERBATIM)
  list(APPEND copies "${copy}")
  file(RELATIVE_PATH folder "${PROJECT_BINARY_DIR}/include" "${folder}")
  install(FILES "${copy}" DESTINATION "${headers}/${folder}" COMPONENT cpp)
endforeach()
add_custom_target(tensorferry_published DEPENDS ${copies})
add_dependencies(tensorferry_core tensorferry_published)

configure_package_config_file(cmake/tensorferryConfig.cmake.in "${PROJECT_BINARY_DIR}/tensorferryConfig.cmake"
  INSTALL_DESTINATION "${package}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tensorferryConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
file(COPY cmake/LibTorch.cmake cmake/torch_info.py DESTINATION "${PROJECT_BINARY_DIR}")
install(FILES
  "${PROJECT_BINARY_DIR}/tensorferryConfig.cmake" "${PROJECT_BINARY_DIR}/tensorferryConfigVersion.cmake"
  cmake/LibTorch.cmake cmake/torch_info.py
  DESTINATION "${package}" COMPONENT cpp)

# The paths are relative to the file itself, because a prefix may be moved and a wheel always is.
file(RELATIVE_PATH up "/${libraries}/pkgconfig" "/${root}")
configure_file(cmake/tensorferry.pc.in "${PROJECT_BINARY_DIR}/CMakeFiles/tensorferry.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/CMakeFiles/tensorferry.pc" DESTINATION "${libraries}/pkgconfig" COMPONENT cpp)
