// The directory's worlds: who waits for all ranks, who looks for them, and the barriers of their members.
#include <algorithm>
#include <utility>

#include "agent/rendezvous/directory.h"
#include "agent/rendezvous/slots.h"
#include "agent/transport/blocking_io.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {

namespace {

using slots::absent;
using std::chrono::milliseconds;

constexpr milliseconds verdict_grace{5000};  // for the members to read a barrier's verdict; one may have died
constexpr milliseconds world_slice{100};     // of one wait for a world, which a signal may end
constexpr int slices_per_question = 40;      // after so many, a waiting agent asks how many rosters there are
constexpr milliseconds first_look{2000};     // before rank 0 looks by itself: the count may be wrong
constexpr milliseconds first_pause{100}, longest_pause{16000};  // between looks
constexpr std::size_t most_named = 16;                          // members named in one error text

std::string listed(const std::vector<std::string>& parts) {
  std::string text;
  for (std::size_t i = 0; i < std::min(parts.size(), most_named); ++i) text += (i == 0 ? "" : ", ") + parts[i];
  if (parts.size() > most_named) text += formatted(" and {} more", parts.size() - most_named);
  return text;
}

}  // namespace

Status Directory::Look::incomplete() const {
  const auto ranks = [](const std::vector<std::string>& which) {
    return formatted("rank{} {}", which.size() > 1 ? "s" : "", which.empty() ? "none" : listed(which));
  };
  return {Code::deadline_exceeded,
          formatted("{} of {} agents have joined; missing: {}{}. Are their processes running, with the same rendezvous "
                    "and world size?",
                    found.size(), found.size() + missing.size() + gave_up.size(), ranks(missing),
                    gave_up.empty() ? "" : "; " + ranks(gave_up) + " came, and gave up before")};
}

/// Tells the others that this agent gives up, and finds out which of the ranks that are missing had done so.
Status Directory::give_up_waiting(Look& look) {
  const auto key = [this](std::string_view rank) { return formatted("{}/gave_up/{}", prefix_, rank); };
  std::string self;
  {
    const std::lock_guard lock(mutex_);
    self = std::to_string(self_.rank);
  }
  (void)store_->set(key(self), view_of("gave up"));
  std::erase_if(look.missing, [&](const std::string& rank) {
    if (!store_->get(key(rank), milliseconds(0)).ok()) return false;
    look.gave_up.push_back(rank);
    return true;
  });
  return look.incomplete();
}

Result<Directory::Look> Directory::look_for_world(int size, milliseconds timeout) {
  const auto deadline = deadline_after(timeout, clock_);
  Look look;
  for (int rank = 0; rank < size; ++rank) {
    auto member = find_slot(slots::of_rank(rank), formatted("agent of rank {}", rank), until(deadline));
    if (member) {
      look.found.push_back(std::move(*member));
    } else if (member.status().code() == Code::not_found) {
      look.missing.push_back(std::to_string(rank));
    } else {
      return member.status();
    }
  }
  return look;
}

// Returns the incarnations of the newest world under this prefix before this agent came.
Result<std::vector<std::uint64_t>> Directory::members_of_the_last_world() {
  std::int64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = rosters_before_;
  }
  std::vector<std::uint64_t> members;
  if (number == 0) return members;
  const auto bytes = store_->get(roster_key(number), milliseconds(0));
  if (!bytes) return absent(bytes.status()) ? Result(std::move(members)) : bytes.status();
  const auto roster = decode_roster(*bytes, signing_, roster_key(number));
  if (!roster) return roster.status();
  for (const auto& member : roster->members) members.push_back(member.incarnation);
  return members;
}

// Counts the agents of a complete look that have ended among the missing. A store that outlives its processes still has
// the records of those that were killed.
Status Directory::leave_out_the_ended(Look& look, const Ended& ended) {
  if (!ended || !look.missing.empty()) return {};
  const auto earlier = members_of_the_last_world();
  if (!earlier) return earlier.status();
  std::erase_if(look.found, [&](const Record& each) {
    const bool known = std::find(earlier->begin(), earlier->end(), each.incarnation) != earlier->end();
    if (!ended(each, known)) return false;
    look.missing.push_back(formatted("{} (the agent there has ended: {})", each.rank, who(each)));
    return true;
  });
  return {};
}

// Tells all members that the world is complete.
Result<std::vector<WorldMember>> Directory::begin_world(const Look& look) {
  auto roster = roster_of(look.found);
  const auto number = store_->add(prefix_ + "/rosters", 1);
  if (!number) return number.status();
  const auto place = roster_key(*number);
  const auto told = store_->set(place, encode_roster(roster, signing_, place));
  if (!told) return told;
  return adopt(std::move(roster));
}

