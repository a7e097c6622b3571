#include "agent/channel_set.h"

#include <algorithm>

#include "agent/channel_binding.h"
#include "agent/placement.h"
#include "base/log.h"
#include "channels/completion.h"

namespace tensorferry {

ChannelSet::ChannelSet(Link& link) : link_(link), engine_(link.engine()) {}
ChannelSet::~ChannelSet() = default;

void ChannelSet::destroy_channels() {
  for (auto& [key, binding] : bindings_) binding->channel.reset();
}

void ChannelSet::meet(const wire::Hello& hello) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(met_, true)) return;
  theirs_ = hello.drivers;
  their_devices_ = hello.devices;
  bundles_ = (hello.features & wire::feature::bundles) != 0;
}

bool ChannelSet::met() const {
  const std::lock_guard lock(mutex_);
  return met_;
}

namespace {

const wire::Hello::Endpoint* endpoint_of(const std::vector<wire::Hello::Driver>& drivers, std::string_view name,
                                         Device device) {
  for (const auto& driver : drivers) {
    if (driver.name != name) continue;
    for (const auto& endpoint : driver.endpoints) {
      if (endpoint.device == device) return &endpoint;
    }
  }
  return nullptr;
}

}  // namespace

/// Returns why driver `index` does not connect the pair, or nullopt if it does.
static std::optional<Refusal> reach(Engine& engine, std::size_t index, DevicePair pair,
                                    const std::vector<wire::Hello::Driver>& theirs) {
  auto& driver = *engine.drivers[index];
  const auto* mine = endpoint_of(engine.descriptors, driver.name(), pair.local);
  if (mine == nullptr) {
    if (driver.shares_memory() && !engine.options.shared_memory)
      return Refusal{"shared memory is switched off by this agent's options"};
    const auto why = driver.descriptor(pair.local);
    const auto* refusal = std::get_if<Refusal>(&why);
    return Refusal{refusal != nullptr ? refusal->reason : "this agent has no " + text_of(pair.local)};
  }
  const auto* other = endpoint_of(theirs, driver.name(), pair.remote);
  if (other == nullptr) return Refusal{"the peer does not have it for its " + text_of(pair.remote)};
  return driver.reaches(mine->descriptor, other->descriptor);
}

/// Returns the pair's channels. The first call for a pair opens those that reach. The reference stays valid, and the
/// list does not change.
const ChannelSet::ChannelOrder& ChannelSet::order(DevicePair pair) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = orders_.find(pair); it != orders_.end()) return it->second;
  }
  const std::lock_guard opening(open_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = orders_.find(pair); it != orders_.end()) return it->second;
  }
  ChannelOrder order;
  for (std::size_t i = 0; i < engine_.drivers.size(); ++i) {
    const std::string name(engine_.drivers[i]->name());
    const auto refusal = reach(engine_, i, pair, theirs_);
    auto* binding = refusal ? nullptr : open(i, pair);
    order.all.emplace_back(name, binding);
    if (refusal) order.reasons[name] = refusal->reason;
    if (binding != nullptr) order.bindings.push_back(binding);
  }
  const std::lock_guard lock(mutex_);
  return orders_.try_emplace(pair, std::move(order)).first->second;
}

ChannelSet::ChannelBinding* ChannelSet::open(std::size_t driver, DevicePair pair) {
  ChannelBinding* binding = nullptr;
  const bool immediate = engine_.drivers[driver]->immediate();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return nullptr;
    auto& place = bindings_[{driver, pair}];
    if (place) return place.get();
    place = std::make_unique<ChannelBinding>(*this, driver, pair, immediate);
    binding = place.get();
  }
  // The peer opens its end of an immediate channel at the first ticket, and of any other when this message tells it.
  if (!immediate) control(binding->code(), static_cast<std::uint8_t>(ChannelBinding::Control::open), {}, {});
  auto channel = engine_.drivers[driver]->open(*binding, pair);
  Status ended;
  {
    const std::lock_guard lock(mutex_);
    binding->channel = std::move(channel);
    if (closed_) ended = status_;
  }
  if (!ended.ok()) binding->channel->close(ended);  // close() may have run before the binding had its channel
  return binding;
}

std::optional<std::uint64_t> ChannelSet::probing(Message& message, const std::string& require,
                                                 const Placement& placement) {
  if (message.sharing.empty() && require.empty()) return std::nullopt;
  if (!place(message, placement).ok()) return std::nullopt;  // build() returns the error
  std::uint64_t known = 0;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return std::nullopt;
    known = probes_ended_;
  }
  for (std::size_t i = 0; i < message.buffers.size(); ++i) {
    if (require.empty() && message.sharing_of(i) == Sharing::by_value) continue;
    for (const auto* binding : order({message.buffers[i].device, message.destination_of(i).device}).bindings) {
      const bool needed =
          require.empty() ? engine_.drivers[binding->driver()]->shares_memory() : binding->name() == require;
      if (needed && binding->state() == ChannelBinding::State::probing) return known;
    }
  }
  return std::nullopt;
}

