// Lines on stderr. Each test has a pipe of its own in the place of stderr.
#include "base/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <string>
#include <thread>

namespace tensorferry {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

/// A pipe in the place of stderr.
class Log : public ::testing::Test {
 protected:
  Log() {
    EXPECT_EQ(::pipe2(ends_.data(), O_CLOEXEC), 0);
    ::fcntl(ends_[0], F_SETFL, O_NONBLOCK);
    ::dup2(ends_[1], STDERR_FILENO);
    log_rate::forget();
  }
  ~Log() override {
    ::dup2(kept_, STDERR_FILENO);
    for (const int fd : {kept_, ends_[0], ends_[1]}) ::close(fd);
    log_rate::forget();
  }

  /// Returns what has been written to the pipe, and empties it.
  std::string written() const {
    std::string all;
    std::array<char, 65536> some{};
    for (ssize_t got = 0; (got = ::read(ends_[0], some.data(), some.size())) > 0;)
      all.append(some.data(), static_cast<std::size_t>(got));
    return all;
  }
  /// Fills the pipe, so that a write to it would block.
  void fill() const {
    ::fcntl(ends_[1], F_SETFL, O_NONBLOCK);
    const std::string filling(4096, 'x');
    while (::write(ends_[1], filling.data(), filling.size()) > 0) {
    }
    ::fcntl(ends_[1], F_SETFL, 0);
  }

 private:
  const int kept_ = ::dup(STDERR_FILENO);
  std::array<int, 2> ends_{};
};

auto count(const std::string& text, char c) { return std::count(text.begin(), text.end(), c); }

TEST_F(Log, NeverBlocksOnAPipeThatNobodyReadsAndCountsWhatItDrops) {
  fill();
  auto done = std::async(std::launch::async, [] {
    for (int i = 0; i < 1000; ++i) log_warning("dropped");
  });
  ASSERT_EQ(done.wait_for(seconds(30)), std::future_status::ready);
  EXPECT_EQ(count(written(), '\n'), 0);
  const auto until = std::chrono::steady_clock::now() + seconds(30);
  std::string now;
  while (now.empty() && std::chrono::steady_clock::now() < until) {
    log_rate::write_counted();
    now = written();
    std::this_thread::yield();
  }
  EXPECT_EQ(now, "tensorferry warning: dropped (and 999 more)\n");
}

TEST_F(Log, HasARateForEachKindOfLine) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 10'000; ++i) log_warning("a flood");
  log_warning("of another kind");
  const auto took = std::chrono::duration_cast<seconds>(std::chrono::steady_clock::now() - begin);
  const auto first = written();
  EXPECT_GE(count(first, '\n'), log_rate::burst + 1);
  EXPECT_LE(count(first, '\n'), log_rate::burst + 1 + took.count() + 1);
  EXPECT_THAT(first, HasSubstr("tensorferry warning: of another kind\n"));
}

TEST_F(Log, PassesNoCharacterThatATerminalObeys) {
  log_warning(
      "a\nb\rc\x1b[31md\x7f"
      "e\u009b2Jf\u0085g\u202eh\u2066i\u2028j\u200bk\xff\x9bl \u00e9\u4e2d\U0001f600");
  EXPECT_EQ(written(), "tensorferry warning: a b c [31md e 2Jf g h i j k??l \u00e9\u4e2d\U0001f600\n");
}

TEST_F(Log, CutsALongLine) {
  log_warning(std::string(100'000, 'A'));
  const auto line = written();
  EXPECT_EQ(line.size(), 4001U);
  EXPECT_EQ(line.back(), '\n');
}

}  // namespace
}  // namespace tensorferry
