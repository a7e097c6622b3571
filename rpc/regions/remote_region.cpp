#include "rpc/regions/remote_region.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/host.h"
#include "base/text.h"
#include "rpc/regions/owned_regions.h"
#include "rpc/regions/parts_of_runs.h"

namespace tensorferry::regions {
namespace {

constexpr std::size_t page_bytes = OwnedRegions::most_grants * sizeof(std::uint64_t);
constexpr std::size_t prefetched = std::size_t{1} << 14;  // runs up to this size are copied by plain memcpy

/// Copies runs of the process's memory at `base` to `into`. Returns 0 or an errno value, as cma::Process::read.
int read_runs(std::int32_t pid, std::uint64_t base, const Runs& runs, std::byte* into) {
  constexpr std::size_t most = 512;
  std::array<iovec, most> remote{};
  for (std::size_t next = 0; next < runs.offsets.size();) {
    const auto count = std::min(most, runs.offsets.size() - next);
    for (std::size_t i = 0; i < count; ++i) {
      const auto address = base + runs.offsets[next + i];
      remote[i] = {reinterpret_cast<void*>(address), runs.run_bytes};  // NOLINT(performance-no-int-to-ptr): remote
    }
    std::size_t skipped = 0;  // of the batch
    const auto all = count * runs.run_bytes;
    while (skipped < all) {
      const auto first = skipped / runs.run_bytes;
      const auto within = skipped % runs.run_bytes;
      auto& begin = remote[first];
      begin = {
          reinterpret_cast<void*>(base + runs.offsets[next + first] + within),  // NOLINT(performance-no-int-to-ptr)
          runs.run_bytes - within};
      const iovec local{into + skipped, all - skipped};
      const auto got = ::process_vm_readv(pid, &local, 1, &begin, count - first, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno;
      if (got == 0) return EFAULT;
      skipped += static_cast<std::size_t>(got);
    }
    into += all;
    next += count;
  }
  return 0;
}

Status no_memory(std::uint64_t bytes) { return {Code::resource_exhausted, formatted("no memory for {} bytes", bytes)}; }

std::atomic<std::uint64_t>& word_in(const Buffer& page, std::uint32_t slot) {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(page.data)[slot];
}

}  // namespace

RemoteRegion::RemoteRegion(std::shared_ptr<RemoteRegions> regions, std::shared_ptr<Visit> visit, RegionGrant grant)
    : regions_(std::move(regions)), visit_(std::move(visit)), grant_(std::move(grant)) {}

RemoteRegion::~RemoteRegion() {
  if (!visit_->ended()) tell(CloseRegion{visit_->number(), grant_.id});
}

void RemoteRegion::tell(const RegionMessage& message) {
  Message out;
  out.payload = encode(message);
  RawCallOptions options;
  options.timeout = Milliseconds(10000);
  regions_->agent_->call(owner(), region_function, std::move(out), std::move(options));
}

Status RemoteRegion::dropped() const {
  return {Code::not_found, formatted("region {} of \"{}\" was dropped or replaced by its owner", id(), owner())};
}

Status RemoteRegion::alive() const {
  if (visit_->ended()) return visit_->why();
  const bool there = page_.data == nullptr || word_in(page_, grant_.slot).load(std::memory_order_acquire) == grant_.id;
  if (!there || dropped_.load(std::memory_order_relaxed)) return dropped();
  return {};
}

Status RemoteRegion::noting_a_drop(Status status) {
  if (status.code() == Code::not_found) dropped_.store(true, std::memory_order_relaxed);
  return status;
}

Status RemoteRegion::check_right(bool to_write) const {
  if (to_write ? grant_.write : grant_.read) return {};
  return {Code::permission_denied,
          formatted("\"{}\" does not let this agent {} region {}", owner(), to_write ? "write" : "read", id())};
}

Status RemoteRegion::check(const Runs& runs, const Buffer& memory, bool to_write) const {
  if (auto allowed = check_right(to_write); !allowed.ok()) return allowed;
  if (runs.offsets.size() > most_runs) {
    return {Code::invalid_argument, formatted("a transfer has at most {} runs", most_runs)};
  }
  if (auto fits = check_runs(bytes(), runs.run_bytes, runs.offsets); !fits.ok()) return fits;
  if (memory.bytes == runs.bytes()) return {};
  return {Code::invalid_argument, formatted("{} bytes of region {} of \"{}\", but memory of {} bytes", runs.bytes(),
                                            id(), owner(), memory.bytes)};
}

Status RemoteRegion::copy_mapped(const Runs& runs, std::byte* memory, bool to_region) {
  if (auto before = alive(); !before.ok() || runs.bytes() == 0) return before;
  auto* const base = memory_.data + grant_.offset;
  if (runs.run_bytes <= prefetched && runs.offsets.size() <= 64) {
    for (const auto offset : runs.offsets) {
      std::memcpy(to_region ? base + offset : memory, to_region ? memory : base + offset, runs.run_bytes);
      memory += runs.run_bytes;
    }
  } else {
    std::vector<Copier::Piece> pieces;
    pieces.reserve(runs.offsets.size());
    for (const auto offset : runs.offsets) {
      pieces.push_back({to_region ? base + offset : memory, to_region ? memory : base + offset, runs.run_bytes});
      memory += runs.run_bytes;
    }
    regions_->copier_.copy(pieces);
  }
  // The second look comes after the copy, on every processor.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return alive();
}

Status RemoteRegion::read_in_place(const Runs& runs, std::byte* into) {
  const auto look = [&]() -> int {
    std::uint64_t word = 0;
    const auto error = process_->read(reinterpret_cast<std::byte*>(&word), grant_.word_address, sizeof word);
    return error != 0 ? error : word == grant_.id ? 0 : ENOENT;
  };
  auto error = look();
  if (error == 0 && runs.run_bytes != 0) error = read_runs(process_->pid(), grant_.address, runs, into);
  if (error == 0 || error == EFAULT) {
    const auto after = look();
    if (after != 0) error = after;
  }
  if (!process_->alive()) error = ESRCH;
  if (error == 0) return visit_->ended() ? visit_->why() : Status();
  if (error == ENOENT) return dropped();
  if (error == ESRCH) return {Code::connection_lost, formatted("\"{}\" has gone: its process has ended", owner())};
  return {Code::channel_unavailable, cma::is_refusal(error) ? cma::text_of_refusal(error) : std::strerror(error)};
}

Result<Buffer> RemoteRegion::map_on(int device, bool to_write) {
  if (auto allowed = check_right(to_write); !allowed.ok()) return allowed;
  if (auto good = alive(); !good.ok()) return good;
  const Status refused(Code::channel_unavailable,
                       formatted("region {} of \"{}\" cannot be mapped here", id(), owner()));
  if (!grant_.on_gpu || reach() != Reach::mapped) return refused;
  const std::lock_guard lock(mapping_);
  const auto known = mapped_.find(device);
  if (known != mapped_.end()) return known->second.data != nullptr ? Result<Buffer>(known->second) : refused;
  auto mapped = map_gpu_memory(grant_.place, grant_.bytes, device);
  mapped_[device] = mapped.ok() ? *mapped : Buffer();
  const bool any = std::ranges::any_of(mapped_, [](const auto& each) { return each.second.data != nullptr; });
  if (!any) reach_.store(Reach::served, std::memory_order_relaxed);
  return mapped;
}

Result<Buffer> RemoteRegion::mapped_bytes() const {
  if (auto allowed = check_right(false); !allowed.ok()) return allowed;
  if (auto good = alive(); !good.ok()) return good;
  if (memory_.data == nullptr) {
    return Status(Code::channel_unavailable,
                  formatted("this process cannot map region {} of \"{}\": it can if the two are on one host, with the "
                            "channel shm, and the memory is of tensorferry.empty()",
                            id(), owner()));
  }
  return Buffer{memory_.device, memory_.data + grant_.offset, bytes(), nullptr, memory_.owner};
}

Result<Buffer> RemoteRegion::word_on(int device) {
  if (page_.data == nullptr) {
    return Status(Code::channel_unavailable,
                  formatted("\"{}\" shares no word that tells whether region {} lives", owner(), id()));
  }
  const std::lock_guard lock(mapping_);
  if (!words_) {
    auto locked = regions_->locked(page_, device);
    if (!locked.ok()) return locked.status();
    words_ = *std::move(locked);
  }
  const auto begin = words_->address_on(device);
  if (!begin.ok()) return begin.status();
  const Device on{DeviceType::cuda, static_cast<std::uint8_t>(device)};
  return Buffer{on, *begin + grant_.slot * sizeof(std::uint64_t), sizeof(std::uint64_t), nullptr, words_};
}

Status RemoteRegion::read(const Runs& runs, const Buffer& into, const TransferLimits& limits) {
  if (auto fits = check(runs, into, false); !fits.ok()) return fits;
  if (auto good = alive(); !good.ok()) return good;
  if (into.device != Device{}) return read_by_gpu(runs, into, limits);
  if (memory_.data != nullptr) return copy_mapped(runs, into.data, false);
  if (reach() == Reach::in_place) {
    auto read = read_in_place(runs, into.data);
    if (read.code() != Code::channel_unavailable) return noting_a_drop(std::move(read));
    reach_.store(Reach::served, std::memory_order_relaxed);  // memory that the kernel does not let us read
  }
  if (auto read = by_card(runs, into, false, limits)) return noting_a_drop(*std::move(read));
  return noting_a_drop(read_served(runs, into, limits));
}

Status RemoteRegion::write(const Runs& runs, const Buffer& from, std::optional<std::uint64_t> notify,
                           const TransferLimits& limits) {
  if (auto fits = check(runs, from, true); !fits.ok()) return fits;
  if (auto good = alive(); !good.ok()) return good;
  Status status;
  if (from.device != Device{}) {
    status = write_by_gpu(runs, from, limits);
  } else if (memory_.data != nullptr) {
    status = copy_mapped(runs, from.data, true);
  } else if (auto written = by_card(runs, from, true, limits)) {
    status = noting_a_drop(*std::move(written));
  } else {
    status = noting_a_drop(write_served(runs, from, limits));
  }
  if (!status.ok() || !notify) return status;
  return regions_->ask(owner(), NotifyOwner{visit_->number(), id(), *notify}, {}, {}, limits).status();
}

Status RemoteRegion::read_by_gpu(const Runs& runs, const Buffer& into, const TransferLimits& limits) {
  if (auto read = by_card(runs, into, false, limits)) return noting_a_drop(*std::move(read));
  const auto host = regions_->agent_->allocate(into.bytes);
  if (host.data == nullptr && into.bytes != 0) return no_memory(into.bytes);
  auto status = read(runs, host, limits);
  return status.ok() ? copy_runs(into, into.bytes, {0}, host.data, true) : status;
}

Status RemoteRegion::write_by_gpu(const Runs& runs, const Buffer& from, const TransferLimits& limits) {
  if (auto written = by_card(runs, from, true, limits)) return noting_a_drop(*std::move(written));
  const auto host = regions_->agent_->allocate(from.bytes);
  if (host.data == nullptr && from.bytes != 0) return no_memory(from.bytes);
  auto status = copy_runs(from, from.bytes, {0}, host.data, false);
  return status.ok() ? write(runs, host, {}, limits) : status;
}

Status RemoteRegion::read_served(const Runs& runs, const Buffer& into, const TransferLimits& limits) {
  const auto part = [&](const Runs& few, std::uint64_t at) -> Status {
    const Buffer target{{}, into.data + at, few.bytes(), nullptr, into.owner};
    auto reply =
        regions_->ask(owner(), ReadRuns{visit_->number(), id(), few.run_bytes, few.offsets}, {}, target, limits);
    if (!reply.ok()) return reply.status();
    if (reply->buffers.size() != 1 || reply->buffers[0].bytes != few.bytes() || !on_host(reply->buffers[0])) {
      return {Code::protocol_error, formatted("\"{}\" answered a read with other bytes than were asked for", owner())};
    }
    if (reply->buffers[0].data != target.data && few.bytes() != 0) {
      std::memcpy(target.data, reply->buffers[0].data, few.bytes());
    }
    return {};
  };
  return in_messages(runs, part);
}

Status RemoteRegion::write_served(const Runs& runs, const Buffer& from, const TransferLimits& limits) {
  const auto part = [&](const Runs& few, std::uint64_t at) -> Status {
    Message bytes;
    bytes.buffers.push_back({{}, from.data + at, few.bytes(), nullptr, from.owner});
    return regions_
        ->ask(owner(), WriteRuns{visit_->number(), id(), few.run_bytes, few.offsets}, std::move(bytes), {}, limits)
        .status();
  };
  return in_messages(runs, part);
}

RemoteRegions::RemoteRegions(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visits> visits)
    : agent_(std::move(agent)), visits_(std::move(visits)), place_(own_place()), proof_(random_word()) {}

Result<Received> RemoteRegions::ask(const std::string& owner, const RegionMessage& message, Message bytes,
                                    const Buffer& into, const TransferLimits& limits) const {
  bytes.payload = encode(message);
  RawCallOptions options;
  options.timeout = limits.timeout;
  options.label = "a region's message";
  if (into.data != nullptr) options.into.push_back(into);
  auto call = agent_->call(owner, region_function, std::move(bytes), std::move(options));
  bool stopped = false;
  std::function<bool()> interrupted;
  if (limits.interrupted) interrupted = [&] { return stopped = stopped || limits.interrupted(); };
  // What interrupts the transfer may be no signal, so no wait is long.
  const auto slice = [&] {
    return interrupted ? std::optional(agent_->clock().now() + Milliseconds(50)) : std::nullopt;
  };
  while (!call.wait(slice(), interrupted) && !call.done() && !(interrupted && interrupted())) {
  }
  if (call.done()) return call.take();
  call.cancel();
  // A reply that is landing in the caller's memory is awaited, because the memory must not be written afterwards.
  call.wait();
  if (auto ended = call.take(); ended.ok()) return ended;
  return Status(Code::cancelled, "the transfer was interrupted");
}

void RemoteRegions::attach(RemoteRegion& region, std::vector<Buffer> buffers) const {
  const auto& grant = region.grant_;
  if (!std::ranges::all_of(buffers, on_host)) return;
  if (grant.page && !buffers.empty() && buffers[0].bytes >= page_bytes && grant.slot < OwnedRegions::most_grants) {
    region.page_ = std::move(buffers[0]);
  }
  const auto most = most_.load();
  if (grant.on_gpu) {
    if (grant.reach == Reach::mapped && most == Reach::mapped && region.page_.data != nullptr)
      region.reach_ = Reach::mapped;
    return;
  }
  if (grant.reach == Reach::mapped && most == Reach::mapped && region.page_.data != nullptr && buffers.size() == 2 &&
      grant.offset <= buffers[1].bytes && grant.bytes <= buffers[1].bytes - grant.offset) {
    region.memory_ = std::move(buffers[1]);
    region.reach_ = Reach::mapped;
    return;
  }
  if (most == Reach::served || most == Reach::by_card || grant.process.pid == 0 || place_.process.pid == 0) return;
  if (!agent_->check_process(region.owner(), grant.process.pid).ok()) return;
  auto process = cma::Process::find(grant.process);
  if (!process.ok()) return;
  std::uint64_t word = 0;
  const auto error = process->read(reinterpret_cast<std::byte*>(&word), grant.proof_address, sizeof word);
  if (error != 0 || word != proof_) return;
  region.process_.emplace(*std::move(process));
  region.reach_ = Reach::in_place;
}

Result<std::shared_ptr<LockedWords>> RemoteRegions::locked(const Buffer& page, int device) {
  const std::lock_guard lock(mutex_);
  std::erase_if(locked_, [](const auto& each) { return each.second.expired(); });
  if (const auto known = locked_.find(page.data); known != locked_.end()) {
    if (auto kept = known->second.lock()) return kept;
  }
  auto out = lock_words(page, device);
  if (out.ok()) locked_[page.data] = *out;
  return out;
}

Result<std::shared_ptr<RemoteRegion>> RemoteRegions::grant(const RegionKey& key, const std::shared_ptr<Visit>& visit,
                                                           bool map, const TransferLimits& limits) {
  const OpenRegion asked{visit->number(), key.incarnation, key.id, key.name, map, place_, proof_};
  auto reply = ask(key.owner, asked, {}, {}, limits);
  if (!reply.ok()) return reply.status();
  auto grant = decode<RegionGrant>(reply->payload);
  if (!grant) return Status(Code::protocol_error, formatted("\"{}\" sent a malformed grant of a region", key.owner));
  std::shared_ptr<RemoteRegion> out(new RemoteRegion(shared_from_this(), visit, *std::move(grant)));
  attach(*out, std::move(reply->buffers));
  return out;
}

Result<std::shared_ptr<RemoteRegion>> RemoteRegions::open(const RegionKey& key, const TransferLimits& limits) {
  const std::pair place(key.owner, key.id);
  if (key.id != 0) {
    const std::lock_guard lock(mutex_);
    const auto known = open_.find(place);
    auto region = known == open_.end() ? nullptr : known->second.lock();
    if (region && region->alive().ok()) return region;
  }
  const auto visit = visits_->visit(key.owner);
  if (visit->ended()) return visit->why();
  auto opened = grant(key, visit, most_.load() == Reach::mapped, limits);
  if (!opened.ok() && opened.status().code() == Code::channel_unavailable) opened = grant(key, visit, false, limits);
  if (!opened.ok()) return opened.status();
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [](const auto& each) { return each.second.expired(); });
  open_[{key.owner, (*opened)->id()}] = *opened;
  return opened;
}

}  // namespace tensorferry::regions
