// The caller's side of a link: credit for bytes in flight, and calls that wait for a connection.
#include <string>
#include <utility>

#include "agent/link.h"
#include "base/futex.h"
#include "base/text.h"

namespace tensorferry {

Status Link::acquire_credit(std::size_t bytes, const RawCallOptions& options) {
  const auto until = options.timeout.count() > 0 ? std::optional(Clock::now() + options.timeout) : std::nullopt;
  bool first = true;
  while (true) {
    const auto word = flow_word_.load();
    {
      const std::lock_guard lock(flow_mutex_);
      if (closed() || bytes_in_flight_ == 0 || bytes_in_flight_ + bytes <= engine_->options.max_bytes_in_flight) {
        bytes_in_flight_ += bytes;
        return {};
      }
    }
    if (until && Clock::now() >= *until) {
      return {Code::deadline_exceeded, "\"" + peer_.name +
                                           "\" did not read the messages that were sent to it before (" +
                                           std::to_string(engine_->options.max_bytes_in_flight) +
                                           " bytes may be in flight). Raise max_bytes_in_flight or timeout"};
    }
    if (std::exchange(first, false)) {
      engine_->pool->about_to_block();
      calls_.expect_replies();  // replies carry the acknowledgements that return credit
    }
    futex_wait(flow_word_, word, until);
  }
}

void Link::release_credit(std::size_t bytes) {
  if (bytes == 0) return;
  {
    const std::lock_guard lock(flow_mutex_);
    bytes_in_flight_ -= bytes;
  }
  flow_word_.fetch_add(1);
  futex_wake(flow_word_);
}

void Link::start(const std::shared_ptr<Call::State>& call, Message message) {
  calls_.add(call, message);
  std::unique_lock lock(connect_mutex_);
  if (closed()) {
    const auto ended = status_;
    lock.unlock();
    return calls_.drop({call, std::move(message)}, ended);
  }
  if (const auto stream = outgoing_) {
    lock.unlock();
    return calls_.send(stream, call, std::move(message));
  }
  call->hold = SendHold::connection;
  deferred_.push_back({call, std::move(message)});
  const bool dial = !std::exchange(dialling_, true);
  lock.unlock();
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::calls);
}

std::string Link::state_text() {
  std::size_t deferred = 0;
  bool dialling = false;
  {
    const std::lock_guard lock(connect_mutex_);
    deferred = deferred_.size();
    dialling = dialling_;
  }
  const auto stream = outgoing();
  std::string why_no_ring;
  const auto transport = this->transport(why_no_ring);
  std::string out = "link to \"" + peer_.name + "\": " +
                    (closed()   ? "ended, " + status().text()
                     : stream   ? "up, calls by " + transport
                     : dialling ? "being dialled"
                                : "not dialled");
  if (!why_no_ring.empty()) out += ", no ring: " + why_no_ring;
  if (stream) out += "; " + calls_.reader().state_text(*stream);
  out += formatted("; {} calls wait for the link, {} in flight", deferred, calls_.count());
  return out + calls_.state_text();
}

}  // namespace tensorferry
