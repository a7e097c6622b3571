/// How remote objects, and the handles that users hold on them, are named. The protocol that keeps them alive is
/// references.h.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

#include "base/record.h"

namespace tensorferry {

/// A number that no other agent, and no other life of this one, gives out.
template <class Kind>
struct UniqueId {
  std::uint64_t incarnation = 0;  // of the agent that made it
  std::uint64_t counter = 0;      // from 1
  static constexpr std::tuple fields{&UniqueId::incarnation, &UniqueId::counter};
  auto operator<=>(const UniqueId&) const = default;
};

/// Names an object: made by whoever asked for its creation, who need not be the owner.
using RRefId = UniqueId<struct RRefIdKind>;
/// Names one agent's hold on an object: made by whoever passed it on.
using ForkId = UniqueId<struct ForkIdKind>;

/// The ids of a remote object that a call creates: `object`, and the caller's own hold on it.
struct Creation {
  RRefId object;
  ForkId fork;
  bool operator==(const Creation&) const = default;
};

/// One life of one agent, by name (to call it) and incarnation (to know it is still the same).
struct AgentId {
  std::string name;
  std::uint64_t incarnation = 0;
  static constexpr std::tuple fields{&AgentId::name, &AgentId::incarnation};
  auto operator<=>(const AgentId&) const = default;
};

/// A reference inside a message: whose object, which, and the hold that the receiver gets with it.
struct ReferenceRecord {
  AgentId owner;
  RRefId object;
  ForkId fork;
  AgentId parent;              // who passes it on, and keeps it alive until the receiver's hold is known to the owner
  std::uint64_t receiver = 0;  // whom it is passed to, by incarnation: a next life must not take it
  std::string type_hint;       // the type's name as the creator knew it, or ""

  bool operator==(const ReferenceRecord&) const = default;
};

}  // namespace tensorferry

template <class Kind>
struct std::hash<tensorferry::UniqueId<Kind>> {
  std::size_t operator()(const tensorferry::UniqueId<Kind>& id) const noexcept {
    return id.incarnation * 0x9e3779b97f4a7c15U ^ id.counter * 0xff51afd7ed558ccdU;
  }
};
