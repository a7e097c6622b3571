// FrameStream over socket pairs: the frames that arrive, their pieces, and the end of a stream.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "agent/transport/address.h"
#include "agent/transport/frame_stream.h"
#include "agent/transport/nudge.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using wire::Header;
using wire::Kind;
using Part = FrameStream::Part;

std::pair<FileDescriptor, FileDescriptor> socket_pair(int send_buffer = 0) {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  if (send_buffer != 0) {
    for (const int fd : fds) ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
  }
  return {FileDescriptor(fds[0]), FileDescriptor(fds[1])};
}

Bytes frame_of(Kind kind, std::string_view payload, std::uint64_t trailing = 0, std::size_t descriptors = 0,
               std::uint64_t call = 0) {
  Header header;
  header.kind = kind;
  header.call = call;
  header.trailing = trailing;
  header.buffers = trailing != 0 ? 1 : 0;
  header.descriptors = static_cast<std::uint8_t>(descriptors);
  return wire::assemble(header, {}, {}, view_of(payload));
}

std::vector<Part> parts_of(const std::vector<Buffer>& buffers, std::atomic<int>* written = nullptr) {
  std::vector<Part> parts;
  for (const auto& buffer : buffers) {
    parts.push_back({buffer, [written](const Status& status) {
                       if (written != nullptr) *written += status.ok() ? 1 : 1000;
                     }});
  }
  return parts;
}

/// Records the frames that arrive. `take` decides where the bytes behind each frame go.
struct Recorder final : FrameSink {
  std::function<Result<Taken>(FrameStream&, const Header&)> take = [](FrameStream&, const Header&) {
    return Taken::yes;
  };
  std::vector<std::string> frames;
  std::vector<std::uint64_t> calls;
  std::vector<Descriptors> descriptors;

  Result<Taken> on_frame(FrameStream& stream, const Header& header, ByteView body, Descriptors came) override {
    auto taken = take(stream, header);
    if (taken.ok() && *taken == Taken::yes) {
      frames.emplace_back(text_of(body));
      calls.push_back(header.call);
      descriptors.push_back(std::move(came));
    }
    return taken;
  }
};

/// Reads until no bytes are left, or the stream ends. Returns the last progress.
FrameStream::Progress drain(FrameStream& stream, FrameSink& sink) {
  auto progress = FrameStream::Progress::some;
  EXPECT_TRUE(stream.begin_read());
  while (progress == FrameStream::Progress::some) progress = stream.read_some(sink);
  stream.end_read();
  return progress;
}

struct Streams : ::testing::Test {
  void connect(FrameStream::Use use = FrameStream::Use::calls, int send_buffer = 0) {
    auto [one, other] = socket_pair(send_buffer);
    a = std::make_unique<FrameStream>(std::move(one), true, use);
    b = std::make_unique<FrameStream>(std::move(other), true, use);
  }
  /// Writes at `a` and reads at `b` until `b` has `count` frames and no bytes are left.
  void flow(std::size_t count) {
    ASSERT_TRUE(eventually([&] {
      const bool written = a->write_some();
      drain(*b, sink);
      return sink.frames.size() >= count && written;
    }));
    drain(*b, sink);
  }
  std::unique_ptr<FrameStream> a, b;
  Recorder sink;
};

TEST_F(Streams, FramesArriveInOrder) {
  connect();
  for (int i = 0; i < 5000; ++i) a->send(frame_of(Kind::control, std::to_string(i)), {}, {}, i % 3 == 0);
  flow(5000);
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(sink.frames[static_cast<std::size_t>(i)], std::to_string(i));
}

TEST_F(Streams, AnUnflushedFrameWaitsForTheFlush) {
  connect();
  EXPECT_TRUE(a->send(frame_of(Kind::ping, ""), {}, {}, false));
  EXPECT_TRUE(a->corked());
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::none);
  EXPECT_TRUE(a->write_some());
  EXPECT_FALSE(a->corked());
  flow(1);
}

