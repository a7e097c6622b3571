#include "agent/buffers/channel_set.h"

#include <algorithm>

#include "agent/buffers/channel_binding.h"
#include "agent/buffers/placement.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/text.h"
#include "channels/completion.h"

namespace tensorferry {

ChannelSet::ChannelSet(ChannelSurroundings around)
    : around_(around),
      probes_([&link = around.link](UniqueFunction<void()> job) { link.run(std::move(job)); }),
      outgoing_controls_(around.link),
      bindings_({around_, outgoing_controls_, bulk_reads_, probes_, shared_}) {}
ChannelSet::~ChannelSet() = default;

std::optional<std::uint64_t> ChannelSet::probing(Message& message, const std::string& require,
                                                 const Placement& placement) {
  if (message.sharing.empty() && require.empty()) return std::nullopt;
  if (!place(message, placement).ok()) return std::nullopt;  // build() returns the error
  const auto known = probes_.count();
  if (!known) return std::nullopt;  // the link has ended
  for (std::size_t i = 0; i < message.buffers.size(); ++i) {
    if (require.empty() && message.sharing_of(i) == Sharing::by_value) continue;
    for (const auto* binding :
         bindings_.order({message.buffers[i].device, message.destination_of(i).device}).bindings) {
      const bool needed =
          require.empty() ? around_.drivers[binding->driver()].shares_memory() : binding->name() == require;
      if (needed && binding->state() == ChannelBinding::State::probing) return known;
    }
  }
  return std::nullopt;
}

Status ChannelSet::on_control(std::uint64_t id, ByteView payload, Descriptors descriptors) {
  Reader in(payload);
  const auto operation = static_cast<ChannelBinding::Control>(in.get<std::uint8_t>());
  const auto code = in.get<std::uint32_t>();
  if (in.failed()) return {Code::protocol_error, "the control frame names no channel"};
  if (!incoming_controls_.is_next(id)) return {Code::protocol_error, "the control frame is out of order"};
  if (operation < ChannelBinding::Control::open || operation > ChannelBinding::Control::message)
    return {Code::protocol_error, "the control frame has an unknown operation"};
  const bool uses = operation == ChannelBinding::Control::open || operation == ChannelBinding::Control::message;
  const auto named = bindings_.of_code(code, uses);
  if (!named.ok()) return {Code::protocol_error, "the control frame is for " + std::string(named.status().what())};
  if (auto* binding = *named) {  // else its messages are dropped until the peer has read the refusal
    switch (operation) {
      case ChannelBinding::Control::open:
        break;  // of_code() has opened it
      case ChannelBinding::Control::ready:
        binding->peer_ready();
        break;
      case ChannelBinding::Control::failed:
        binding->peer_failed("at the peer: " + std::string(text_of(in.rest())));
        break;
      case ChannelBinding::Control::message:
        binding->channel->control(in.rest(), std::move(descriptors));
        break;
    }
  }
  for (const auto& pull : incoming_controls_.received(id)) pull({});
  return {};
}

Result<FrameSink::Taken> ChannelSet::on_bulk(FrameStream& stream, const wire::Header& header) {
  const auto named = bindings_.of_code(header.channel);
  if (!named.ok()) return Status(Code::protocol_error, "the bulk bytes are of " + std::string(named.status().what()));
  const auto* binding = *named;
  if (binding == nullptr) return FrameSink::Taken::yes;  // the stream drops the bytes
  auto read = bulk_reads_.take({binding->code(), header.sequence});
  if (!read) return FrameSink::Taken::hold;
  if (read->destination.bytes != header.trailing) {
    const Status wrong(Code::protocol_error, "the bulk bytes have another size than their ticket says");
    complete(std::move(read->landed), wrong);
    return wrong;
  }
  stream.read(std::move(read->destination), std::move(read->landed));
  return FrameSink::Taken::yes;
}

std::string ChannelSet::awaited() const {
  const auto controls = incoming_controls_.waiting();
  const auto bulk = bulk_reads_.waiting();
  std::string out;
  if (controls.pulls != 0) {
    out += formatted(": {} of this link wait for control message {} of the peer, of which {} have come", controls.pulls,
                     controls.needed, controls.received);
  }
  if (bulk != 0) {
    out += formatted("{} {} of this link wait for bytes on its {} bulk connections", out.empty() ? ":" : ",", bulk,
                     around_.link.bulk_connections_in());
  }
  return out.empty() ? ": they are being copied" : out;
}

void ChannelSet::want_release(std::uint64_t id) {
  if (id == 0) return;
  acknowledgements_.add(id);
  around_.link.activate();
}

std::vector<std::uint64_t> ChannelSet::take_releases(std::size_t most) {
  // Lets the channels complete work that is done but that they would notice only after this frame, such as GPU copies.
  if (acknowledgements_.any_read()) {
    for (auto* channel : bindings_.channels()) channel->progress();
  }
  return acknowledgements_.take(most);
}

void ChannelSet::acknowledged(const std::vector<std::uint64_t>& releases) {
  for (const auto id : releases) {
    const auto offered = offered_.take(id);
    if (offered) offered->binding->channel->acknowledged(offered->ticket);  // else: an id that was never given out
  }
}

Result<Device> ChannelSet::arrival_of(Device source, Destination destination, const Placement& placement) {
  if (!destination.anywhere || (source == Device() && placement.empty())) return destination.device;
  bool elsewhere = false;
  auto device = bindings_.arrival(source, placement, &elsewhere);
  if (elsewhere) {
    warn_once("arrival " + text_of(source), "peer=" + around_.link.peer().name + " device=" + text_of(source) +
                                                " lands on its cpu: it has no " +
                                                std::string(source.type == DeviceType::cuda ? "GPU" : "such device"));
  }
  return device;
}

Result<Route> ChannelSet::explain(Device local, const Placement& placement, std::size_t bytes) {
  const auto arrives = arrival_of(local, {local, true}, placement);
  if (!arrives) return arrives.status();
  const auto remote = *arrives;
  Route route;
  route.remote = remote;
  const auto& order = bindings_.order({local, remote});
  for (const auto& [name, binding] : order.all) {
    const bool usable = binding != nullptr && binding->state() == ChannelBinding::State::usable;
    std::string reason = binding == nullptr ? "" : usable ? binding->channel->describe() : binding->reason();
    if (binding == nullptr) {
      const auto it = order.reasons.find(name);
      reason = it == order.reasons.end() ? "the link has ended" : it->second;
    }
    if (usable && route.channel.empty()) route.channel = name;
    route.candidates.push_back({name, usable, reason});
  }
  if (bytes <= inline_bytes && local.type == DeviceType::cpu && remote.type == DeviceType::cpu)
    route.channel = "inline";
  return route;
}

std::shared_ptr<OneSided> ChannelSet::one_sided(DevicePair pair) {
  if (!bindings_.has(pair.remote)) return nullptr;  // the peer names it, and each pair is kept
  for (const auto* binding : bindings_.order(pair).bindings) {
    if (binding->state() != ChannelBinding::State::usable) continue;
    if (auto found = binding->channel->one_sided()) return found;
  }
  return nullptr;
}

void ChannelSet::warn_once(const std::string& about, const std::string& line) {
  {
    const std::lock_guard lock(warned_mutex_);
    if (!warned_.insert(about).second) return;
  }
  log_warning(line);
}

void ChannelSet::close(const Status& status) {
  const auto channels = bindings_.end(status);
  if (!channels) return;
  // Nothing is added from here on; what waits ends afterwards, in this order, each also if another has no memory.
  using out_of_memory::with_reserve;
  offered_.end(status);
  auto reads = bulk_reads_.end(status);
  const auto pulls = incoming_controls_.end(status);
  auto jobs = probes_.end();
  for (auto& [name, read] : reads) complete(std::move(read.landed), status);
  for (auto* channel : *channels) with_reserve([&] { channel->close(status); });
  for (const auto& [after, pull] : pulls) with_reserve([&] { pull(status); });
  for (auto& job : jobs) with_reserve([&] { job(); });
}

}  // namespace tensorferry
