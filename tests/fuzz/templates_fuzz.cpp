// Fuzzes payload deltas. Input: u8 n, two payloads of n bytes each, then a delta as a peer may send it.
#include <cstdint>
#include <cstdlib>

#include "agent/templates.h"

namespace {

using namespace tensorferry;

void must(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Reader in(std::as_bytes(std::span(data, size)));
  const std::size_t bytes = in.get<std::uint8_t>();
  const auto from = in.raw(bytes), to = in.raw(bytes);
  if (in.failed()) return 0;
  const auto between = differences(from, to, 4 * bytes);
  must(between.has_value());
  const auto again = apply_differences(from, *between);
  must(again.has_value() && *again == Bytes(to.begin(), to.end()));

  const auto made_up = apply_differences(from, in.rest());
  must(!made_up || made_up->size() == bytes);

  ReceivedTemplates templates;
  must(templates.keep(7, from).ok() && !templates.keep(7, to).ok());
  const auto restored = templates.restore(7, in.rest());
  must(restored.ok() == made_up.has_value() && (!made_up || *restored == *made_up));
  return 0;
}
