/// The list of a world's members, which the agent that finds the world complete writes into the store for all others.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "agent/rendezvous/record.h"
#include "agent/transport/cluster_key.h"
#include "base/record.h"
#include "base/status.h"
#include "base/text.h"

namespace tensorferry {

/// What all agents of a world know of one of them. Its addresses are in its Record.
struct WorldMember {
  std::string name;
  std::int32_t rank = -1;
  std::uint64_t incarnation = 0;
  std::int32_t pid = 0;  // this and `host` are for error messages only
  std::string host;
  static constexpr std::tuple fields{&WorldMember::name, &WorldMember::rank, &WorldMember::incarnation,
                                     &WorldMember::pid, &WorldMember::host};
  [[nodiscard]] bool valid() const { return check_name(name).ok() && incarnation != 0; }
};

struct Roster {
  static constexpr std::uint8_t tag = 1;  // the format
  std::vector<WorldMember> members;       // of rank 0, 1, 2, ...
  std::string warning;                    // for the log of every member; "": none
  static constexpr std::tuple fields{&Roster::members, &Roster::warning};
  /// Returns whether the members have the ranks from 0 on.
  [[nodiscard]] bool valid() const;
  [[nodiscard]] bool has(std::uint64_t incarnation) const;
};

/// Returns the roster of the agents with these records, in the order of their ranks.
Roster roster_of(const std::vector<Record>& records);

/// Encodes a roster for the key `place` of the store; signs it unless `key` is empty.
Bytes encode_roster(const Roster& roster, const Key& key, std::string_view place);
/// Decodes a roster; checks the signature before it parses unless `key` is empty. Errors: as decode_record().
Result<Roster> decode_roster(ByteView bytes, const Key& key, std::string_view place);

/// Names an agent in an error text, by its name, rank, pid and host.
template <class Agent>
std::string who(const Agent& agent) {
  return formatted("\"{}\" (rank {}, pid {} on {})", agent.name, agent.rank, agent.pid, agent.host);
}

}  // namespace tensorferry
