/// Who is in a group, seen from one of its ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "rpc/collectives/messages.h"

namespace tensorferry::collectives {

/// What the formation of a group finds out.
struct Membership {
  std::uint64_t id = 0;               // of the group
  std::size_t rank = 0;               // this one
  std::vector<MemberRecord> members;  // by rank

  [[nodiscard]] std::size_t size() const noexcept { return members.size(); }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& member : members) out.push_back(member.name);
    return out;
  }
};

}  // namespace tensorferry::collectives
