/// What the programs of this folder share: their command line, their two processes, where these run, how they repeat
/// and what they print.
#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tensorferry::benchmarks {

constexpr int not_here = 77;  // native.py: the machine does not let this be measured

struct SampleArguments {
  std::string transport = "unix";
  std::string kind = "empty";  // "text": 64 bytes; "tensor": of `bytes`; "tensors": 64 of them
  std::string peer = "cpp";    // "python-serves", "python-calls"
  std::string python = "python3";
  int callers = 1;
  std::size_t bytes = 0;
  double seconds = 0.2;
  int caller_cpu = -1;  // -1: unpinned
  int callee_cpu = -1;
  // Of cpp_transfer; "": both processes stay, and use the loopback interface.
  std::string caller_namespace, callee_namespace;  // as `ip netns` names them
  std::string address = "127.0.0.1";               // of the caller
  std::string channels = "basic";
  std::string require;                     // the channel that must carry
  std::string caller_cards, callee_cards;  // as TENSORFERRY_RDMA_DEVICES names them
};

/// Splits "ONE,OTHER".
inline bool split(const std::string& value, std::string& one, std::string& other) {
  const auto comma = value.find(',');
  one = value.substr(0, comma);
  if (comma != std::string::npos) other = value.substr(comma + 1);
  return comma != std::string::npos;
}

[[noreturn]] inline void usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--transport T] [--bytes N] [--kind K] [--peer P] [--callers N] [--python PATH] "
               "[--cpus CALLER,CALLEE] [--namespaces CALLER,CALLEE] [--address CALLER] [--channels C] "
               "[--require CHANNEL] [--cards CALLER,CALLEE] [--seconds S]\n",
               program);
  std::exit(2);
}

/// Exits with a usage line on anything that it does not know.
inline SampleArguments parse(int argc, char** argv, std::initializer_list<std::string_view> transports) {
  SampleArguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    const std::string value = argv[i + 1];
    if (flag == "--transport" && std::find(transports.begin(), transports.end(), value) != transports.end()) {
      arguments.transport = value;
    } else if (flag == "--kind" && (value == "empty" || value == "text" || value == "tensor" || value == "tensors")) {
      arguments.kind = value;
    } else if (flag == "--peer" && (value == "cpp" || value == "python-serves" || value == "python-calls")) {
      arguments.peer = value;
    } else if (flag == "--python") {
      arguments.python = value;
    } else if (flag == "--callers" && std::atoi(value.c_str()) > 0) {
      arguments.callers = std::atoi(value.c_str());
    } else if (flag == "--bytes") {
      arguments.bytes = std::strtoull(value.c_str(), nullptr, 10);
    } else if (flag == "--seconds") {
      arguments.seconds = std::atof(value.c_str());
    } else if (flag == "--cpus" &&
               std::sscanf(value.c_str(), "%d,%d", &arguments.caller_cpu, &arguments.callee_cpu) == 2) {
    } else if (flag == "--namespaces" && split(value, arguments.caller_namespace, arguments.callee_namespace)) {
    } else if (flag == "--address") {
      arguments.address = value;
    } else if (flag == "--channels") {
      arguments.channels = value;
    } else if (flag == "--require") {
      arguments.require = value;
    } else if (flag == "--cards" && split(value, arguments.caller_cards, arguments.callee_cards)) {
    } else {
      usage(argv[0]);
    }
  }
  if (argc % 2 == 0) usage(argv[0]);
  return arguments;
}

/// Pins the calling thread and those that it makes from now on.
inline void pin(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpu), &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) std::perror("sched_setaffinity"), std::exit(1);
}

/// Two connected sockets, one for each process of a program.
struct Ends {
  int caller;
  int callee;
};

inline Ends unix_sockets() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::perror("socketpair"), std::exit(1);
  return {ends[0], ends[1]};
}

/// Runs `callee(socket)` in a child process, and `caller(socket, child)` in this one, which must have no other thread.
/// Each process has closed the other's end. When `caller` returns, its end is closed, which must let `callee` return.
/// Returns the exit status of main(): in this process the child's, or 1 if a signal has ended the child.
template <class Callee, class Caller>
int run_in_two_processes(Ends ends, Callee callee, Caller caller) {
  const pid_t child = fork();
  if (child < 0) std::perror("fork"), std::exit(1);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends.caller);
    callee(ends.callee);
    return 0;
  }
  close(ends.callee);
  caller(ends.caller, child);
  close(ends.caller);
  int how = 0;
  waitpid(child, &how, 0);
  return WIFEXITED(how) ? WEXITSTATUS(how) : 1;
}

/// Nanoseconds of each repetition of `operation`, for `seconds` of which the first fifth is not counted, and longer
/// where a busy machine let it run less than `few` times.
template <class Operation>
std::vector<std::int64_t> repeat(Operation operation, double seconds, std::size_t few = 20) {
  using Steady = std::chrono::steady_clock;
  const auto begin = Steady::now();
  const auto counted = begin + std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 0.2e9));
  const auto end = begin + std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
  std::vector<std::int64_t> samples;
  for (auto before = Steady::now(); before < end || samples.size() < few;) {
    operation();
    const auto after = Steady::now();
    if (before >= counted) samples.push_back(std::chrono::nanoseconds(after - before).count());
    before = after;
  }
  return samples;
}

/// The same by `callers` threads at once: nanoseconds of all of them together for each call, once for each of twenty
/// stretches of time, of which the first four are not counted.
template <class Operation>
std::vector<std::int64_t> repeat_at_once(Operation operation, int callers, double seconds) {
  constexpr int stretches = 20, warm_up = 4;
  std::atomic<std::int64_t> calls{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&] {
      while (!over.load(std::memory_order_relaxed)) {
        operation();
        calls.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }
  std::vector<std::int64_t> samples;
  auto before = std::chrono::steady_clock::now();
  auto counted = calls.load();
  for (int i = 0; i < stretches; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds / stretches));
    const auto after = std::chrono::steady_clock::now();
    const auto now = calls.load();
    if (i >= warm_up && now != counted) {
      samples.push_back(std::chrono::nanoseconds(after - before).count() / (now - counted));
    }
    before = after;
    counted = now;
  }
  over = true;
  for (auto& thread : threads) thread.join();
  return samples;
}

/// One JSON line, read by native.py.
inline void print(const std::vector<std::int64_t>& samples) {
  std::string line = "{\"samples_ns\": [";
  for (std::size_t i = 0; i < samples.size(); ++i) line += (i == 0 ? "" : ", ") + std::to_string(samples[i]);
  std::puts((line + "]}").c_str());
}

}  // namespace tensorferry::benchmarks
