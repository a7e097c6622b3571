#include "rpc/regions/publications.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/host.h"
#include "base/text.h"

namespace tensorferry::regions {
namespace {

/// Copies a version to the host for a peer, in a handler. No code of the driver's goes out: the peer would take
/// ChannelUnavailable for its own, and ask for the version as a copy.
Status land_for_peer(const VersionStore& store, const std::string& name, const VersionLease& version) {
  const WaitInHandler waiting;
  const auto landed = store.land(version);
  if (landed.ok()) return {};
  return {Code::internal, formatted("\"{}\" cannot be copied from the GPU to the host: {}", name, landed.what())};
}

Status withdrawn(const std::string& name) { return {Code::not_found, formatted("\"{}\" is published no more", name)}; }

/// Memory of an image that is a region too. Its end drops the region, before the memory goes back to its allocator.
struct ImageRegion {
  ImageRegion(std::shared_ptr<OwnedRegions> all, std::uint64_t number, Owner of_memory)
      : memory(std::move(of_memory)), owned(std::move(all)), id(number) {}
  ~ImageRegion() { (void)owned->drop(id); }
  ImageRegion(const ImageRegion&) = delete;
  ImageRegion& operator=(const ImageRegion&) = delete;
  const Owner memory;
  const std::shared_ptr<OwnedRegions> owned;
  const std::uint64_t id;
};

Result<GpuMemory> as_region(const std::shared_ptr<OwnedRegions>& owned, GpuMemory memory) {
  const auto id = owned->add(memory.memory, {});
  if (!id.ok()) return id.status();
  memory.memory.owner = std::make_shared<ImageRegion>(owned, *id, memory.memory.owner);
  memory.region = *id;
  return memory;
}

}  // namespace

Publication::Publication(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visitors> visitors,
                         std::shared_ptr<OwnedRegions> owned, std::string name, std::shared_ptr<VersionStore> store,
                         std::uint64_t epoch, Refresh refresh)
    : agent_(std::move(agent)),
      visitors_(std::move(visitors)),
      owned_(std::move(owned)),
      name_(std::move(name)),
      store_(std::move(store)),
      epoch_(epoch),
      refresh_(std::move(refresh)),
      last_lease_(random_word() >> 1) {}

Result<std::uint64_t> Publication::update(const NewBytes& given, std::optional<Clock::time_point> until,
                                          const std::function<bool()>& interrupted, const GpuWriter* gpu) {
  const std::lock_guard turn(updating_);
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return closed_;
  }
  // A subscriber that has never attended may have gone, and no call tells of that.
  const auto look = [&] {
    visitors_->sweep();
    return interrupted && interrupted();
  };
  visitors_->sweep();
  std::optional<GpuWriter> shared;
  if (gpu != nullptr && owned_ != nullptr) {
    const auto make = [this, writer = gpu](std::uint64_t bytes) -> Result<GpuMemory> {
      auto memory = writer->make(bytes);
      if (!memory.ok()) return memory.status();
      return as_region(owned_, *std::move(memory));
    };
    gpu = &shared.emplace(GpuWriter{make, gpu->write});
  }
  auto version = store_->update(
      given, until, [this] { return holders(); }, look, gpu);
  if (version.ok()) tell_waiting();
  const std::lock_guard lock(mutex_);
  if (!closed_.ok()) return closed_;  // meanwhile: the version is dropped
  return version;
}

std::string Publication::holders() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  for (const auto& [visit, held] : held_) {
    if (!held.leases.empty()) out.push_back('"' + held.peer + '"');
  }
  return out.empty() ? "this process" : joined(out, ", ");
}

std::size_t Publication::leases() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [visit, held] : held_) sum += held.leases.size();
  return sum;
}

std::size_t Publication::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size();
}

void Publication::tell_waiting() {
  const auto version = store_->current();
  if (!version) return;
  std::vector<Waiting> ready;
  {
    const std::lock_guard lock(mutex_);
    const auto none = std::ranges::partition(
        waiting_, [&](const Waiting& each) { return each.asked.newer_than >= version->version; });
    std::ranges::move(none, std::back_inserter(ready));
    waiting_.erase(none.begin(), none.end());
  }
  for (auto& each : ready) {
    if (!each.reply->cancelled()) answer(each.peer, each.asked, version, *each.reply);
  }
}

