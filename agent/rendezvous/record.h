/// An agent's entry in the store: its name, its incarnation and its addresses. Peers read it before they dial.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "agent/transport/cluster_key.h"
#include "base/record.h"
#include "base/status.h"

namespace tensorferry {

/// The fields of a record. decode_record() checks every bound, because a peer has written the bytes.
struct Record {
  static constexpr std::uint8_t tag = 2;  // the format
  std::string name;
  std::int32_t rank = -1;           // -1: none
  std::uint64_t incarnation = 0;    // random, never 0
  std::string host;                 // for error messages only
  std::string boot_id;              // identifies the running kernel: the same in all containers of a host
  std::uint64_t net_namespace = 0;  // abstract unix sockets are visible within it; 0 unknown
  std::uint32_t uid = 0;
  std::int32_t pid = 0;                            // in its own pid namespace
  std::string unix_address;                        // "@name" abstract, or a path; "": none
  std::vector<std::string> tcp_addresses;          // "host:port", best first
  std::uint16_t version_min = 1, version_max = 1;  // of the link protocol
  bool left = false;                               // the agent has left on purpose; then it has no addresses
  bool operator==(const Record&) const = default;

  static constexpr std::size_t most_name = 255;
  static constexpr std::size_t most_addresses = 16;
  static constexpr std::tuple fields{&Record::left,
                                     &Record::name,
                                     &Record::rank,
                                     &Record::incarnation,
                                     &Record::host,
                                     &Record::boot_id,
                                     &Record::net_namespace,
                                     &Record::uid,
                                     &Record::pid,
                                     &Record::version_min,
                                     &Record::version_max,
                                     &Record::unix_address,
                                     at_most(&Record::tcp_addresses, most_addresses)};
  [[nodiscard]] bool valid() const;
};

/// Returns a record with host, boot id, network namespace, uid and pid of this process, and a new random incarnation.
Record describe_this_process();

/// Returns whether `mine` may reach the unix socket of `theirs`: there is one, on the same kernel, and if its name is
/// abstract in the same network namespace. A path may still lie outside this mount namespace; then connecting fails.
[[nodiscard]] bool may_share_unix(const Record& mine, const Record& theirs);

/// Encodes a record for the key `place` of the store, which names the job, the slot and the generation; signs it unless
/// `key` is empty.
Bytes encode_record(const Record& record, const Key& key, std::string_view place);
/// Decodes a record. If `key` is not empty, checks the signature before it parses the record; otherwise ignores a
/// signature. Unauthenticated: the signature is missing or wrong, or was made for another place; ProtocolError:
/// malformed.
Result<Record> decode_record(ByteView bytes, const Key& key, std::string_view place);

/// Wraps what an agent writes into the store: in front of `body` is a seal, which is a signature over `place` and
/// `body` unless `key` is empty.
Bytes sealed(ByteView body, const Key& key, std::string_view place);
/// Returns the body. Unauthenticated: `key` is not empty, and the signature is missing or wrong; ProtocolError.
Result<ByteView> unsealed(ByteView bytes, const Key& key, std::string_view place);

/// Checks an agent's name: 1 to most_name bytes without control characters. InvalidArgument otherwise.
Status check_name(std::string_view name);

}  // namespace tensorferry
