#include "rpc/regions/subscription.h"

#include <algorithm>
#include <cstring>

#include "base/host.h"
#include "base/text.h"

namespace tensorferry::regions {
namespace {

constexpr Milliseconds look_every{100};
constexpr std::size_t images_of_a_copy = 3;

Milliseconds left_of(std::optional<Clock::time_point> until) {
  if (!until) return Milliseconds(0);
  const auto left = std::chrono::duration_cast<Milliseconds>(*until - Clock().now());
  return std::max(left, Milliseconds(1));
}

bool source_has_gone(const Status& status) {
  return status.code() == Code::connection_lost || status.code() == Code::agent_closed;
}

}  // namespace

Result<std::vector<Copier::Piece>> copies_of(const VersionView& view, std::span<const ImageTarget> targets,
                                             const std::optional<std::vector<ByteRange>>& ranges) {
  const auto all = view.layout->bytes;
  const std::vector<ByteRange> whole{{0, all}};
  const auto& wanted = ranges ? *ranges : whole;
  std::vector<Copier::Piece> out;
  for (const auto& target : targets) {
    if (target.offset > all || target.bytes > all - target.offset) {
      return Status(Code::invalid_argument, "bytes beyond the end of a version");
    }
    const auto end = target.offset + target.bytes;
    auto range = std::ranges::upper_bound(wanted, target.offset, {}, &ByteRange::offset);
    if (range != wanted.begin()) --range;
    for (; range != wanted.end() && range->offset < end; ++range) {
      const auto from = std::max(target.offset, range->offset);
      const auto to = std::min(end, range->offset + range->bytes);
      if (from < to) out.push_back({target.to + (from - target.offset), view.data + from, to - from});
    }
  }
  return out;
}

/// A lease at the source. Its end tells the source.
struct Subscription::Lease {
  Lease(std::shared_ptr<Subscription> asked, std::shared_ptr<Source> from, const Acquired& told)
      : subscription(std::move(asked)), source(std::move(from)), acquired(told) {}
  ~Lease() {
    {
      const std::lock_guard lock(subscription->mutex_);
      source->leases.erase(acquired.lease);
    }
    if (source->visit->ended()) return;
    Message message;
    message.payload =
        encode(VersionMessage(ReleaseVersion{source->visit->number(), subscription->name_, acquired.lease}));
    RawCallOptions options;
    options.timeout = Milliseconds(10000);
    memory = {};  // before the source may write it
    subscription->all_->agent_->call(source->agent, version_function, std::move(message), std::move(options));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  const std::shared_ptr<Subscription> subscription;
  const std::shared_ptr<Source> source;
  const Acquired acquired;
  Buffer memory;  // mapped
};

Subscription::~Subscription() {
  if (relays_) all_->publications_->withdraw(name_);
}

Status Subscription::malformed(const Source& source) const {
  return {Code::protocol_error, formatted("\"{}\" sent a malformed answer about \"{}\"", source.agent, name_)};
}

Result<Received> Subscription::ask(const std::string& agent, const VersionMessage& message, const Buffer& into,
                                   const Limits& limits) const {
  Message out;
  out.payload = encode(message);
  RawCallOptions options;
  options.timeout = left_of(limits.until);
  options.label = "a message about \"" + name_ + "\"";
  if (into.data != nullptr) options.into.push_back(into);
  auto call = all_->agent_->call(agent, version_function, std::move(out), std::move(options));
  for (;;) {
    if (call.wait(all_->agent_->clock().now() + look_every)) return call.take();
    if (limits.interrupted && limits.interrupted()) break;
  }
  call.cancel();
  call.wait();  // a reply that is landing in the caller's memory
  if (auto ended = call.take(); ended.ok()) return ended;
  return Status(Code::cancelled, formatted("the wait for \"{}\" was interrupted", name_));
}

ImageLayout Subscription::layout() const {
  const std::lock_guard lock(mutex_);
  return layout_;
}

std::string Subscription::carried() const {
  const std::lock_guard lock(mutex_);
  if (!source_) return "not connected";
  if (!source_->maps) return "copied";
  return source_->agent == publisher_ ? "mapped" : formatted("mapped from \"{}\"", source_->agent);
}

Result<std::shared_ptr<Subscription::Source>> Subscription::connect_to(const std::string& agent, std::string& relay,
                                                                       const Limits& limits) {
  auto source = std::make_shared<Source>();
  source->agent = agent;
  source->visit = all_->visits_->visit(agent);
  if (source->visit->ended()) return source->visit->why();
  const bool relays = agent == publisher_;
  auto reply = ask(agent, SubscribeTo{source->visit->number(), name_, all_->host_, relays}, {}, limits);
  if (!reply.ok()) return reply.status();
  auto told = decode<Subscribed>(reply->payload);
  if (!told || !told->layout.valid()) return malformed(*source);
  source->layout = std::move(told->layout);
  source->epoch = told->epoch;
  source->maps = told->host == all_->host_ && !told->host.empty();
  relay = std::move(told->relay);
  if (!source->maps && relay.empty()) return copy_instead(*source, relays);
  return source;
}

Result<std::shared_ptr<Subscription::Source>> Subscription::connect(const Limits& limits) {
  const std::lock_guard turn(connecting_);
  {
    const std::lock_guard lock(mutex_);
    if (source_ && !source_->visit->ended()) return source_;
  }
  std::string relay, none;
  auto source = connect_to(publisher_, relay, limits);
  if (source.ok() && !relay.empty()) {
    // A relay that cannot serve, because it ends at this moment, is passed over.
    auto nearer = connect_to(relay, none, limits);
    if (nearer.ok() && (*nearer)->maps && (*nearer)->epoch == (*source)->epoch) {
      source = std::move(nearer);
    } else {
      source = copy_instead(**source, false);
    }
  }
  if (!source.ok()) return source.status();
  const std::lock_guard lock(mutex_);
  source_ = *source;
  layout_ = source_->layout;
  return source_;
}

std::shared_ptr<Subscription::Source> Subscription::copy_instead(const Source& source, bool relays) {
  auto out = std::make_shared<Source>();
  out->agent = source.agent;
  out->visit = source.visit;
  out->layout = source.layout;
  out->layout.gpu_from = out->layout.bytes;  // the copy is in memory of the host
  out->epoch = source.epoch;
  out->copy = std::make_shared<VersionStore>(out->layout, VersionStore::Options{images_of_a_copy});
  bool relayed = false;
  {
    const std::lock_guard lock(mutex_);
    relayed = std::exchange(relays_, false);
  }
  if (relayed) all_->publications_->withdraw(name_);
  if (!relays) return out;
  const auto served = all_->publications_->relay(
      name_, out->copy, out->epoch,
      [weak = weak_from_this()](std::uint64_t newer_than, bool wait, const auto& cancelled, auto until) {
        const auto self = weak.lock();
        if (!self) return Status(Code::not_found, "the subscription that relays has ended");
        return self->newest({newer_than, wait, false}, {until, cancelled}).status();
      });
  const std::lock_guard lock(mutex_);
  relays_ = served.ok();
  return out;
}

void Subscription::leave(const std::shared_ptr<Source>& source) {
  unmap(*source);
  const std::lock_guard lock(mutex_);
  if (source_ == source) source_ = nullptr;
}

void Subscription::unmap(Source& source) {
  std::map<std::uint64_t, std::shared_ptr<RemoteRegion>> ended;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  ended.swap(source.regions);
}

Result<std::shared_ptr<Subscription::Lease>> Subscription::acquire(const std::shared_ptr<Source>& source,
                                                                   const Wanted& wanted, const Limits& limits) {
  const bool on_gpu = wanted.on_gpu && source->maps && source->layout.on_gpu() && all_->remote_ != nullptr;
  AcquireVersion message{source->visit->number(), name_, wanted.newer_than, source->maps, wanted.wait, {}, 0,
                         source->epoch,           on_gpu};
  {
    const std::lock_guard lock(mutex_);
    message.holds.assign(source->leases.begin(), source->leases.end());
    if (source->asking++ == 0) message.seen = source->seen;  // else a lease may be on its way here
  }
  auto reply = ask(source->agent, message, {}, limits);
  const auto told = reply.ok() ? decode<Acquired>(reply->payload) : std::nullopt;
  {
    const std::lock_guard lock(mutex_);
    --source->asking;
    if (told && told->version != 0) {
      source->leases.insert(told->lease);
      source->seen = std::max(source->seen, told->lease);
    }
  }
  if (!reply.ok()) return reply.status();
  if (!told || told->version == 0) return malformed(*source);
  auto lease = std::make_shared<Lease>(shared_from_this(), source, *told);
  if (told->region != 0 && !on_gpu) return malformed(*source);
  if (!source->maps) return lease;
  if (reply->buffers.size() != 1 || reply->buffers[0].bytes < source->layout.bytes || !on_host(reply->buffers[0])) {
    return malformed(*source);
  }
  lease->memory = std::move(reply->buffers[0]);
  return lease;
}

Status Subscription::verify(const Lease& lease, std::uint64_t checksum) const {
  if (checksum == lease.acquired.checksum) return {};
  return {Code::protocol_error,
          formatted("version {} of \"{}\" from \"{}\" has checksum {}, and its bytes have {}", lease.acquired.version,
                    name_, lease.source->agent, hex(lease.acquired.checksum), hex(checksum))};
}

Result<std::optional<std::vector<ByteRange>>> Subscription::ask_changes(const Lease& lease, std::uint64_t base,
                                                                        const Limits& limits) const {
  const auto& source = *lease.source;
  const auto reply =
      ask(source.agent, AskChanges{source.visit->number(), name_, lease.acquired.lease, base}, {}, limits);
  if (!reply.ok()) return reply.status();
  auto told = decode<Changes>(reply->payload);
  if (!told) return malformed(source);
  if (!told->known) return std::optional<std::vector<ByteRange>>();
  // A part of a block would leave the rest of it as it was in an older version.
  const auto all = source.layout.bytes, block = std::uint64_t{source.layout.block};
  std::uint64_t end = 0;
  for (const auto& range : told->ranges) {
    if (range.offset < end || range.bytes > all || range.offset > all - range.bytes) return malformed(source);
    end = range.offset + range.bytes;
    if (range.offset % block != 0 || (end % block != 0 && end != all)) return malformed(source);
  }
  return std::optional(std::move(told->ranges));
}

Status Subscription::fetch(const Lease& lease, const std::vector<ByteRange>& ranges, const Buffer& image,
                           const Limits& limits) {
  const auto& source = *lease.source;
  FetchRanges message{source.visit->number(), name_, lease.acquired.lease, {}};
  std::uint64_t asked = 0;
  const auto flush = [&]() -> Status {
    if (asked == 0) return {};
    const bool one = message.ranges.size() == 1;
    const Buffer into{{}, one ? image.data + message.ranges[0].offset : nullptr, one ? asked : 0, nullptr, image.owner};
    const auto reply = ask(source.agent, message, into, limits);
    if (!reply.ok()) return reply.status();
    if (reply->buffers.size() != 1 || reply->buffers[0].bytes != asked || !on_host(reply->buffers[0])) {
      return malformed(source);
    }
    const auto* from = reply->buffers[0].data;
    for (const auto& range : message.ranges) {
      auto* const to = image.data + range.offset;
      if (to != from) std::memcpy(to, from, range.bytes);
      from += range.bytes;
    }
    fetched_.fetch_add(asked, std::memory_order_relaxed);
    message.ranges.clear();
    asked = 0;
    return {};
  };
  constexpr std::uint64_t small = 1 << 20;  // larger ranges land in place, one message each
  for (auto range : ranges) {
    while (range.bytes > 0) {
      const auto bytes = std::min(range.bytes, most_served_bytes);
      if (bytes > small || asked + bytes > most_served_bytes || message.ranges.size() >= 65536) {
        if (auto done = flush(); !done.ok()) return done;
      }
      message.ranges.push_back({range.offset, bytes});
      asked += bytes;
      range.offset += bytes;
      range.bytes -= bytes;
      if (bytes <= small) continue;
      if (auto done = flush(); !done.ok()) return done;
    }
  }
  return flush();
}

Status Subscription::copy(const Lease& lease, const Limits& limits) {
  const auto& source = *lease.source;
  VersionStore::Origin origin;
  origin.version = lease.acquired.version;
  origin.changes = [&](std::uint64_t base) -> Result<std::vector<ByteRange>> {
    const std::vector<ByteRange> all{{0, source.layout.bytes}};
    if (base == 0) return all;
    auto told = ask_changes(lease, base, limits);
    if (!told.ok()) return told.status();
    return *told ? **std::move(told) : all;
  };
  origin.fetch = [&](const auto& ranges, const Buffer& image) { return fetch(lease, ranges, image, limits); };
  origin.verify = [&](std::uint64_t checksum) { return verify(lease, checksum); };
  return source.copy->take_over(origin, limits.until);
}

Result<std::shared_ptr<RemoteRegion>> Subscription::region_of(Source& source, std::uint64_t id,
                                                              const Limits& limits) const {
  std::vector<std::shared_ptr<RemoteRegion>> ended;  // dropped without the lock
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = source.regions.find(id); known != source.regions.end() && known->second->alive().ok()) {
      return known->second;
    }
    std::erase_if(source.regions, [&](auto& each) {
      if (each.second->alive().ok()) return false;
      ended.push_back(std::move(each.second));
      return true;
    });
  }
  auto opened = all_->remote_->open({source.agent, 0, id}, {left_of(limits.until), limits.interrupted});
  if (!opened.ok()) return opened.status();
  // Of a later visit, the number might be that of another region, of the publisher's next process.
  if ((*opened)->visit() != source.visit) return source.visit->why();
  if ((*opened)->bytes() != source.layout.bytes - source.layout.gpu_from) return malformed(source);
  std::shared_ptr<RemoteRegion> one_too_many;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  source.regions[id] = *opened;
  if (source.regions.size() > Publication::most_leases) {  // more images than a publication of ours can have leased
    const auto oldest =
        source.regions.begin()->first == id ? std::next(source.regions.begin()) : source.regions.begin();
    one_too_many = std::move(oldest->second);
    source.regions.erase(oldest);
  }
  return opened;
}

