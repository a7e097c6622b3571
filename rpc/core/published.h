/// Published values: a message that is encoded once and sent to many agents. The bytes of its buffers lie in one frozen
/// region. Peers that can map the region map it copy-on-write; all others receive a copy.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "agent/agent.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"

namespace tensorferry {

/// One published value. Immutable; any thread may write it into any number of messages. The region lives as long as
/// this object, a message under way that holds it, or a receiver's mapping of it.
class Published final {
 public:
  /// Copies the bytes of the message's buffers into a new region. InvalidArgument: a buffer is not in host memory,
  /// would not land there, or is itself handed over (shared memory, or another published value); also the region's
  /// errors.
  static Result<std::shared_ptr<const Published>> make(const Message& message);

  /// Writes it as one value.
  void write(Encoder& out, const void* identity = nullptr) const;
  /// Returns the size of the region; 0 if the message has no bytes in buffers.
  [[nodiscard]] std::size_t bytes() const noexcept { return region_.bytes; }

 private:
  Bytes payload_;
  std::vector<PublishedPart> parts_;
  Buffer region_;
};

/// Returns the buffers that the payload of a published value names: parts of the one buffer that arrived, each of which
/// keeps that buffer alive. Call it after `in.next()` has returned Tag::published.
std::vector<Buffer> published_buffers(const Decoder& in);

}  // namespace tensorferry
