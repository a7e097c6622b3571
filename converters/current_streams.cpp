#include "converters/current_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace tensorferry {

CurrentStreams::CurrentStreams(const Converters& converters, std::span<const Buffer> buffers) {
  for (const auto& buffer : buffers) {
    if (buffer.device.type == DeviceType::cpu) continue;
    const auto* const converter = converters.find(buffer.device.type);
    const auto stream = converter == nullptr ? std::nullopt : converter->stream_of(buffer);
    if (!stream) continue;
    const bool done = std::any_of(before_.begin(), before_.end(),
                                  [&stream](const c10::Stream& before) { return before.device() == stream->device(); });
    if (!done) before_.push_back(c10::impl::VirtualGuardImpl(stream->device_type()).exchangeStream(*stream));
  }
}

CurrentStreams::~CurrentStreams() {
  for (const auto& stream : before_) c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
}

}  // namespace tensorferry
