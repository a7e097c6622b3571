/// What the system says of this host and process, and chance.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry {

/// Names the running kernel: what processes of one host have in common, in whatever containers. "": the system does not
/// say (/proc/sys/kernel/random/boot_id).
std::string boot_id();

/// The inode of a namespace of this process ("pid", "user", "net"); 0: the system does not say.
std::uint64_t own_namespace(const char* kind);

/// 64 random bits, not to be guessed.
std::uint64_t random_word();

}  // namespace tensorferry
