#include "rpc/core/reference_proof.h"

#include <array>
#include <bit>

namespace tensorferry {

std::uint64_t siphash(std::uint64_t key0, std::uint64_t key1, std::span<const std::uint64_t> words) {
  auto v0 = key0 ^ 0x736f6d6570736575U;
  auto v1 = key1 ^ 0x646f72616e646f6dU;
  auto v2 = key0 ^ 0x6c7967656e657261U;
  auto v3 = key1 ^ 0x7465646279746573U;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  };
  const auto absorb = [&](std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  for (const auto word : words) absorb(word);
  absorb(std::uint64_t{8 * words.size()} << 56);  // the length in bytes, as the algorithm's last word
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

std::uint64_t proof_of(const RRefId& object, const ForkId& fork, std::uint64_t receiver) {
  return siphash(object.nonce, object.counter,
                 std::array{object.incarnation, fork.incarnation, fork.counter, receiver});
}

}  // namespace tensorferry
