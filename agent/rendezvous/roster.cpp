#include "agent/rendezvous/roster.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "agent/transport/address.h"

namespace tensorferry {

namespace {

// Returns whether the agent listens at loopback addresses alone.
bool hidden(const Record& record) {
  const auto local = [](const std::string& address) {
    const auto parts = split_host_port(address);
    return parts.ok() && is_loopback(parts->host);
  };
  return !record.tcp_addresses.empty() && std::all_of(record.tcp_addresses.begin(), record.tcp_addresses.end(), local);
}

bool same_loopback(const Record& one, const Record& two) {
  return one.boot_id == two.boot_id && one.net_namespace == two.net_namespace;
}

// Returns a warning if a member cannot reach another, which listens at loopback addresses alone.
std::string loopback_warning(const std::vector<Record>& records) {
  for (const auto& shy : records) {
    if (!hidden(shy)) continue;
    const auto other = std::find_if(records.begin(), records.end(), [&](const Record& member) {
      return !may_share_unix(member, shy) && !same_loopback(member, shy);
    });
    if (other == records.end()) continue;
    return formatted(
        "peer={} {} listens at loopback addresses alone, where {} cannot reach it: let its "
        "MASTER_ADDR be an address that other hosts reach, or set interface=",
        shy.name, who(shy), who(*other));
  }
  return "";
}

}  // namespace

bool Roster::valid() const {
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    if (std::cmp_not_equal(members[rank].rank, rank)) return false;
  }
  return !members.empty();
}

bool Roster::has(std::uint64_t incarnation) const {
  return std::any_of(members.begin(), members.end(),
                     [&](const WorldMember& member) { return member.incarnation == incarnation; });
}

Roster roster_of(const std::vector<Record>& records) {
  Roster roster;
  roster.members.reserve(records.size());
  for (const auto& record : records) {
    roster.members.push_back({record.name, record.rank, record.incarnation, record.pid, record.host});
  }
  roster.warning = loopback_warning(records);
  return roster;
}

Bytes encode_roster(const Roster& roster, const Key& key, std::string_view place) {
  return sealed(encode(roster), key, place);
}

Result<Roster> decode_roster(ByteView bytes, const Key& key, std::string_view place) {
  const auto body = unsealed(bytes, key, place);
  if (!body) return body.status();
  auto roster = decode<Roster>(*body);
  if (!roster) return Status(Code::protocol_error, "the list of the world's members in the store is malformed");
  return *std::move(roster);
}

}  // namespace tensorferry
