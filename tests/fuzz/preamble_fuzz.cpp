// Fuzzes both sides of the handshake. A stranger's bytes never pass for those of a peer that knows the key.

#include <algorithm>
#include <cstdint>

#include "agent/handshake/auth.h"
#include "tests/fuzz/must.h"

using namespace tensorferry;
using tensorferry::fuzzing::must;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Key key = Key::random();
  const ByteView input = std::as_bytes(std::span(data, size));

  if (const auto preamble = Preamble::decode(input); preamble.ok()) {
    const auto again = Preamble::decode(preamble->encode());
    must(again.ok() && again->encode() == preamble->encode());
  }
  for (const bool demands : {true, false}) {
    DiallerHandshake dialler({.key = &key, .demands_proof = demands, .purpose = "link"});
    const auto proof = dialler.answer(input);
    must(!proof.ok() || (!demands && !dialler.agreement().proven));

    AcceptorHandshake acceptor({.key = &key, .demands_proof = demands, .purpose = "link"});
    const auto answer = acceptor.answer(input.first(std::min(size, Preamble::size)));
    if (!answer.ok() || !answer->verdict) continue;
    const auto rest = input.subspan(Preamble::size);
    const bool passed = acceptor.check(rest.first(std::min(rest.size(), sizeof(Digest)))).ok();
    must(!passed || (!demands && !acceptor.agreement().proven));
  }
  return 0;
}
