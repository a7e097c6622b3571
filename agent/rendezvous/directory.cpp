#include "agent/rendezvous/directory.h"

#include <algorithm>
#include <set>
#include <utility>

#include "agent/rendezvous/blocking_io.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {

namespace {

using std::chrono::milliseconds;

constexpr std::string_view void_record = "void";
// Microseconds lie between a claim's add() and its set(). A claim that takes longer than this counts as dead.
constexpr milliseconds claim_grace{2000};
constexpr std::int64_t most_generations = 100'000;  // of one slot: newest() may have to read each
constexpr milliseconds verdict_grace{5000};         // for the members to read a barrier's verdict; one may have died
constexpr milliseconds polling_slice{1000};         // of one get() if the waiting loop also polls for other changes
constexpr milliseconds short_slice{50};
constexpr int most_attempts = 100;
constexpr std::int64_t most_erased = 1000;  // keys that one agent deletes in place of others
constexpr milliseconds world_slice{100};    // of one wait for a world, which a signal may end
constexpr int slices_per_question = 40;     // after so many, a waiting agent asks how many rosters there are
constexpr milliseconds first_look{2000};    // before rank 0 looks by itself: the count may be wrong
constexpr milliseconds first_pause{100}, longest_pause{16000};  // between looks
constexpr std::size_t most_named = 16;                          // members named in one error text

std::string name_slot(std::string_view name) { return formatted("n/{}", name); }
std::string rank_slot(std::int64_t rank) { return formatted("r/{}", rank); }

bool absent(const Status& status) { return status.code() == Code::deadline_exceeded; }

std::string seconds_of(milliseconds time) { return fixed(static_cast<double>(time.count()) / 1000, 1) + " s"; }

Status taken(const std::string& slot, const Record& by) {
  const auto what =
      slot.starts_with("n/") ? formatted("the name \"{}\"", slot.substr(2)) : formatted("rank {}", slot.substr(2));
  return {Code::invalid_argument, formatted("{} is taken by the agent {}, which is alive: choose another, or end that "
                                            "process",
                                            what, who(by))};
}

template <class Agent>
Status has_left(const std::string& whom, const Agent& agent) {
  return {Code::not_found, formatted("{} has left (it was pid {} on {})", whom, agent.pid, agent.host)};
}

std::string listed(const std::vector<std::string>& parts) {
  std::string text;
  for (std::size_t i = 0; i < std::min(parts.size(), most_named); ++i) text += (i == 0 ? "" : ", ") + parts[i];
  if (parts.size() > most_named) text += formatted(" and {} more", parts.size() - most_named);
  return text;
}

}  // namespace

Directory::Directory(std::shared_ptr<Store> store, std::string prefix, Key signing, Clock clock)
    : store_(std::move(store)), prefix_(std::move(prefix)), signing_(std::move(signing)), clock_(std::move(clock)) {}

milliseconds Directory::until(Clock::time_point deadline) const {
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(deadline - clock_.now()));
}

std::string Directory::record_key(std::string_view slot, std::int64_t generation) const {
  return formatted("{}/rec/{}/{}", prefix_, slot, generation);
}

std::string Directory::counter_key(std::string_view slot) const { return formatted("{}/gen/{}", prefix_, slot); }

std::string Directory::roster_key(std::int64_t number) const { return formatted("{}/roster/{}", prefix_, number); }

std::string Directory::refused_key(std::uint64_t holder) const {
  return formatted("{}/refused/{}", prefix_, hex(holder, 16));
}

// ---- Claims

