/// The messages between the reference tables of two agents: batches of operations, and their answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/record.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

inline constexpr std::size_t longest_reason = 1024;

/// One thing that one agent's tables tell another's. Which fields have a meaning depends on the kind; all travel.
struct ReferenceOp {
  /// Numbers travel: never renumber.
  enum class Kind : std::uint8_t {
    fork = 0,      // user to owner: I hold `object` by `fork`, which `parent` gave me
    accept = 1,    // user to parent: the owner knows of `fork` (or the object is gone); you need not hold on for me
    remove = 2,    // user to owner: I hold `object` by `fork` no more
    abandon = 3,   // creator to owner: I gave the creation of `object` up, because of `text`; my hold was `fork`
    withdraw = 4,  // parent to user: has `fork` come, or can it still by the reply to your call `call`? Else refuse it
    ping = 5,      // owner to anyone: are you there?
    last = ping,
  };
  Kind kind = Kind::ping;
  RRefId object;
  ForkId fork;
  AgentId parent;
  std::uint64_t call = 0;
  std::string text;
  static constexpr std::tuple fields{&ReferenceOp::kind,         &ReferenceOp::fork,
                                     &ReferenceOp::object,       &ReferenceOp::parent,
                                     varint(&ReferenceOp::call), at_most(&ReferenceOp::text, longest_reason)};

  /// Other fields are for the caller to set.
  static ReferenceOp of(Kind kind, const ForkId& fork = {}, const RRefId& object = {}) {
    ReferenceOp op;
    op.kind = kind;
    op.fork = fork;
    op.object = object;
    return op;
  }
  bool operator==(const ReferenceOp&) const = default;
};

/// What became of one operation.
struct ReferenceResult {
  /// Numbers travel.
  enum class Code : std::uint8_t {
    done = 0,     // also: there was nothing to do any more
    gone = 1,     // fork: there is no such object (any more)
    held = 2,     // withdraw: it has come
    maybe = 3,    // withdraw: that call is still under way
    refused = 4,  // withdraw: it has not come and never will
    last = refused,
  };
  Code code = Code::done;
  std::string text;  // gone: why
  static constexpr std::tuple fields{&ReferenceResult::code, at_most(&ReferenceResult::text, longest_reason)};

  bool operator==(const ReferenceResult&) const = default;
};

/// Operations of one agent for another, in order. Batches of a pair are numbered from 1 and come one at a time: the
/// next is sent when the last is answered, and one whose answer is not known is sent again under its number. So each is
/// done once and in order, whatever the calls beneath do.
struct ReferenceBatch {
  static constexpr std::size_t most_ops = 1024;

  std::uint64_t receiver = 0;  // incarnation: another life of the receiver's must not take it
  std::uint64_t number = 0;
  std::vector<ReferenceOp> ops;
  static constexpr std::tuple fields{&ReferenceBatch::receiver, &ReferenceBatch::number,
                                     at_most(&ReferenceBatch::ops, most_ops)};
};

struct ReferenceAnswer {
  /// Numbers travel.
  enum class Kind : std::uint8_t {
    done = 0,      // one result an operation
    stranger = 1,  // I am not that incarnation
    stale = 2,     // that number was done before the last one, or is not the next: nobody waits for this answer
    dead = 3,      // I was told that you are dead, and have dropped what you held
    last = dead,
  };
  Kind kind = Kind::done;
  std::vector<ReferenceResult> results;
  static constexpr std::tuple fields{&ReferenceAnswer::kind,
                                     at_most(&ReferenceAnswer::results, ReferenceBatch::most_ops)};
};

}  // namespace tensorferry
