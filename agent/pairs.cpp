#include "agent/pairs.h"

#include <algorithm>

#include "agent/log.h"
#include "agent/pairs_slot.h"
#include "agent/placement.h"
#include "channels/completion.h"

namespace tensorferry {

Pairs::Pairs(Link& link) : link_(link), engine_(link.engine()) {}
Pairs::~Pairs() = default;

void Pairs::destroy_channels() {
  for (auto& [key, slot] : slots_) slot->channel.reset();
}

void Pairs::meet(const wire::Hello& hello) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(met_, true)) return;
  theirs_ = hello.drivers;
  their_devices_ = hello.devices;
  bundles_ = (hello.features & wire::feature::bundles) != 0;
}

bool Pairs::met() const {
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
const Pairs::Way& Pairs::way(DevicePair pair) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = ways_.find(pair); it != ways_.end()) return it->second;
  }
  const std::lock_guard opening(open_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = ways_.find(pair); it != ways_.end()) return it->second;
  }
  Way way;
  for (std::size_t i = 0; i < engine_.drivers.size(); ++i) {
    const std::string name(engine_.drivers[i]->name());
    const auto refusal = reach(engine_, i, pair, theirs_);
    auto* slot = refusal ? nullptr : open(i, pair);
    way.all.emplace_back(name, slot);
    if (refusal) way.reasons[name] = refusal->reason;
    if (slot != nullptr) way.slots.push_back(slot);
  }
  const std::lock_guard lock(mutex_);
  return ways_.try_emplace(pair, std::move(way)).first->second;
}

Pairs::Slot* Pairs::open(std::size_t driver, DevicePair pair) {
  Slot* slot = nullptr;
  const bool immediate = engine_.drivers[driver]->immediate();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return nullptr;
    auto& place = slots_[{driver, pair}];
    if (place) return place.get();
    place = std::make_unique<Slot>(*this, driver, pair, immediate);
    slot = place.get();
  }
  // The peer opens its end of an immediate channel at our first ticket, and of any other when this message tells it.
  if (!immediate) control(*slot, static_cast<std::uint8_t>(Slot::Control::open), {}, {});
  auto channel = engine_.drivers[driver]->open(*slot, pair);
  Status ended;
  {
    const std::lock_guard lock(mutex_);
    slot->channel = std::move(channel);
    if (closed_) ended = status_;
  }
  if (!ended.ok()) slot->channel->close(ended);  // close() may have run before the channel was in the slot
  return slot;
}

std::optional<std::uint64_t> Pairs::probing(Message& message, const std::string& require, const Placement& placement) {
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
    for (const auto* slot : way({message.buffers[i].device, message.destination_of(i).device}).slots) {
      const bool needed = require.empty() ? engine_.drivers[slot->driver()]->shares_memory() : slot->name() == require;
      if (needed && slot->state() == Slot::State::probing) return known;
    }
  }
  return std::nullopt;
}

