#include "agent/calls/stream_reader.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "agent/pool/pool.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {

void StreamReader::watch(const std::shared_ptr<FrameStream>& stream, std::shared_ptr<Readable> readable) {
  const std::lock_guard lock(mutex_);
  pool_.add(stream->fd(), std::move(readable), Pool::Watch::always);
  armed_ = true;
  if (stream->being_read()) disarm(*stream);
}

/// Takes the right to read for a waiting thread. Under mutex_.
bool StreamReader::take(FrameStream& stream) {
  if (stream.closed() || !stream.begin_read()) return false;
  disarm(stream);
  return true;
}

/// Makes the pool watch the stream no longer: a thread reads it. Under mutex_.
void StreamReader::disarm(const FrameStream& stream) {
  if (std::exchange(armed_, false)) pool_.disarm(stream.fd());
}

/// Gives up the right to read, and hands it to a thread that waits, or to the pool.
void StreamReader::release(FrameStream& stream) noexcept {
  stream.end_read();
  const std::lock_guard lock(mutex_);
  if (stream.being_read()) return;  // by a thread that came meanwhile, and will do this
  for (auto* sleeper : sleepers_) {
    if (sleeper->done()) continue;
    sleeper->wake();
    return;
  }
  if (armed_) return;
  if (!peer_only_answers()) return arm(stream);
  due_ = true;
  out_of_memory::run_or([&] { link_.activate(); },
                        [&] {  // no tick comes
                          due_ = false;
                          arm(stream);
                        });
}

/// Makes the pool watch the stream: no thread reads. Under mutex_.
void StreamReader::arm(const FrameStream& stream) {
  if (!stream.closed() && !std::exchange(armed_, true)) pool_.arm(stream.fd());
}

/// Returns whether the peer has sent nothing but answers for a second.
bool StreamReader::peer_only_answers() const {
  const auto spoke = Clock::time_point(Clock::duration(spoke_.load(std::memory_order_relaxed)));
  return clock_.now() - spoke > std::chrono::seconds(1);
}

void StreamReader::tick() {
  if (!due_.exchange(false)) return;
  const auto stream = link_.stream();
  const std::lock_guard lock(mutex_);
  if (stream && !stream->being_read()) arm(*stream);
}

bool StreamReader::wait(Call::State& call, std::optional<Clock::time_point> until,
                        const std::function<bool()>& interrupted) {
  call.wait.waited = true;
  bool slept = false;
  const bool done = read_or_sleep(call, until, interrupted, slept);
  // release() may have woken this thread to read for the others at the moment it left.
  if (const auto stream = slept ? link_.stream() : nullptr; stream && stream->begin_read()) release(*stream);
  return done;
}

/// `slept`: set if this thread slept while another one read.
bool StreamReader::read_or_sleep(Call::State& call, std::optional<Clock::time_point> until,
                                 const std::function<bool()>& interrupted, bool& slept) {
  bool stopped = false;
  while (!call.done()) {
    const auto now = clock_.now();
    if (until && now >= *until) return false;
    if (call.deadline && now >= *call.deadline) link_.expire(call);
    // A call whose reply is landing in the caller's own memory has no deadline: the reply has come, and after
    // a time-out the channels would still write to that memory.
    const bool bound = call.deadline && !call.lands_at_callers();
    auto limit = until;
    if (bound && (!limit || *call.deadline < *limit)) limit = call.deadline;
    if (call.done()) break;

    call.prepare_to_sleep();
    const auto stream = link_.stream();
    bool reader = false;
    {
      const std::lock_guard lock(mutex_);
      if (call.done()) break;
      reader = stream && take(*stream);
      if (!reader) sleepers_.push_back(&call);
    }
    if (reader) {
      const std::unique_ptr<FrameStream, Release> held(stream.get(), Release{this});
      const Taking taking(*this);
      read_until_done(call, stream, limit, interrupted, stopped);
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

void StreamReader::read_until_done(Call::State& call, const std::shared_ptr<FrameStream>& stream,
                                   std::optional<Clock::time_point> until, const std::function<bool()>& interrupted,
                                   bool& stopped) {
  const Nudge::Sleeper nudged(nudge_);
  while (!call.done() && !stream->closed()) {
    if (call.progress.landing) link_.progress_until_done(call);
    if (call.done()) return;
    pollfd sources[2] = {{stream->fd(), POLLIN, 0}, {nudged.fd(), POLLIN, 0}};
    auto limit = until;
    if (nudged.fd() < 0) {  // nothing can wake this thread when its call ends
      const auto soon = clock_.now() + Milliseconds(10);
      limit = until ? std::min(*until, soon) : soon;
    }
    const int ready = clock_.poll(sources, limit);
    if (ready == 0) return;
    if (ready < 0) {
      stopped = interrupted && interrupted();
      if (stopped) return;
      continue;
    }
    if (sources[1].revents != 0) nudged.drain();
    if (sources[0].revents != 0 && stream->read_some(link_.sink()) == FrameStream::Progress::closed)
      link_.close_after_peer(stream->status());
  }
}

void StreamReader::on_readable(const std::shared_ptr<FrameStream>& stream) {
  constexpr int most_reads = 16;  // then others have a turn
  {
    const std::lock_guard lock(mutex_);
    if (!stream->begin_read()) return disarm(*stream);  // the thread that reads sees to the rest
  }
  auto progress = FrameStream::Progress::some;
  for (int reads = 0; progress == FrameStream::Progress::some && reads < most_reads; ++reads) {
    progress = stream->read_some(link_.sink());
    if (!pool_.caught_up()) break;  // this thread may have to run what it has read
  }
  if (progress == FrameStream::Progress::closed) link_.close_after_peer(stream->status());
  release(*stream);
}

void StreamReader::wake_sleepers() {
  const std::lock_guard lock(mutex_);
  for (auto* sleeper : sleepers_) sleeper->wake();
}

void StreamReader::call_ended(const Call::State& call) {
  if (call.wait.waited && reading_ != this) nudge_.wake();
}

std::string StreamReader::state_text(FrameStream& stream) {
  const auto unread = stream.port().unread();
  const std::lock_guard lock(mutex_);
  return formatted("{} bytes unread, {}, {} threads wait to read", unread,
                   stream.being_read() ? "a thread reads"
                   : armed_            ? "the pool is to read"
                                       : "no thread reads",
                   sleepers_.size());
}

}  // namespace tensorferry
