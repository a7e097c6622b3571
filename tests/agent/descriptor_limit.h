/// The number of descriptors that a process may open.
#pragma once

#include <sys/resource.h>

namespace tensorferry::testing {

/// Raises this process's limit as far as the system allows without privileges.
inline void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace tensorferry::testing
