/// What an emulated card can do at most. ibv_query_device tells programs.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace tensorferry::emulated_verbs::limits {

inline constexpr ibv_mtu mtu = IBV_MTU_4096;
inline constexpr int work_requests = 8192;
inline constexpr int pieces = 16;
inline constexpr unsigned inline_bytes = 928;
inline constexpr int reads = 16;
inline constexpr int completion_entries = 1 << 20;
inline constexpr std::uint64_t message_bytes = std::uint64_t{1} << 30;

}  // namespace tensorferry::emulated_verbs::limits
