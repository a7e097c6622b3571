#include "agent/rendezvous/directory.h"

#include <algorithm>
#include <set>
#include <utility>

#include "agent/rendezvous/slots.h"
#include "agent/transport/blocking_io.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {

namespace {

using slots::absent;
using std::chrono::milliseconds;

constexpr std::string_view void_record = "void";
// Microseconds lie between a claim's add() and its set(). A claim that takes longer than this counts as dead.
constexpr milliseconds claim_grace{2000};
constexpr milliseconds short_slice{50};
constexpr int most_attempts = 100;
constexpr std::int64_t most_erased = 1000;  // keys that one agent deletes in place of others

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
  if (up_to < 0 || up_to > slots::most_generations) {
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
    if (slot != slots::of_name(record->name) && slot != slots::of_rank(record->rank)) {
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
    rosters = std::clamp(*before, std::int64_t{0}, slots::most_generations);
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
  auto name = claim(slots::of_name(record.name), record, ask_once);
  if (!name) return name.status();
  claims.push_back(*name);
  if (record.rank < 0) return {};
  auto rank = claim(slots::of_rank(record.rank), record, ask_once);
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
  return find_slot(slots::of_name(name), formatted("agent \"{}\"", name), timeout);
}

Result<Record> Directory::find(int rank, milliseconds timeout) {
  return find_slot(slots::of_rank(rank), formatted("agent of rank {}", rank), timeout);
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
    const auto woken = store_->get(next, std::min(left, holder->hole ? short_slice : slots::polling_slice));
    if (!woken && !absent(woken.status())) return woken.status();
  }
}

// Returns the error for an agent of which the store knows nothing. It has left if it was in the world.
Status Directory::absent_agent(const std::string& slot, const std::string& whom, milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  for (const auto& member : world_) {
    if (slot == slots::of_name(member.name) || slot == slots::of_rank(member.rank)) return has_left(whom, member);
  }
  return {Code::not_found, timeout.count() > 0
                               ? formatted("no {} has joined within {}", whom, slots::seconds_of(timeout))
                               : formatted("no {} has joined", whom)};
}

}  // namespace tensorferry
