/// Work requests of a queue pair, as the verbs take them.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace tensorferry::rdma {

/// Returns registered memory of this process, as a work request names it.
ibv_sge place_of(const std::byte* data, std::uint32_t bytes, std::uint32_t key);

/// Returns a request that is signalled, between `here`, to which it refers, and as many bytes of the peer's memory at
/// `there`.
ibv_send_wr request_of(ibv_wr_opcode opcode, ibv_sge& here, std::uint64_t there, std::uint32_t their_key);

}  // namespace tensorferry::rdma
