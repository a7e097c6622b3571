# cmake -DCXX= -DNM= -DOBJCOPY= -DOUT= -DSTRIP=ON/OFF -P prelink.cmake -- OBJECTS ...
# Joins objects into one, OUT. OUT contains inline functions and template instances (Boost's above all) once, even if
# several objects contain them. Boost's symbols become local to OUT, so that a program may use another Boost. Symbols of
# std's template instances become local too, because as global symbols they only take space.

set(objects)
set(behind OFF)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
  if(behind)
    list(APPEND objects "${CMAKE_ARGV${i}}")
  elseif(CMAKE_ARGV${i} STREQUAL "--")
    set(behind ON)
  endif()
endforeach()

execute_process(COMMAND ${CXX} -r -nostdlib -Wl,--force-group-allocation -Wl,-T,${CMAKE_CURRENT_LIST_DIR}/prelink.ld
  -o ${OUT} ${objects} COMMAND_ERROR_IS_FATAL ANY)

# GCC's unique symbols (variables of inline functions and templates) would now clash with a program's symbols of the
# same names. The linker merges weak symbols instead.
execute_process(COMMAND ${NM} --format=posix ${OUT} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n ]+ u " unique "${symbols}")
list(TRANSFORM unique REPLACE " u " "\n")
list(JOIN unique "" unique)
file(WRITE ${OUT}.unique "${unique}")
execute_process(COMMAND ${OBJCOPY} --weaken-symbols=${OUT}.unique ${OUT} COMMAND_ERROR_IS_FATAL ANY)

set(strip)
if(STRIP)
  set(strip --strip-unneeded)
endif()
execute_process(COMMAND ${OBJCOPY} --wildcard "--localize-symbol=*boost*" "--localize-symbol=_ZNSt*"
  "--localize-symbol=_ZNKSt*" ${strip} ${OUT} COMMAND_ERROR_IS_FATAL ANY)
