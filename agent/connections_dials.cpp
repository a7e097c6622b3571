// How a link's connections are made: what a dial asks, and who waits for its end. dial.cpp has the dial itself.
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "agent/connections.h"
#include "agent/engine.h"
#include "agent/link.h"

namespace tensorferry {

using Purpose = wire::Hello::Purpose;

void Connections::dial() {
  {
    const std::lock_guard lock(mutex_);
    if (closed() || !begin_dialling(ConnectionRole::calls_out)) return;
  }
  link_.engine().dial(link_.shared_from_this(), Purpose::calls);
}

bool Connections::keep_dialling(Purpose purpose) {
  const auto role = dialled_role(purpose);
  std::deque<UnsentCall> ended;  // their calls have ended meanwhile, by their deadlines for example
  bool wanted = false;
  {
    const std::lock_guard lock(mutex_);
    auto& state = slot(role).state;
    if (closed() || state != State::dialling) return false;
    if (is_bulk(role) && !bulk_.out.empty()) {  // one more: tried once
      if (std::exchange(bulk_.attempt_due, false)) return true;
      bulk_.allow_no_more();
      state = State::up;
      return false;
    }
    ended = unsent_.take_calls_if([&](const Call::State& call) { return !link_.calls().contains(call); });
    const bool called = slot(ConnectionRole::calls_in).stream != nullptr;
    wanted = is_bulk(role) ? !unsent_.buffers.empty()
                           : !called || !unsent_.calls.empty() || !unsent_.controls.empty() || connecting_ != 0;
    if (!wanted) state = State::absent;
  }
  for (const auto& unsent : ended) link_.calls().drop(unsent, {Code::cancelled, "the call has ended"});
  return wanted;
}

bool Connections::ask_to_dial(Purpose purpose) {
  auto by = stream(ConnectionRole::calls_out);
  if (!by) by = stream(ConnectionRole::calls_in);  // which the peer reads from time to time
  if (!by) return false;
  const Bytes wanted{static_cast<std::byte>(purpose)};
  wire::Header header;
  header.kind = wire::Kind::dial;
  transmit(by, wire::assemble(header, {}, {}, wanted), {}, true);
  return true;
}

Status Connections::on_dial(ByteView payload) {
  const auto wanted = decode<wire::DialRequest>(payload);
  if (!wanted) return {Code::protocol_error, "a malformed dial frame"};
  const auto purpose = wanted->purpose == Purpose::bulk ? Purpose::bulk_back : Purpose::calls_back;
  {
    const std::lock_guard lock(mutex_);
    if (!begin_dialling(dialled_role(purpose))) return {};
  }
  link_.engine().dial_back(link_.shared_from_this(), purpose);
  return {};
}

void Connections::dialled_back(Purpose purpose) {
  const std::lock_guard lock(mutex_);
  auto& state = slot(dialled_role(purpose)).state;
  if (state == State::dialling) state = State::absent;
}

bool Connections::peer_has_dialled() const {
  const std::lock_guard lock(mutex_);
  const auto& calls_in = slot(ConnectionRole::calls_in);
  return calls_in.stream && !calls_in.dialled;
}

bool Connections::awaits_bulk() const {
  const std::lock_guard lock(mutex_);
  return slot(ConnectionRole::bulk_out).state == State::dialling && bulk_.out.empty();
}

void Connections::fail_impatient(const Status& why, bool may_answer) {
  std::deque<UnsentCall> impatient;
  {
    const std::lock_guard lock(mutex_);
    impatient = unsent_.take_calls_if([&](const Call::State& call) {
      return !(may_answer || call.options.wait_for_ready) || !link_.calls().contains(call);
    });
  }
  const Status named(why.code(), "no link to \"" + peer().name + "\": " + std::string(why.what()));
  for (const auto& unsent : impatient) link_.calls().drop(unsent, named);
}

bool Connections::is_awaited() const {
  const std::lock_guard lock(mutex_);
  return connecting_ != 0;
}

Milliseconds Connections::patience() const {
  const std::lock_guard lock(mutex_);
  return unsent_.patience(link_.engine().clock.now());
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
    begin = !closed() && begin_dialling(ConnectionRole::calls_out);
  }
  if (begin) link_.engine().dial(link_.shared_from_this(), Purpose::calls);
  const auto& clock = link_.engine().clock;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto seen = changes_.count;
    lock.unlock();
    const bool over = closed() || (stream(ConnectionRole::calls_out) && settled()) || clock.now() >= until;
    lock.lock();
    if (over) break;
    clock.wait_until(changes_.changed, lock, until, [&] { return changes_.count != seen; });
  }
  --connecting_;
  if (!closed() && !slot(ConnectionRole::calls_out).stream)
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
void Connections::changed_state() {
  ++changes_.count;
  changes_.changed.notify_all();
  for (const auto& wake : changes_.wakes) {
    if (wake) wake();
  }
}

}  // namespace tensorferry