Result<HeldVersion> Subscription::newest_of(const std::shared_ptr<Source>& source, const Wanted& wanted,
                                            const Limits& limits) {
  auto acquired = acquire(source, wanted, limits);
  if (!acquired.ok()) return acquired.status();
  auto lease = *std::move(acquired);
  const auto& told = lease->acquired;
  const std::shared_ptr<const ImageLayout> layout(source, &source->layout);
  if (source->maps) {
    const auto* const data = lease->memory.data;
    if (layout->checksums) {
      const auto checksum = checksum_of(block_hashes({data, layout->bytes}, layout->block));
      if (auto whole = verify(*lease, checksum); !whole.ok()) return whole;
    }
    std::shared_ptr<RemoteRegion> region;
    if (told.region != 0) {
      auto opened = region_of(*source, told.region, limits);
      if (!opened.ok()) return opened.status();
      region = *std::move(opened);
    }
    return std::make_shared<const VersionView>(
        VersionView{told.version, data, told.checksum, source->epoch, true, layout, lease, std::move(region)});
  }
  const std::lock_guard turn(copying_);
  auto current = source->copy->current();
  if (!current || current->version < told.version) {
    if (auto done = copy(*lease, limits); !done.ok()) return done;
    current = source->copy->current();
  }
  const auto* const data = current->memory.data;
  auto owner = std::make_shared<VersionLease>(current);
  return std::make_shared<const VersionView>(VersionView{current->version, data, checksum_of(current->hashes),
                                                         source->epoch, false, layout, std::move(owner)});
}

