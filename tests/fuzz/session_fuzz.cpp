// Fuzzes an agent with a peer that completes the handshake and then sends frames from the input. The agent serves the
// peer and calls it. After any input, calls of other peers succeed, no call of the hostile peer is in flight, and no
// descriptor or thread is left.
//
// The input's first bytes say how the peer connects (Session::connect). The others are its steps (Session::step).
#include <poll.h>
#include <sanitizer/lsan_interface.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/handshake/auth.h"
#include "agent/rendezvous/directory.h"
#include "agent/rendezvous/memory_store.h"
#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"
#include "channels/host_memory.h"
#include "tests/agent/mail_channel.h"
#include "tests/fuzz/descriptors.h"
#include "tests/fuzz/frames_from_input.h"
#include "tests/fuzz/record_input.h"

namespace {

using namespace tensorferry;
using fuzzing::frame_from;
using fuzzing::must;
using std::chrono::milliseconds;
using std::chrono::seconds;
using wire::Header;
using wire::Kind;

template <class Condition>
void must_become(const Condition& holds) {
  const auto until = Clock().now() + seconds(40);
  while (!holds()) {
    must(Clock().now() < until);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::ptrdiff_t threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
}
/// Returns the number of open descriptors, without pipes: the fuzzer opens some to its symbolizer.
std::ptrdiff_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::count_if(begin(all), end(all), [](const auto& entry) {
    std::error_code gone;
    return !std::filesystem::read_symlink(entry, gone).string().starts_with("pipe:");
  });
}

/// Memory with a bound on each buffer. A peer may name any size, and the fuzzer's own memory must stay small.
class BoundedMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    return bytes <= std::size_t{1} << 20 ? host_.allocate(bytes, device) : Buffer();
  }

 private:
  HostMemory host_;
};

/// Memory that the host must not access.
class DeviceMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    return {device, reinterpret_cast<std::byte*>(4096), bytes, nullptr, nullptr};
  }
};

/// The peer's end of a connection.
class Connection {
 public:
  explicit Connection(FileDescriptor fd) : fd_(std::move(fd)) {}

  /// Writes all bytes. If the agent has closed the connection or no longer reads, gives up for good.
  void write(ByteView bytes, std::size_t descriptors) {
    while (!bytes.empty() && !ended_) {
      const auto written = fuzzing::send_with_descriptors(fd_.get(), bytes, std::exchange(descriptors, 0));
      if (written > 0) bytes = bytes.subspan(static_cast<std::size_t>(written));
      pollfd writable{fd_.get(), POLLOUT, 0};
      ended_ = written <= 0 && (errno != EAGAIN || ::poll(&writable, 1, 5) <= 0);
    }
  }
  void half_close() {
    ended_ = true;
    ::shutdown(fd_.get(), SHUT_WR);
  }
  /// Returns whether the agent has closed the connection. Drops the bytes that it has sent.
  bool ended() {
    std::array<std::byte, 16384> dropped;
    auto got = static_cast<ssize_t>(dropped.size());
    while (got > 0) got = ::recv(fd_.get(), dropped.data(), dropped.size(), MSG_DONTWAIT);
    return got == 0 || errno != EAGAIN;
  }
  void wait_for_bytes() {
    pollfd readable{fd_.get(), POLLIN, 0};
    ::poll(&readable, 1, 1);
  }

 private:
  FileDescriptor fd_;
  bool ended_ = false;
};

// ---- The agent, and its peers

Clock::time_point soon() { return Clock().now() + seconds(40); }

Terms terms() {
  static const Key none;
  Terms terms;
  terms.key = &none;
  terms.demands_proof = false;
  terms.purpose = "link";
  return terms;
}

wire::Hello read_hello(int fd) {
  Bytes bytes(Header::size);
  must(read_exactly(fd, bytes, soon()).ok());
  const auto header = Header::decode(bytes);
  must(header.ok() && header->kind == Kind::hello);
  bytes.resize(header->length);
  must(read_exactly(fd, bytes, soon()).ok());
  auto hello = wire::Hello::decode(bytes);
  must(hello.ok());
  return *hello;
}

