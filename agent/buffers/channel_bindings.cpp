#include "agent/buffers/channel_bindings.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "agent/buffers/channel_binding.h"
#include "agent/buffers/placement.h"
#include "agent/handshake/auth.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {
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

ChannelBindings::ChannelBindings(WireParts parts) : parts_(parts) {}
ChannelBindings::~ChannelBindings() = default;

void ChannelBindings::meet(const wire::Hello& hello, std::optional<uid_t> uid) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(peer_.met, true)) return;
  peer_.uid = uid;
  peer_.drivers = hello.drivers;
  peer_.devices = hello.devices;
  peer_.bundles = (hello.features & wire::feature::bundles) != 0;
}

Result<Device> ChannelBindings::arrival(Device source, const Placement& placement, bool* elsewhere) const {
  const std::lock_guard lock(mutex_);  // the peer's first hello may come at this moment
  return tensorferry::arrival(source, placement, peer_.devices, parts_.around.link.peer().name, elsewhere);
}

bool ChannelBindings::has(Device theirs) const {
  const std::lock_guard lock(mutex_);
  return theirs == Device() || std::find(peer_.devices.begin(), peer_.devices.end(), theirs) != peer_.devices.end();
}

/// Returns why a driver does not connect the pair, or nullopt if it does.
std::optional<Refusal> ChannelBindings::reach(std::size_t index, DevicePair pair) const {
  const auto& drivers = parts_.around.drivers;
  auto& driver = drivers[index];
  const auto* mine = endpoint_of(drivers.announced(), driver.name(), pair.local);
  if (mine == nullptr) {
    if (driver.shares_memory() && !parts_.around.shares_memory)
      return Refusal{"shared memory is switched off by this agent's options"};
    const auto why = driver.descriptor(pair.local);
    const auto* refusal = std::get_if<Refusal>(&why);
    return Refusal{refusal != nullptr ? refusal->reason : "this agent has no " + text_of(pair.local)};
  }
  const auto* other = endpoint_of(peer_.drivers, driver.name(), pair.remote);
  if (other == nullptr) return Refusal{"the peer does not have it for its " + text_of(pair.remote)};
  if (auto refusal = driver.reaches(mine->descriptor, other->descriptor)) return refusal;
  if (!driver.within_one_user() || !key_needed(peer_.uid, ::geteuid())) return std::nullopt;
  return Refusal{peer_.uid ? formatted("another user: uid {}, here {}", *peer_.uid, ::geteuid())
                           : "the kernel does not say which user the peer is"};
}

const ChannelOrder& ChannelBindings::order(DevicePair pair) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = orders_.find(pair); it != orders_.end()) return it->second;
    static const ChannelOrder unknown;
    if (!peer_.met) return unknown;  // one that is kept would be empty for the life of the link
  }
  try {
    return open_all(pair);
  } catch (const std::bad_alloc&) {  // the peer may have been told of a channel that this end does not have
    out_of_memory::release_reserve();
    parts_.around.link.fail(out_of_memory::status());
    throw;
  }
}

const ChannelOrder& ChannelBindings::open_all(DevicePair pair) {
  const std::lock_guard opening(open_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = orders_.find(pair); it != orders_.end()) return it->second;
  }
  ChannelOrder order;
  const auto& drivers = parts_.around.drivers;
  for (std::size_t i = 0; i < drivers.size(); ++i) {
    const std::string name(drivers[i].name());
    const auto refusal = reach(i, pair);
    auto* binding = refusal ? nullptr : open(i, pair);
    order.all.emplace_back(name, binding);
    if (refusal) order.reasons[name] = refusal->reason;
    if (binding != nullptr) order.bindings.push_back(binding);
  }
  const std::lock_guard lock(mutex_);
  return orders_.try_emplace(pair, std::move(order)).first->second;
}

