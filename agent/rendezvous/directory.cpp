#include "agent/rendezvous/directory.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "agent/address.h"
#include "agent/rendezvous/blocking_io.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::string_view kVoid = "void";
// Microseconds lie between a claim's add() and its set(). A claim that takes longer than this counts as dead.
constexpr milliseconds kClaimGrace{2000};
constexpr std::int64_t kMostGenerations = 100'000;  // of one slot: newest() may have to read each
constexpr milliseconds kVerdictGrace{5000};         // for the members to read a barrier's verdict; one may have died
constexpr milliseconds kSlice{1000};                // of one get() if the waiting loop also polls for other changes
constexpr milliseconds kShortSlice{50};
constexpr int kMostAttempts = 100;
constexpr std::size_t kMostNamed = 16;  // members named in one error text

std::string name_slot(std::string_view name) { return formatted("n/{}", name); }
std::string rank_slot(std::int64_t rank) { return formatted("r/{}", rank); }

milliseconds until(Deadline deadline) {
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(deadline - steady_clock::now()));
}

bool absent(const Status& status) { return status.code() == Code::deadline_exceeded; }

std::string seconds_of(milliseconds time) { return fixed(static_cast<double>(time.count()) / 1000, 1) + " s"; }

std::string who(const Record& record) {
  return formatted("\"{}\" (rank {}, pid {} on {})", record.name, record.rank, record.pid, record.host);
}

Status taken(const std::string& slot, const Record& by) {
  const auto what =
      slot.starts_with("n/") ? formatted("the name \"{}\"", slot.substr(2)) : formatted("rank {}", slot.substr(2));
  return {Code::invalid_argument, formatted("{} is taken by the agent {}, which is alive: choose another, or end that "
                                            "process",
                                            what, who(by))};
}

std::string listed(const std::vector<std::string>& parts) {
  std::string text;
  for (std::size_t i = 0; i < std::min(parts.size(), kMostNamed); ++i) text += (i == 0 ? "" : ", ") + parts[i];
  if (parts.size() > kMostNamed) text += formatted(" and {} more", parts.size() - kMostNamed);
  return text;
}

/// Logs a line if members on other hosts cannot reach an agent that listens at loopback addresses alone.
void warn_of_loopback(const Record& self, const std::vector<Record>& world) {
  const auto hidden = [](const Record& record) {
    const auto local = [](const std::string& address) {
      const auto parts = split_host_port(address);
      return parts.ok() && is_loopback(parts->host);
    };
    return !record.tcp_addresses.empty() &&
           std::all_of(record.tcp_addresses.begin(), record.tcp_addresses.end(), local);
  };
  for (const auto& member : world) {
    if (member.left || may_share_unix(self, member)) continue;
    if (member.boot_id == self.boot_id && member.net_namespace == self.net_namespace) continue;
    if (!hidden(self) && !hidden(member)) continue;
    const auto& [shy, other] = hidden(self) ? std::tie(self, member) : std::tie(member, self);
    return log_warning(
        formatted("peer={} {} listens at loopback addresses alone, where {} cannot reach it: let its "
                  "MASTER_ADDR be an address that other hosts reach, or set interface=",
                  member.name, who(shy), who(other)));
  }
}

bool left_after_meeting(const Record& record, std::uint64_t incarnation) {
  return std::find(record.world.begin(), record.world.end(), incarnation) != record.world.end();
}

}  // namespace

Directory::Directory(std::shared_ptr<Store> store, std::string prefix, Key signing)
    : store_(std::move(store)), prefix_(std::move(prefix)), signing_(std::move(signing)) {}

std::string Directory::record_key(std::string_view slot, std::int64_t generation) const {
  return formatted("{}/rec/{}/{}", prefix_, slot, generation);
}

std::string Directory::counter_key(std::string_view slot) const { return formatted("{}/gen/{}", prefix_, slot); }

// ---- Claims