Result<Directory::Newest> Directory::newest(std::string_view slot, std::int64_t up_to, milliseconds grace) {
  if (up_to < 0 || up_to > most_generations) {
    return Status(
        Code::protocol_error,
        formatted("the store counts {} claims of \"{}\": another program writes to this key", up_to, slot.substr(2)));
  }
  const auto deadline = deadline_after(grace, clock_);
  Newest found;
  for (auto generation = up_to; generation > 0; --generation) {
    const auto place = record_key(slot, generation);
    const auto bytes = store_->get(place, until(deadline));
    if (!bytes && !absent(bytes.status())) return bytes.status();
    if (!bytes) {
      found.hole = true;
      continue;
    }
    if (text_of(*bytes) == void_record) continue;
    auto record = decode_record(*bytes, signing_, place);
    if (!record) return record.status();
    if (slot != name_slot(record->name) && slot != rank_slot(record->rank)) {
      return Status(Code::protocol_error, formatted("the store holds the record of \"{}\" in place of \"{}\"'s",
                                                    record->name, slot.substr(2)));
    }
    found.record = std::move(*record);
    found.generation = generation;
    break;
  }
  return found;
}

Status Directory::publish(const Claim& claim, const Record& record) {
  const auto place = record_key(claim.slot, claim.generation);
  return store_->set(place, encode_record(record, signing_, place));
}

Status Directory::give_up(const Claim& claim) {
  return store_->set(record_key(claim.slot, claim.generation), view_of(void_record));
}

Result<Directory::Claim> Directory::claim(const std::string& slot, const Record& record, const Alive& alive) {
  for (int attempt = 0; attempt < most_attempts; ++attempt) {
    const auto seen = store_->add(counter_key(slot), 0);
    if (!seen) return seen.status();
    const auto holder = newest(slot, *seen, claim_grace);
    if (!holder) {
      return Status(holder.status().code(), formatted("claiming \"{}\": {}", slot.substr(2), holder.status().what()));
    }
    if (holder->record && !holder->record->left && alive(*holder->record)) {
      return refuse(slot, record, *holder->record, alive);
    }

    const auto number = store_->add(counter_key(slot), 1);
    if (!number) return number.status();
    const Claim mine{slot, *number, holder->generation};
    if (*number != *seen + 1) {  // another claim came in between: start again from its record
      if (auto status = give_up(mine); !status) return status;
      continue;
    }
    if (auto status = publish(mine, record); !status) return status;
    const auto predecessor = holder->record ? holder->record->incarnation : 0;
    if (auto status = confirm(mine, record, predecessor, alive); !status) return status;
    return mine;
  }
  return Status(Code::resource_exhausted, formatted("too many agents claim \"{}\" at once", slot.substr(2)));
}

// Checks a claim again after its record is published. An agent that was stopped between its add() and its set() for
// longer than claim_grace has been passed over, and may set its record now; or the counter began anew, because an agent
// left, while this one still judged the record of that agent (`predecessor`, its incarnation). Both agents run this
// check after their own set(), so at most one of them keeps the slot.
Status Directory::confirm(const Claim& claim, const Record& record, std::uint64_t predecessor, const Alive& alive) {
  const auto top = store_->add(counter_key(claim.slot), 0);
  if (!top) return top.status();
  const auto later = newest(claim.slot, *top, milliseconds(0));
  if (!later) return later.status();
  auto rival = later->generation > claim.generation && !later->record->left ? later->record : std::nullopt;
  if (!rival) {
    const auto earlier = newest(claim.slot, claim.generation - 1, milliseconds(0));
    if (!earlier) return earlier.status();
    const bool known = earlier->record && earlier->record->incarnation == predecessor;
    if (earlier->record && !known && !earlier->record->left && alive(*earlier->record)) rival = earlier->record;
  }
  if (!rival) return {};
  static_cast<void>(give_up(claim));
  return refuse(claim.slot, record, *rival, alive);
}

// Returns the error of a claim on a slot that another agent has, and tells that agent of it.
Status Directory::refuse(const std::string& slot, const Record& record, const Record& holder, const Alive& alive) {
  const auto place = refused_key(holder.incarnation);
  if (store_->set(place, encode_record(record, signing_, place))) static_cast<void>(alive(holder));
  return taken(slot, holder);
}

std::optional<Record> Directory::take_refused(std::uint64_t own) {
  const auto place = refused_key(own);
  const auto bytes = store_->get(place, milliseconds(0));
  if (!bytes) return std::nullopt;
  static_cast<void>(store_->erase(place));
  auto record = decode_record(*bytes, signing_, place);
  if (!record) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (std::exchange(last_refused_, record->incarnation) == record->incarnation) return std::nullopt;
  return std::move(*record);
}

