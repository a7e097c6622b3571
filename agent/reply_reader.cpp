#include "agent/reply_reader.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "agent/link.h"
#include "base/text.h"

namespace tensorferry {

ReplyReader::ReplyReader(Link& link) : link_(link) {}

bool ReplyReader::wait(Call::State& call, std::optional<Clock::time_point> until,
                       const std::function<bool()>& interrupted) {
  call.waited = true;
  bool slept = false;
  const bool done = read_or_sleep(call, until, interrupted, slept);
  // stop_reading() may have woken this thread to read for the others at the moment it left.
  if (const auto stream = slept ? link_.outgoing() : nullptr; stream && stream->begin_read()) stop_reading(stream);
  return done;
}

/// `slept`: set if this thread slept while another one read.
bool ReplyReader::read_or_sleep(Call::State& call, std::optional<Clock::time_point> until,
                                const std::function<bool()>& interrupted, bool& slept) {
  bool stopped = false;
  while (!call.done()) {
    const auto now = link_.engine().clock.now();
    if (until && now >= *until) return false;
    if (call.deadline && now >= *call.deadline) link_.calls().expire(call.shared_from_this());
    // A call whose reply is landing in the caller's own memory has no deadline: the reply has come, and after
    // a time-out the channels would still write to that memory.
    const bool bound = call.deadline && !call.lands_at_callers();
    auto limit = until;
    if (bound && (!limit || *call.deadline < *limit)) limit = call.deadline;
    if (call.done()) break;

    call.prepare_to_sleep();
    auto stream = link_.outgoing();
    bool reader = false;
    {
      const std::lock_guard lock(mutex_);
      if (call.done()) break;
      reader = stream && !stream->closed() && stream->begin_read();
      if (!reader) sleepers_.push_back(&call);
    }
    if (reader) {
      {
        const Taking taking(*this);
        read_until_done(call, stream, limit, interrupted, stopped);
      }
      stop_reading(stream);
    } else {
      slept = true;
      stopped = !call.sleep(limit) && interrupted && interrupted();
      const std::lock_guard lock(mutex_);
      sleepers_.erase(std::find(sleepers_.begin(), sleepers_.end(), &call));
    }
    if (stopped) return false;
  }
  return true;
}

void ReplyReader::read_until_done(Call::State& call, const std::shared_ptr<FrameStream>& stream,
                                  std::optional<Clock::time_point> until, const std::function<bool()>& interrupted,
                                  bool& stopped) {
  const Nudge::Sleeper nudged(nudge_);
  while (!call.done() && !stream->closed()) {
    if (call.landing) link_.channels().progress_until([&] { return call.done(); });
    if (call.done()) return;
    pollfd sources[2] = {{stream->fd(), POLLIN, 0}, {nudged.fd(), POLLIN, 0}};
    auto limit = until;
    if (nudged.fd() < 0) {  // nothing can wake this thread when its call ends
      const auto soon = link_.engine().clock.now() + Milliseconds(10);
      limit = until ? std::min(*until, soon) : soon;
    }
    const int ready = link_.engine().clock.poll(sources, limit);
    if (ready == 0) return;
    if (ready < 0) {
      stopped = interrupted && interrupted();
      if (stopped) return;
      continue;
    }
    if (sources[1].revents != 0) nudged.drain();
    if (sources[0].revents != 0 && stream->read_some(link_) == FrameStream::Progress::closed)
      link_.close_after_peer(stream->status());
  }
}

/// Gives up the right to read, and hands it to another waiting thread, or to the pool if calls are in flight.
void ReplyReader::stop_reading(const std::shared_ptr<FrameStream>& stream) {
  stream->end_read();
  const std::lock_guard lock(mutex_);
  for (auto* sleeper : sleepers_) {
    if (sleeper->done()) continue;
    sleeper->wake();
    return;
  }
  // The pool also reads when no call is in flight, until the peer has answered the offer of a ring.
  const bool wanted = (link_.calls().count() != 0 || draining_ || !link_.ring_settled()) && !stream->closed();
  if (wanted == armed_ && !std::exchange(missed_, false)) return;
  armed_ = wanted;
  if (wanted)
    link_.engine().pool->arm(stream->fd());
  else
    link_.engine().pool->disarm(stream->fd());
}

void ReplyReader::read_late_replies() {
  const auto stream = late_.load(std::memory_order_relaxed) ? link_.outgoing() : nullptr;
  if (!stream) return;
  const auto unread = stream->port().unread();
  {
    const std::lock_guard lock(mutex_);
    draining_ = unread > 0;
  }
  if (unread > 0) expect_frames();
}

void ReplyReader::expect_frames() {
  const auto stream = link_.outgoing();
  if (!stream) return;
  const std::lock_guard lock(mutex_);
  if (armed_) return;
  armed_ = true;
  link_.engine().pool->arm(stream->fd());
}

void ReplyReader::on_readable(const std::shared_ptr<FrameStream>& stream) {
  if (!stream->begin_read()) {
    const std::lock_guard lock(mutex_);
    if (!stream->begin_read()) {
      // A waiting caller reads the stream. It arms the stream again in stop_reading(), because `missed_` is set.
      if (std::exchange(armed_, false)) link_.engine().pool->disarm(stream->fd());
      missed_ = true;
      return;
    }
  }
  auto progress = FrameStream::Progress::some;
  while (progress == FrameStream::Progress::some) progress = stream->read_some(link_);
  if (progress == FrameStream::Progress::closed) link_.close_after_peer(stream->status());
  stop_reading(stream);
}

void ReplyReader::wake_sleepers() {
  const std::lock_guard lock(mutex_);
  for (auto* sleeper : sleepers_) sleeper->wake();
}

void ReplyReader::call_ended(const Call::State& call) {
  if (call.waited && reading_ != this) nudge_.wake();
}

std::string ReplyReader::state_text(FrameStream& stream) {
  const auto unread = stream.port().unread();
  const std::lock_guard lock(mutex_);
  return formatted("{} bytes of replies unread, {}, {} threads wait to read", unread,
                   stream.being_read() ? "a thread reads"
                   : armed_            ? "the pool is to read"
                                       : "no thread reads",
                   sleepers_.size());
}

}  // namespace tensorferry
