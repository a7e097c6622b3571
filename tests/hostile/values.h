/// Payloads of requests: values of the codec, messages between reference tables, records of groups. Written from
/// docs/codec.md and docs/protocol.md.
#pragma once

#include <cstdint>
#include <string>

#include "tests/hostile/random.h"

namespace hostile {

/// What the payloads of one link refer to.
struct Facts {
  std::uint64_t mine = 0, theirs = 0;  // incarnations
  std::uint64_t mails = 0;             // messages between the reference tables so far
  std::string name;                    // of the hostile peer
};

/// Returns one value. `buffers`: how many the message has.
std::string value(Random& random, std::uint64_t buffers, int depth = 0);
/// Returns the value of a tensor of bytes that is the whole of buffer `buffer`.
std::string tensor_value(std::uint64_t bytes, std::uint64_t buffer);
/// Returns the payload of a request with these values as its positional arguments.
std::string arguments(const std::string& values, std::uint64_t count);
/// Returns a payload for one of the functions "tf:...".
std::string mail(Random& random, Facts& facts);
std::string group_record(Random& random, const Facts& facts);
std::string use_of_object(Random& random, const Facts& facts);

}  // namespace hostile
