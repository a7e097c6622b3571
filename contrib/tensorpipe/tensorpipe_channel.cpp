#include "contrib/tensorpipe/tensorpipe_channel.h"

#include <string>
#include <utility>

#include "base/fork.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/offers.h"
#include "channels/reserve.h"
#include "channels/wire_use.h"
#include "channels/xth/directory.h"
#include "contrib/tensorpipe/contexts.h"
#include "contrib/tensorpipe/flow.h"
#include "contrib/tensorpipe/meeting.h"
#include "contrib/tensorpipe/messages.h"

namespace tensorferry {
namespace {

using tp::PipeFlow;
using tp::PipeMeeting;

class TensorpipeChannel final : public Channel {
 public:
  TensorpipeChannel(Wire& wire, DevicePair pair, TensorpipeOptions options)
      : wire_(wire),
        pair_(pair),
        flow_(std::make_shared<PipeFlow>(
            pair, std::string(wire.peer()),
            [use = use_](const Status& why) { use->with([&](Wire& told) { told.ready(why); }); })),
        meeting_(std::make_shared<PipeMeeting>(use_, pair.local.type, std::string(wire.peer()), options.loopback,
                                               [flow = flow_](Result<PipeMeeting::Pipe> met) {
                                                 if (met.ok())
                                                   flow->use(std::move(*met));
                                                 else
                                                   flow->fail(met.status());
                                               })) {}

  ~TensorpipeChannel() override {
    TensorpipeChannel::close({});
    use_->end();
    if (born_in_ != forks()) (void)new std::pair(flow_, meeting_);  // leaked: locks may be held for ever
  }

  void begin() {
    wire_.ready({});
    meeting_->begin();
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (buffer.device != pair_.local)
      return Refusal{formatted("the channel carries {}, not {}", text_of(pair_.local), text_of(buffer.device))};
    if (sharing == Sharing::shared) return Refusal{"tensorpipe copies bytes and cannot share them"};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (const auto ended = flow_->end(); !ended.ok()) return Refusal{std::string(ended.what())};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(tp::TensorpipeTicket{})};
    }
    if (!flow_->ready() && !message.last_resort()) return Refusal{"its pipe is not connected yet", true};
    auto held = buffer;
    if (pair_.local.type == DeviceType::cuda) {
      auto found = tp::gpu::held(buffer);
      if (auto* refusal = std::get_if<Refusal>(&found)) return std::move(*refusal);
      held = std::get<Buffer>(std::move(found));
    }
    const auto number = offers_->add(std::move(held), std::move(released));
    if (!number) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    return Ticket{
        .bytes = buffer.bytes, .opaque = encode(tp::TensorpipeTicket{*number, buffer.bytes}), .acknowledge = true};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) { complete(std::move(landed), std::move(consumed), status); };
    if (auto ended = flow_->end(); !ended.ok()) return finish(ended);
    const auto offer = tp::offer_of(ticket);
    if (!offer)
      return finish({Code::protocol_error, formatted("{} sent a ticket that tensorpipe cannot read", wire_.peer())});
    auto memory = reserve(sink, ticket.bytes, pair_.local, wire_.peer());
    if (!memory.ok()) return finish(memory.status());
    if (ticket.bytes == 0) return finish({});
    if (!flow_->receive(*offer, *memory, landed, consumed))
      return finish({Code::protocol_error, formatted("{} sent a ticket twice", wire_.peer())});
    wire_.control(encode(tp::PipeRequest{*offer, ticket.bytes}), {});
  }

  void withdraw(const Ticket& ticket) override {
    if (const auto offer = tp::offer_of(ticket); offer && *offer != 0) offers_->end(*offer);
  }
  void progress() override { tp::gpu::progress(); }

  void control(ByteView message, Descriptors) override {
    const auto parsed = decode<tp::Control>(message);
    if (!parsed || !flow_->end().ok()) return;
    if (const auto* hello = std::get_if<tp::PipeHello>(&*parsed)) return meeting_->hear(*hello);
    if (const auto* listening = std::get_if<tp::Listening>(&*parsed)) return meeting_->hear(*listening);
    const auto& request = std::get<tp::PipeRequest>(*parsed);
    auto source = offers_->begin_copy(request.offer, request.bytes);
    if (!source.ok()) return;  // a peer that invents an offer gets no bytes, and waits
    flow_->send(request.offer, std::move(source->buffer),
                [offers = offers_, offer = request.offer](const Status&) { offers->end_copy(offer); });
  }

  [[nodiscard]] std::string describe() const override {
    return flow_->ready() ? "a pipe of TensorPipe" : "its pipe is not connected yet";
  }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // the pipe is the parent's
    meeting_->close();
    flow_->close(status);
    offers_->close(std::move(status));
  }

 private:
  Wire& wire_;
  const DevicePair pair_;
  const std::uint32_t born_in_ = forks();
  const std::shared_ptr<WireUse> use_ = std::make_shared<WireUse>(wire_);
  const std::shared_ptr<Offers> offers_ = std::make_shared<Offers>();
  const std::shared_ptr<PipeFlow> flow_;
  const std::shared_ptr<PipeMeeting> meeting_;
};

class TensorpipeDriver final : public Driver {
 public:
  explicit TensorpipeDriver(TensorpipeOptions options) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return "tensorpipe"; }

  std::variant<Bytes, Refusal> descriptor(Device device) override {
    if (auto why = tp::Contexts::of_this_process().why_not(device); !why.empty()) return Refusal{std::move(why)};
    return encode(tp::Endpoint{device.type, id_});
  }

  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override {
    const auto ours = decode<tp::Endpoint>(mine), others = decode<tp::Endpoint>(theirs);
    if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
    if (ours->agent == others->agent) return Refusal{"an agent has no pipe to itself"};
    if (ours->type != others->type) return Refusal{"tensorpipe does not carry between a GPU and a CPU"};
    return std::nullopt;
  }

  /// Needs no probe: if it were the only channel, a probe would make it refuse the first buffers.
  [[nodiscard]] bool immediate() const override { return true; }

  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override {
    auto channel = std::make_unique<TensorpipeChannel>(wire, pair, options_);
    channel->begin();
    return channel;
  }

 private:
  const TensorpipeOptions options_;
  const tp::Secret id_ = xth::random_id();
};

}  // namespace

std::unique_ptr<Driver> make_tensorpipe_driver(TensorpipeOptions options) {
  return std::make_unique<TensorpipeDriver>(options);
}

}  // namespace tensorferry