Result<Directory::Newest> Directory::newest(std::string_view slot, std::int64_t up_to, milliseconds grace) {
  if (up_to < 0 || up_to > kMostGenerations) {
    return Status(
        Code::protocol_error,
        formatted("the store counts {} claims of \"{}\": another program writes to this key", up_to, slot.substr(2)));
  }
  const auto deadline = deadline_after(grace);
  Newest found;
  for (auto generation = up_to; generation > 0; --generation) {
    const auto bytes = store_->get(record_key(slot, generation), until(deadline));
    if (!bytes && !absent(bytes.status())) return bytes.status();
    if (!bytes) {
      found.hole = true;
      continue;
    }
    if (text_of(*bytes) == kVoid) continue;
    auto record = decode_record(*bytes, signing_, slot, generation);
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
  return store_->set(record_key(claim.slot, claim.generation),
                     encode_record(record, signing_, claim.slot, claim.generation));
}

Status Directory::give_up(const Claim& claim) {
  return store_->set(record_key(claim.slot, claim.generation), view_of(kVoid));
}

Result<Directory::Claim> Directory::claim(const std::string& slot, const Record& record, const Alive& alive) {
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    const auto seen = store_->add(counter_key(slot), 0);
    if (!seen) return seen.status();
    const auto holder = newest(slot, *seen, kClaimGrace);
    if (!holder) {
      return Status(holder.status().code(), formatted("claiming \"{}\": {}", slot.substr(2), holder.status().what()));
    }
    if (holder->record && !holder->record->left && alive(*holder->record)) return taken(slot, *holder->record);

    const auto number = store_->add(counter_key(slot), 1);
    if (!number) return number.status();
    Claim mine{slot, *number};
    if (*number != *seen + 1) {  // another claim came in between: start again from its record
      if (auto status = give_up(mine); !status) return status;
      continue;
    }
    if (auto status = publish(mine, record); !status) return status;
    if (auto status = confirm(mine, holder->hole, alive); !status) return status;
    return mine;
  }
  return Status(Code::resource_exhausted, formatted("too many agents claim \"{}\" at once", slot.substr(2)));
}

// Checks a claim again after its record is published. An agent that was stopped between its add() and its set() for
// longer than kClaimGrace has been passed over, and may set its record now. Both agents run this check after their own
// set(), so at most one of them keeps the slot.
Status Directory::confirm(const Claim& claim, bool after_hole, const Alive& alive) {
  const auto top = store_->add(counter_key(claim.slot), 0);
  if (!top) return top.status();
  const auto later = newest(claim.slot, *top, milliseconds(0));
  if (!later) return later.status();
  auto rival = later->generation > claim.generation && !later->record->left ? later->record : std::nullopt;
  if (!rival && after_hole) {
    const auto earlier = newest(claim.slot, claim.generation - 1, milliseconds(0));
    if (!earlier) return earlier.status();
    if (earlier->record && !earlier->record->left && alive(*earlier->record)) rival = earlier->record;
  }
  if (!rival) return {};
  static_cast<void>(give_up(claim));
  return taken(claim.slot, *rival);
}

Status Directory::join(const Record& record, const Alive& alive) {
  if (auto status = check_name(record.name); !status) return status;
  if (record.rank < -1) return {Code::invalid_argument, formatted("{} is not a rank", record.rank)};
  // A restarted agent finds its predecessor in both slots, and dials it once for both.
  std::map<std::uint64_t, bool> known;
  const Alive ask_once = [&](const Record& other) {
    const auto [entry, first] = known.try_emplace(other.incarnation, false);
    if (first) entry->second = alive(other);
    return entry->second;
  };
  auto name = claim(name_slot(record.name), record, ask_once);
  if (!name) return name.status();
  std::vector<Claim> claims{*name};
  if (record.rank >= 0) {
    auto rank = claim(rank_slot(record.rank), record, ask_once);
    if (!rank) {
      static_cast<void>(give_up(*name));
      return rank.status();
    }
    claims.push_back(*rank);
  }
  const std::lock_guard lock(mutex_);
  self_ = record;
  claims_ = std::move(claims);
  return {};
}

void Directory::leave() noexcept try {
  std::vector<Claim> claims;
  Record last;
  {
    const std::lock_guard lock(mutex_);
    claims.swap(claims_);
    last = self_;
    for (const auto& member : world_) last.world.push_back(member.incarnation);
  }
  last.left = true;
  for (const auto& claim : claims) {
    if (const auto status = publish(claim, last); !status) {
      log_info(formatted("leaving name=\"{}\": {}", last.name, status.text()));  // the store ended first: no harm
      return;
    }
  }
} catch (...) {  // no memory: peers find out when they dial
}

// ---- Looking up

Result<Record> Directory::find(std::string_view name, milliseconds timeout) {
  return find_slot(name_slot(name), formatted("agent \"{}\"", name), timeout,
                   [](const Record& record) { return !record.left; });
}

Result<Record> Directory::find(int rank, milliseconds timeout) {
  return find_slot(rank_slot(rank), formatted("agent of rank {}", rank), timeout,
                   [](const Record& record) { return !record.left; });
}

