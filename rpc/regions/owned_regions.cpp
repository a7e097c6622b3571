#include "rpc/regions/owned_regions.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

#include "base/host.h"
#include "base/text.h"
#include "channels/region.h"

namespace tensorferry::regions {
namespace {

constexpr std::size_t page_bytes = OwnedRegions::most_grants * sizeof(std::uint64_t);

bool same_host(const ProcessPlace& a, const ProcessPlace& b) {
  return !a.boot_id.empty() && a.boot_id == b.boot_id && a.process.pid != 0 && b.process.pid != 0 &&
         a.pid_namespace == b.pid_namespace && a.user_namespace == b.user_namespace;
}

/// Waits until the device sees what cards have written, so that who has written by card reads that here too. Where the
/// cards cannot flush any more, the device sees it soon after their last try.
void wait_for(const ExposedMemory::Flush& flush) {
  if (!flush) return;
  const WaitInHandler waiting;
  const auto ended = std::make_shared<std::promise<void>>();
  const auto end = ended->get_future();
  flush([ended](const Status&) { ended->set_value(); });
  end.wait();
}

}  // namespace

ProcessPlace own_place() {
  const auto process = cma::own_identity();
  if (!process || cma::own_scope_refusal()) return {};
  return {boot_id(), own_namespace("pid"), own_namespace("user"), *process};
}

Status check_runs(std::uint64_t bytes, std::uint64_t run_bytes, const std::vector<std::uint64_t>& offsets) {
  for (const auto offset : offsets) {
    if (run_bytes <= bytes && offset <= bytes - run_bytes) continue;
    return {Code::invalid_argument,
            formatted("{} bytes at offset {} are out of the bounds of a region of {} bytes", run_bytes, offset, bytes)};
  }
  return {};
}

std::atomic<std::uint64_t>& OwnedRegions::Visited::word(std::uint32_t slot) const {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(page.data)[slot];
}

OwnedRegions::OwnedRegions(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visitors> visitors)
    : agent_(std::move(agent)), visitors_(std::move(visitors)), place_(own_place()) {}

std::shared_ptr<OwnedRegions> OwnedRegions::serve(std::shared_ptr<RawAgent> agent, Visitors& visitors) {
  auto& raw = *agent;
  std::shared_ptr<OwnedRegions> out(new OwnedRegions(std::move(agent), visitors.shared_from_this()));
  const std::weak_ptr weak(out);
  visitors.on_end([weak](VisitId visit) {
    if (const auto self = weak.lock()) self->end(visit);
  });
  raw.serve(std::string(region_function), [weak](Request request, Reply reply) {
    const auto self = weak.lock();
    if (!self) return reply.fail({Code::agent_closed, "the agent has left"});
    self->handle(std::move(request), std::move(reply));
  });
  return out;
}

Result<std::uint64_t> OwnedRegions::add(Buffer memory, RegionRights rights, const std::string& name,
                                        std::string shape) {
  if (auto supported = check_memory(memory); !supported.ok()) return supported;
  if (name.size() > longest_name) {
    return Status(Code::invalid_argument, formatted("the name of a region has at most {} bytes", longest_name));
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(Code::agent_closed, "the agent has left");
  const auto id = ++last_id_;
  regions_[id] = {name, std::make_shared<const Buffer>(std::move(memory)), std::move(rights), std::move(shape), {}, {}};
  if (!name.empty()) names_[name] = id;
  return id;
}

Status OwnedRegions::gone(std::uint64_t id) const {
  const bool was = id != 0 && id <= last_id_;
  return {Code::not_found, formatted("region {} of \"{}\" {}", id, agent_->self().name,
                                     was ? "was dropped or replaced by its owner" : "does not exist")};
}

Status OwnedRegions::drop(std::uint64_t id) {
  std::map<std::uint64_t, Owned>::node_type dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped = regions_.extract(id);
    if (dropped.empty()) return gone(id);
    const auto named = names_.find(dropped.mapped().name);
    if (named != names_.end() && named->second == id) names_.erase(named);
    for (auto& [visit, visited] : visits_) {
      const auto slot = visited.slots.find(id);
      if (slot == visited.slots.end()) continue;
      visited.word(slot->second.place).store(0);
      visited.free.push_back(slot->second.place);
      visited.slots.erase(slot);
    }
    // The words are 0 for all readers before the memory may be used for anything else.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    changed_.notify_all();
  }
  const std::lock_guard turn(exposing_);  // a thread that makes keys to it holds it
  dropped.mapped().exposed = nullptr;
  return {};
}

void OwnedRegions::close() {
  std::vector<std::uint64_t> ids;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const auto& [id, region] : regions_) ids.push_back(id);
  }
  for (const auto id : ids) (void)drop(id);
}

