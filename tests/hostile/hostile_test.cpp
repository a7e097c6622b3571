// A peer that has the key sends an agent generated frames, while the agent serves an honest peer.
//
// TENSORFERRY_SEED=7 draws the frames of seed 7 again. Threads still run as the system schedules them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

/// How the system schedules a child: `idle` has only the time of a processor that no other process wants.
enum class Schedule : std::uint8_t { normal, idle };

/// A child with pipes at its input and output. Ends it when destroyed.
class Program {
 public:
  explicit Program(std::vector<std::string> command, Schedule schedule = Schedule::normal) {
    std::array<int, 2> in{}, out{};
    EXPECT_EQ(::pipe2(in.data(), O_CLOEXEC) | ::pipe2(out.data(), O_CLOEXEC), 0);
    std::vector<char*> arguments;
    for (auto& each : command) arguments.push_back(each.data());
    arguments.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      const sched_param none{};
      if (schedule == Schedule::idle) ::sched_setscheduler(0, SCHED_IDLE, &none);
      ::dup2(in[0], 0);
      ::dup2(out[1], 1);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    in_ = in[1];
    out_ = ::fdopen(out[0], "r");
  }
  ~Program() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    static_cast<void>(exit_status());
    ::close(in_);
    std::fclose(out_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  std::string read_line() {
    std::string line;
    for (int c = std::fgetc(out_); c != EOF && c != '\n'; c = std::fgetc(out_)) line += static_cast<char>(c);
    return line;
  }
  std::string ask() {
    EXPECT_EQ(::write(in_, "\n", 1), 1);
    return read_line();
  }
  /// Waits for the end. Returns the exit status, or -1 if a signal ended the process.
  int exit_status() {
    if (pid_ <= 0) return status_;
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = 0;
    return status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void end_input() { ::close(std::exchange(in_, -1)); }
  [[nodiscard]] bool is_alive() const {
    siginfo_t ended{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0;
  }
  void pause() { send_signal(pid_, SIGSTOP); }
  void go_on() { ::kill(pid_, SIGCONT); }
  [[nodiscard]] std::string process() const { return "/proc/" + std::to_string(pid_); }

 private:
  pid_t pid_ = 0;
  int in_ = -1, status_ = -1;
  std::FILE* out_ = nullptr;
};

/// What a process has of the system at a moment.
struct Holdings {
  std::size_t descriptors = 0, threads = 0, resident_mebibytes = 0;

  static Holdings of(const Program& program) {
    std::size_t pages = 0, resident = 0;
    std::ifstream(program.process() + "/statm") >> pages >> resident;
    return {entries_of((program.process() + "/fd").c_str()), entries_of((program.process() + "/task").c_str()),
            resident >> 8};
  }
  friend std::ostream& operator<<(std::ostream& out, const Holdings& holds) {
    return out << holds.descriptors << " descriptors, " << holds.threads << " threads, " << holds.resident_mebibytes
               << " MiB";
  }
};

/// What the honest peer has seen since it was asked last.
struct Served {
  std::int64_t calls = 0, failed = 0, p50 = 0, p99 = 0;  // times in microseconds

  static Served by(Program& honest) {
    Served served;
    std::istringstream(honest.ask()) >> served.calls >> served.failed >> served.p50 >> served.p99;
    return served;
  }
};

/// What the honest peer sees while the hostile one attacks and while it is stopped, in turns, so that both are of the
/// same machine at the same time.
class Windows {
 public:
  explicit Windows(Program& honest) : honest_(honest) {}

  /// Measures until the attack has ended.
  void measure(Program& hostile) {
    for (;;) {
      const auto attacked = window(seconds(2));
      if (!hostile.is_alive()) return;
      attacked_.push_back(attacked);
      hostile.pause();
      quiet_.push_back(window(std::chrono::milliseconds(500)));
      hostile.go_on();
    }
  }
  /// Counts calls that are in no window.
  Served note(const Served& served) {
    calls_ += served.calls;
    failed_ += served.failed;
    return served;
  }
  [[nodiscard]] std::int64_t calls() const noexcept { return calls_; }
  [[nodiscard]] std::int64_t failed() const noexcept { return failed_; }
  /// Returns the median of the windows' 99th percentiles, in microseconds; 0: there are none.
  [[nodiscard]] std::int64_t attacked_p99() const { return median_p99(attacked_); }
  [[nodiscard]] std::int64_t quiet_p99() const { return median_p99(quiet_); }
  friend std::ostream& operator<<(std::ostream& out, const Windows& windows) {
    for (const auto* all : {&windows.quiet_, &windows.attacked_}) {
      out << (all == &windows.quiet_ ? "without the attack: " : "with the attack:    ") << all->size()
          << " windows, p50 " << median(*all, &Served::p50) << " us, p99 " << median(*all, &Served::p99) << " us\n";
    }
    return out << windows.calls_ << " calls, " << windows.failed_ << " failed";
  }

 private:
  Served window(std::chrono::milliseconds length) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the agent ends what it has begun
    note(Served::by(honest_));
    std::this_thread::sleep_for(length);
    return note(Served::by(honest_));
  }
  static std::int64_t median(std::vector<Served> all, std::int64_t Served::*value) {
    if (all.empty()) return 0;
    std::ranges::sort(all, {}, value);
    return all[all.size() / 2].*value;
  }
  static std::int64_t median_p99(const std::vector<Served>& all) { return median(all, &Served::p99); }

  Program& honest_;
  std::vector<Served> attacked_, quiet_;
  std::int64_t calls_ = 0, failed_ = 0;
};

std::uint64_t seed_of_this_run() {
  const char* given = std::getenv("TENSORFERRY_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : static_cast<std::uint64_t>(::getpid()) * 1'000'003;
}

const std::string key = "a key that the hostile peer has too";

TEST(HostilePeer, GeneratedFramesHarmNoOtherPeerAndNothingOfThemIsKept) {
  ::setenv("TENSORFERRY_LOG", "error", 0);
  const auto seed = seed_of_this_run();
  Program target({HOSTILE_AGENT, "target", key});
  std::string port, by_unix, by_tcp;
  std::istringstream(target.read_line()) >> port >> by_unix >> by_tcp;
  ASSERT_FALSE(by_tcp.empty());
  Program honest({HOSTILE_AGENT, "honest", key, port});
  // On processors of its own the hostile peer would take none of the honest one's time. Here it has what others leave
  // if that time is measured, so that the honest peer waits for the agent alone.
  const auto schedule = is_soak ? Schedule::idle : Schedule::normal;
  const auto attack = [&](int frames, std::uint64_t drawn, const std::function<void(Program&)>& meanwhile) {
    Program peer({HOSTILE_PEER, by_unix, by_tcp, key, std::to_string(frames), std::to_string(drawn)}, schedule);
    meanwhile(peer);
    std::cout << peer.read_line() << std::endl;
    EXPECT_EQ(peer.exit_status(), 0) << "seed " << drawn;
  };

  attack(rounds(50'000), seed, [](Program&) {});  // the caches fill
  Served::by(honest);
  const auto before = Holdings::of(target);
  std::cout << "before the attack:  " << before << std::endl;

  Windows windows(honest);
  attack(rounds(1'000'000), seed + 1, [&](Program& hostile) { windows.measure(hostile); });
  ASSERT_TRUE(target.is_alive()) << "seed " << seed + 1;
  std::cout << windows << "; " << Holdings::of(target) << std::endl;
  EXPECT_EQ(windows.failed(), 0) << "seed " << seed + 1;
  // The attack may have taken less time than one call, if the system ran the honest peer late.
  EXPECT_TRUE(eventually([&] { return windows.calls() > 0 || windows.note(Served::by(honest)).calls > 0; }))
      << "seed " << seed + 1;
  if (is_soak) {
    EXPECT_LE(windows.attacked_p99(), 10 * windows.quiet_p99()) << "seed " << seed + 1;
  }

  constexpr std::size_t slack = under_sanitizer ? 512 : 64;  // MiB: a sanitizer keeps freed memory
  constexpr std::size_t idle_connections =
      4;  // both ends of those that a client of the target's store keeps, if it used them
  const auto back = [&] {
    const auto now = Holdings::of(target);
    return now.descriptors <= before.descriptors + idle_connections && now.threads <= before.threads + 2 &&
           now.resident_mebibytes <= before.resident_mebibytes + slack;
  };
  EXPECT_TRUE(eventually(back, seconds(60)))
      << "before: " << before << "; after: " << Holdings::of(target) << "; seed " << seed + 1;
  std::cout << "after the attack:   " << Holdings::of(target) << std::endl;
  EXPECT_EQ(Served::by(honest).failed, 0);
  honest.end_input();
  EXPECT_EQ(honest.exit_status(), 0);
  target.end_input();
  EXPECT_EQ(target.exit_status(), 0) << "a sanitizer has found something, or the agent did not end";
}

}  // namespace
}  // namespace tensorferry
