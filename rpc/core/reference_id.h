/// The ids of remote objects and of the holds on them. references.h has the protocol that keeps objects alive.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

#include "base/record.h"

namespace tensorferry {

/// A number that no other agent, and no other incarnation of this one, gives out, and that no agent can guess.
template <class Kind>
struct UniqueId {
  std::uint64_t incarnation = 0;  // of the agent that made it
  std::uint64_t counter = 0;      // from 1
  std::uint64_t nonce = 0;        // reference_proof.h
  static constexpr std::tuple fields{&UniqueId::incarnation, &UniqueId::counter, &UniqueId::nonce};
  auto operator<=>(const UniqueId&) const = default;
};

/// Names an object. The agent that asks for the object's creation makes it, and need not be the owner. The holders of
/// the object keep the nonce secret.
using RRefId = UniqueId<struct RRefIdKind>;
/// Names one agent's hold on an object. The agent that passes the object on makes it. The nonce proves that it was made
/// for that agent.
using ForkId = UniqueId<struct ForkIdKind>;

/// The ids of a remote object that a call creates: `object`, and the caller's own hold on it.
struct Creation {
  RRefId object;
  ForkId fork;
  bool operator==(const Creation&) const = default;
};

/// One incarnation of one agent: the name to call it by, and the incarnation that tells a restarted agent from it.
struct AgentId {
  std::string name;
  std::uint64_t incarnation = 0;
  static constexpr std::tuple fields{&AgentId::name, &AgentId::incarnation};
  auto operator<=>(const AgentId&) const = default;
};

/// A reference inside a message: the object, its owner, and the hold that the receiver gets.
struct ReferenceRecord {
  AgentId owner;
  RRefId object;
  ForkId fork;
  AgentId parent;              // the agent that passes it on, and holds it until the owner knows of the receiver's hold
  std::uint64_t receiver = 0;  // the receiver's incarnation; another one must not take the reference
  std::string type_hint;       // the name of the object's type, from its creator; "": not known

  bool operator==(const ReferenceRecord&) const = default;
};

}  // namespace tensorferry

template <class Kind>
struct std::hash<tensorferry::UniqueId<Kind>> {
  std::size_t operator()(const tensorferry::UniqueId<Kind>& id) const noexcept {
    return id.incarnation * 0x9e3779b97f4a7c15U ^ id.counter * 0xff51afd7ed558ccdU ^ id.nonce;
  }
};
