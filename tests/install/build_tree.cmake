# Tests find_package() in a build folder, without an installation.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")
build_example(07-simulator "-DCMAKE_PREFIX_PATH=${BUILD}")
expect_few_libraries("${WORK}/07-simulator/simulator")
