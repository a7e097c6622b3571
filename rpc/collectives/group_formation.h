/// What the sources of Groups share: a group that is being formed, and the messages of groups.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "rpc/collectives/groups.h"
#include "rpc/collectives/messages.h"

namespace tensorferry::collectives {

/// A group that is being formed, at its rank 0.
struct Groups::Forming {
  std::uint64_t id = 0;
  std::vector<std::string> names;
  Buffer board;
  std::map<std::size_t, Reply> ready;  // answered with the decision
  std::string no_board, no_memory;
};

template <class Record>
Message message_of(const Record& record) {
  Message out;
  out.payload = encode(record);
  return out;
}

}  // namespace tensorferry::collectives