void ChannelSet::when_probed(std::uint64_t known, UniqueFunction<void()> job) {
  bool ended = false;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_ && known == probes_ended_) {
      after_probe_.push_back(std::move(job));
      return;
    }
    ended = closed_;
  }
  if (ended)
    job();
  else
    link_.run(std::move(job), false);
}

void ChannelSet::probe_ended() {
  std::vector<UniqueFunction<void()>> due;
  {
    const std::lock_guard lock(mutex_);
    ++probes_ended_;
    due.swap(after_probe_);
  }
  for (auto& job : due) link_.run(std::move(job), false);
}

Result<ChannelSet::ChannelBinding*> ChannelSet::binding_of_peer(std::uint8_t driver, DevicePair theirs, bool refuses) {
  const DevicePair ours{theirs.remote, theirs.local};
  std::string name;
  {
    const std::lock_guard lock(mutex_);
    if (driver < theirs_.size()) name = theirs_[driver].name;
    // Only what the peer has announced, so that it cannot fill the maps with invented devices.
    if (driver >= theirs_.size() || endpoint_of(theirs_, name, ours.remote) == nullptr)
      return Status(Code::protocol_error, "a channel that does not reach this device: the peer has not announced it");
  }
  std::string reason = "this agent has no " + text_of(ours.local);
  if (endpoint_of(engine_.descriptors, name, ours.local) != nullptr) {
    const auto& order = this->order(ours);
    for (const auto& [known, binding] : order.all) {
      if (known == name && binding != nullptr) return binding;
    }
    const auto why = order.reasons.find(name);
    reason = why == order.reasons.end() ? "the link has ended" : why->second;
  }
  if (refuses) refuse(name, ours, reason);
  return nullptr;
}

Result<ChannelSet::ChannelBinding*> ChannelSet::binding_of_code(std::uint32_t code, bool refuses) {
  const Device local{static_cast<DeviceType>((code >> 20) & 0xf), static_cast<std::uint8_t>(code >> 12)};
  const Device remote{static_cast<DeviceType>((code >> 8) & 0xf), static_cast<std::uint8_t>(code)};
  return binding_of_peer(static_cast<std::uint8_t>(code >> 24), {local, remote}, refuses);
}

void ChannelSet::refuse(const std::string& driver, DevicePair pair, const std::string& reason) {
  constexpr std::size_t most = 1024;  // pairs; a peer that names more of them gets no further answer
  for (std::size_t i = 0; i < engine_.drivers.size(); ++i) {
    if (engine_.drivers[i]->name() != driver) continue;
    const auto code = ChannelBinding::code(i, pair);
    {
      const std::lock_guard lock(mutex_);
      if (closed_ || refused_.size() == most || !refused_.insert(code).second) return;
    }
    control(code, static_cast<std::uint8_t>(ChannelBinding::Control::failed), view_of(reason), {});
    return;
  }
}

ControlId ChannelSet::control(std::uint32_t code, std::uint8_t operation, ByteView bytes, Descriptors descriptors) {
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
    const std::lock_guard order(control_mutex_);
    header.control = ++controls_sent_;
    link_.queue_control(wire::assemble(header, {}, {}, payload), std::move(descriptors));
  }
  link_.write_controls();
  return header.control;
}

Status ChannelSet::on_control(std::uint64_t id, ByteView payload, Descriptors descriptors) {
  Reader in(payload);
  const auto operation = static_cast<ChannelBinding::Control>(in.get<std::uint8_t>());
  const auto code = in.get<std::uint32_t>();
  if (in.failed()) return {Code::protocol_error, "the control frame names no channel"};
  if (id != controls_received_ + 1) return {Code::protocol_error, "the control frame is out of order"};
  if (operation < ChannelBinding::Control::open || operation > ChannelBinding::Control::message)
    return {Code::protocol_error, "the control frame has an unknown operation"};
  const bool uses = operation == ChannelBinding::Control::open || operation == ChannelBinding::Control::message;
  const auto named = binding_of_code(code, uses);
  if (!named.ok()) return {Code::protocol_error, "the control frame is for " + std::string(named.status().what())};
  if (auto* binding = *named) {  // else its messages are dropped until the peer has read the refusal
    switch (operation) {
      case ChannelBinding::Control::open:
        break;  // binding_of_code() has opened it
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
  std::vector<std::function<void(const Status&)>> due;
  {
    const std::lock_guard lock(mutex_);
    controls_received_ = id;
    const auto ready =
        std::stable_partition(after_.begin(), after_.end(), [&](const auto& wait) { return wait.first > id; });
    for (auto it = ready; it != after_.end(); ++it) due.push_back(std::move(it->second));
    after_.erase(ready, after_.end());
  }
  for (const auto& pull : due) pull({});
  return {};
}

void ChannelSet::pull_when(ControlId after, std::function<void(const Status&)> pull) {
  Status failed;
  {
    const std::lock_guard lock(mutex_);
    if (after > controls_received_ && !closed_) {
      after_.emplace_back(after, std::move(pull));
      return;
    }
    if (after > controls_received_) failed = status_;
  }
  pull(failed);
}

/// Bytes may be named twice if one of the two drops them: a sender that lost a connection withdraws a message that may
/// have arrived. The other one gets the bytes then.
void ChannelSet::receive_bulk(std::uint32_t code, std::uint64_t sequence, BulkRead read) {
  const auto drops = [](const BulkRead& each) { return each.destination.data == nullptr; };
  Status failed;
  Completion needless;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      failed = status_;
    } else if (const auto [it, added] = bulk_reads_.try_emplace({code, sequence}, std::move(read)); !added) {
      if (!drops(read) && drops(it->second)) std::swap(read, it->second);
      if (drops(read)) {
        needless = std::move(read.landed);
      } else {
        failed = {Code::protocol_error, "two tickets name the same bulk bytes"};
      }
    }
  }
  if (needless) return complete(std::move(needless), {});
  if (!failed.ok())
    complete(std::move(read.landed), failed);
  else
    link_.resume_bulk();
}

