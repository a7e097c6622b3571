# For the scripts beside this one, which CTest runs with BUILD, SOURCE, WORK (a folder of the test's own) and the tools.

file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}")

# run(COMMAND ...): a failure ends the test with what the command printed; `output` holds it otherwise.
function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${WORK}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${failed}:\n${said}")
  endif()
  set(output "${said}" PARENT_SCOPE)
endfunction()

# Builds a project of its own that knows nothing but where to look for the package.
function(build_example folder)
  run("${CMAKE_COMMAND}" -S "${SOURCE}/examples/${folder}" -B "${WORK}/${folder}" -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_BUILD_TYPE=Release ${ARGN})
  run("${CMAKE_COMMAND}" --build "${WORK}/${folder}")
endfunction()

# A program that holds an agent needs libcrypto beside what every C++ program needs.
function(expect_few_libraries program)
  run("${READELF}" -d "${program}")
  string(REGEX MATCHALL "Shared library: \\[[^]]*" needed "${output}")
  list(TRANSFORM needed REPLACE ".*\\[" "")
  list(FILTER needed EXCLUDE REGEX "^(lib(crypto|stdc\\+\\+|m|gcc_s|c|pthread|dl|rt)|ld-linux[^.]*)\\.so")
  if(needed)
    message(FATAL_ERROR "${program} needs ${needed}")
  endif()
endfunction()
