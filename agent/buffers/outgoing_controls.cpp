#include "agent/buffers/outgoing_controls.h"

#include <mutex>
#include <utility>

#include "agent/wire/frame.h"

namespace tensorferry {

ControlId OutgoingControls::send(std::uint32_t code, std::uint8_t operation, ByteView bytes, Descriptors descriptors) {
  Bytes payload;
  Writer writer(payload);
  writer.put(operation);
  writer.put(code);
  writer.raw(bytes);
  wire::Header header;
  header.kind = wire::Kind::control;
  header.descriptors = static_cast<std::uint8_t>(descriptors.size());
  {
    // Only queues: to write would complete other messages, and completions run under no lock.
    const std::lock_guard order(mutex_);
    header.control = ++sent_;
    link_.queue_control(wire::assemble(header, {}, {}, payload), std::move(descriptors));
  }
  link_.write_controls();
  return header.control;
}

}  // namespace tensorferry
