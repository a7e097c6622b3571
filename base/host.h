/// Identifies this host and process, and draws random numbers.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry {

/// Returns an id of the running kernel (/proc/sys/kernel/random/boot_id), which all processes of one host share, in any
/// container. Returns "" if the system does not say.
std::string boot_id();

/// Returns the inode of a namespace of this process ("pid", "user", "net"); 0 if the system does not say.
std::uint64_t own_namespace(const char* kind);

/// Returns the name of this host; "" if the system does not say.
std::string host_name();

/// Returns 64 random bits that cannot be guessed.
std::uint64_t random_word();

}  // namespace tensorferry
