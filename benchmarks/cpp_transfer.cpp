/// Tensors between two C++ agents, over sockets by the channel basic or by the channels that are named: sent to a
/// callee that answers with nothing, in so many calls at a time, of one tensor or of 64; or empty calls beside such a
/// transfer. The two processes may be in network namespaces of their own, and may have RDMA cards of their own.

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/rendezvous/tcp_store.h"
#include "base/environment.h"
#include "benchmarks/samples.h"

namespace tensorferry::benchmarks {
namespace {

constexpr Milliseconds patience{20000};
constexpr auto key = "the key of the benchmarks";

[[noreturn]] void die(std::string_view what, const Status& status) {
  std::fprintf(stderr, "%.*s: %s\n", static_cast<int>(what.size()), what.data(), status.text().c_str());
  std::exit(1);
}

template <class T>
T value_or_die(std::string_view what, Result<T> result) {
  if (!result) die(what, result.status());
  return *std::move(result);
}

/// Moves this process into a network namespace of `ip netns`; "": stays.
void enter(const std::string& name) {
  if (name.empty()) return;
  const int fd = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) {
    std::perror(name.c_str());
    std::exit(not_here);
  }
  close(fd);
}

/// Leaves this process these RDMA cards; "": all.
void use(const std::string& cards) {
  if (!cards.empty()) setenv(environment::rdma_devices.name, cards.c_str(), 1);
}

std::shared_ptr<RawAgent> join(const char* name, std::uint16_t port, const SampleArguments& arguments) {
  RawAgentOptions options;
  options.name = name;
  options.store = value_or_die("connect_tcp_store", connect_tcp_store(arguments.address, port, key, patience));
  options.key = key;
  options.reaches = arguments.address;
  options.unix_sockets = arguments.transport == "unix";
  options.tls = arguments.transport == "tls" ? "key" : "off";
  options.shared_memory = false;
  options.channels = arguments.channels;
  return value_or_die("RawAgent::join", RawAgent::join(std::move(options)));
}

/// Serves until the caller's end of the socket closes. The socket carries the port of the store to the callee, and a
/// byte back when it serves.
void serve(int socket, const SampleArguments& arguments) {
  std::uint16_t port = 0;
  if (read(socket, &port, sizeof port) != sizeof port) return;  // the caller failed, and has said so
  enter(arguments.callee_namespace);
  use(arguments.callee_cards);
  pin(arguments.callee_cpu);
  const auto agent = join("callee", port, arguments);
  agent->serve("take", [](Request, Reply reply) { reply.send({}); });
  char byte = 0;
  if (write(socket, &byte, 1) != 1) return;
  while (read(socket, &byte, 1) > 0) {
  }
  agent->leave();
}

Buffer tensor_of(std::size_t bytes) {
  const auto owner = std::make_shared<std::vector<std::byte>>(bytes, std::byte{'x'});
  return {{}, owner->data(), bytes, nullptr, owner};
}

void finish(Call call) {
  call.wait();
  if (const auto reply = call.take(); !reply) die("call", reply.status());
}

/// Makes a call with each of the lists, all at once, whose tensors go by this channel ("": any), and waits until the
/// callee has all of them.
void send(RawAgent& agent, const std::vector<std::vector<Buffer>>& lists, const std::string& channel) {
  std::vector<Call> calls;
  for (const auto& tensors : lists) {
    Message message;
    message.buffers = tensors;
    RawCallOptions options;
    options.require = channel;
    calls.push_back(agent.call("callee", "take", std::move(message), std::move(options)));
  }
  for (auto& call : calls) finish(std::move(call));
}

void call(int socket, const SampleArguments& arguments) {
  enter(arguments.caller_namespace);
  use(arguments.caller_cards);
  const auto store = value_or_die("TcpStoreServer::listen", TcpStoreServer::listen(arguments.address, 0, key));
  const std::uint16_t port = store->port();
  if (write(socket, &port, sizeof port) != sizeof port) die("write", Status(Code::internal, "the callee is gone"));
  pin(arguments.caller_cpu);
  const auto agent = join("caller", port, arguments);
  char serving = 0;
  if (read(socket, &serving, 1) != 1) die("read", Status(Code::internal, "the callee is gone"));
  const std::size_t length = arguments.kind == "tensors" ? 64 : 1;
  std::vector<std::vector<Buffer>> lists(static_cast<std::size_t>(arguments.callers));
  for (auto& tensors : lists) {
    while (tensors.size() < length) tensors.push_back(tensor_of(arguments.bytes));
  }
  const auto send_all = [&] { send(*agent, lists, arguments.require); };
  send_all();
  if (arguments.kind != "empty") {
    const bool large = arguments.bytes * length * lists.size() >= std::size_t{64} << 20;
    print(repeat(send_all, arguments.seconds, large ? 3 : 20));
  } else {
    std::atomic<bool> over{arguments.bytes == 0};
    std::thread transfer([&] {
      while (!over) send_all();
    });
    print(repeat([&] { finish(agent->call("callee", "take", {})); }, arguments.seconds));
    over = true;
    transfer.join();
  }
  agent->leave();
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix", "tcp", "tls"});
  return run_in_two_processes(
      unix_sockets(), [&](int socket) { serve(socket, arguments); },
      [&](int socket, pid_t /*child*/) { call(socket, arguments); });
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