void Publication::close(const Status& why) {
  std::vector<Waiting> waiting;
  std::map<VisitId, Held> held;
  {
    const std::lock_guard lock(mutex_);
    closed_ = why;
    waiting.swap(waiting_);
    if (!refresh_) held.swap(held_);
  }
  for (auto& each : waiting) each.reply->fail(why);
  if (!refresh_) store_->close();  // a copy goes on, and must not write what its subscribers may still read
}

void Publication::acquire(const PeerInfo& peer, const AcquireVersion& asked, Reply reply) {
  if (asked.epoch != epoch_) {
    return reply.fail({Code::agent_closed, formatted("\"{}\" was withdrawn, and published anew", name_)});
  }
  std::vector<VersionLease> ended;  // dropped without the lock
  {
    const std::lock_guard lock(mutex_);
    const auto held = held_.find({peer.incarnation, asked.visit});
    if (held != held_.end()) {
      std::erase_if(held->second.leases, [&](auto& each) {
        if (each.first > asked.seen || std::ranges::find(asked.holds, each.first) != asked.holds.end()) return false;
        ended.push_back(std::move(each.second));
        return true;
      });
    }
  }
  if (!ended.empty()) {
    ended.clear();
    store_->lease_ended();
  }
  if (refresh_) {
    const auto fresh = refresh_(
        asked.newer_than, asked.wait, [&] { return reply.cancelled(); }, reply.deadline());
    if (!fresh.ok()) return reply.fail(fresh);
  }
  auto kept = std::make_shared<Reply>(std::move(reply));
  VersionLease current;
  Status refused;
  {
    const std::lock_guard lock(mutex_);
    current = store_->current();
    const bool there = current && current->version > asked.newer_than;
    if (!closed_.ok()) {
      refused = closed_;
    } else if (!there && !asked.wait) {
      refused = {Code::not_found, formatted("\"{}\" has no version above {} yet", name_, asked.newer_than)};
    } else if (!there) {
      std::erase_if(waiting_, [](const Waiting& each) { return each.reply->cancelled(); });
      const auto of_visit = std::ranges::count_if(waiting_, [&](const Waiting& each) {
        return each.peer.incarnation == peer.incarnation && each.asked.visit == asked.visit;
      });
      if (static_cast<std::size_t>(of_visit) < most_waiting) return waiting_.push_back({peer, asked, kept});
      refused = {Code::resource_exhausted,
                 formatted("\"{}\" waits {} times for \"{}\" already", peer.name, most_waiting, name_)};
    }
  }
  if (!refused.ok()) return kept->fail(refused);
  answer(peer, asked, current, *kept);
}

void Publication::answer(const PeerInfo& peer, const AcquireVersion& asked, const VersionLease& version, Reply& reply) {
  Acquired out{version->version, 0, checksum_of(version->hashes), asked.on_gpu ? version->region : 0};
  if (asked.map && out.region == 0) {
    if (auto landed = land_for_peer(*store_, name_, version); !landed.ok()) return reply.fail(landed);
  }
  const VisitId visit{peer.incarnation, asked.visit};
  Status refused;
  {
    const std::lock_guard lock(mutex_);
    refused = closed_;
    if (refused.ok()) {
      auto& held = held_[visit];
      held.peer = peer.name;
      if (held.leases.size() >= most_leases) {
        refused = {Code::resource_exhausted,
                   formatted("\"{}\" holds {} leases of versions of \"{}\": drop some", peer.name, most_leases, name_)};
      } else {
        out.lease = ++last_lease_;
        held.leases.emplace(out.lease, version);
      }
    }
  }
  if (!refused.ok()) return reply.fail(refused);
  if (!visitors_->has(visit)) {  // it has ended since it asked, perhaps before the lease was there
    end(visit);
    return reply.fail({Code::connection_lost, "the visit has ended"});
  }
  Message message{encode(out), {}, {}, {}};
  if (asked.map) {
    message.buffers.push_back(version->memory);
    message.sharing.push_back(Sharing::shared);
  }
  reply.send(std::move(message));
}

void Publication::release(VisitId visit, std::uint64_t lease) {
  VersionLease ended;
  {
    const std::lock_guard lock(mutex_);
    const auto held = held_.find(visit);
    if (held == held_.end()) return;
    const auto found = held->second.leases.find(lease);
    if (found == held->second.leases.end()) return;
    ended = std::move(found->second);
    held->second.leases.erase(found);
  }
  ended.reset();
  store_->lease_ended();
}

