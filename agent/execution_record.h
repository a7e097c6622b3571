/// The idempotent calls that one peer has made to this agent: those that run, and the answers of those that have run. A
/// call whose connection was lost comes again, with the same key, over the session's next link. The record then gives
/// it the first execution's answer, so the call of a key runs once.
///
/// The record belongs to the session, and ends with the peer. A peer that was taken for dead may come back: Peers keeps
/// the greatest key, so that no call runs again. The record keeps an answer until the caller has settled its key
/// or the call's deadline has passed, but at most `most_answers` answers with `most_bytes` of payloads and buffers;
/// beyond that it forgets the oldest ones. It keeps the buffers of an answer alive and does not copy them. A call whose
/// answer is forgotten fails, and does not run again.
///
/// Threads: any. Replies are sent under no lock of this class.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "agent/agent.h"
#include "agent/wire/frame.h"
#include "base/interval_set.h"
#include "base/mutex.h"

namespace tensorferry {

class ExecutionRecord final {
 public:
  static constexpr std::size_t most_answers = 1024;
  static constexpr std::size_t most_bytes = std::size_t{256} << 20;

  /// `first_key`: requests with smaller keys do not begin.
  explicit ExecutionRecord(std::uint64_t first_key = 0) : settled_(first_key) {}

  /// Decides what becomes of a request with `key`. True: it is the first one with this key. The caller runs it, and
  /// calls end() with its answer. False: the record has taken `reply`, and answers it: with the first execution's
  /// answer as soon as there is one, or with ConnectionLost if the record has forgotten the key. `cancel` cancels the
  /// execution that this request would begin; it runs if a later request of the key is cancelled.
  bool admit(const wire::IdempotencyKey& key, Reply& reply, std::function<void()> cancel);
  /// Answers on their way out. They are destroyed after the lock is released, because that may take long, or locks.
  using Dropped = std::vector<std::shared_ptr<const Result<Message>>>;
  /// Drops the answers to calls whose deadlines have passed: their callers send no request any more. Returns them.
  [[nodiscard]] Dropped expire(Clock::time_point now);
  /// Stores the answer of the execution of `key`, and sends it to the requests that wait for it.
  void end(std::uint64_t key, Result<Message> answer);

  /// Lets no request begin any more: the session has ended. Returns the least key that is greater than all that have
  /// begun; 0: there is none, or the record was retired before.
  std::uint64_t retire();
  /// Cancels the executions that run: their caller is dead. Call it under no lock.
  void cancel_all();

  [[nodiscard]] std::size_t answers() const;

 private:
  struct Execution {
    std::shared_ptr<const Result<Message>> answer;  // null: it runs
    std::size_t bytes = 0;                          // of the answer
    std::optional<Clock::time_point> deadline;
    std::function<void()> cancel;
    std::vector<Reply> waiting;
  };
  using Executions = std::map<std::uint64_t, Execution>;

  void settle_below(std::uint64_t key, Dropped& dropped);
  Executions::iterator forget(Executions::iterator execution, Dropped& dropped);

  mutable Mutex mutex_;
  Executions executions_;
  std::size_t answers_ = 0, bytes_ = 0;
  std::uint64_t settled_;       // no request with a key below this one begins
  std::uint64_t next_key_ = 0;  // greater than all keys that have begun
  bool retired_ = false;
  IntervalSet forgotten_;  // keys whose answers had to make room
};

}  // namespace tensorferry