TEST_F(Streams, BytesBehindAFrameLandForAnySplit) {
  std::mt19937 random(7);
  for (const std::size_t most : {1UL, 7UL, 39UL, 40UL, 41UL, 1000UL, 70'000UL}) {
    auto [writer, reader] = socket_pair();
    b = std::make_unique<FrameStream>(std::move(reader), true, FrameStream::Use::calls);
    sink.frames.clear();
    const std::vector<Buffer> sent{patterned(most < 50 ? 3'000 : 150'000, 1), patterned(1, 2), patterned(5'000, 3)};
    std::vector<Buffer> got;
    int landed = 0;
    sink.take = [&](FrameStream& stream, const Header& header) {
      if (header.trailing != 0) {
        for (const auto& buffer : sent) {
          got.push_back(patterned(buffer.bytes, 99));
          stream.read(got.back(), [&](const Status& status) { landed += status.ok() ? 1 : 1000; });
        }
      }
      return FrameSink::Taken::yes;
    };
    std::uint64_t total = 0;
    for (const auto& buffer : sent) total += buffer.bytes;
    Bytes stream = frame_of(Kind::request, "first", total);
    for (const auto& buffer : sent) stream.insert(stream.end(), buffer.data, buffer.data + buffer.bytes);
    const auto next = frame_of(Kind::request, "second");
    stream.insert(stream.end(), next.begin(), next.end());

    for (std::size_t at = 0; at < stream.size();) {
      const auto piece =
          std::min<std::size_t>(stream.size() - at, std::uniform_int_distribution<std::size_t>(1, most)(random));
      const auto wrote = ::write(writer.get(), stream.data() + at, piece);
      if (wrote > 0) at += static_cast<std::size_t>(wrote);
      drain(*b, sink);
    }
    EXPECT_EQ(sink.frames, (std::vector<std::string>{"first", "second"})) << most;
    EXPECT_EQ(landed, 3);
    for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_TRUE(same_bytes(got[i], sent[i])) << most << " " << i;
  }
}

TEST_F(Streams, UnrequestedBytesAreDropped) {
  connect();
  const auto middle = patterned(50'000, 2);
  const auto got = patterned(50'000, 0);
  int landed = 0;
  sink.take = [&](FrameStream& stream, const Header& header) {
    if (header.trailing == 250'000) {
      Buffer nowhere;
      nowhere.bytes = 100'000;
      stream.read(nowhere, [&](const Status&) { ++landed; });
      stream.read(got, [&](const Status&) { ++landed; });
    }
    return FrameSink::Taken::yes;
  };
  a->send(frame_of(Kind::request, "1", 250'000), parts_of({patterned(100'000, 1), middle, patterned(100'000, 3)}), {},
          true);
  a->send(frame_of(Kind::request, "2", 300'000), parts_of({patterned(300'000, 4)}), {}, true);
  a->send(frame_of(Kind::request, "3"), {}, {}, true);
  flow(3);
  EXPECT_EQ(sink.frames, (std::vector<std::string>{"1", "2", "3"}));
  EXPECT_EQ(landed, 2);
  EXPECT_TRUE(same_bytes(got, middle));
}

TEST_F(Streams, ADestinationLargerThanTheRemainingBytesFailsAtOnce) {
  connect();
  Status first, second;
  sink.take = [&](FrameStream& stream, const Header& header) {
    if (header.trailing != 0) {
      stream.read(patterned(600), [&](Status status) { first = std::move(status); });
      stream.read(patterned(401), [&](Status status) { second = std::move(status); });
    }
    return FrameSink::Taken::yes;
  };
  a->send(frame_of(Kind::request, "1", 1000), parts_of({patterned(1000)}), {}, true);
  flow(1);
  EXPECT_TRUE(first.ok()) << first.text();
  EXPECT_EQ(second.code(), Code::protocol_error);
}

TEST_F(Streams, CompletionsMayBeEmpty) {
  connect();
  sink.take = [&](FrameStream& stream, const Header& header) {
    if (header.trailing != 0) {
      stream.read(patterned(600), {});
      stream.read(patterned(401), {});  // more than is left
    }
    return FrameSink::Taken::yes;
  };
  const auto send = [&](std::string_view text, bool flush) {
    std::vector<Part> part;
    part.push_back({patterned(1000), {}});
    a->send(frame_of(Kind::request, text, 1000), std::move(part), {}, flush);
  };
  send("1", true);
  flow(1);
  send("2", false);
  a->close({Code::connection_lost, "the end"});
  send("3", true);
  EXPECT_EQ(sink.frames, std::vector<std::string>{"1"});
}

TEST_F(Streams, AHeldFrameIsPassedAgain) {
  connect(FrameStream::Use::bulk);
  bool ready = false;
  const auto got = patterned(100'000, 0), sent = patterned(100'000, 5);
  sink.take = [&](FrameStream& stream, const Header&) {
    if (!ready) return FrameSink::Taken::hold;
    stream.read(got, [](const Status&) {});
    return FrameSink::Taken::yes;
  };
  a->send(frame_of(Kind::bulk, "", 100'000), parts_of({sent}), {}, true);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(drain(*b, sink), FrameStream::Progress::held);
  ready = true;
  flow(1);
  EXPECT_TRUE(same_bytes(got, sent));
}

TEST_F(Streams, BulkBytesAreReadStraightIntoTheirDestination) {
  connect(FrameStream::Use::bulk, 4096);
  std::vector<Buffer> sent, got;
  for (unsigned i = 0; i < 20; ++i) sent.push_back(patterned(1 + i * 9973, i));
  sink.take = [&](FrameStream& stream, const Header& header) {
    got.push_back(patterned(header.trailing, 77));
    stream.read(got.back(), [](const Status&) {});
    return FrameSink::Taken::yes;
  };
  for (const auto& buffer : sent) a->send(frame_of(Kind::bulk, "", buffer.bytes), parts_of({buffer}), {}, true);
  flow(sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_TRUE(same_bytes(got[i], sent[i])) << i;
}

TEST_F(Streams, ABodyOnABulkConnectionClosesIt) {
  connect(FrameStream::Use::bulk);
  a->send(frame_of(Kind::bulk, "body", 1), parts_of({patterned(1)}), {}, true);
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::closed);
  EXPECT_EQ(b->status().code(), Code::protocol_error);
}

TEST_F(Streams, FileDescriptorsArriveWithTheirFrame) {
  connect();
  const auto pipe_with = [](std::string_view text) {
    int fds[2];
    EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
    EXPECT_EQ(::write(fds[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ::close(fds[1]);
    return FileDescriptor(fds[0]);
  };
  Descriptors first, second;
  first.push_back(pipe_with("one"));
  second.push_back(pipe_with("two"));
  second.push_back(pipe_with("three"));
  a->send(frame_of(Kind::control, "a"), {}, {}, false);
  a->send(frame_of(Kind::control, "b", 0, 1), {}, std::move(first), false);
  a->send(frame_of(Kind::control, "c"), {}, {}, false);
  a->send(frame_of(Kind::control, "d", 0, 2), {}, std::move(second), true);
  flow(4);
  ASSERT_EQ(sink.frames, (std::vector<std::string>{"a", "b", "c", "d"}));
  const auto text = [](const FileDescriptor& fd) {
    char bytes[16];
    const auto got = ::read(fd.get(), bytes, sizeof bytes);
    return std::string(bytes, static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  };
  EXPECT_TRUE(sink.descriptors[0].empty());
  ASSERT_EQ(sink.descriptors[1].size(), 1U);
  EXPECT_EQ(text(sink.descriptors[1][0]), "one");
  EXPECT_TRUE(sink.descriptors[2].empty());
  ASSERT_EQ(sink.descriptors[3].size(), 2U);
  EXPECT_EQ(text(sink.descriptors[3][0]), "two");
  EXPECT_EQ(text(sink.descriptors[3][1]), "three");
  EXPECT_NE(::fcntl(sink.descriptors[3][1].get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(Streams, AFrameWithMissingFileDescriptorsClosesTheStream) {
  connect();
  a->send(frame_of(Kind::control, "x", 0, 1), {}, {}, true);
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::closed);
  EXPECT_EQ(b->status().code(), Code::protocol_error);
}

/// At RLIMIT_NOFILE the system drops descriptors that arrive. Only their frame goes without them.
TEST_F(Streams, DescriptorsThatTheSystemDropsAreMissingInTheirFrameAlone) {
  connect();
  const auto pipes = [](std::size_t count) {
    Descriptors all;
    while (all.size() < count) {
      int fds[2];
      EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
      ::close(fds[1]);
      all.emplace_back(fds[0]);
    }
    return all;
  };
  a->send(frame_of(Kind::control, "all", 0, 2), {}, pipes(2), true);
  flow(1);
  a->send(frame_of(Kind::control, "dropped", 0, 2), {}, pipes(2), false);
  a->send(frame_of(Kind::control, "none", 0, 0), {}, {}, false);
  a->send(frame_of(Kind::control, "later", 0, 1), {}, pipes(1), false);
  EXPECT_TRUE(a->write_some());  // the sender's copies of the descriptors are closed
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<FileDescriptor> fill;
  const auto lowest = [] { return FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); };
  fill.push_back(lowest());
  const rlimit few{static_cast<rlim_t>(fill.back().get()) + 2, before.rlim_max};  // room for one descriptor
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  while (true) {
    fill.push_back(lowest());
    if (!fill.back()) break;
  }
  fill.pop_back();
  if (!fill.empty()) fill.pop_back();
  Recorder& seen = sink;
  (void)b->read_some(seen);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  flow(4);
  ASSERT_EQ(sink.frames, (std::vector<std::string>{"all", "dropped", "none", "later"}));
  EXPECT_EQ(sink.descriptors[0].size(), 2U);
  EXPECT_TRUE(sink.descriptors[1].empty());
  EXPECT_TRUE(sink.descriptors[2].empty());
  EXPECT_EQ(sink.descriptors[3].size(), 1U);
}

/// Control messages are written by threads that may hold locks.
TEST_F(Streams, WhatAWriteCompletesCanBeLeftToAnotherThread) {
  connect();
  std::atomic<int> written{0};
  a->send(frame_of(Kind::request, "m", 100), parts_of({patterned(100)}, &written), {}, false);
  a->queue(frame_of(Kind::control, "c"), {});
  EXPECT_TRUE(a->corked());
  std::vector<FrameStream::Written> apart;
  EXPECT_TRUE(a->write_some(&apart));
  EXPECT_EQ(written, 0);
  FrameStream::complete_all(apart);
  EXPECT_EQ(written, 1);
  flow(2);
}

TEST_F(Streams, UnannouncedFileDescriptorsAreClosed) {
  auto [writer, reader] = socket_pair();
  const auto before = open_descriptors();
  b = std::make_unique<FrameStream>(std::move(reader), true, FrameStream::Use::calls);
  FrameStream flood(std::move(writer), true, FrameStream::Use::calls);
  for (int i = 0; i < 200; ++i) {
    Descriptors descriptors;
    for (int n = 0; n < 2; ++n) descriptors.emplace_back(::dup(0));
    flood.send(frame_of(Kind::ping, ""), {}, std::move(descriptors), true);  // the header announces no descriptors
    drain(*b, sink);
  }
  EXPECT_LE(open_descriptors(), before + 70);
}

TEST_F(Streams, AnErrorOfTheSinkClosesTheStreamWithIt) {
  connect();
  sink.take = [](FrameStream&, const Header&) -> Result<FrameSink::Taken> {
    return Status(Code::protocol_error, "no");
  };
  a->send(frame_of(Kind::ping, ""), {}, {}, true);
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::closed);
  EXPECT_EQ(b->status().what(), "no");
  EXPECT_TRUE(b->closed());
}

// ---- Endings

TEST_F(Streams, CloseWhileWritingCompletesEveryPartOnce) {
  connect(FrameStream::Use::calls, 4096);
  std::atomic<int> written{0}, failed{0};
  for (int i = 0; i < 20; ++i) {
    std::vector<Part> parts;
    parts.push_back({patterned(100'000), [&](const Status& status) { ++(status.ok() ? written : failed); }});
    a->send(frame_of(Kind::request, "", 100'000), std::move(parts), {}, true);
  }
  EXPECT_LT(written, 20);
  a->close({Code::cancelled, "enough"});
  EXPECT_EQ(written + failed, 20);
  a->close({Code::internal, "again"});
  EXPECT_EQ(a->status().what(), "enough");
  EXPECT_EQ(written + failed, 20);
  int late = 0;
  std::vector<Part> parts;
  parts.push_back({patterned(1), [&](const Status& status) { late += status.code() == Code::cancelled ? 1 : 1000; }});
  a->send(frame_of(Kind::request, "", 1), std::move(parts), {}, true);
  EXPECT_EQ(late, 1);
}

TEST_F(Streams, CloseWhileLandingCompletesEveryDestinationOnce) {
  connect();
  std::vector<Status> landed;
  sink.take = [&](FrameStream& stream, const Header&) {
    for (int i = 0; i < 3; ++i)
      stream.read(patterned(1000), [&](Status status) { landed.push_back(std::move(status)); });
    return FrameSink::Taken::yes;
  };
  a->send(frame_of(Kind::request, "", 3000), parts_of({patterned(1500)}), {}, true);
  drain(*b, sink);
  ASSERT_EQ(landed.size(), 1U);
  b->close({Code::cancelled, "enough"});
  ASSERT_EQ(landed.size(), 3U);
  EXPECT_TRUE(landed[0].ok());
  EXPECT_EQ(landed[1].code(), Code::cancelled);
  EXPECT_EQ(landed[2].code(), Code::cancelled);
}

TEST_F(Streams, ThePeersEndCompletesEveryOpenDestination) {
  connect();
  Status landed;
  sink.take = [&](FrameStream& stream, const Header&) {
    stream.read(patterned(1000), [&](Status status) { landed = std::move(status); });
    return FrameSink::Taken::yes;
  };
  a->send(frame_of(Kind::request, "", 1000), parts_of({patterned(999)}), {}, true);
  a->close({Code::cancelled, "gone"});
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::closed);
  EXPECT_EQ(landed.code(), Code::connection_lost);
}

TEST_F(Streams, BytesBeforeTheEndAreReadBeforeTheEndIsReported) {
  connect();
  for (int i = 0; i < 100; ++i) a->send(frame_of(Kind::control, std::to_string(i)), {}, {}, true);
  a.reset();
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::closed);
  EXPECT_EQ(sink.frames.size(), 100U);
}

TEST_F(Streams, CloseInsideAFrameTakesEffectWhenTheReaderReturns) {
  connect();
  int landed = 0;
  sink.take = [&](FrameStream& stream, const Header&) {
    stream.read(patterned(1000), [&](const Status& status) { landed += status.ok() ? 1000 : 1; });
    stream.close({Code::cancelled, "from within"});
    EXPECT_EQ(landed, 0) << "the reader is still here";
    return FrameSink::Taken::yes;
  };
  a->send(frame_of(Kind::request, "", 1000), parts_of({patterned(10)}), {}, true);
  EXPECT_EQ(drain(*b, sink), FrameStream::Progress::closed);
  EXPECT_EQ(landed, 1);
}

TEST_F(Streams, CloseFromAnotherThreadAtAnyMomentCompletesEverythingOnce) {
  for (int round = 0; round < rounds(20'000); ++round) {
    connect(FrameStream::Use::calls, 4096);
    std::atomic<int> asked{0}, completed{0}, queued{0}, written{0};
    sink.take = [&](FrameStream& stream, const Header& header) {
      ++asked;
      stream.read(patterned(header.trailing), [&](const Status&) { ++completed; });
      return FrameSink::Taken::yes;
    };
    std::thread writer([&] {
      for (int i = 0; i < 50; ++i) {
        std::vector<Part> parts;
        parts.push_back({patterned(3000), [&](const Status&) { ++written; }});
        ++queued;
        a->send(frame_of(Kind::request, "", 3000), std::move(parts), {}, true);
        if (i % 8 == 7) a->write_some();
      }
    });
    std::thread reader([&] {
      while (!b->closed()) {
        if (!b->begin_read()) continue;
        b->read_some(sink);
        b->end_read();
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 37 % 1000));
    a->close({Code::cancelled, "a"});
    b->close({Code::cancelled, "b"});
    writer.join();
    reader.join();
    EXPECT_EQ(asked, completed);
    EXPECT_EQ(queued, written);
  }
}

TEST_F(Streams, ASlowReaderDoesNotBlockTheWriter) {
  connect(FrameStream::Use::calls, 4096);
  std::atomic<int> written{0};
  sink.take = [&](FrameStream& stream, const Header& header) {
    stream.read(patterned(header.trailing, 9), [](const Status&) {});
    return FrameSink::Taken::yes;
  };
  const Since since;
  bool all = true;
  for (int i = 0; i < 50; ++i) {
    all = a->send(frame_of(Kind::request, std::to_string(i), 100'000), parts_of({patterned(100'000)}, &written), {},
                  true);
  }
  EXPECT_FALSE(all) << "says that something is left";
  EXPECT_LT(since.passed(), std::chrono::seconds(2));
  EXPECT_LT(written, 50);
  flow(50);
  EXPECT_EQ(written, 50);
  for (int i = 0; i < 50; ++i) ASSERT_EQ(sink.frames[static_cast<std::size_t>(i)], std::to_string(i));
}

/// Two ends of a TCP connection over the loopback interface.
std::pair<FileDescriptor, FileDescriptor> tcp_pair() {
  auto listener = listen_tcp("127.0.0.1", {});
  EXPECT_TRUE(listener.ok());
  auto one = start_connect_tcp("127.0.0.1", listener->port);
  EXPECT_TRUE(one.ok());
  pollfd ready{listener->socket.get(), POLLIN, 0};
  ::poll(&ready, 1, 5000);
  const int other = ::accept4(listener->socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  EXPECT_GE(other, 0);
  return {std::move(*one), FileDescriptor(other)};
}

TEST(BulkStreamOverTcp, WakesItsReaderForManyBytesOfALargeBufferAtOnce) {
  using std::chrono::milliseconds;
  constexpr std::size_t kilobyte = 1024;
  auto [one, other] = tcp_pair();
  FrameStream reader(std::move(other), false, FrameStream::Use::bulk);
  const auto write = [&, fd = one.get()](std::size_t bytes) {
    const auto source = patterned(bytes);
    for (std::size_t sent = 0; sent < bytes;) {
      const auto some = ::send(fd, source.data + sent, bytes - sent, MSG_NOSIGNAL);
      if (some > 0) sent += static_cast<std::size_t>(some);
    }
  };
  Recorder sink;
  int landed = 0;
  sink.take = [&](FrameStream& stream, const Header& header) {
    stream.read(patterned(header.trailing), [&](const Status& status) { landed += status.ok() ? 1 : 100; });
    return FrameSink::Taken::yes;
  };
  const auto header = frame_of(Kind::bulk, "", 300 * kilobyte);
  EXPECT_EQ(::send(one.get(), header.data(), header.size(), MSG_NOSIGNAL), static_cast<ssize_t>(header.size()));
  ASSERT_TRUE(reader.begin_read());
  EXPECT_TRUE(reader.wait_readable(milliseconds(5000))) << "a frame is reported at once";
  while (reader.read_some(sink) == FrameStream::Progress::some) {
  }
  write(64 * kilobyte);
  EXPECT_FALSE(reader.wait_readable(milliseconds(20))) << "a part of the buffer is not";
  write(200 * kilobyte);
  EXPECT_TRUE(reader.wait_readable(milliseconds(5000)));
  while (reader.read_some(sink) == FrameStream::Progress::some) {
  }
  write(36 * kilobyte);
  EXPECT_TRUE(reader.wait_readable(milliseconds(5000))) << "the end of the buffer is reported however short it is";
  while (reader.read_some(sink) == FrameStream::Progress::some) {
  }
  EXPECT_EQ(landed, 1);
  EXPECT_EQ(::send(one.get(), header.data(), header.size(), MSG_NOSIGNAL), static_cast<ssize_t>(header.size()));
  EXPECT_TRUE(reader.wait_readable(milliseconds(5000))) << "and so is the next frame";
  one.reset();
  EXPECT_TRUE(reader.wait_readable(milliseconds(5000)));
  reader.end_read();
}

TEST(Nudges, ReachEverySleeperWhileTheDescriptorIsGivenBack) {
  Nudge nudge;
  std::atomic<int> asked{0}, answered{0};
  std::atomic<bool> over{false};
  int lost = 0;
  std::thread sleeper([&] {
    while (!over) {
      const Nudge::Sleeper here(nudge);
      while (!over && asked == answered) {
        pollfd source{here.fd(), POLLIN, 0};
        lost += ::poll(&source, 1, 5000) == 0 ? 1 : 0;
        here.drain();
      }
      answered = asked.load();
    }
  });
  std::thread idler([&] {
    while (!over) nudge.give_back_if_idle();
  });
  for (int i = 1; i <= rounds(100'000); ++i) {
    asked = i;
    nudge.wake();
    while (answered != i) std::this_thread::yield();
  }
  over = true;
  nudge.wake();
  sleeper.join();
  idler.join();
  EXPECT_EQ(lost, 0);
}

TEST(Nudges, CostNoDescriptorWhileNoThreadSleeps) {
  Nudge nudge;
  const auto before = open_descriptors();
  { const Nudge::Sleeper here(nudge); }
  EXPECT_EQ(open_descriptors(), before + 1);
  nudge.give_back_if_idle();
  nudge.wake();
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace tensorferry