VersionLease Publication::lease_of(VisitId visit, std::uint64_t lease) const {
  const std::lock_guard lock(mutex_);
  const auto held = held_.find(visit);
  if (held == held_.end()) return nullptr;
  const auto found = held->second.leases.find(lease);
  return found == held->second.leases.end() ? nullptr : found->second;
}

void Publication::changes(const PeerInfo& peer, const AskChanges& asked, Reply reply) {
  const auto version = lease_of({peer.incarnation, asked.visit}, asked.lease);
  if (!version) return reply.fail({Code::not_found, formatted("that lease of \"{}\" has ended", name_)});
  auto ranges = store_->changes(version->version, asked.base);
  Changes out{ranges.has_value(), {}};
  if (ranges) out.ranges = *std::move(ranges);
  reply.send({encode(out), {}, {}, {}});
}

void Publication::fetch(const PeerInfo& peer, const FetchRanges& asked, Reply reply) {
  const auto version = lease_of({peer.incarnation, asked.visit}, asked.lease);
  if (!version) return reply.fail({Code::not_found, formatted("that lease of \"{}\" has ended", name_)});
  const auto all = store_->layout().bytes;
  std::uint64_t total = 0;
  for (const auto& range : asked.ranges) {
    if (range.bytes > all || range.offset > all - range.bytes || range.bytes > most_served_bytes - total) {
      return reply.fail({Code::invalid_argument, formatted("such bytes of \"{}\" cannot be fetched", name_)});
    }
    total += range.bytes;
  }
  if (auto landed = land_for_peer(*store_, name_, version); !landed.ok()) return reply.fail(landed);
  Message message;
  if (asked.ranges.size() == 1) {
    // The buffer keeps the lease, so the image is not written before the bytes are sent.
    auto held = std::make_shared<VersionLease>(version);
    message.buffers.push_back({{}, version->memory.data + asked.ranges[0].offset, total, nullptr, std::move(held)});
  } else {
    auto gathered = agent_->allocate(total);
    if (total != 0 && gathered.data == nullptr) {
      return reply.fail({Code::resource_exhausted, formatted("no memory for {} bytes", total)});
    }
    for (auto* to = gathered.data; const auto& range : asked.ranges) {
      if (range.bytes != 0) std::memcpy(to, version->memory.data + range.offset, range.bytes);
      to += range.bytes;
    }
    message.buffers.push_back(std::move(gathered));
  }
  reply.send(std::move(message));
}

void Publication::subscribe(const PeerInfo& peer, const SubscribeTo& asked, const std::string& host, Reply reply) {
  Subscribed out{store_->layout(), host, {}, epoch_};
  if (asked.host != host && !asked.host.empty()) {
    const std::lock_guard lock(mutex_);
    const auto known = relays_.find(asked.host);
    if (known != relays_.end() && known->second.second != peer.name) {
      out.relay = known->second.second;
    } else if (asked.relays && relays_.size() < 4096) {
      relays_[asked.host] = {{peer.incarnation, asked.visit}, peer.name};
    }
  }
  reply.send({encode(out), {}, {}, {}});
}

void Publication::end(VisitId visit) {
  std::map<VisitId, Held>::node_type ended;
  std::vector<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    ended = held_.extract(visit);
    std::erase_if(relays_, [&](const auto& each) { return each.second.first == visit; });
    std::erase_if(waiting_, [&](Waiting& each) {
      if (each.peer.incarnation != visit.incarnation || each.asked.visit != visit.number) return false;
      waiting.push_back(std::move(each));
      return true;
    });
  }
  if (ended.empty()) return;
  for (const auto& [number, lease] : ended.mapped().leases) store_->abandon(lease);
  ended.mapped().leases.clear();
  store_->lease_ended();
}

Publications::Publications(std::shared_ptr<RawAgent> agent, std::shared_ptr<OwnedRegions> owned)
    : agent_(std::move(agent)), owned_(std::move(owned)), host_(boot_id()) {}

std::shared_ptr<Publications> Publications::serve(std::shared_ptr<RawAgent> agent, Visitors& visitors,
                                                  std::shared_ptr<OwnedRegions> owned) {
  auto& raw = *agent;
  std::shared_ptr<Publications> out(new Publications(std::move(agent), std::move(owned)));
  out->visitors_ = visitors.shared_from_this();
  const std::weak_ptr weak(out);
  visitors.on_end([weak](VisitId visit) {
    const auto self = weak.lock();
    if (!self) return;
    std::vector<std::shared_ptr<Publication>> all;
    {
      const std::lock_guard lock(self->mutex_);
      for (const auto& [name, each] : self->publications_) all.push_back(each);
    }
    for (const auto& each : all) each->end(visit);
  });
  raw.serve(std::string(version_function), [weak](Request request, Reply reply) {
    const auto self = weak.lock();
    if (!self) return reply.fail({Code::agent_closed, "the agent has left"});
    self->handle(std::move(request), std::move(reply));
  });
  return out;
}