void Pairs::when_probed(std::uint64_t known, UniqueFunction<void()> job) {
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

void Pairs::probe_ended() {
  std::vector<UniqueFunction<void()>> due;
  {
    const std::lock_guard lock(mutex_);
    ++probes_ended_;
    due.swap(after_probe_);
  }
  for (auto& job : due) link_.run(std::move(job), false);
}

Pairs::Slot* Pairs::slot_of_peer(std::uint8_t driver, DevicePair theirs) {
  const DevicePair ours{theirs.remote, theirs.local};
  std::string name;
  {
    const std::lock_guard lock(mutex_);
    if (driver >= theirs_.size()) return nullptr;
    name = theirs_[driver].name;
    // Refuses devices that one side does not have, so that a peer cannot fill the maps with invented ones.
    if (endpoint_of(theirs_, name, ours.remote) == nullptr ||
        endpoint_of(engine_.descriptors, name, ours.local) == nullptr) {
      return nullptr;
    }
  }
  for (const auto& [known, slot] : way(ours).all) {
    if (known == name) return slot;
  }
  return nullptr;
}

Pairs::Slot* Pairs::slot_of_code(std::uint32_t code) {
  const Device local{static_cast<DeviceType>((code >> 20) & 0xf), static_cast<std::uint8_t>(code >> 12)};
  const Device remote{static_cast<DeviceType>((code >> 8) & 0xf), static_cast<std::uint8_t>(code)};
  return slot_of_peer(static_cast<std::uint8_t>(code >> 24), {local, remote});
}

ControlId Pairs::control(Slot& slot, std::uint8_t operation, ByteView bytes, Descriptors descriptors) {
  Bytes payload;
  Writer writer(payload);
  writer.put(operation);
  writer.put(slot.code());
  writer.raw(bytes);
  const std::lock_guard order(control_mutex_);
  wire::Header header;
  header.kind = wire::Kind::control;
  header.call = ++controls_sent_;
  header.descriptors = static_cast<std::uint8_t>(descriptors.size());
  link_.send_control(wire::assemble(header, {}, {}, payload), std::move(descriptors));
  return header.call;
}

Status Pairs::on_control(std::uint64_t id, ByteView payload, Descriptors descriptors) {
  Reader in(payload);
  const auto operation = static_cast<Slot::Control>(in.get<std::uint8_t>());
  const auto code = in.get<std::uint32_t>();
  if (in.failed()) return {Code::protocol_error, "a control frame without a channel"};
  if (id != controls_received_ + 1) return {Code::protocol_error, "a control frame out of order"};
  auto* slot = slot_of_code(code);
  if (slot == nullptr) return {Code::protocol_error, "a control frame for a channel that does not reach"};
  switch (operation) {
    case Slot::Control::open:
      break;  // slot_of_code() has opened it
    case Slot::Control::ready:
      slot->peer_ready();
      break;
    case Slot::Control::failed:
      slot->peer_failed("at the peer: " + std::string(text_of(in.rest())));
      break;
    case Slot::Control::message:
      slot->channel->control(in.rest(), std::move(descriptors));
      break;
    default:
      return {Code::protocol_error, "a control frame of unknown operation"};
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

void Pairs::pull_when(ControlId after, std::function<void(const Status&)> pull) {
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

void Pairs::receive_bulk(std::uint32_t code, std::uint64_t sequence, BulkRead read) {
  Status failed;
  {
    const std::lock_guard lock(mutex_);
    if (closed_)
      failed = status_;
    else if (!bulk_reads_.try_emplace({code, sequence}, std::move(read)).second)
      failed = {Code::protocol_error, "two tickets for the same bulk bytes"};
  }
  if (!failed.ok())
    complete(std::move(read.landed), failed);
  else
    link_.resume_bulk();
}

Result<FrameSink::Taken> Pairs::on_bulk(FrameStream& stream, const wire::Header& header) {
  auto* slot = slot_of_code(header.order);
  if (slot == nullptr) return Status(Code::protocol_error, "bulk bytes of a channel that does not reach");
  BulkRead read;
  {
    const std::lock_guard lock(mutex_);
    const auto it = bulk_reads_.find({slot->code(), header.call});
    if (it == bulk_reads_.end()) return FrameSink::Taken::hold;
    read = std::move(it->second);
    bulk_reads_.erase(it);
  }
  if (read.destination.bytes != header.trailing) {
    const Status wrong(Code::protocol_error, "bulk bytes of another size than their ticket says");
    complete(std::move(read.landed), wrong);
    return wrong;
  }
  stream.read(std::move(read.destination), std::move(read.landed));
  return FrameSink::Taken::yes;
}

void Pairs::want_release(std::uint64_t id) {
  if (id == 0) return;
  {
    const std::lock_guard lock(mutex_);
    releases_.push_back(id);
  }
  engine_.housekeeping->kick();
}

/// Lets the channels complete work that is done but that they would notice only after this frame, such as GPU copies.
void Pairs::settle() {
  std::vector<Channel*> channels;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [key, slot] : slots_) {
      if (slot->channel) channels.push_back(slot->channel.get());
    }
  }
  for (auto* channel : channels) channel->settle();
}

std::vector<std::uint64_t> Pairs::take_releases(std::size_t most) {
  if (unconsumed_ > 0) settle();
  const std::lock_guard lock(mutex_);
  if (releases_.empty()) return {};
  const auto count = std::min(most, releases_.size());
  std::vector<std::uint64_t> taken(releases_.end() - static_cast<std::ptrdiff_t>(count), releases_.end());
  releases_.resize(releases_.size() - count);
  return taken;
}

void Pairs::acknowledged(const std::vector<std::uint64_t>& releases) {
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
    if (offered) offered->slot->channel->acknowledged(offered->ticket);  // else: an id that was never given out
  }
}

Result<Device> Pairs::arrival_of(Device source, Destination destination, const Placement& placement) {
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

Result<Route> Pairs::explain(Device local, const Placement& placement, std::size_t bytes) {
  const auto arrives = arrival_of(local, {local, true}, placement);
  if (!arrives) return arrives.status();
  const auto remote = *arrives;
  Route route;
  route.remote = remote;
  const auto& way = this->way({local, remote});
  for (const auto& [name, slot] : way.all) {
    const bool usable = slot != nullptr && slot->state() == Slot::State::usable;
    std::string reason = slot == nullptr ? "" : usable ? slot->channel->describe() : slot->reason();
    if (slot == nullptr) {
      const auto it = way.reasons.find(name);
      reason = it == way.reasons.end() ? "the link has ended" : it->second;
    }
    if (usable && route.channel.empty()) route.channel = name;
    route.candidates.push_back({name, usable, reason});
  }
  if (bytes <= inline_bytes && local.type == DeviceType::cpu && remote.type == DeviceType::cpu)
    route.channel = "inline";
  return route;
}

void Pairs::warn_once(const std::string& about, const std::string& line) {
  {
    const std::lock_guard lock(mutex_);
    if (!warned_.insert(about).second) return;
  }
  log_warning(line);
}

void Pairs::close(const Status& status) {
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
    for (auto& [key, slot] : slots_) {
      if (slot->channel) channels.push_back(slot->channel.get());
    }
  }
  for (auto& [key, read] : reads) complete(std::move(read.landed), status);
  for (auto* channel : channels) channel->close(status);
  for (auto& [after, pull] : waiting) pull(status);
  for (const auto& job : unprobed) job();
}

}  // namespace tensorferry