std::size_t OwnedRegions::size() const {
  const std::lock_guard lock(mutex_);
  return regions_.size();
}

std::size_t OwnedRegions::grants() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [visit, visited] : visits_) sum += visited.slots.size();
  return sum;
}

void OwnedRegions::end(VisitId visit) {
  std::map<VisitId, Visited>::node_type ended;
  const std::lock_guard lock(mutex_);
  ended = visits_.extract(visit);
  if (ended.empty()) return;
  // The visitor may still read, until it learns of the end. It must not take what follows a drop for the region.
  for (const auto& [id, slot] : ended.mapped().slots) ended.mapped().word(slot.place).store(0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void OwnedRegions::handle(Request request, Reply reply) {
  const auto message = decode<RegionMessage>(request.arguments.payload);
  if (!message) return reply.fail({Code::protocol_error, "malformed message of a region"});
  const auto visit = std::visit([](const auto& each) { return each.visit; }, *message);
  if (auto noted = visitors_->note({request.peer.incarnation, visit}); !noted.ok()) return reply.fail(noted);
  if (const auto* asked = std::get_if<OpenRegion>(&*message)) return open(request.peer, *asked, std::move(reply));
  if (const auto* asked = std::get_if<ReadRuns>(&*message)) return read(request.peer, *asked, std::move(reply));
  if (const auto* asked = std::get_if<AskKeys>(&*message)) {
    const auto keys = this->keys(request.peer, *asked);
    return keys.ok() ? reply.send({encode(*keys), {}, {}, {}}) : reply.fail(keys.status());
  }
  if (const auto* told = std::get_if<NotifyOwner>(&*message)) return notify(request.peer, *told, std::move(reply));
  Status status;
  if (const auto* asked = std::get_if<WriteRuns>(&*message)) {
    status = write(request.peer, *asked, request.arguments.buffers);
  } else if (const auto* closed = std::get_if<CloseRegion>(&*message)) {
    close_grant({request.peer.incarnation, closed->visit}, closed->id);
  }
  if (!status.ok()) return reply.fail(status);
  reply.send({});
}

Result<OwnedRegions::Owned*> OwnedRegions::allowed(const PeerInfo& peer, std::uint64_t id, bool to_write) {
  const auto found = regions_.find(id);
  if (found == regions_.end()) return gone(id);
  const auto& rights = found->second.rights;
  const bool named = rights.peers.empty() || std::ranges::find(rights.peers, peer.name) != rights.peers.end();
  if (named && (to_write ? rights.write : rights.read || rights.write)) return &found->second;
  return Status(Code::permission_denied,
                formatted("\"{}\" does not let \"{}\" {} region {}{}", agent_->self().name, peer.name,
                          to_write ? "write" : "use", id, named ? "" : ": it is not among the region's peers"));
}

Result<std::uint32_t> OwnedRegions::slot_of(Visited& visited, std::uint64_t id) const {
  if (const auto known = visited.slots.find(id); known != visited.slots.end()) {
    ++known->second.grants;
    return known->second.place;
  }
  if (visited.slots.size() >= most_grants) {
    return Status(Code::resource_exhausted, formatted("\"{}\" holds {} grants of regions of \"{}\": close some",
                                                      visited.peer, most_grants, agent_->self().name));
  }
  auto slot = visited.used;
  if (visited.free.empty()) {
    ++visited.used;
  } else {
    slot = visited.free.back();
    visited.free.pop_back();
  }
  visited.slots[id] = {slot, 1};
  visited.word(slot).store(id);
  return slot;
}

void OwnedRegions::open(const PeerInfo& peer, const OpenRegion& asked, Reply reply) {
  Message message;
  const auto grant = this->grant(peer, asked, message);
  if (!grant.ok()) return reply.fail(grant.status());
  message.payload = encode(*grant);
  reply.send(std::move(message));
}

Result<std::uint64_t> OwnedRegions::named(const OpenRegion& asked) const {
  if (asked.incarnation != 0 && asked.incarnation != agent_->self().incarnation) {
    return Status(Code::not_found, formatted("region {} belonged to an earlier process of \"{}\", which has ended",
                                             asked.id, agent_->self().name));
  }
  if (asked.id != 0) return asked.id;
  const auto found = names_.find(asked.name);
  if (found != names_.end()) return found->second;
  return Status(Code::not_found, formatted("\"{}\" has no region \"{}\"", agent_->self().name, asked.name));
}

Result<OwnedRegions::Visited*> OwnedRegions::visited(const PeerInfo& peer, const OpenRegion& asked) {
  const VisitId id{peer.incarnation, asked.visit};
  const auto known = visits_.find(id);
  if (known != visits_.end()) return &known->second;
  auto page = Regions::of_this_process().make(page_bytes);
  if (!page.ok()) return page.status();
  auto& out = visits_[id];
  out.peer = peer.name;
  out.page = *std::move(page);
  out.proof = std::make_unique<std::uint64_t>(asked.proof);
  return &out;
}

bool OwnedRegions::may_read_in_place(const PeerInfo& peer, const ProcessPlace& place) const {
  return same_host(place, place_) && agent_->check_process(peer.name, place.process.pid).ok();
}

Result<RegionGrant> OwnedRegions::grant(const PeerInfo& peer, const OpenRegion& asked, Message& message) {
  const std::lock_guard lock(mutex_);
  const auto id = named(asked);
  if (!id.ok()) return id.status();
  const auto found = allowed(peer, *id, false);
  if (!found.ok()) return found.status();
  const auto& region = **found;
  const auto visited = this->visited(peer, asked);
  if (!visited.ok()) return visited.status();
  const VisitId visit{peer.incarnation, asked.visit};
  if (!visitors_->has(visit)) {  // it has ended since it asked, perhaps before this was there
    visits_.erase(visit);
    return Status(Code::connection_lost, "the visit has ended");
  }
  const auto slot = slot_of(**visited, *id);
  if (!slot.ok()) return slot.status();
  RegionGrant grant;
  grant.id = *id;
  grant.bytes = region.memory->bytes;
  grant.read = region.rights.read;
  grant.write = region.rights.write;
  grant.slot = *slot;
  grant.shape = region.shape;
  grant.on_gpu = !on_host(*region.memory);
  if (!grant.on_gpu && region.rights.read && may_read_in_place(peer, asked.place)) {
    grant.reach = Reach::in_place;
    grant.process = place_.process;
    grant.address = reinterpret_cast<std::uintptr_t>(region.memory->data);
    grant.word_address = reinterpret_cast<std::uintptr_t>(&(*visited)->word(*slot));
    grant.proof_address = reinterpret_cast<std::uintptr_t>((*visited)->proof.get());
  }
  if (grant.on_gpu && asked.map) grant.place = place_of(*region.memory);
  grant.place.index = region.memory->device.index;
  if (!asked.map) return grant;
  grant.page = true;
  message.buffers.push_back((*visited)->page);
  message.sharing.push_back(Sharing::shared);
  if (region.memory->bytes == 0) return grant;
  if (grant.on_gpu) {
    if (!grant.place.handle.empty()) grant.reach = Reach::mapped;
    return grant;
  }
  const auto memory = Regions::of_this_process().find(region.memory->data, region.memory->bytes);
  if (!memory || memory->region->memory().frozen()) return grant;
  grant.reach = Reach::mapped;
  grant.offset = memory->offset;
  const auto& all = memory->region->memory();
  message.buffers.push_back({{}, all.data(), all.bytes(), nullptr, memory->region});
  message.sharing.push_back(Sharing::shared);
  return grant;
}

void OwnedRegions::close_grant(VisitId visit, std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto visited = visits_.find(visit);
  if (visited == visits_.end()) return;
  const auto slot = visited->second.slots.find(id);
  if (slot == visited->second.slots.end() || --slot->second.grants != 0) return;
  visited->second.word(slot->second.place).store(0);
  visited->second.free.push_back(slot->second.place);
  visited->second.slots.erase(slot);
}

void OwnedRegions::read(const PeerInfo& peer, const ReadRuns& asked, Reply reply) {
  std::shared_ptr<const Buffer> memory;
  ExposedMemory::Flush flush;
  {
    const std::lock_guard lock(mutex_);
    const auto found = allowed(peer, asked.id, false);
    if (!found.ok()) return reply.fail(found.status());
    if (!(*found)->rights.read) {
      return reply.fail(
          {Code::permission_denied, formatted("region {} of \"{}\" may not be read", asked.id, agent_->self().name)});
    }
    memory = (*found)->memory;
    if ((*found)->exposed != nullptr) flush = (*found)->exposed->flush();
  }
  if (auto fits = check_runs(memory->bytes, asked.run_bytes, asked.offsets); !fits.ok()) return reply.fail(fits);
  if (asked.run_bytes != 0 && asked.offsets.size() > most_served_bytes / asked.run_bytes) {
    return reply.fail({Code::invalid_argument, "more bytes than one message may ask for"});
  }
  const auto total = asked.run_bytes * asked.offsets.size();
  auto gathered = agent_->allocate(total);
  if (total != 0 && gathered.data == nullptr) {
    return reply.fail({Code::resource_exhausted, formatted("no memory for {} bytes", total)});
  }
  wait_for(flush);
  if (auto copied = copy(*memory, asked.run_bytes, asked.offsets, gathered.data, false); !copied.ok())
    return reply.fail(copied);
  // Sent from the region itself, the bytes could be those of what follows a drop: the program may write its memory
  // then.
  Status still;
  {
    const std::lock_guard lock(mutex_);
    if (!regions_.contains(asked.id)) still = gone(asked.id);
  }
  if (!still.ok()) return reply.fail(still);
  Message message;
  message.buffers.push_back(std::move(gathered));
  reply.send(std::move(message));
}

Result<RegionKeys> OwnedRegions::keys(const PeerInfo& peer, const AskKeys& asked) {
  RegionKeys out;
  const std::lock_guard turn(exposing_);  // until all that is dropped below has gone
  const VisitId visit{peer.incarnation, asked.visit};
  std::shared_ptr<const Buffer> memory;
  ExposedRights rights;
  Buffer page;
  std::shared_ptr<ExposedMemory> exposed, page_exposed;
  {
    const std::lock_guard lock(mutex_);
    const auto found = allowed(peer, asked.id, false);
    if (!found.ok()) return found.status();
    const auto visited = visits_.find(visit);
    if (visited == visits_.end() || !visited->second.slots.contains(asked.id)) return gone(asked.id);
    memory = (*found)->memory;
    rights = {(*found)->rights.read, (*found)->rights.write};
    exposed = (*found)->exposed;
    page = visited->second.page;
    page_exposed = visited->second.exposed;
  }
  const auto cards = on_host(*memory) ? agent_->one_sided(peer.name)
                                      : agent_->one_sided(peer.name, memory->device, {memory->device.type, asked.gpu});
  if (cards == nullptr) return out;
  auto page_keys = cards->expose(page, {true, false}, page_exposed);
  auto region_keys = page_keys.ok() ? cards->expose(*memory, rights, exposed) : page_keys.status();
  const std::lock_guard lock(mutex_);
  const auto region = regions_.find(asked.id);
  const auto visited = visits_.find(visit);
  if (region == regions_.end() || visited == visits_.end()) return gone(asked.id);
  region->second.exposed = std::move(exposed);
  visited->second.exposed = std::move(page_exposed);
  if (region_keys.ok()) out = {*std::move(region_keys), *std::move(page_keys)};
  return out;
}

Status OwnedRegions::write(const PeerInfo& peer, const WriteRuns& asked, const std::vector<Buffer>& from) {
  std::shared_ptr<const Buffer> memory;
  {
    const std::lock_guard lock(mutex_);
    const auto found = allowed(peer, asked.id, true);
    if (!found.ok()) return found.status();
    memory = (*found)->memory;
  }
  if (auto fits = check_runs(memory->bytes, asked.run_bytes, asked.offsets); !fits.ok()) return fits;
  const auto least = asked.offsets.empty() ? 0 : asked.run_bytes;
  if (from.size() != 1 || (least != 0 && from[0].bytes / least != asked.offsets.size()) ||
      from[0].bytes != asked.run_bytes * asked.offsets.size() || from[0].device != Device{}) {
    return {Code::invalid_argument, "the bytes to write do not fill the runs"};
  }
  return copy(*memory, asked.run_bytes, asked.offsets, from[0].data, true);
}

Status OwnedRegions::copy(const Buffer& region, std::uint64_t run_bytes, const std::vector<std::uint64_t>& offsets,
                          std::byte* host, bool to_region) {
  if (!on_host(region)) {
    const WaitInHandler waiting;
    return copy_runs(region, run_bytes, offsets, host, to_region);
  }
  std::vector<Copier::Piece> pieces;
  pieces.reserve(offsets.size());
  for (const auto offset : offsets) {
    pieces.push_back({to_region ? region.data + offset : host, to_region ? host : region.data + offset, run_bytes});
    host += run_bytes;
  }
  copier_.copy(pieces);
  return {};
}

void OwnedRegions::notify(const PeerInfo& peer, const NotifyOwner& told, Reply reply) {
  ExposedMemory::Flush flush;
  {
    const std::lock_guard lock(mutex_);
    const auto found = regions_.find(told.id);
    if (found != regions_.end() && found->second.exposed != nullptr) flush = found->second.exposed->flush();
  }
  auto then = [self = shared_from_this(), peer, told, reply = std::move(reply)](Status status) mutable {
    if (status.ok()) status = self->note(peer, told);
    if (!status.ok()) return reply.fail(status);
    reply.send({});
  };
  if (!flush) return then({});
  flush(std::move(then));
}

Status OwnedRegions::note(const PeerInfo& peer, const NotifyOwner& told) {
  const std::lock_guard lock(mutex_);
  const auto found = allowed(peer, told.id, true);
  if (!found.ok()) return found.status();
  auto& waiting = (*found)->notifications;
  if (waiting.size() >= most_notifications) {
    return {Code::resource_exhausted,
            formatted("\"{}\" has {} unread notifications of region {}", agent_->self().name, waiting.size(), told.id)};
  }
  waiting.push_back({peer.name, told.notification});
  changed_.notify_all();
  return {};
}

Result<Notification> OwnedRegions::await_notification(std::uint64_t id, std::optional<std::uint64_t> number,
                                                      std::optional<Clock::time_point> until,
                                                      const std::function<bool()>& interrupted) {
  constexpr Milliseconds look_every{50};
  const WaitInHandler waiting;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto region = regions_.find(id);
    if (region == regions_.end()) return gone(id);
    auto& arrived = region->second.notifications;
    const auto found =
        std::ranges::find_if(arrived, [&](const auto& each) { return !number || each.number == *number; });
    if (found != arrived.end()) {
      auto out = std::move(*found);
      arrived.erase(found);
      return out;
    }
    const auto now = agent_->clock().now();
    if (until && now >= *until) {
      return Status(Code::deadline_exceeded, formatted("no peer has written region {} and notified{} in time", id,
                                                       number ? formatted(" with {}", *number) : ""));
    }
    agent_->clock().wait_until(changed_, lock, std::min(now + look_every, until.value_or(Clock::time_point::max())));
    if (!interrupted) continue;
    lock.unlock();
    if (interrupted()) return Status(Code::cancelled, "the wait for a notification was interrupted");
    lock.lock();
  }
}

}  // namespace tensorferry::regions
