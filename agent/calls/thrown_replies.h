/// The reply of a handler that threw. While a handler runs, a Reply that stack unwinding destroys waits here for the
/// code that catches the exception, which knows with which error the call fails.
///
/// Threads: an object belongs to one thread, and objects nest there.
#pragma once

#include <exception>
#include <optional>
#include <utility>

#include "agent/handles.h"

namespace tensorferry {

class ThrownReplies final {
 public:
  ThrownReplies() noexcept : outer_(std::exchange(innermost, this)) {}
  ~ThrownReplies() { innermost = outer_; }
  ThrownReplies(const ThrownReplies&) = delete;
  ThrownReplies& operator=(const ThrownReplies&) = delete;

  /// Keeps a reply that is being destroyed. False: no handler of this thread has thrown, or it had another reply.
  static bool keep(Reply& reply) noexcept {
    auto* const here = innermost;
    if (here == nullptr || std::uncaught_exceptions() <= here->exceptions_ || here->reply_) return false;
    here->reply_.emplace(std::move(reply));
    return true;
  }
  /// Fails the reply that was kept, if there is one.
  void fail(const Status& why) {
    if (!reply_) return;
    auto reply = std::move(*reply_);
    reply_.reset();
    reply.fail(why);
  }

 private:
  static inline thread_local ThrownReplies* innermost = nullptr;
  ThrownReplies* const outer_;
  const int exceptions_ = std::uncaught_exceptions();
  std::optional<Reply> reply_;
};

}  // namespace tensorferry
