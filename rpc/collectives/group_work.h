/// An operation of a group that has been started, and how operations start.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/function.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "rpc/collectives/device_operations.h"
#include "rpc/collectives/mailbox.h"

namespace tensorferry::collectives {

class RawGroup;

/// An operation of a group that has been started. Thread-safe.
class GroupWork final : public std::enable_shared_from_this<GroupWork> {
 public:
  using Deadline = Clock::time_point;
  /// A collective operation: a thread of the group's calls `run`.
  GroupWork(std::shared_ptr<RawGroup> group, UniqueFunction<Status(const WaitLimits&)> run, Deadline deadline);
  /// A send or a receive. The owner sets `delivery_` before it hands the work out.
  GroupWork(std::shared_ptr<RawGroup> group, Deadline deadline, std::string text);

  /// Waits until the operation has ended and returns true; or returns false after `until` or an interruption, and the
  /// operation goes on. Without `until`, the calling thread runs the group's operations if no other thread does; an
  /// interruption then ends the operation that it runs, and fails the group. A send or receive that is late ends here.
  bool wait(std::optional<Deadline> until = std::nullopt, const std::function<bool()>& interrupted = {});
  /// Ends a send or a receive with `why`, unless it has ended. When this returns, nothing uses its memory any more.
  void withdraw(const Status& why);
  [[nodiscard]] bool done();
  /// Returns the result; Ok before done().
  [[nodiscard]] Status status() const;
  /// What a receive has received; valid once done() and Ok.
  [[nodiscard]] Letter letter() const { return delivery_ ? delivery_->letter() : Letter{}; }
  /// Runs `told` once the operation has ended: on the thread that ends it, or now if it has ended.
  void on_done(UniqueFunction<void(const Status&)> told);
  /// Runs `run` before the operation counts as ended, so before any wait() returns: on the thread that ends it, or now
  /// if it is ending. `run` must not use the operation.
  void before_end(UniqueFunction<void()> run);
  /// The number of the operation among those of its group, from 1, in the order of their start.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

 private:
  friend class RawGroup;
  friend class OperationQueue;
  void end(Status status);
  /// Makes the group end this send or receive if it is late or a rank has died, also if no thread calls wait().
  void look_after();
  void end_if_late();
  [[nodiscard]] bool has_ended() const;

  const std::shared_ptr<RawGroup> group_;
  /// What the thread that runs a collective operation calls, in this order: see StartOptions.
  struct Steps {
    std::function<bool()> arrived;
    UniqueFunction<Status(const WaitLimits&)> run;
    std::function<void()> finish;
    std::shared_ptr<GroupWork> earlier;
  };
  Steps steps_;
  std::shared_ptr<Delivery> delivery_;
  const Deadline deadline_;
  const std::string text_;
  std::uint64_t number_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false, done_ = false, looked_after_ = false;
  Status status_;
  std::vector<UniqueFunction<void()>> before_;
  std::vector<UniqueFunction<void(const Status&)>> told_;
};

/// How an operation starts.
struct StartOptions {
  Milliseconds timeout{0};  // 0: the group's
  bool background = true;   // false: the operation runs only while a thread waits for it
  Owner keep;               // of the memory that the operation uses, until it has ended
  // Runs after a success, before the work ends, on the thread that ends it. What it throws fails the work alone.
  std::function<void()> finish{};
  // Whether the inputs are in host memory: the operation waits for it. Polled by the thread that runs the operation; a
  // send's by its caller. What it throws fails the operation, and the group.
  std::function<bool()> arrived{};
  // The inputs and outputs are in the memory of a device, and this performs the operation. Null: they are the host's.
  std::shared_ptr<DeviceOperations> device{};
  // The tensors are those of a device; the inputs and outputs are copies of them in host memory.
  bool staged = false;
  // The name of the algorithm that this call asks for, the same at every rank. "": the group chooses (choose.h).
  std::string algorithm{};
  // An operation of the same call, started before: if it fails, so does this one, although the ranks perform both.
  std::shared_ptr<GroupWork> earlier{};
};

}  // namespace tensorferry::collectives
