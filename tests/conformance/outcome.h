/// What became of an operation: how often its completion ran, and with which status.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "channels/buffer.h"
#include "channels/status.h"

namespace tensorferry::conformance {

/// How long a test waits for what must happen.
inline constexpr std::chrono::seconds patience{30};

/// A copy shares what it watches.
class Outcome {
 public:
  /// To be handed to the operation; `then` runs inside the completion, after it was counted.
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
  /// The status, once it is known; nullopt after too long.
  [[nodiscard]] std::optional<Status> wait(std::chrono::milliseconds limit = patience) const {
    std::unique_lock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, limit, [&] { return state_->runs > 0; })) return std::nullopt;
    return state_->status;
  }
  /// "Ok", "ConnectionLost", or "nothing" where it did not complete: what tests compare.
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