FileDescriptor run_handshake(const std::string& address) {
  auto socket = connect_unix(address);
  must(socket.ok() && handshake_as_dialler(socket->get(), terms(), soon()).ok());
  return std::move(*socket);
}

constexpr auto target_name = "target", witness_name = "witness", hostile_name = "hostile";

/// A call from the agent to the hostile peer. When the call has ended, nothing may write to `memory` any more, because
/// it is freed.
struct Outbound {
  explicit Outbound(std::size_t bytes) : memory(bytes) {}
  Bytes memory;
  Call call;
  std::shared_ptr<std::atomic<int>> sent = std::make_shared<std::atomic<int>>(0);
};

class Agents {
 public:
  Agents() {
    const auto store = std::make_shared<MemoryStore>();
    target = join(store, target_name);
    witness = join(store, witness_name);
    target->serve("echo", [](Request request, Reply reply) {
      auto& arguments = request.arguments;
      reply.send({std::move(arguments.payload), std::move(arguments.buffers), {}, {}});
    });
    target->serve("later", [this](const Request&, Reply reply) {
      const std::lock_guard lock(mutex_);
      kept_.push_back(std::move(reply));
    });
    target->serve("wait", [this](const Request&, Reply reply) {
      const bool alone = !waiting_.exchange(true);
      while (alone && !reply.cancelled() && !end_waiting) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (alone) waiting_ = false;
    });
    target->serve("back", [this](Request request, Reply reply) {
      target->call(request.peer.name, "f", {}).on_done([reply = std::move(reply)](Result<Received> got) mutable {
        if (!got) return reply.fail(got.status());
        reply.send({std::move(got->payload), std::move(got->buffers), {}, {}});
      });
    });
    const auto found = Directory(store, "tensorferry", {}).find(target_name, seconds(5));
    must(found.ok());
    target_address = found->unix_address;
    hello = read_hello(run_handshake(target_address).get());

    auto listening = listen_unix("");
    must(listening.ok());
    listener = std::move(listening->socket);
    record = describe_this_process();
    record.name = hostile_name;
    record.unix_address = listening->address;
    record.incarnation = 1;  // the lowest one, so the hostile peer decides which connection carries the calls
    must(
        hostile_directory_.emplace(store, "tensorferry", Key()).join(record, [](const Record&) { return false; }).ok());
  }

  /// Answers the oldest kept request of function "later", or drops it.
  void answer_one(bool drop) {
    std::optional<Reply> reply;
    {
      const std::lock_guard lock(mutex_);
      if (kept_.empty()) return;
      reply.emplace(std::move(kept_.front()));
      kept_.pop_front();
    }
    if (drop) return;
    auto memory = std::make_shared<Bytes>(300'000);
    reply->send({{}, {{{}, memory->data(), memory->size(), nullptr, memory}}, {}, {}});
  }

  /// Ends the agent's waits: accepts and closes its pending dials to the hostile peer, and drops one kept request. Call
  /// it again for waits that begin later.
  void settle() {
    while (FileDescriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))) {
    }
    answer_one(true);
  }

  bool others_are_served() {
    Bytes text(3);
    auto call = witness->call(target_name, "echo", {text, {}, {}, {}});
    if (!call.wait()) return false;
    const auto reply = call.take();
    return reply.ok() && reply->payload == text;
  }

  std::shared_ptr<RawAgent> target, witness;
  std::string target_address;
  wire::Hello hello;  // of the target
  Record record;
  FileDescriptor listener;        // of the hostile peer
  std::uint64_t connections = 0;  // that the hostile peer has taken for calls
  std::atomic<bool> end_waiting{false};

 private:
  static std::shared_ptr<RawAgent> join(const std::shared_ptr<Store>& store, const char* name) {
    RawAgentOptions options;
    options.name = name;
    options.store = store;
    options.registry = testing::with_mail();
    options.devices = {Device{}, Device{DeviceType::cuda, 0}};
    options.memory = {{DeviceType::cpu, std::make_shared<BoundedMemory>()},
                      {DeviceType::cuda, std::make_shared<DeviceMemory>()}};
    options.heartbeat = milliseconds(20);      // heartbeats end links that have only a bulk connection
    options.peer_timeout = milliseconds(100);  // how long the agent dials a peer that is gone
    auto agent = RawAgent::join(std::move(options));
    must(agent.ok());
    return *agent;
  }

  std::optional<Directory> hostile_directory_;
  std::mutex mutex_;
  std::deque<Reply> kept_;
  std::atomic<bool> waiting_{false};
};

