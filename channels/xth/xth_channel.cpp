#include "channels/xth/xth_channel.h"

#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "base/text.h"
#include "channels/completion.h"
#include "channels/offers.h"
#include "channels/region.h"
#include "channels/xth/directory.h"

namespace tensorferry {

namespace {

using xth::ChannelEnds;
using xth::Id;
using xth::XthTicket;

class XthChannel final : public Channel {
 public:
  explicit XthChannel(Wire& wire) : wire_(wire) { ChannelEnds::of_this_process().enter(id_, offers_); }
  ~XthChannel() override { XthChannel::close({}); }

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
    const auto number = offers_->add(std::move(offered), std::move(released), sharing == Sharing::shared);
    if (!number) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    return Ticket{.bytes = buffer.bytes, .opaque = encode(XthTicket{id_, *number}), .acknowledge = true};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto status = copy(ticket, sink);
    complete(std::move(landed), status);
    complete(std::move(consumed), status);
  }

  void withdraw(const Ticket& ticket) override {
    if (const auto parsed = decode<XthTicket>(ticket.opaque); parsed && parsed->end == id_)
      offers_->end(parsed->number);
  }

  void close(Status status) noexcept override {
    ChannelEnds::of_this_process().leave(id_);
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
      theirs_.reset();
    }
    offers_->close(std::move(status));
  }

 private:
  Status copy(const Ticket& ticket, Sink& sink) {
    const auto parsed = decode<XthTicket>(ticket.opaque);
    if (!parsed) return Status(Code::protocol_error, formatted("{} sent a ticket that xth cannot read", wire_.peer()));
    const auto theirs = find(parsed->end);
    if (!theirs.ok()) return theirs.status();
    const auto source = (*theirs)->begin_copy(parsed->number, ticket.bytes);
    if (!source.ok() && source.status().code() != Code::protocol_error) {  // the other end has closed
      return Status(Code::connection_lost, formatted("the end of {} that offered the buffer is closed", wire_.peer()));
    }
    if (!source.ok()) return source.status();

    if (source->shared) {
      const bool taken = sink.adopt(source->buffer);
      (*theirs)->end_copy(parsed->number);
      if (taken) return {};
      return Status(Code::channel_unavailable,
                    formatted("{} shares memory, and shared memory cannot land in memory that the caller provides",
                              wire_.peer()));
    }
    const auto destination = sink.reserve(ticket.bytes);
    const bool fits = destination && destination->bytes >= ticket.bytes;
    if (fits && ticket.bytes > 0) std::memcpy(destination->data, source->buffer.data, ticket.bytes);
    (*theirs)->end_copy(parsed->number);
    if (fits) return {};
    return Status(Code::resource_exhausted,
                  formatted("no memory for a buffer of {} bytes from {}", ticket.bytes, wire_.peer()));
  }

  /// Returns the other end's offers. Remembers them, because they are the same for each ticket.
  Result<std::shared_ptr<Offers>> find(const Id& end) {
    std::lock_guard lock(mutex_);
    if (closed_) return Status(Code::connection_lost, formatted("the link to {} has ended", wire_.peer()));
    if (theirs_ && theirs_id_ == end) return theirs_;
    auto found = ChannelEnds::of_this_process().find(end);
    if (!found) {  // no ProtocolError: more likely an agent just left than a peer invents tickets
      return Status(Code::connection_lost,
                    formatted("the end of {} that offered the buffer is closed, or never existed", wire_.peer()));
    }
    theirs_id_ = end;
    theirs_ = found;
    return found;
  }

  Wire& wire_;
  const Id id_ = xth::random_id();
  const std::shared_ptr<Offers> offers_ = std::make_shared<Offers>();
  std::mutex mutex_;
  bool closed_ = false;
  Id theirs_id_{};
  std::shared_ptr<Offers> theirs_;
};

}  // namespace

std::variant<Bytes, Refusal> XthDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{formatted("xth carries CPU memory, not {}", text_of(device))};
  const auto nonce = xth::nonce_of_this_process();
  const auto bytes = std::as_bytes(std::span(nonce));
  return Bytes(bytes.begin(), bytes.end());
}

std::optional<Refusal> XthDriver::reaches(ByteView mine, ByteView theirs) {
  if (mine.size() == sizeof(Id) && text_of(mine) == text_of(theirs)) return std::nullopt;
  return Refusal{"another process"};
}

std::unique_ptr<Channel> XthDriver::open(Wire& wire, DevicePair) {
  auto channel = std::make_unique<XthChannel>(wire);
  wire.ready({});
  return channel;
}

}  // namespace tensorferry
