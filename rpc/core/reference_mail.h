/// The messages between the reference tables of two agents: batches of operations, and their answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/record.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

inline constexpr std::size_t longest_reason = 1024;

/// One operation that one agent's tables ask of another's. The kind decides which fields have a meaning; all travel.
struct ReferenceOp {
  /// The numbers travel: never renumber.
  enum class Kind : std::uint8_t {
    fork = 0,      // user to owner: I hold `object` by `fork`, which `parent` gave me
    accept = 1,    // user to parent: the owner knows of `fork`, or the object is gone; you need not keep it for me
    remove = 2,    // user to owner: I have dropped my hold `fork` on `object`
    abandon = 3,   // creator to owner: I gave the creation of `object` up, because of `text`; my hold was `fork`
    withdraw = 4,  // parent to user: has `fork` come, or can the reply to your call `call` bring it? If not, refuse it
    ping = 5,      // owner to any agent: are you there?
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

  /// Makes an operation. The caller sets the other fields.
  static ReferenceOp of(Kind kind, const ForkId& fork = {}, const RRefId& object = {}) {
    ReferenceOp op;
    op.kind = kind;
    op.fork = fork;
    op.object = object;
    return op;
  }
  bool operator==(const ReferenceOp&) const = default;
};

/// The result of one operation.
struct ReferenceResult {
  /// The numbers travel: never renumber.
  enum class Code : std::uint8_t {
    done = 0,     // also if there was nothing to do
    gone = 1,     // fork: the object was freed, or never made
    held = 2,     // withdraw: the fork has come
    maybe = 3,    // withdraw: that call is still under way
    refused = 4,  // withdraw: the fork has not come, and will be refused
    denied = 5,   // fork: no holder of the object gave this fork to the sender
    last = denied,
  };
  Code code = Code::done;
  std::string text;  // the reason, if gone or denied
  static constexpr std::tuple fields{&ReferenceResult::code, at_most(&ReferenceResult::text, longest_reason)};

  bool operator==(const ReferenceResult&) const = default;
};

/// Operations of one agent for another, in order. The batches of one sender to one receiver are numbered from 1. The
/// sender sends the next batch when the last one is answered, and repeats a batch, under its number, until then. So
/// each operation is executed once and in order, even if calls fail or arrive twice.
struct ReferenceBatch {
  static constexpr std::size_t most_ops = 1024;

  std::uint64_t receiver = 0;  // the receiver's incarnation; another one must not take the batch
  std::uint64_t number = 0;
  std::vector<ReferenceOp> ops;
  static constexpr std::tuple fields{&ReferenceBatch::receiver, &ReferenceBatch::number,
                                     at_most(&ReferenceBatch::ops, most_ops)};
};

struct ReferenceAnswer {
  /// The numbers travel: never renumber.
  enum class Kind : std::uint8_t {
    done = 0,      // one result per operation follows
    stranger = 1,  // this agent is another incarnation than the batch names
    stale = 2,     // the number is neither the last one's nor the next
    dead = 3,      // this agent was told that the sender is dead, and has dropped its holds
    last = dead,
  };
  Kind kind = Kind::done;
  std::vector<ReferenceResult> results;
  static constexpr std::tuple fields{&ReferenceAnswer::kind,
                                     at_most(&ReferenceAnswer::results, ReferenceBatch::most_ops)};
};

}  // namespace tensorferry
