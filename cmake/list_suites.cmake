# Runs after the build of a test binary, and writes the tests of CTest for its suites into the file LIST:
#   cmake -D BINARY=... -D NAME=... -D LIST=... -D OWN_PROCESS=regex -D TOGETHER=suites -D TIMEOUT=seconds
#         -D PROPERTIES=text -D EMULATOR=command -P list_suites.cmake
# tensorferry_test in Targets.cmake says which cases share a process.
cmake_minimum_required(VERSION 3.25)
set(cases_in_a_process 24)  # at most, so that a long suite is several tests, which run side by side

execute_process(COMMAND ${EMULATOR} "${BINARY}" --gtest_list_tests OUTPUT_VARIABLE output RESULT_VARIABLE result TIMEOUT 60)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${BINARY} --gtest_list_tests: ${result}\n${output}")
endif()

set(text "if(\"\$ENV{TENSORFERRY_SOAK}\" STREQUAL 1)\n  set(soak TRUE)\nelse()\n  set(soak FALSE)\nendif()\n")

# Writes one test: its name, its filter, how many cases it has, and further properties.
macro(write_test name filter cases)
  # What a case takes beside others in its process, under a sanitizer too. Soak tests run their loops in full.
  math(EXPR seconds "${TIMEOUT} + 10 * (${cases} - 1)")
  math(EXPR soak_seconds "1800 + 60 * (${cases} - 1)")
  string(APPEND text
    "add_test([==[${name}]==] ${EMULATOR} [==[${BINARY}]==] [==[--gtest_filter=${filter}]==])\n"
    "set(seconds ${seconds})\nif(soak)\n  set(seconds ${soak_seconds})\nendif()\n"
    "set_tests_properties([==[${name}]==] PROPERTIES TIMEOUT \${seconds}\n"
    "  FAIL_REGULAR_EXPRESSION \"Running 0 tests\" ${PROPERTIES} ${ARGN})\n")
endmacro()

function(write_suite suite cases)
  list(LENGTH cases count)
  if(count EQUAL 0)
    return()
  endif()
  if(suite IN_LIST TOGETHER)
    write_test("${NAME}.${suite}" "${suite}.*" ${count})
  elseif(OWN_PROCESS AND suite MATCHES "${OWN_PROCESS}")
    foreach(case IN LISTS cases)
      write_test("${NAME}.${suite}.${case}" "${suite}.${case}" 1)
    endforeach()
  else()
    math(EXPR parts "(${count} + ${cases_in_a_process} - 1) / ${cases_in_a_process}")
    math(EXPR each "(${count} + ${parts} - 1) / ${parts}")
    if(parts EQUAL 1)
      write_test("${NAME}.${suite}" "${suite}.*" ${count})
    else()
      foreach(part RANGE 1 ${parts})
        math(EXPR index "${part} - 1")
        write_test("${NAME}.${suite}.part${part}" "${suite}.*" ${each}
          "ENVIRONMENT \"GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=${index}\"")
      endforeach()
    endif()
  endif()
  set(text "${text}" PARENT_SCOPE)
endfunction()

# A line that begins with a name and ends with a dot begins a suite. Its cases follow, two columns to the right.
string(REGEX REPLACE " +#[^\n]*" "" output "${output}")  # the values of parameters
string(REGEX MATCHALL "[^\n]+" lines "${output}")
set(suite)
set(cases)
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ]+)\\.$")
    set(next "${CMAKE_MATCH_1}")
    write_suite("${suite}" "${cases}")
    set(suite "${next}")
    set(cases)
  elseif(NOT "${suite}${line}" MATCHES "DISABLED_" AND line MATCHES "^  ([^ ]+)$")
    list(APPEND cases "${CMAKE_MATCH_1}")
  endif()
endforeach()
write_suite("${suite}" "${cases}")
file(WRITE "${LIST}" "${text}")
