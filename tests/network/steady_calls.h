/// Means to watch agents while the network changes: steps that are printed with their times, and steady small calls.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/network/hosts.h"

namespace tensorferry::testing {

inline std::chrono::milliseconds between(std::chrono::steady_clock::time_point begin,
                                         std::chrono::steady_clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(end - begin);
}

/// Returns the class and the text of the exception that is being handled.
inline std::string current_error() {
  try {
    throw;
#define TENSORFERRY_CATCH(number, code, Class, python, description) \
  }                                                                 \
  catch (const Class& error) {                                      \
    return std::string(#Class ": ") + error.what();
    TENSORFERRY_PLAIN_ERRORS(TENSORFERRY_CATCH)
#undef TENSORFERRY_CATCH
  } catch (const RemoteError& error) {
    return std::string("RemoteError: ") + error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Runs a step of a test, and prints how it ended and after what time.
template <class F>
::testing::AssertionResult attempt(const std::string& what, F step) {
  const Since since;
  std::string error;
  try {
    step();
  } catch (...) {
    error = current_error();
  }
  const auto text = what + ": " + (error.empty() ? "ok" : error);
  std::printf("    %6lld ms  %s\n", static_cast<long long>(since.passed().count()), text.c_str());
  std::fflush(stdout);
  return error.empty() ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << text;
}

/// Calls "record" of a peer from some threads, in each one call after the other, until stop().
class SteadyCalls {
 public:
  struct Record {
    int number;
    std::chrono::steady_clock::time_point made, ended;
    std::string error;  // "": answered
  };

  SteadyCalls(Agent& agent, std::string peer, std::chrono::milliseconds timeout, int threads = 4)
      : agent_(agent), peer_(std::move(peer)), timeout_(timeout) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  }
  ~SteadyCalls() { stop(); }
  SteadyCalls(const SteadyCalls&) = delete;
  SteadyCalls& operator=(const SteadyCalls&) = delete;

  /// Returns whether a call that was made after `moment` is answered in time.
  bool answers_after(std::chrono::steady_clock::time_point moment, std::chrono::milliseconds within) {
    return eventually(
        [&] {
          const std::lock_guard lock(mutex_);
          return std::any_of(records_.begin(), records_.end(),
                             [&](const Record& each) { return each.error.empty() && each.made >= moment; });
        },
        within);
  }
  /// Waits for the calls in flight. Prints a summary, and returns all calls.
  const std::vector<Record>& stop() {
    if (threads_.empty()) return records_;
    stop_ = true;
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    std::map<std::string, int> errors;
    for (const auto& each : records_)
      if (!each.error.empty()) ++errors[each.error];
    std::printf("    %zu small calls; p50 %lld ms, p99 %lld ms, slowest %lld ms\n", records_.size(), percentile(50),
                percentile(99), percentile(100));
    for (const auto& [error, count] : errors) std::printf("    %d x %s\n", count, error.c_str());
    std::fflush(stdout);
    return records_;
  }
  /// Returns the number of calls that failed. Only after stop().
  [[nodiscard]] std::size_t failed() const {
    return static_cast<std::size_t>(
        std::count_if(records_.begin(), records_.end(), [](const Record& each) { return !each.error.empty(); }));
  }
  /// Returns the time in std::chrono::milliseconds within which that percentage of the calls has ended. Only after
  /// stop().
  [[nodiscard]] long long percentile(std::size_t percent) const {
    std::vector<long long> times;
    for (const auto& each : records_) times.push_back(tensorferry::testing::between(each.made, each.ended).count());
    std::sort(times.begin(), times.end());
    return times.empty() ? 0 : times[(times.size() - 1) * percent / 100];
  }
  /// Checks at the peer that no call has run twice, and that each answered one has run. Only after stop().
  void expect_each_ran_once() {
    std::map<int, int> runs;
    for (const auto& [number, count] : agent_.call<std::vector<std::pair<int, int>>>(peer_, "runs").get()) {
      EXPECT_EQ(count, 1) << "call " << number;
      runs[number] = count;
    }
    for (const auto& each : records_) {
      if (!each.error.empty()) continue;
      EXPECT_EQ(runs[each.number], 1) << "call " << each.number << " was answered";
    }
  }

 private:
  void run() {
    while (!stop_) {
      Record record{next_++, std::chrono::steady_clock::now(), {}, {}};
      try {
        agent_.call_with<int>(within(timeout_), peer_, "record", record.number).get();
      } catch (...) {
        record.error = current_error();
      }
      record.ended = std::chrono::steady_clock::now();
      {
        const std::lock_guard lock(mutex_);
        records_.push_back(std::move(record));
      }
      std::this_thread::sleep_for(5ms);
    }
  }

  Agent& agent_;
  const std::string peer_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> stop_{false};
  std::atomic<int> next_{0};
  std::mutex mutex_;  // guards records_ until stop()
  std::vector<Record> records_;
  std::vector<std::thread> threads_;
};

}  // namespace tensorferry::testing
