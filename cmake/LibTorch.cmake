# Makes libtorch an imported target, from the torch folder of a Python. The build uses it, and so does the installed
# package's component torch. find_package(Torch) is no substitute: for a CUDA torch it fails without a CUDA toolkit.
#
#   tensorferry_import_libtorch(ROOT CXX11_ABI)     makes tensorferry::libtorch; Threads::Threads must exist
#   tensorferry_import_libtorch_cuda(ROOT CUDART)   makes tensorferry::libtorch_cuda. CUDART is the CUDA runtime library
#                                                   that torch was built with

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
  # Links libstdc++ by its file name. A compiler that is set up to link it statically would add a second libstdc++
  # beside libtorch's, and one of them would free locales that the other one made.
  target_link_libraries(tensorferry::libtorch INTERFACE
    tensorferry::lib_torch_cpu tensorferry::lib_c10 -l:libstdc++.so.6 Threads::Threads)
  # The linker need not resolve libtorch's own dependencies (CUDA's libraries beside it).
  target_link_options(tensorferry::libtorch INTERFACE -Wl,--allow-shlib-undefined)
endfunction()

# C++ programs must load libtorch_cuda themselves, as no Python import of torch does it. Its kernels register themselves
# when it is loaded. libc10_cuda and the runtime are in the same group, because a static archive refers to them.
function(tensorferry_import_libtorch_cuda root cudart)
  add_library(tensorferry::libtorch_cuda INTERFACE IMPORTED GLOBAL)
  target_link_options(tensorferry::libtorch_cuda INTERFACE
    "LINKER:--push-state,--no-as-needed,${root}/lib/libtorch_cuda.so,${root}/lib/libc10_cuda.so,${cudart},--pop-state")
endfunction()
