// How a link's connections are made: what a dial asks, and who waits for its end. dial.cpp has the dial itself.
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "agent/connections/connections.h"
#include "base/out_of_memory.h"

namespace tensorferry {

using Purpose = wire::Hello::Purpose;

void Connections::dial() {
  {
    const std::lock_guard lock(mutex_);
    if (closed() || !begin_dialling(ConnectionRole::calls)) return;
  }
  start_dial(Purpose::calls);
}

/// Begins a dial that begin_dialling() has allowed. If there is no memory for it, another one may begin.
void Connections::start_dial(Purpose purpose) {
  try {
    around_.link.start_dial(purpose);
  } catch (const std::bad_alloc&) {
    begin_no_dial(dialled_role(purpose));
    throw;
  }
}

/// Undoes begin_dialling() or begin_another().
void Connections::begin_no_dial(ConnectionRole role) {
  const std::lock_guard lock(mutex_);
  auto& slot = this->slot(role);
  if (slot.state == State::dialling) slot.state = is_bulk(role) && !bulk(role).empty() ? State::up : State::absent;
  slot.once = false;
}

bool Connections::keep_dialling(Purpose purpose) {
  const auto role = dialled_role(purpose);
  const Status has_ended(Code::cancelled, "the call has ended");
  std::list<UnsentCall> ended;  // their calls have ended meanwhile, by their deadlines for example
  bool wanted = true;
  {
    const std::lock_guard lock(mutex_);
    auto& slot = this->slot(role);
    if (closed() || slot.state != State::dialling) return false;
    if (is_bulk(role) && !bulk(role).empty()) {  // one more: tried once
      if (std::exchange(slot.once, false)) return true;
      if (role == ConnectionRole::bulk_out) bulk_.allow_no_more();
      slot.state = State::up;
      return false;
    }
    ended = unsent_.take_calls_if([&](const Call::State& call) { return !around_.link.calls().contains(call); });
    // The connection for calls is wanted for itself, and a peer that has asked for one of bulk data waits for it.
    wanted = role != ConnectionRole::bulk_out || !unsent_.buffers.empty();
    if (!wanted) slot.state = State::absent;
  }
  for (const auto& unsent : ended) around_.link.calls().drop(unsent, has_ended);
  return wanted;
}

std::optional<std::uint64_t> Connections::number_for_hello(Purpose purpose) const {
  const std::lock_guard lock(mutex_);
  if (purpose != Purpose::calls) return number();
  if (calls_ || closed()) return std::nullopt;
  return other_.session() ? other_.session()->connection() : 0;
}

Status Connections::on_want_bulk() {
  {
    const std::lock_guard lock(mutex_);
    if (!dialled_) return {Code::protocol_error, "a peer that dials its bulk connections wants one from this side"};
    auto& slot = this->slot(ConnectionRole::bulk_in);
    // The peer may ask for another connection before this side has taken the one that it has dialled.
    if (slot.state == State::dialling) slot.again = true;
    const bool another = bulk_.in.size() < BulkStreams::most && begin_another(ConnectionRole::bulk_in);
    if (!another && !begin_dialling(ConnectionRole::bulk_in)) return {};
  }
  start_dial(Purpose::bulk_back);
  return {};
}

void Connections::dial_again_for_peer() {
  {
    const std::lock_guard lock(mutex_);
    auto& slot = this->slot(ConnectionRole::bulk_in);
    if (!slot.again || bulk_.in.size() >= BulkStreams::most || !begin_another(ConnectionRole::bulk_in)) return;
    slot.again = false;
  }
  start_dial(Purpose::bulk_back);
}

bool Connections::awaits(Purpose purpose) const {
  const auto role = dialled_role(purpose);
  const std::lock_guard lock(mutex_);
  return slot(role).state == State::dialling && (is_bulk(role) ? bulk(role).empty() : !calls_);
}

void Connections::fail_impatient(const Status& why, bool may_answer) {
  const Status named(why.code(), "no link to \"" + peer().name + "\": " + std::string(why.what()));
  std::list<UnsentCall> impatient;
  {
    const std::lock_guard lock(mutex_);
    impatient = unsent_.take_calls_if([&](const Call::State& call) {
      return !(may_answer || call.options.wait_for_ready) || !around_.link.calls().contains(call);
    });
  }
  for (const auto& unsent : impatient) around_.link.calls().drop(unsent, named);
}

bool Connections::is_awaited() const {
  const std::lock_guard lock(mutex_);
  return connecting_ != 0;
}

Milliseconds Connections::patience() const {
  const std::lock_guard lock(mutex_);
  return unsent_.patience(around_.clock.now());
}

void Connections::note_dial(std::string what) {
  const std::lock_guard lock(mutex_);
  dial_progress_ = std::move(what);
}

std::string Connections::dial_progress() const {
  const std::lock_guard lock(mutex_);
  return dial_progress_.empty() ? "" : ": " + dial_progress_;
}

Status Connections::connect(Clock::time_point until, const std::function<bool()>& settled) {
  bool begin = false;
  {
    const std::lock_guard lock(mutex_);
    ++connecting_;
    begin = !closed() && begin_dialling(ConnectionRole::calls);
  }
  if (begin) start_dial(Purpose::calls);
  const auto& clock = around_.clock;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto seen = changes_.count;
    lock.unlock();
    const bool over = closed() || (call_stream_if_up() && settled()) || clock.now() >= until;
    lock.lock();
    if (over) break;
    clock.wait_until(changes_.changed, lock, until, [&] { return changes_.count != seen; });
  }
  --connecting_;
  if (!closed() && slot(ConnectionRole::calls).state != State::up)
    return {Code::deadline_exceeded,
            "no link to \"" + peer().name + "\" yet" + (dial_progress_.empty() ? "" : ": " + dial_progress_)};
  return status_;
}

void Connections::wake_at_change(ConnectionRole role, std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  changes_.wakes[static_cast<std::size_t>(role)] = std::move(wake);
}

void Connections::notice_change() {
  const std::lock_guard lock(mutex_);
  changed_state();
}

/// Under mutex_.
void Connections::changed_state() noexcept {
  ++changes_.count;
  changes_.changed.notify_all();
  for (const auto& wake : changes_.wakes) {
    if (wake) out_of_memory::with_reserve(wake);
  }
}

}  // namespace tensorferry
