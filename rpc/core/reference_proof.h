/// Numbers that cannot be guessed: the nonces in the ids of objects and forks (reference_id.h).
///
/// The nonce of an object is a secret of the agents that hold references to it. The nonce of a fork is a proof, made
/// with the object's nonce, that a holder gave the fork to one receiver. So the owner can check a fork of which it has
/// not heard yet. docs/security.md ("Who may use an object") says what this protects.
#pragma once

#include <cstdint>
#include <span>

#include "rpc/core/reference_id.h"

namespace tensorferry {

/// Returns SipHash-2-4 of `words`, as little-endian bytes, with a key of two words: a keyed hash of 64 bits, whose
/// values cannot be guessed without the key. https://www.aumasson.jp/siphash/siphash.pdf
std::uint64_t siphash(std::uint64_t key0, std::uint64_t key1, std::span<const std::uint64_t> words);

/// Returns the nonce of the fork `fork` of `object` for the agent of incarnation `receiver`. Ignores `fork.nonce`.
std::uint64_t proof_of(const RRefId& object, const ForkId& fork, std::uint64_t receiver);

/// Returns whether a holder of `object` gave `fork` to the agent of incarnation `receiver`.
[[nodiscard]] inline bool proves(const RRefId& object, const ForkId& fork, std::uint64_t receiver) {
  return fork.incarnation != 0 && fork.nonce == proof_of(object, fork, receiver);
}

}  // namespace tensorferry