Result<FrameSink::Taken> ChannelSet::on_bulk(FrameStream& stream, const wire::Header& header) {
  const auto named = binding_of_code(header.channel);
  if (!named.ok()) return Status(Code::protocol_error, "the bulk bytes are of " + std::string(named.status().what()));
  const auto* binding = *named;
  if (binding == nullptr) return FrameSink::Taken::yes;  // the stream drops the bytes
  BulkRead read;
  {
    const std::lock_guard lock(mutex_);
    const auto it = bulk_reads_.find({binding->code(), header.sequence});
    if (it == bulk_reads_.end()) return FrameSink::Taken::hold;
    read = std::move(it->second);
    bulk_reads_.erase(it);
  }
  if (read.destination.bytes != header.trailing) {
    const Status wrong(Code::protocol_error, "the bulk bytes have another size than their ticket says");
    complete(std::move(read.landed), wrong);
    return wrong;
  }
  stream.read(std::move(read.destination), std::move(read.landed));
  return FrameSink::Taken::yes;
}

void ChannelSet::want_release(std::uint64_t id) {
  if (id == 0) return;
  {
    const std::lock_guard lock(mutex_);
    releases_.push_back(id);
  }
  link_.activate();
}

/// Lets the channels complete work that is done but that they would notice only after this frame, such as GPU copies.
void ChannelSet::progress() {
  std::vector<Channel*> channels;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [key, binding] : bindings_) {
      if (binding->channel) channels.push_back(binding->channel.get());
    }
  }
  for (auto* channel : channels) channel->progress();
}

std::vector<std::uint64_t> ChannelSet::take_releases(std::size_t most) {
  if (unconsumed_ > 0) progress();
  const std::lock_guard lock(mutex_);
  if (releases_.empty()) return {};
  const auto count = std::min(most, releases_.size());
  std::vector<std::uint64_t> taken(releases_.end() - static_cast<std::ptrdiff_t>(count), releases_.end());
  releases_.resize(releases_.size() - count);
  return taken;
}

void ChannelSet::acknowledged(const std::vector<std::uint64_t>& releases) {
  for (const auto id : releases) {
    std::optional<Offered> offered;
    {
      const std::lock_guard lock(mutex_);
      const auto it = offered_.find(id);
      if (it != offered_.end()) {
        offered = std::move(it->second);
        offered_.erase(it);
      }
    }
    if (offered) offered->binding->channel->acknowledged(offered->ticket);  // else: an id that was never given out
  }
}

Result<Device> ChannelSet::arrival_of(Device source, Destination destination, const Placement& placement) {
  if (!destination.anywhere || (source == Device() && placement.empty())) return destination.device;
  bool elsewhere = false;
  auto device = [&] {
    const std::lock_guard lock(mutex_);  // the peer's first hello may come at this moment
    return arrival(source, placement, their_devices_, link_.peer().name, &elsewhere);
  }();
  if (elsewhere) {
    warn_once("arrival " + text_of(source), "peer=" + link_.peer().name + " device=" + text_of(source) +
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
  const auto& order = this->order({local, remote});
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

void ChannelSet::warn_once(const std::string& about, const std::string& line) {
  {
    const std::lock_guard lock(mutex_);
    if (!warned_.insert(about).second) return;
  }
  log_warning(line);
}

void ChannelSet::close(const Status& status) {
  std::vector<Channel*> channels;
  std::map<std::pair<std::uint32_t, std::uint64_t>, BulkRead> reads;
  decltype(after_) waiting;
  decltype(after_probe_) unprobed;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    status_ = status;
    reads.swap(bulk_reads_);
    waiting.swap(after_);
    unprobed.swap(after_probe_);
    offered_.clear();
    for (auto& [key, binding] : bindings_) {
      if (binding->channel) channels.push_back(binding->channel.get());
    }
  }
  for (auto& [key, read] : reads) complete(std::move(read.landed), status);
  for (auto* channel : channels) channel->close(status);
  for (auto& [after, pull] : waiting) pull(status);
  for (const auto& job : unprobed) job();
}

}  // namespace tensorferry
