#include "channels/xth/xth_channel.h"

#include <cstring>
#include <utility>

#include "base/text.h"
#include "channels/completion.h"
#include "channels/region.h"
#include "channels/reserve.h"
#include "channels/xth/directory.h"

namespace tensorferry {

namespace {

class XthChannel final : public Channel {
 public:
  XthChannel(Wire& wire, DevicePair pair) : wire_(wire), end_("xth", pair, wire) {}

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing&, Completion released) override {
    if (buffer.device.type != DeviceType::cpu)
      return Refusal{formatted("xth carries CPU memory, not {}", text_of(buffer.device))};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    auto offered = buffer;
    if (sharing == Sharing::shared) {
      if (buffer.bytes == 0) return Refusal{"the buffer has no bytes to share"};
      auto found = Regions::of_this_process().find(buffer.data, buffer.bytes);
      if (!found) return Refusal{"only memory that was made to be shared can be shared"};
      offered.owner = std::move(found->region);
    }
    return end_.offer(std::move(offered), std::move(released), sharing == Sharing::shared);
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto status = copy(ticket, sink);
    complete(std::move(landed), std::move(consumed), status);
  }

  [[nodiscard]] bool copies_into(const Sink&) const override { return true; }

  void withdraw(const Ticket& ticket) override { end_.withdraw(ticket); }
  void close(Status status) noexcept override { end_.close(std::move(status)); }

 private:
  Status copy(const Ticket& ticket, Sink& sink) {
    const auto source = end_.begin_copy(ticket);
    if (!source.ok()) return source.status();
    if (source->shared) {
      const bool taken = sink.adopt(source->buffer);
      source->end_copy();
      if (taken) return {};
      return Status(Code::channel_unavailable,
                    formatted("{} shares memory, and shared memory cannot land in memory that the caller provides",
                              wire_.peer()));
    }
    const auto destination = reserve(sink, ticket.bytes, {}, wire_.peer());
    if (destination.ok() && ticket.bytes > 0) std::memcpy(destination->data, source->buffer.data, ticket.bytes);
    source->end_copy();
    return destination.status();
  }

  Wire& wire_;
  xth::LocalEnd end_;
};

}  // namespace

std::variant<Bytes, Refusal> XthDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{formatted("xth carries CPU memory, not {}", text_of(device))};
  return xth::descriptor();
}

std::optional<Refusal> XthDriver::reaches(ByteView mine, ByteView theirs) { return xth::reaches(mine, theirs); }

std::unique_ptr<Channel> XthDriver::open(Wire& wire, DevicePair pair) {
  auto channel = std::make_unique<XthChannel>(wire, pair);
  wire.ready({});
  return channel;
}

}  // namespace tensorferry
