# libtorch as an imported target, from the folder of a Python's torch. Used by the build and, installed, by the package's
# component torch: find_package(Torch) fails for a CUDA torch where there is no CUDA toolkit.
#
#   tensorferry_import_libtorch(ROOT CXX11_ABI)   makes tensorferry::libtorch; Threads::Threads must be there

function(tensorferry_import_libtorch root cxx11_abi)
  foreach(name c10 torch_cpu)
    add_library(tensorferry::lib_${name} SHARED IMPORTED GLOBAL)
    set_target_properties(tensorferry::lib_${name} PROPERTIES IMPORTED_LOCATION "${root}/lib/lib${name}.so")
  endforeach()
  add_library(tensorferry::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(tensorferry::libtorch SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  target_compile_definitions(tensorferry::libtorch INTERFACE
    _GLIBCXX_USE_CXX11_ABI=${cxx11_abi} USE_DISTRIBUTED USE_RPC USE_TENSORPIPE USE_C10D_GLOO)
  # libstdc++ by name: a compiler that was set up to link it statically would put a second one beside libtorch's, and
  # locales made by one are freed by the other.
  target_link_libraries(tensorferry::libtorch INTERFACE
    tensorferry::lib_torch_cpu tensorferry::lib_c10 -l:libstdc++.so.6 Threads::Threads)
  # libtorch's own dependencies (CUDA's libraries beside it) are its business, not the linker's.
  target_link_options(tensorferry::libtorch INTERFACE -Wl,--allow-shlib-undefined)
endfunction()