void Publications::handle(Request request, Reply reply) {
  const auto message = decode<VersionMessage>(request.arguments.payload);
  if (!message) return reply.fail({Code::protocol_error, "malformed message of a version"});
  const auto [visit, name] = std::visit([](const auto& each) { return std::pair(each.visit, each.name); }, *message);
  if (auto noted = visitors_->note({request.peer.incarnation, visit}); !noted.ok()) return reply.fail(noted);
  std::shared_ptr<Publication> found;
  {
    const std::lock_guard lock(mutex_);
    const auto at = publications_.find(name);
    if (at != publications_.end()) found = at->second;
  }
  if (!found) {
    return reply.fail({Code::not_found, formatted("\"{}\" publishes no \"{}\"", agent_->self().name, name)});
  }
  const auto& peer = request.peer;
  if (const auto* asked = std::get_if<SubscribeTo>(&*message)) {
    found->subscribe(peer, *asked, host_, std::move(reply));
  } else if (const auto* acquired = std::get_if<AcquireVersion>(&*message)) {
    found->acquire(peer, *acquired, std::move(reply));
  } else if (const auto* changes = std::get_if<AskChanges>(&*message)) {
    found->changes(peer, *changes, std::move(reply));
  } else if (const auto* fetched = std::get_if<FetchRanges>(&*message)) {
    found->fetch(peer, *fetched, std::move(reply));
  } else if (const auto* released = std::get_if<ReleaseVersion>(&*message)) {
    found->release({peer.incarnation, visit}, released->lease);
    reply.send({});
  }
}

Result<std::shared_ptr<Publication>> Publications::add(const std::string& name, std::shared_ptr<VersionStore> store,
                                                       std::uint64_t epoch, Publication::Refresh refresh) {
  auto made =
      std::make_shared<Publication>(agent_, visitors_, owned_, name, std::move(store), epoch, std::move(refresh));
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(Code::agent_closed, "the agent has left");
  if (name.empty() || name.size() > longest_name) {
    return Status(Code::invalid_argument, formatted("the name of a publication has 1 to {} bytes", longest_name));
  }
  if (!publications_.try_emplace(name, made).second) {
    return Status(Code::invalid_argument, formatted("\"{}\" publishes \"{}\" already", agent_->self().name, name));
  }
  return made;
}

Result<std::shared_ptr<Publication>> Publications::publish(const std::string& name, ImageLayout layout,
                                                           VersionStore::Options options, std::size_t on_gpu) {
  lay_out(layout, on_gpu);
  if (!layout.valid()) {
    return Status(Code::invalid_argument, "the block of a publication is a power of two, 4096 to 65536 bytes");
  }
  if (options.kept < 2) return Status(Code::invalid_argument, "a publication keeps at least 2 versions");
  if (layout.checksums && layout.on_gpu()) {
    return Status(Code::invalid_argument, "checksums are of versions in host memory: leave out checksums, or on_gpu");
  }
  return add(name, std::make_shared<VersionStore>(std::move(layout), options), random_word(), {});
}

Result<std::shared_ptr<Publication>> Publications::relay(const std::string& name, std::shared_ptr<VersionStore> store,
                                                         std::uint64_t epoch, Publication::Refresh refresh) {
  return add(name, std::move(store), epoch, std::move(refresh));
}

void Publications::withdraw(const std::string& name) {
  std::shared_ptr<Publication> ended;
  {
    const std::lock_guard lock(mutex_);
    const auto found = publications_.find(name);
    if (found == publications_.end()) return;
    ended = std::move(found->second);
    publications_.erase(found);
  }
  ended->close(withdrawn(name));
}

void Publications::close() {
  std::map<std::string, std::shared_ptr<Publication>, std::less<>> all;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    all.swap(publications_);
  }
  for (const auto& [name, each] : all) {
    each->close({Code::connection_lost, formatted("\"{}\", which published it, has left", agent_->self().name)});
  }
}

}  // namespace tensorferry::regions
