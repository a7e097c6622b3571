#include "channels/xth/directory.h"

#include <unordered_map>
#include <utility>

#include "base/fork.h"
#include "base/host.h"
#include "base/mutex.h"
#include "base/text.h"

namespace tensorferry::xth {

/// The channel ends of this process, by their ids. It is global, because the two ends of a link meet nowhere else.
struct LocalEnd::Ends {
  static Ends& of_this_process() {
    static auto& ends = *new Ends;  // never destroyed: an agent may be closed by another static's destructor
    return ends;
  }
  struct Hash {
    std::size_t operator()(const Id& id) const noexcept { return id[0]; }
  };
  Mutex mutex;
  std::unordered_map<Id, Shown, Hash> by_id;
};

Id random_id() { return {random_word(), random_word()}; }

Id nonce_of_this_process() {
  static Mutex mutex;
  static std::optional<Id> nonce;
  static std::uint32_t drawn_at = 0;
  std::lock_guard lock(mutex);
  if (!nonce || drawn_at != forks()) {
    nonce = random_id();
    drawn_at = forks();
  }
  return *nonce;
}

Bytes descriptor() {
  const auto nonce = nonce_of_this_process();
  const auto bytes = std::as_bytes(std::span(nonce));
  return {bytes.begin(), bytes.end()};
}

std::optional<Refusal> reaches(ByteView mine, ByteView theirs) {
  if (mine.size() == sizeof(Id) && text_of(mine) == text_of(theirs)) return std::nullopt;
  return Refusal{"another process"};
}

LocalEnd::LocalEnd(std::string_view channel, DevicePair pair, const Wire& wire)
    : channel_(channel), pair_(pair), wire_(wire) {
  auto& all = Ends::of_this_process();
  const std::lock_guard lock(all.mutex);
  all.by_id.emplace(id_, Shown{channel_, pair_, offers_});
}

Offer LocalEnd::offer(Buffer buffer, Completion released, bool shared) {
  const auto bytes = buffer.bytes;
  const auto number = offers_->add(std::move(buffer), std::move(released), shared);
  if (!number) return Refusal{formatted("the link to {} has ended", wire_.peer())};
  return Ticket{.bytes = bytes, .opaque = encode(XthTicket{id_, *number}), .acknowledge = true};
}

void LocalEnd::withdraw(const Ticket& ticket) {
  if (const auto parsed = decode<XthTicket>(ticket.opaque); parsed && parsed->end == id_) offers_->end(parsed->number);
}

Result<LocalEnd::Source> LocalEnd::begin_copy(const Ticket& ticket) {
  const auto parsed = decode<XthTicket>(ticket.opaque);
  if (!parsed)
    return Status(Code::protocol_error, formatted("{} sent a ticket that {} cannot read", wire_.peer(), channel_));
  const auto theirs = find(parsed->end);
  if (!theirs.ok()) return theirs.status();
  const auto source = *theirs != nullptr ? (*theirs)->begin_copy(parsed->number, ticket.bytes)
                                         : Result<Offers::OfferedMemory>(Status(Code::connection_lost, ""));
  if (source.ok()) return Source{*source, *theirs, parsed->number};
  if (source.status().code() == Code::protocol_error) return source.status();
  return Status(Code::connection_lost,
                formatted("the link to {} has ended, or its end that offered the buffer is closed", wire_.peer()));
}

void LocalEnd::close(Status status) {
  {
    auto& all = Ends::of_this_process();
    const std::lock_guard lock(all.mutex);
    all.by_id.erase(id_);
  }
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    theirs_.reset();
  }
  offers_->close(std::move(status));
}

/// Returns the other end's offers; null if either end is closed. Remembers them, because they are the same for each
/// ticket. An unknown end is no ProtocolError: more likely an agent just left than a peer invents tickets.
Result<std::shared_ptr<Offers>> LocalEnd::find(const Id& end) {
  const std::lock_guard lock(mutex_);
  if (closed_ || (theirs_ && theirs_id_ == end)) return theirs_;
  auto& all = Ends::of_this_process();
  const std::lock_guard all_lock(all.mutex);
  const auto found = all.by_id.find(end);
  if (found == all.by_id.end()) return std::shared_ptr<Offers>();
  const auto& [channel, pair, offers] = found->second;
  if (channel != channel_ || pair != DevicePair{pair_.remote, pair_.local}) {
    return Status(Code::protocol_error,
                  formatted("{} sent by {} a ticket of another channel or device", wire_.peer(), channel_));
  }
  theirs_id_ = end;
  return theirs_ = offers;
}

}  // namespace tensorferry::xth
