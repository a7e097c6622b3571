# System libraries. Each becomes one target: tensorferry::NAME, or the imported target of CMake's own module.

find_package(Threads REQUIRED)
find_package(OpenSSL 3 REQUIRED COMPONENTS Crypto SSL)

# Only Boost's headers: find_package(Boost) would also require the configuration of its compiled libraries.
find_path(TENSORFERRY_BOOST_INCLUDE boost/asio.hpp)
if(NOT TENSORFERRY_BOOST_INCLUDE)
  message(FATAL_ERROR "Boost headers not found: install libboost1.81-dev (Debian 12) or libboost-dev (Ubuntu 24.04)")
endif()
file(STRINGS "${TENSORFERRY_BOOST_INCLUDE}/boost/version.hpp" boost_version REGEX "#define BOOST_VERSION [0-9]+")
string(REGEX MATCH "[0-9]+" boost_version "${boost_version}")
if(boost_version LESS 108100)
  message(FATAL_ERROR "Boost ${boost_version} in ${TENSORFERRY_BOOST_INCLUDE} is older than 1.81 (108100): "
                      "install libboost1.81-dev, or set TENSORFERRY_BOOST_INCLUDE")
endif()
add_library(tensorferry_boost INTERFACE)
add_library(tensorferry::boost ALIAS tensorferry_boost)
target_include_directories(tensorferry_boost SYSTEM INTERFACE "${TENSORFERRY_BOOST_INCLUDE}")
target_compile_definitions(tensorferry_boost INTERFACE BOOST_ASIO_NO_DEPRECATED)
target_link_libraries(tensorferry_boost INTERFACE Threads::Threads)

if(TENSORFERRY_TESTS)
  find_package(GTest REQUIRED)
endif()