Result<HeldVersion> Subscription::newest(const Wanted& wanted, const Limits& limits) {
  for (int attempt = 0;; ++attempt) {
    const auto source = connect(limits);
    if (!source.ok()) return source.status();
    std::uint64_t given = 0;
    {
      const std::lock_guard lock(mutex_);
      given = given_epoch_;
    }
    const bool anew = given != 0 && given != (*source)->epoch;
    auto view = newest_of(*source, {anew ? 0 : wanted.newer_than, wanted.wait, wanted.on_gpu}, limits);
    if (view.ok()) {
      const std::lock_guard lock(mutex_);
      given_epoch_ = (*view)->epoch;
      return view;
    }
    const auto status = view.status();
    const bool relayed = (*source)->agent != publisher_;
    if ((*source)->maps && status.code() == Code::channel_unavailable) {
      const auto copied = copy_instead(**source, false);
      const std::lock_guard lock(mutex_);
      source_ = copied;
    } else if (source_has_gone(status) || (relayed && status.code() == Code::not_found)) {
      leave(*source);
      const bool published_anew = status.code() == Code::agent_closed && !(*source)->visit->ended();
      if (!relayed && !published_anew) return status;
    } else {
      if (status.code() == Code::not_found) unmap(**source);
      return status;
    }
    if (attempt == 3) return status;
  }
}