/// One life of the hostile peer, for one input.
class Session {
 public:
  Session(Agents& agents, ByteView input) : agents_(agents), in_(input) {}

  void run() {
    connect();
    for (int i = 0; i < 100 && !in_.empty() && !connections_.empty(); ++i) step();
    end();
  }

 private:
  /// Returns a hello with the agent's own channels, which all reach, or with channels that do not reach, or one that
  /// the input makes up.
  Bytes hello_of(wire::Hello::Purpose purpose) {
    wire::Hello hello;
    hello.purpose = purpose;
    hello.name = hostile_name;
    hello.incarnation = agents_.record.incarnation;
    hello.devices = agents_.hello.devices;
    hello.drivers = agents_.hello.drivers;
    hello.connection = agents_.connections;
    if ((shape_ & 0x20) != 0) hello.drivers = {{"basic", {{{}, {}}}}, {"basic", {{{}, {}}}}, {"none", {}}};
    if ((shape_ & 0x40) != 0) {
      auto said = fuzzing::message_from<wire::Hello>(in_, (shape_ & 0x10) != 0);
      const auto decoded = wire::Hello::decode(said);
      // A peer that knows the key can use any name. With the witness's name, this connection would end the witness's.
      if (!decoded.ok() || decoded->name != witness_name) return said;
    }
    return encode(hello);
  }
  /// Returns the frame of a hello, and `go` if it is the hostile peer that says it.
  Bytes opening(ByteView hello) {
    Header header;
    header.kind = Kind::hello;
    auto frames = wire::assemble(header, {}, {}, hello);
    const auto said = wire::Hello::decode(hello);
    if (!said.ok() || said->purpose != wire::Hello::Purpose::calls) return frames;
    if (said->incarnation >= agents_.hello.incarnation) return frames;
    header.kind = Kind::go;
    header.connection = ++agents_.connections;
    const auto go = wire::assemble(header, {}, {}, {});
    frames.insert(frames.end(), go.begin(), go.end());
    return frames;
  }