ChannelBinding* ChannelBindings::open(std::size_t driver, DevicePair pair) {
  auto& kind = parts_.around.drivers[driver];
  const bool immediate = kind.immediate();
  auto made = std::make_unique<ChannelBinding>(parts_, static_cast<Carriers&>(*this), driver, pair, immediate);
  auto* const binding = made.get();
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return nullptr;
    const auto [place, is_new] = bindings_.try_emplace({driver, pair}, std::move(made));
    if (!is_new) return place->second->channel ? place->second.get() : nullptr;  // null: there was no memory for it
  }
  // The peer opens its end of an immediate channel at the first ticket, and of any other when this message tells it.
  if (!immediate) binding->tell_open();
  auto channel = kind.open(*binding, pair);
  std::optional<Status> ended;
  {
    const std::lock_guard lock(mutex_);
    binding->channel = std::move(channel);
    ended = ended_;
  }
  if (ended) binding->channel->close(*ended);  // end() may have run before the binding had its channel
  return binding;
}

Result<ChannelBinding*> ChannelBindings::of_peer(std::uint8_t driver, DevicePair theirs, bool refuses) {
  const DevicePair ours{theirs.remote, theirs.local};
  std::string name;
  {
    const std::lock_guard lock(mutex_);
    if (driver < peer_.drivers.size()) name = peer_.drivers[driver].name;
    // Only what the peer has announced, so that it cannot fill the maps with invented devices.
    if (driver >= peer_.drivers.size() || endpoint_of(peer_.drivers, name, ours.remote) == nullptr)
      return Status(Code::protocol_error, "a channel that does not reach this device: the peer has not announced it");
  }
  std::string reason = "this agent has no " + text_of(ours.local);
  if (endpoint_of(parts_.around.drivers.announced(), name, ours.local) != nullptr) {
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

Result<ChannelBinding*> ChannelBindings::of_code(std::uint32_t code, bool refuses) {
  const Device local{static_cast<DeviceType>((code >> 20) & 0xf), static_cast<std::uint8_t>(code >> 12)};
  const Device remote{static_cast<DeviceType>((code >> 8) & 0xf), static_cast<std::uint8_t>(code)};
  return of_peer(static_cast<std::uint8_t>(code >> 24), {local, remote}, refuses);
}

/// Tells the peer that this end does not want a channel that the peer has opened.
void ChannelBindings::refuse(const std::string& driver, DevicePair pair, const std::string& reason) {
  constexpr std::size_t most = 1024;  // pairs; a peer that names more of them gets no further answer
  for (std::size_t i = 0; i < parts_.around.drivers.size(); ++i) {
    if (parts_.around.drivers[i].name() != driver) continue;
    const auto code = ChannelBinding::code(i, pair);
    {
      const std::lock_guard lock(mutex_);
      if (ended_ || refused_.size() == most || !refused_.insert(code).second) return;
    }
    parts_.controls.send(code, static_cast<std::uint8_t>(ChannelBinding::Control::failed), view_of(reason), {});
    return;
  }
}

std::vector<Channel*> ChannelBindings::channels() const {
  const std::lock_guard lock(mutex_);
  return open_channels();
}

/// Under mutex_.
std::vector<Channel*> ChannelBindings::open_channels() const {
  std::vector<Channel*> channels;
  for (const auto& [key, binding] : bindings_) {
    if (binding->channel) channels.push_back(binding->channel.get());
  }
  return channels;
}

std::optional<std::vector<Channel*>> ChannelBindings::end(const Status& status) {
  const std::lock_guard lock(mutex_);
  if (ended_) return std::nullopt;
  auto open = open_channels();
  ended_ = status;
  return open;
}

void ChannelBindings::destroy_channels() {
  for (const bool carriers : {false, true}) {  // the channels that use a carrier go before it
    for (auto& [key, binding] : bindings_) {
      if (parts_.around.drivers[key.first].carries_staged() == carriers) binding->channel.reset();
    }
  }
}

Wire::Carrier ChannelBindings::best() {
  for (const auto* binding : order(DevicePair{}).bindings) {
    if (parts_.around.drivers[binding->driver()].carries_staged() && binding->state() == ChannelBinding::State::usable)
      return {binding->channel.get(), binding->name()};
  }
  return {};
}

Wire::Carrier ChannelBindings::named(std::string_view name) {
  for (const auto* binding : order(DevicePair{}).bindings) {
    if (binding->name() == name && parts_.around.drivers[binding->driver()].carries_staged())
      return {binding->channel.get(), binding->name()};
  }
  return {};
}

}  // namespace tensorferry