Result<std::vector<WorldMember>> Directory::adopt(Roster roster) {
  if (!roster.warning.empty()) log_warning(roster.warning);
  const std::lock_guard lock(mutex_);
  world_ = std::move(roster.members);
  return world_;
}

// Returns whether this agent is to look for the whole world now: the last agent to arrive at once, rank 0 as soon as
// all have arrived, and both by a schedule that grows ever slower, in case the count is wrong.
Result<bool> Directory::may_be_complete(int size, const Looking& looking) {
  if (!looking.looks) return false;
  if (until(looking.at).count() == 0) return true;
  if (looking.looked) return false;
  const auto arrived = store_->add(prefix_ + "/arrived", 0);
  if (!arrived) return arrived.status();
  return *arrived >= size;
}

// Returns the number of the roster to wait for after a long wait for `next`. Another count than expected is that of a
// world whose last member has left meanwhile.
Result<std::int64_t> Directory::expected_roster(std::int64_t next) {
  const auto number = store_->add(prefix_ + "/rosters", 0);
  if (!number) return number.status();
  if (*number + 1 == next) return next;
  return std::clamp(*number, std::int64_t{1}, slots::most_generations);
}

Result<std::vector<WorldMember>> Directory::wait_for_world(int size, milliseconds timeout, const Check& check,
                                                           const Ended& ended) {
  std::uint64_t self = 0;
  std::int64_t next = 0;
  std::int32_t rank = -1;
  Looking looking;
  {
    const std::lock_guard lock(mutex_);
    rank = self_.rank;
    if (self_.rank < 0 || self_.rank >= size) {
      return Status(Code::invalid_argument, formatted("rank {} is not within a world of {}", self_.rank, size));
    }
    in_world_ = true;
    self = self_.incarnation;
    next = rosters_before_ + 1;
    const bool last = arrival_ >= size;
    looking.looks = last || self_.rank == 0;
    looking.pause = last ? milliseconds(0) : first_look;
    looking.at = deadline_after(looking.pause, clock_);
  }
  (void)store_->erase(formatted("{}/gave_up/{}", prefix_, rank));  // of an earlier attempt
  const auto deadline = deadline_after(timeout, clock_);
  for (int slices = 1;; ++slices) {
    const bool over = until(deadline).count() == 0;
    const auto due = may_be_complete(size, looking);
    if (!due) return due.status();
    if (over || *due) {
      // The agents that came before may not have claimed their ranks yet: waits for them, once.
      auto look =
          look_for_world(size, looking.looked ? milliseconds(0) : std::min(until(deadline), slots::polling_slice));
      if (!look) return look.status();
      if (const auto status = leave_out_the_ended(*look, ended); !status) return status;
      if (look->missing.empty()) return begin_world(*look);
      if (over) return give_up_waiting(*look);
      looking.looked = true;
      looking.pause = std::clamp(2 * looking.pause, first_pause, longest_pause);
      looking.at = deadline_after(looking.pause, clock_);
    }
    const auto slice = std::min({until(deadline), looking.looks ? until(looking.at) : world_slice, world_slice});
    const auto bytes = store_->get(roster_key(next), slice);
    if (bytes) {
      auto roster = decode_roster(*bytes, signing_, roster_key(next));
      if (!roster) return roster.status();
      if (std::cmp_equal(roster->members.size(), size) && roster->has(self)) return adopt(std::move(*roster));
      ++next;  // it is of a world before this one
      continue;
    }
    if (!absent(bytes.status())) return bytes.status();
    if (const auto status = check ? check() : Status(); !status) return status;
    if (slices % slices_per_question != 0) continue;
    const auto expected = expected_roster(next);
    if (!expected) return expected.status();
    next = *expected;
  }
}

// ---- Barriers

// Arrival keys hold the incarnation, so that neither an earlier world in the same store nor a restarted member counts.
Status Directory::barrier(const std::string& tag, milliseconds timeout) {
  std::vector<WorldMember> world;
  std::string barrier;
  std::uint64_t self = 0;
  {
    const std::lock_guard lock(mutex_);
    if (world_.empty()) return {Code::invalid_argument, "a barrier needs a world: join with a world size"};
    world = world_;
    self = self_.incarnation;
    barrier = formatted("{}/barrier/{}/{}", prefix_, tag, ++barriers_[tag]);
  }
  if (auto status = store_->set(formatted("{}/{}", barrier, hex(self, 16)), view_of("here")); !status) return status;
  return world.front().incarnation == self ? gather(barrier, world, timeout) : follow(barrier, self, world, timeout);
}

