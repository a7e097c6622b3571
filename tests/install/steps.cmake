# Functions for the scripts beside this one. CTest runs the scripts with BUILD, SOURCE, WORK (the test's own folder) and
# the paths of the tools.

file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}")

# run(COMMAND ...): runs a command in WORK. If it fails, the test fails with its output; else `output` holds the output.
function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${WORK}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${failed}:\n${said}")
  endif()
  set(output "${said}" PARENT_SCOPE)
endfunction()

# Builds an example as a separate project, which is told only where to find the package.
function(build_example folder)
  run("${CMAKE_COMMAND}" -S "${SOURCE}/examples/${folder}" -B "${WORK}/${folder}" -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_BUILD_TYPE=Release ${ARGN})
  run("${CMAKE_COMMAND}" --build "${WORK}/${folder}")
endfunction()

# Checks that a program with an agent needs no shared library but libssl, libcrypto and those of every C++ program.
function(expect_few_libraries program)
  run("${READELF}" -d "${program}")
  string(REGEX MATCHALL "Shared library: \\[[^]]*" needed "${output}")
  list(TRANSFORM needed REPLACE ".*\\[" "")
  list(FILTER needed EXCLUDE REGEX "^(lib(ssl|crypto|stdc\\+\\+|m|gcc_s|c|pthread|dl|rt)|ld-linux[^.]*)\\.so")
  if(needed)
    message(FATAL_ERROR "${program} needs ${needed}")
  endif()
endfunction()