// Deletes the keys below a claim that has been confirmed: no agent reads them any more.
void Directory::forget_predecessors(const Claim& claim) {
  const auto first = std::max({claim.replaced, std::int64_t{1}, claim.generation - most_erased});
  for (auto generation = first; generation < claim.generation; ++generation) {
    if (!store_->erase(record_key(claim.slot, generation))) return;
  }
}

Status Directory::join(const Record& record, const Alive& alive) {
  if (auto status = check_name(record.name); !status) return status;
  if (record.rank < -1) return {Code::invalid_argument, formatted("{} is not a rank", record.rank)};
  std::int64_t arrival = 0, rosters = 0;
  if (record.rank >= 0) {
    // Both before the claims: the number of agents that arrived is then never below the number of ranks that are
    // claimed, and the roster of a world with this agent comes after those that are there now.
    const auto before = store_->add(prefix_ + "/rosters", 0);
    if (!before) return before.status();
    const auto number = store_->add(prefix_ + "/arrived", 1);
    if (!number) return number.status();
    arrival = *number;
    rosters = std::clamp(*before, std::int64_t{0}, most_generations);
  }
  std::vector<Claim> claims;
  if (auto status = claim_both(record, alive, claims); !status) {
    if (record.rank >= 0) withdraw_arrival();
    return status;
  }
  for (const auto& claim : claims) forget_predecessors(claim);
  const std::lock_guard lock(mutex_);
  self_ = record;
  claims_ = std::move(claims);
  arrival_ = arrival;
  rosters_before_ = rosters;
  return {};
}

Status Directory::claim_both(const Record& record, const Alive& alive, std::vector<Claim>& claims) {
  // A restarted agent finds its predecessor in both slots, and dials it once for both.
  std::set<std::uint64_t> dead;
  const Alive ask_once = [&](const Record& other) {
    if (dead.contains(other.incarnation)) return false;
    const bool answers = alive(other);
    if (!answers) dead.insert(other.incarnation);
    return answers;
  };
  auto name = claim(name_slot(record.name), record, ask_once);
  if (!name) return name.status();
  claims.push_back(*name);
  if (record.rank < 0) return {};
  auto rank = claim(rank_slot(record.rank), record, ask_once);
  if (!rank) {
    static_cast<void>(give_up(*name));
    return rank.status();
  }
  claims.push_back(*rank);
  return {};
}

// Takes back the arrival of an agent that leaves. The last one deletes what belongs to no agent.
void Directory::withdraw_arrival() {
  const auto arrived = prefix_ + "/arrived", rosters = prefix_ + "/rosters";
  const auto others = store_->add(arrived, -1);
  if (!others || *others != 0) return;
  const auto number = store_->add(rosters, 0);
  if (!number) return;
  for (std::int64_t i = 0; i < std::min(*number, most_erased); ++i) {
    static_cast<void>(store_->erase(formatted("{}/roster/{}", prefix_, *number - i)));
  }
  static_cast<void>(store_->erase(rosters));
  static_cast<void>(store_->erase(arrived));
}

// Deletes a slot, if this agent still has it. The counter goes first: an agent that claims the slot at the same time
// then either still finds the record, whose agent answers it, or does not get the number that it expects.
Status Directory::erase_claim(const Claim& claim, std::uint64_t incarnation) {
  const auto top = store_->add(counter_key(claim.slot), 0);
  if (!top) return top.status();
  const auto now = newest(claim.slot, *top, milliseconds(0));
  if (!now) return now.status();
  if (!now->record || now->record->incarnation != incarnation) return {};
  if (auto status = store_->erase(counter_key(claim.slot)); !status) return status;
  return store_->erase(record_key(claim.slot, claim.generation));
}