  void dial(wire::Hello::Purpose purpose) {
    auto socket = run_handshake(agents_.target_address);
    (void)read_hello(socket.get());
    const auto hello = hello_of(purpose);
    connections_.emplace_back(std::move(socket)).write(opening(hello), 0);
  }
  /// Accepts the connection that the agent dials when it calls. If the agent still has a link of the life before, it
  /// does not dial; the call then fails, and this returns.
  void accept(const Outbound& outbound) {
    while (!outbound.call.done()) {
      pollfd readable{agents_.listener.get(), POLLIN, 0};
      if (::poll(&readable, 1, 1) <= 0) continue;
      FileDescriptor socket(::accept4(agents_.listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket || !handshake_as_acceptor(socket.get(), terms(), soon()).ok()) continue;
      Connection connection(std::move(socket));
      connection.write(opening(hello_of(wire::Hello::Purpose::calls)), 0);
      connections_.push_back(std::move(connection));
      return;
    }
  }

  /// Makes the connections. The input says which side dials, for which purpose, and with which hello.
  void connect() {
    shape_ = in_.get<std::uint8_t>();
    if ((shape_ & 3) != 2) dial(wire::Hello::Purpose::calls);
    if ((shape_ & 4) != 0 && !connections_.empty()) dial(wire::Hello::Purpose::bulk);
    if ((shape_ & 2) != 0) accept(call());
  }

  Outbound& call() {
    const auto form = in_.get<std::uint8_t>();
    auto& outbound = outbound_.emplace_back((form & 1) != 0 ? 5000 : 0);
    RawCallOptions options;
    if (!outbound.memory.empty())
      options.into = {{{}, outbound.memory.data(), outbound.memory.size(), nullptr, nullptr}};
    if ((form & 6) == 6) options.timeout = milliseconds(1);
    Message message;
    if ((form & 8) != 0) {
      auto memory = std::make_shared<Bytes>((form & 16) != 0 ? 70'000 : 300);
      message.buffers = {{{}, memory->data(), memory->size(), nullptr, memory}};
    }
    if ((form & 32) != 0) message.payload.resize(60'000);
    outbound.call = agents_.target->call(hostile_name, "f", std::move(message), options);
    outbound.call.on_sent([sent = outbound.sent](const Status&) { ++*sent; });
    return outbound;
  }

  void step() {
    constexpr std::array kinds{Kind::request, Kind::request, Kind::reply,   Kind::reply, Kind::cancel, Kind::control,
                               Kind::control, Kind::release, Kind::goodbye, Kind::ping,  Kind::bulk,   Kind::pong};
    const auto choice = in_.get<std::uint8_t>();
    auto& connection =
        *std::next(connections_.begin(), static_cast<std::ptrdiff_t>((choice >> 5) % connections_.size()));
    const auto what = choice % 32U;
    if (what < 2 * kinds.size()) {
      const auto sent = frame_from(in_, kinds[what / 2], controls_);
      return connection.write(sent.bytes, sent.descriptors);
    }
    switch (what) {
      case 24:
        return connection.write(in_.sized(), 0);
      case 25:
        return agents_.answer_one(false);
      case 26:
        return agents_.answer_one(true);
      case 27:
        if (!outbound_.empty() && outbound_.size() < 8) call();
        return;
      case 28:
        if (!outbound_.empty()) outbound_.front().call.cancel();
        return;
      case 29:
        return connection.half_close();
      case 30:
        if (!outbound_.empty()) outbound_.back().call.wait(Clock().now() + milliseconds(1));
        return;
      default:
        return connection.wait_for_bytes();
    }
  }

  void end() {
    const bool abrupt = (shape_ & 0x80) != 0;  // the next life begins before the agent has seen the end
    for (auto& connection : connections_) connection.half_close();
    if (abrupt) connections_.clear();
    agents_.end_waiting = true;
    must_become([&] {
      agents_.settle();
      std::erase_if(connections_, [](auto& connection) { return connection.ended(); });
      const bool done = std::all_of(outbound_.begin(), outbound_.end(),
                                    [](const auto& each) { return each.call.done() && *each.sent == 1; });
      return connections_.empty() && done && agents_.target->in_flight() == std::pair<std::size_t, std::size_t>();
    });
    agents_.end_waiting = false;
    for (auto& outbound : outbound_) (void)outbound.call.take();
  }

  Agents& agents_;
  Reader in_;
  std::uint8_t shape_ = 0;
  std::list<Connection> connections_;
  std::list<Outbound> outbound_;
  std::uint64_t controls_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  ::setenv("TENSORFERRY_LOG", "off", 1);  // the agent would log a line for each link that ends
  // Background threads allocate and free all the time, so the fuzzer would search for leaks after almost every input.
  static std::vector<char*> with_mine(*arguments, *arguments + *count);
  static std::string mine = "-detect_leaks=0";
  with_mine.push_back(mine.data());
  *count = static_cast<int>(with_mine.size());
  with_mine.push_back(nullptr);
  *arguments = with_mine.data();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto& agents = *new Agents;
  static std::size_t runs = 0;
  static std::ptrdiff_t descriptors = 0;
  Session(agents, std::as_bytes(std::span(data, size))).run();
  if (runs % 4 == 0) must(agents.others_are_served());
  if (runs == 0) descriptors = open_descriptors();
  if (++runs % 64 == 0) {
    must_become([] {
      agents.settle();
      return open_descriptors() <= descriptors;
    });
    must(threads() < 100);
  }
  if (runs % 4096 == 0) must(__lsan_do_recoverable_leak_check() == 0);
  return 0;
}