/// Rank 0's side of a barrier: waits for all arrivals and publishes the verdict. So the store serves n waits for
/// arrivals, not n for each member.
Status Directory::gather(const std::string& barrier, const std::vector<WorldMember>& world, milliseconds timeout) {
  const auto deadline = deadline_after(timeout, clock_);
  std::vector<std::string> missing;
  bool hopeless = false;  // a member has left and will not arrive: collect the other missing members, and end
  for (const auto& member : world) {
    const auto arrival = formatted("{}/{}", barrier, hex(member.incarnation, 16));
    for (bool left = false;;) {
      const auto arrived =
          store_->get(arrival, hopeless || left ? milliseconds(0) : std::min(until(deadline), slots::polling_slice));
      if (arrived) break;
      if (!absent(arrived.status())) return arrived.status();
      if (!hopeless && !left && until(deadline).count() > 0) {
        left = gone(member);  // then read once more: it may have arrived before it left
        continue;
      }
      hopeless = hopeless || left;
      missing.push_back(who(member) + (left ? ", which has left" : ""));
      break;
    }
  }
  Status verdict;
  if (!missing.empty()) {
    verdict = {Code::deadline_exceeded,
               formatted("{} of {} agents did not reach the barrier within {}: {}", missing.size(), world.size(),
                         slots::seconds_of(timeout), listed(missing))};
  }
  const auto leader = world.front().incarnation;
  const auto present = world.size() - missing.size();
  Bytes said;
  Writer out(said);
  out.varint(present);
  out.raw(view_of(verdict.what()));
  const auto published = store_->set(formatted("{}/verdict/{}", barrier, hex(leader, 16)), said);
  // Rank 0's process usually serves the store and may end after this returns. So it first waits until all members have
  // read the verdict.
  const auto read = formatted("{}/read/{}", barrier, hex(leader, 16));
  if (published && (present == 1 || store_->get(read, verdict_grace).ok())) {
    for (const auto* key : {"verdict", "readers", "read"}) {
      static_cast<void>(store_->erase(formatted("{}/{}/{}", barrier, key, hex(leader, 16))));
    }
    static_cast<void>(store_->erase(formatted("{}/{}", barrier, hex(leader, 16))));
  }
  return verdict ? published : verdict;
}

Status Directory::follow(const std::string& barrier, std::uint64_t self, const std::vector<WorldMember>& world,
                         milliseconds timeout) {
  const auto deadline = deadline_after(timeout, clock_);
  const auto& leader = world.front();
  const auto verdict = formatted("{}/verdict/{}", barrier, hex(leader.incarnation, 16));
  const auto arrival = formatted("{}/{}", barrier, hex(self, 16));
  for (bool left = false;;) {
    const auto said = store_->get(verdict, left ? milliseconds(0) : std::min(until(deadline), slots::polling_slice));
    if (said) {
      Reader in(*said);
      const auto present = in.varint();
      const std::string text(text_of(in.rest()));
      static_cast<void>(store_->erase(arrival));
      const auto readers = store_->add(formatted("{}/readers/{}", barrier, hex(leader.incarnation, 16)), 1);
      if (readers && *readers + 1 == static_cast<std::int64_t>(present)) {  // the last reader tells the leader
        static_cast<void>(store_->set(formatted("{}/read/{}", barrier, hex(leader.incarnation, 16)), view_of("all")));
      }
      return text.empty() ? Status() : Status(Code::deadline_exceeded, text);
    }
    if (!absent(said.status())) return said.status();
    if (!left && until(deadline).count() > 0) {
      left = gone(leader);  // then read once more: it may have published before it left
      continue;
    }

    std::vector<std::string> missing;
    for (const auto& member : world) {
      const auto arrived = store_->get(formatted("{}/{}", barrier, hex(member.incarnation, 16)), milliseconds(0));
      if (!arrived && !absent(arrived.status())) return arrived.status();
      if (!arrived) missing.push_back(who(member));
    }
    if (missing.empty()) missing.push_back(who(leader) + ", which did not complete the barrier");
    return {Code::deadline_exceeded,
            formatted("{} of {} agents did not reach the barrier within {}: {}{}", missing.size(), world.size(),
                      slots::seconds_of(timeout), listed(missing), left ? "; rank 0 has left" : "")};
  }
}

// Returns whether a member has left on purpose or was restarted, so that it will not arrive. This does not detect a
// member that died: links to it do.
bool Directory::gone(const WorldMember& member) {
  const auto slot = slots::of_rank(member.rank);
  const auto top = store_->add(counter_key(slot), 0);
  if (!top) return false;
  const auto now = newest(slot, *top, milliseconds(0));
  return now.ok() && (!now->record || now->record->left || now->record->incarnation != member.incarnation);
}

}  // namespace tensorferry