void Directory::leave() noexcept try {
  std::vector<Claim> claims;
  Record last;
  bool of_world = false;
  {
    const std::lock_guard lock(mutex_);
    claims.swap(claims_);
    last = self_;
    of_world = in_world_;
  }
  last.left = true;
  last.unix_address.clear();
  last.tcp_addresses.clear();
  for (const auto& claim : claims) {
    const auto status = of_world ? erase_claim(claim, last.incarnation) : publish(claim, last);
    if (status.ok()) continue;
    log_info(formatted("leaving name=\"{}\": {}", last.name, status.text()));  // the store ended first: no harm
    return;
  }
  if (!claims.empty() && last.rank >= 0) withdraw_arrival();
} catch (...) {  // no memory: peers find out when they dial
}

// ---- Looking up

Result<Record> Directory::find(std::string_view name, milliseconds timeout) {
  return find_slot(name_slot(name), formatted("agent \"{}\"", name), timeout);
}

Result<Record> Directory::find(int rank, milliseconds timeout) {
  return find_slot(rank_slot(rank), formatted("agent of rank {}", rank), timeout);
}

Result<Record> Directory::find_slot(const std::string& slot, const std::string& whom, milliseconds timeout) {
  const auto deadline = deadline_after(timeout, clock_);
  for (;;) {
    const auto top = store_->add(counter_key(slot), 0);
    if (!top) return top.status();
    auto holder = newest(slot, *top, milliseconds(0));
    if (!holder) {
      return Status(holder.status().code(), formatted("{}: {}", whom, holder.status().what()));
    }
    if (holder->record && !holder->record->left) return std::move(*holder->record);
    if (!holder->record && holder->hole) {  // the next claim may have deleted the record that the counter spoke of
      const auto now = store_->add(counter_key(slot), 0);
      if (!now) return now.status();
      if (*now != *top) continue;
    }
    const auto left = until(deadline);
    if (left.count() == 0) {
      return holder->record ? has_left(whom, *holder->record) : absent_agent(slot, whom, timeout);
    }
    // If a claim is under way, waits for its record, which is due in a moment; else for the next claim's.
    const auto next = record_key(slot, holder->hole ? *top : *top + 1);
    const auto woken = store_->get(next, std::min(left, holder->hole ? short_slice : polling_slice));
    if (!woken && !absent(woken.status())) return woken.status();
  }
}

// Returns the error for an agent of which the store knows nothing. It has left if it was in the world.
Status Directory::absent_agent(const std::string& slot, const std::string& whom, milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  for (const auto& member : world_) {
    if (slot == name_slot(member.name) || slot == rank_slot(member.rank)) return has_left(whom, member);
  }
  return {Code::not_found, timeout.count() > 0 ? formatted("no {} has joined within {}", whom, seconds_of(timeout))
                                               : formatted("no {} has joined", whom)};
}

// ---- Worlds

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
    auto member = find_slot(rank_slot(rank), formatted("agent of rank {}", rank), until(deadline));
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
  return std::clamp(*number, std::int64_t{1}, most_generations);
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
      auto look = look_for_world(size, looking.looked ? milliseconds(0) : std::min(until(deadline), polling_slice));
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
          store_->get(arrival, hopeless || left ? milliseconds(0) : std::min(until(deadline), polling_slice));
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
    verdict = {Code::deadline_exceeded, formatted("{} of {} agents did not reach the barrier within {}: {}",
                                                  missing.size(), world.size(), seconds_of(timeout), listed(missing))};
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
    const auto said = store_->get(verdict, left ? milliseconds(0) : std::min(until(deadline), polling_slice));
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
                      seconds_of(timeout), listed(missing), left ? "; rank 0 has left" : "")};
  }
}

// Returns whether a member has left on purpose or was restarted, so that it will not arrive. This does not detect a
// member that died: links to it do.
bool Directory::gone(const WorldMember& member) {
  const auto slot = rank_slot(member.rank);
  const auto top = store_->add(counter_key(slot), 0);
  if (!top) return false;
  const auto now = newest(slot, *top, milliseconds(0));
  return now.ok() && (!now->record || now->record->left || now->record->incarnation != member.incarnation);
}

}  // namespace tensorferry