Result<HeldVersion> Subscription::latest(const Limits& limits, bool on_gpu) {
  return newest({0, false, on_gpu}, limits);
}

Result<HeldVersion> Subscription::wait(std::uint64_t newer_than, const Limits& limits, bool on_gpu) {
  return newest({newer_than, true, on_gpu}, limits);
}

std::optional<std::vector<ByteRange>> Subscription::changes(const VersionView& version, std::uint64_t base,
                                                            std::uint64_t epoch, const Limits& limits) {
  if (base == 0 || epoch != version.epoch) return std::nullopt;
  if (version.leased) {
    auto told = ask_changes(*std::static_pointer_cast<Lease>(version.owner), base, limits);
    return told.ok() ? *std::move(told) : std::nullopt;
  }
  std::shared_ptr<VersionStore> copy;
  {
    const std::lock_guard lock(mutex_);
    if (source_ && source_->epoch == epoch) copy = source_->copy;
  }
  return copy ? copy->changes(version.version, base) : std::nullopt;
}

Subscriptions::Subscriptions(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visits> visits,
                             std::shared_ptr<Publications> publications, std::shared_ptr<RemoteRegions> remote)
    : agent_(std::move(agent)),
      visits_(std::move(visits)),
      publications_(std::move(publications)),
      remote_(std::move(remote)),
      host_(boot_id()) {}

Result<std::shared_ptr<Subscription>> Subscriptions::subscribe(const std::string& publisher, const std::string& name,
                                                               const Subscription::Limits& limits) {
  std::shared_ptr<Subscription> out;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(subscriptions_, [](const auto& each) { return each.second.expired(); });
    auto& known = subscriptions_[{publisher, name}];
    out = known.lock();
    if (!out) {
      out.reset(new Subscription(shared_from_this(), publisher, name));
      known = out;
    }
  }
  auto connected = out->connect(limits);
  if (!connected.ok()) return connected.status();
  return out;
}

}  // namespace tensorferry::regions
