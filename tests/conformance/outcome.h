/// A record of one operation's completion: how often it ran, and with which status. Thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry::conformance {

/// How long a test waits for an event that must happen. TENSORFERRY_TEST_PATIENCE raises it, in seconds, where the
/// processor is emulated.
inline const std::chrono::seconds patience = [] {
  const char* const wanted = std::getenv("TENSORFERRY_TEST_PATIENCE");
  return std::chrono::seconds(std::max(30, wanted == nullptr ? 0 : std::atoi(wanted)));
}();

/// Counts the runs of completions and keeps the last status. Copies share their state.
class Outcome {
 public:
  /// Returns a completion to hand to the operation. `then` runs inside it, after the run has been counted.
  Completion completion(Completion then = {}) {
    return [state = state_, then = std::move(then)](Status status) {
      {
        std::lock_guard lock(state->mutex);
        ++state->runs;
        state->status = status;
        state->changed.notify_all();
      }
      if (then) then(std::move(status));
    };
  }

  [[nodiscard]] int runs() const {
    std::lock_guard lock(state_->mutex);
    return state_->runs;
  }
  /// Waits for the first run. Returns the last status, or nullopt if no run comes within `limit`.
  [[nodiscard]] std::optional<Status> wait(std::chrono::milliseconds limit = patience) const {
    std::unique_lock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, limit, [&] { return state_->runs > 0; })) return std::nullopt;
    return state_->status;
  }
  /// Waits likewise. Returns the name of the status, such as "Ok" or "ConnectionLost", or "nothing" if the operation
  /// did not complete.
  [[nodiscard]] std::string_view wait_name() const {
    const auto status = wait();
    return status ? name_of(status->code()) : "nothing";
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int runs = 0;
    Status status;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tensorferry::conformance
