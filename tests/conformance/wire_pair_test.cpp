/// Tests of the suite's own link. The channel here only shows the arguments that the link hands to it.
#include "tests/conformance/wire_pair.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <future>
#include <string>

#include "channels/completion.h"

namespace tensorferry::conformance {
namespace {

/// Sends a buffer's bytes through a pipe. The pipe's reading end goes ahead of the ticket, in a control message.
class PipeChannel final : public Channel {
 public:
  explicit PipeChannel(Wire& wire) : wire_(wire) {}

  Offer offer(const Buffer& buffer, Sharing, Outgoing&, Completion released) override {
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return Refusal{"no pipe"};
    FileDescriptor reading(ends[0]), writing(ends[1]);
    if (::write(writing.get(), buffer.data, buffer.bytes) != static_cast<ssize_t>(buffer.bytes)) return Refusal{"full"};
    Descriptors descriptors;
    descriptors.push_back(std::move(reading));
    Ticket ticket{.bytes = buffer.bytes, .opaque = {}};
    ticket.after = wire_.control(Bytes(3, std::byte{7}), std::move(descriptors));
    complete(std::move(released), {});
    return ticket;
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    std::lock_guard lock(mutex_);
    const auto destination = sink.reserve(ticket.bytes);
    const bool whole =
        pipe_ && ::read(pipe_.get(), destination->data, ticket.bytes) == static_cast<ssize_t>(ticket.bytes);
    const auto status = whole ? Status() : Status(Code::internal, "the pipe did not come ahead of its ticket");
    landed(status);
    consumed(status);
  }

  void control(ByteView message, Descriptors descriptors) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // by then the ticket has arrived
    std::lock_guard lock(mutex_);
    if (message.size() == 3 && descriptors.size() == 1) pipe_ = std::move(descriptors.front());
  }

  void withdraw(const Ticket&) override {}
  void close(Status) noexcept override {}

 private:
  Wire& wire_;
  std::mutex mutex_;
  FileDescriptor pipe_;
};

class PipeDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "pipe"; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return Bytes{}; }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return std::nullopt; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair) override {
    wire.ready({});
    return std::make_unique<PipeChannel>(wire);
  }
};

TEST(WirePair, FileDescriptorsArriveAndTicketsWaitForTheirControlMessage) {
  PipeDriver driver;
  const auto memory = cpu_memory();
  WirePair pair(driver, driver, {}, *memory, *memory);
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    pair.a->send(memory->filled(1000, seed));
    const auto arrivals = pair.b->receive();
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrivals.front()->buffer, seed));
  }
}

TEST(Lane, QueuedMessagesFailWhenTheOtherEndCloses) {
  auto [a, b] = connected_sockets();
  Lane lane(std::move(a.bulk));
  b = {};
  Outcome first, late;
  const auto memory = cpu_memory();
  lane.send({.head = Bytes(1), .parts = {}});
  Lane::Record record{.head = Bytes(1)};
  record.parts.push_back({memory->allocate(100), first.completion()});
  lane.send(std::move(record));
  lane.start([&] { return lane.read_head().has_value(); }, [] {});
  EXPECT_EQ(first.wait_name(), "ConnectionLost");
  EXPECT_TRUE(lane.wait_ended());
  Lane::Record another{.head = Bytes(1)};
  another.parts.push_back({memory->allocate(100), late.completion()});
  lane.send(std::move(another));
  EXPECT_EQ(late.runs(), 1);
  EXPECT_EQ(late.wait_name(), "ConnectionLost");
}

TEST(Lane, AHeldReaderBlocksTheWriter) {
  auto [a, b] = connected_sockets();
  Lane from(std::move(a.bulk)), to(std::move(b.bulk));
  const auto memory = cpu_memory();
  constexpr std::size_t bytes = 8 << 20;
  const auto source = memory->filled(bytes, 1);
  const auto destination = memory->allocate(bytes);
  to.hold_after(bytes / 2);
  from.start([&] { return from.read_head().has_value(); }, [] {});
  Outcome written, read;
  to.start(
      [&] {
        if (!to.read_head()) return false;
        auto done = read.completion();
        done(to.read(destination.data, bytes) ? Status() : Status(Code::connection_lost, ""));
        return true;
      },
      [] {});
  Lane::Record record{.head = Bytes(1)};
  record.parts.push_back({source, written.completion()});
  from.send(std::move(record));
  while (!to.held()) std::this_thread::yield();
  EXPECT_EQ(written.wait(std::chrono::milliseconds(20)), std::nullopt);
  to.resume();
  EXPECT_EQ(read.wait_name(), "Ok");
  EXPECT_EQ(written.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(destination, 1));
}

}  // namespace
}  // namespace tensorferry::conformance
