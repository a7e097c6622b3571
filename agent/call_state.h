/// A call in flight, as the link that made it sees it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/transport/call_ring.h"

namespace tensorferry {

class Link;

class Call::State final : public std::enable_shared_from_this<Call::State> {
 public:
  State(std::string function, RawCallOptions options);

  /// Ends the call; the first one counts. Wakes waiters, or hands the completion to `link`'s pool.
  void complete(Result<Received> result);
  [[nodiscard]] bool done() const noexcept { return word_.load(std::memory_order_seq_cst) == finished; }

  /// Sleeps until done or `until` or woken by wake(); false: interrupted by a signal.
  bool sleep(std::optional<Clock::time_point> until);
  /// Calls a sleeper back although the call has not ended: it should read the stream itself.
  void wake();
  /// Before it looks for a reader, a thread that may sleep takes the word's ticket; a wake() in between is not lost.
  void prepare_to_sleep();

  /// A call of the parent's, in a forked child: what it waits on is not there, its lock may be held for ever.
  [[nodiscard]] bool inherited() const noexcept;

  Result<Received> take();
  void on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor, Notice notice);
  void hurry();
  bool claim();
  void on_sent(Completion sent, bool with_executor);

  /// What errors call its function.
  [[nodiscard]] std::string shown() const {
    return options.label.empty() ? std::string(shown_name(function)) : options.label;
  }
  /// The reply is on its way into `options.into`: the call ends when nothing can write there any more.
  [[nodiscard]] bool lands_at_callers() const noexcept { return landing && !options.into.empty(); }

  /// One more, one fewer reason why the arguments may not be overwritten yet.
  void hold_arguments();
  void release_arguments();

  const std::string function;
  const RawCallOptions options;
  const Clock::time_point made = Clock::now();
  const std::optional<Clock::time_point> deadline;
  std::shared_ptr<Link> link;              // set before the state is shared with readers
  std::uint64_t id = 0;                    // in the link's table of pending calls; 0: not there
  std::size_t counted_bytes = 0;           // against the bound on bytes in flight
  std::chrono::nanoseconds device_time{};  // that GPUs take to copy the arguments, roughly
  std::atomic<bool> landing{false};        // the reply's buffers are on their way (perhaps into `options.into`)
  std::atomic<bool> waited{false};         // a thread waits for this very call
  SlotId slot;                             // of the link's outgoing ring; where `in_ring`
  std::atomic<bool> in_ring{false};        // the answer is to be looked for in `slot`
  bool looked_for = false;                 // for a while, in vain: the thread that waits need not do so again
  std::atomic<bool> relaxed{false};        // there is a completion, and nothing is told to take the reply for it yet

 private:
  static constexpr std::uint32_t idle = 0, sleeping = 1, woken = 2, finished = 3;
  void run_completion();

  std::atomic<std::uint32_t> word_{idle};
  std::mutex mutex_;
  std::optional<Result<Received>> result_;
  UniqueFunction<void(Result<Received>)> completion_;
  bool with_executor_ = false;
  std::vector<Completion> sent_;
  int holds_ = 1;  // the call itself, until it has been handed to its link
};

}  // namespace tensorferry