Result<Record> Directory::find_slot(const std::string& slot, const std::string& whom, milliseconds timeout,
                                    const Accept& accept) {
  const auto deadline = deadline_after(timeout);
  for (;;) {
    const auto top = store_->add(counter_key(slot), 0);
    if (!top) return top.status();
    auto holder = newest(slot, *top, milliseconds(0));
    if (!holder) {
      return Status(holder.status().code(), formatted("{}: {}", whom, holder.status().what()));
    }
    if (holder->record && accept(*holder->record)) return std::move(*holder->record);
    const auto left = until(deadline);
    if (left.count() == 0) {
      return Status(Code::not_found, holder->record ? formatted("{} has left (it was pid {} on {})", whom,
                                                                holder->record->pid, holder->record->host)
                                     : timeout.count() > 0
                                         ? formatted("no {} has joined within {}", whom, seconds_of(timeout))
                                         : formatted("no {} has joined", whom));
    }
    // If a claim is under way, waits for its record, which is due in a moment; else for the next claim's.
    const auto next = record_key(slot, holder->hole ? *top : *top + 1);
    const auto woken = store_->get(next, std::min(left, holder->hole ? kShortSlice : kSlice));
    if (!woken && !absent(woken.status())) return woken.status();
  }
}

Result<std::vector<Record>> Directory::wait_for_world(int size, milliseconds timeout) {
  Record self;
  {
    const std::lock_guard lock(mutex_);
    self = self_;
  }
  if (self.rank < 0 || self.rank >= size) {
    return Status(Code::invalid_argument, formatted("rank {} is not within a world of {}", self.rank, size));
  }
  const auto deadline = deadline_after(timeout);
  std::vector<Record> world;
  std::vector<std::string> missing;
  for (int rank = 0; rank < size; ++rank) {
    // A member that saw this agent in its complete world and has left since counts. One that left an earlier world does
    // not.
    auto member = find_slot(
        rank_slot(rank), formatted("agent of rank {}", rank), until(deadline),
        [&self](const Record& record) { return !record.left || left_after_meeting(record, self.incarnation); });
    if (member) {
      world.push_back(std::move(*member));
    } else if (member.status().code() == Code::not_found) {
      missing.push_back(std::to_string(rank));
    } else {
      return member.status();
    }
  }
  if (!missing.empty()) {
    return Status(
        Code::deadline_exceeded,
        formatted("{} of {} agents have joined; missing: rank{} {}. Are their processes running, with the same "
                  "rendezvous and world size?",
                  world.size(), size, missing.size() > 1 ? "s" : "", listed(missing)));
  }
  warn_of_loopback(self, world);
  const std::lock_guard lock(mutex_);
  world_ = world;
  return world;
}

// ---- Barriers

// Arrival keys hold the incarnation, so that neither an earlier world in the same store nor a restarted member counts.
Status Directory::barrier(const std::string& tag, milliseconds timeout) {
  std::vector<Record> world;
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
  return world.front().incarnation == self ? gather(barrier, world, timeout) : follow(barrier, world, timeout);
}

/// Rank 0's side of a barrier: waits for all arrivals and publishes the verdict. So the store serves n waits for
/// arrivals, not n for each member.
Status Directory::gather(const std::string& barrier, const std::vector<Record>& world, milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  std::vector<std::string> missing;
  bool hopeless = false;  // a member has left and will not arrive: collect the other missing members, and end
  for (const auto& member : world) {
    const auto arrival = formatted("{}/{}", barrier, hex(member.incarnation, 16));
    for (bool left = false;;) {
      const auto arrived = store_->get(arrival, hopeless || left ? milliseconds(0) : std::min(until(deadline), kSlice));
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
  if (published && present > 1) {
    static_cast<void>(store_->get(formatted("{}/read/{}", barrier, hex(leader, 16)), kVerdictGrace));
  }
  return verdict ? published : verdict;
}

Status Directory::follow(const std::string& barrier, const std::vector<Record>& world, milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  const auto& leader = world.front();
  const auto verdict = formatted("{}/verdict/{}", barrier, hex(leader.incarnation, 16));
  for (bool left = false;;) {
    const auto said = store_->get(verdict, left ? milliseconds(0) : std::min(until(deadline), kSlice));
    if (said) {
      Reader in(*said);
      const auto present = in.varint();
      const std::string text(text_of(in.rest()));
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
bool Directory::gone(const Record& member) {
  const auto slot = rank_slot(member.rank);
  const auto top = store_->add(counter_key(slot), 0);
  if (!top) return false;
  const auto now = newest(slot, *top, milliseconds(0));
  return now.ok() && now->record && (now->record->left || now->record->incarnation != member.incarnation);
}

}  // namespace tensorferry
