/// What an agent tells about itself in the store, where others read it before they dial it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "agent/auth.h"
#include "channels/bytes.h"
#include "channels/status.h"

namespace tensorferry {

/// Text and counts are bounded: what a peer has put into the store is checked by decode_record().
struct Record {
  std::string name;
  std::int32_t rank = -1;           // -1: none
  std::uint64_t incarnation = 0;    // random, never 0
  std::string host;                 // for messages only
  std::string boot_id;              // which kernel: the same for all containers of a host
  std::uint64_t net_namespace = 0;  // whose abstract unix sockets it sees; 0 unknown
  std::uint32_t uid = 0;
  std::int32_t pid = 0;                            // in its own pid namespace
  std::string unix_address;                        // "@name" abstract, or a path; "": none
  std::vector<std::string> tcp_addresses;          // "host:port", best first
  std::uint16_t version_min = 1, version_max = 1;  // of the link protocol
  bool left = false;                               // ended in order
  std::vector<std::uint64_t> world;  // of one that left: the incarnations of the world that it had seen complete
  bool operator==(const Record&) const = default;

  static constexpr std::size_t kMostName = 255;
  static constexpr std::size_t kMostAddresses = 16;
};

/// Host, boot id, network namespace, uid, pid and a fresh incarnation of this process.
Record describe_this_process();

/// Whether a unix socket of `theirs` may be reached from `mine`: it has one, on this kernel and, where abstract, in
/// this network namespace. A path may still be outside this mount namespace; connecting tells.
[[nodiscard]] bool may_share_unix(const Record& mine, const Record& theirs);

/// Bytes of a record under `slot` and `generation`, signed where there is a key.
Bytes encode_record(const Record& record, const Key& key, std::string_view slot, std::int64_t generation);
/// Unauthenticated: there is a key, and the signature is missing or wrong (also for another slot or generation's
/// record); ProtocolError: malformed. A signature is checked before anything else is parsed, and is not looked at where
/// there is no key here.
Result<Record> decode_record(ByteView bytes, const Key& key, std::string_view slot, std::int64_t generation);

/// 1 to kMostName bytes without control characters.
Status check_name(std::string_view name);

}  // namespace tensorferry
