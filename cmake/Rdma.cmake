# Sets TENSORFERRY_HAS_RDMA: ON if the header of libibverbs is found. The library itself is loaded at run time.
# To build as on a machine without the header: -DTENSORFERRY_RDMA=OFF.

find_path(TENSORFERRY_VERBS_INCLUDE infiniband/verbs.h)
mark_as_advanced(TENSORFERRY_VERBS_INCLUDE)
set(TENSORFERRY_HAS_RDMA OFF)
if(TENSORFERRY_RDMA STREQUAL OFF)
  message(STATUS "RDMA parts: off (TENSORFERRY_RDMA=OFF)")
elseif(TENSORFERRY_VERBS_INCLUDE)
  set(TENSORFERRY_HAS_RDMA ON)
  message(STATUS "RDMA parts: on")
elseif(TENSORFERRY_RDMA STREQUAL ON)
  message(FATAL_ERROR "TENSORFERRY_RDMA=ON, but infiniband/verbs.h is not found: install libibverbs-dev")
else()
  message(STATUS "RDMA parts: off (infiniband/verbs.h is not found: the channel ibv is left out; install libibverbs-dev)")
endif()
