/// A message that is encoded once and goes to many: its bytes in one frozen region, which every peer that can maps
/// copy-on-write, and which others get a copy of.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "agent/agent.h"
#include "channels/buffer.h"
#include "channels/status.h"
#include "rpc/core/codec.h"

namespace tensorferry {

/// Immutable; may be written into any number of messages, from any threads. The region lives as long as this, a message
/// that is under way, or anybody's mapping of it.
class Published final {
 public:
  /// Copies the bytes of the message's buffers together. InvalidArgument where one is not in host memory, or is handed
  /// over itself (shared memory, or another published value); ResourceExhausted.
  static Result<std::shared_ptr<const Published>> make(const Message& message);

  /// Writes it as a value.
  void write(Encoder& out, const void* identity = nullptr) const;
  /// Of the region; 0: it had no buffers.
  [[nodiscard]] std::size_t bytes() const noexcept { return region_.bytes; }

 private:
  Bytes payload_;
  std::vector<PublishedPart> parts_;
  Buffer region_;
};

/// The buffers that the payload of a published value names, once `in` has given Tag::published: parts of the one that
/// came.
std::vector<Buffer> published_buffers(const Decoder& in);

}  // namespace tensorferry
