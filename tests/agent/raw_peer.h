/// A peer whose every byte the test chooses. It dials an agent, or takes an agent's place and is dialled.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/connections/connections.h"
#include "agent/handshake/auth.h"
#include "agent/rendezvous/directory.h"
#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"
#include "agent/wire/frame.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/channels/basic_tickets.h"

namespace tensorferry::testing {

/// One connection. Reads and writes block until they are done, or for `long_enough`.
class RawConnection {
 public:
  explicit RawConnection(FileDescriptor fd) : fd_(std::move(fd)) {}

  Status write(ByteView bytes) { return write_all(fd_.get(), bytes, soon()); }
  Status write(std::string_view text) { return write(view_of(text)); }
  struct Frame {
    wire::Header header;
    Bytes body;
  };
  Result<Frame> read() {
    Bytes head(wire::Header::size);
    if (auto status = read_exactly(fd_.get(), head, soon()); !status) return status;
    const auto header = wire::Header::decode(head);
    if (!header) return header.status();
    Frame frame{*header, Bytes(header->length)};
    if (auto status = read_exactly(fd_.get(), frame.body, soon()); !status) return status;
    return frame;
  }
  /// Returns the next frame of this kind, and drops the frames before it.
  Result<Frame> read(wire::Kind kind) {
    while (true) {
      auto frame = read();
      if (!frame || frame->header.kind == kind) return frame;
    }
  }
  Bytes read_bytes(std::size_t count) {
    Bytes bytes(count);
    EXPECT_TRUE(read_exactly(fd_.get(), bytes, soon()).ok());
    return bytes;
  }
  /// Returns whether the other side closes the connection in time. Drops the bytes that it sent before.
  bool ended(std::chrono::milliseconds within = long_enough) {
    Bytes bytes(1 << 16);
    const auto is_closed = [&] {
      const auto got = ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      return got == 0 || (got < 0 && errno == ECONNRESET);
    };
    return eventually(is_closed, within);
  }
  void half_close() { ::shutdown(fd_.get(), SHUT_WR); }
  void close() { fd_.reset(); }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  static Deadline soon() { return deadline_after(long_enough); }
  FileDescriptor fd_;
};

/// Returns the record that agents find in the store under this name. `key`: that of the agents, if they have one.
inline Record record_of(const std::shared_ptr<Store>& store, const std::string& name, const Key& key = {}) {
  const auto record = Directory(store, "tensorferry", key).find(name, long_enough);
  EXPECT_TRUE(record.ok()) << record.status().text();
  return record.ok() ? *record : Record{};
}

inline Terms raw_terms(const Key& key, bool proof) {
  Terms terms;
  terms.key = &key;
  terms.demands_proof = proof;
  terms.purpose = "link";
  return terms;
}

/// Connects to the agent of that record, and sends nothing.
inline RawConnection raw_connect(const Record& record, bool by_unix) {
  if (by_unix) {
    auto socket = connect_unix(record.unix_address);
    EXPECT_TRUE(socket.ok()) << socket.status().text();
    return RawConnection(socket.ok() ? std::move(*socket) : FileDescriptor());
  }
  const auto where = split_host_port(record.tcp_addresses.at(0));
  auto socket = start_connect_tcp(where->host, where->port);
  EXPECT_TRUE(socket.ok()) << socket.status().text();
  if (!socket.ok()) return RawConnection(FileDescriptor());
  EXPECT_TRUE(wait_for_socket(socket->get(), POLLOUT, deadline_after(long_enough)).ok());
  return RawConnection(std::move(*socket));
}

/// Returns a raw peer's hello. It announces the channel basic alone, for the CPU.
inline wire::Hello raw_hello(const std::string& name, std::uint64_t incarnation = 77) {
  wire::Hello hello;
  hello.name = name;
  hello.incarnation = incarnation;
  hello.devices = {Device{}};
  hello.drivers = {{"basic", {{{}, {}}}}};
  return hello;
}

inline Bytes hello_frame(const wire::Hello& hello) {
  wire::Header header;
  header.kind = wire::Kind::hello;
  return wire::assemble(header, {}, {}, encode(hello));
}

inline Bytes go_frame(std::uint64_t number) {
  wire::Header header;
  header.kind = wire::Kind::go;
  header.connection = number;
  return wire::assemble(header, {}, {}, {});
}

/// The number of a raw peer's connection for calls, if it decides, as it does whose incarnation is low.
constexpr std::uint64_t raw_number = 1;

/// Sends `go`, or reads the other side's. `self` and `other`: the incarnations. A bulk connection's acceptor says it.
inline Status raw_go(RawConnection& connection, std::uint64_t self, std::uint64_t other, wire::Hello::Purpose purpose,
                     bool dialled, std::uint64_t number = raw_number) {
  if (!decides({"", -1, self}, other, purpose, dialled)) return connection.read(wire::Kind::go).status();
  return connection.write(go_frame(number));
}

/// Dials the agent `name` of the store, and performs the handshake and the exchange of hellos. Frames may follow. Dials
/// again if the agent has cut it off, as an agent does whose acceptor, or who itself, was held up in the handshake.
/// `go`: also waits for the agent's `go`, or says `go` with the number in the hello, or else with raw_number.
inline RawConnection raw_dial(const std::shared_ptr<Store>& store, const std::string& name, wire::Hello hello,
                              bool by_unix = true, bool go = true) {
  const auto number = hello.connection != 0 ? hello.connection : raw_number;
  if (hello.purpose != wire::Hello::Purpose::calls) hello.connection = number;
  for (const Since since;;) {
    auto connection = raw_connect(record_of(store, name), by_unix);
    const auto agreed = handshake_as_dialler(connection.fd(), raw_terms(Key(), false), deadline_after(long_enough));
    auto status = agreed.status();
    const auto theirs = status.ok() ? connection.read(wire::Kind::hello) : Result<RawConnection::Frame>(status);
    status = theirs.status();
    if (status.ok()) status = connection.write(hello_frame(hello));
    if (status.ok() && go)
      status = raw_go(connection, hello.incarnation, wire::Hello::decode(theirs->body)->incarnation, hello.purpose,
                      true, number);
    if (!status.ok() && status.code() == Code::connection_lost && since.passed() < long_enough) continue;
    EXPECT_TRUE(status.ok()) << status.text();
    return connection;
  }
}

/// A listener that has an agent's record in the store, of this host and user. The test answers its connections itself.
class RawPeer {
 public:
  RawPeer(const std::shared_ptr<Store>& store, const std::string& name) : RawPeer(store, name, raw_hello(name, 0)) {}
  /// Announces `hello`, with the incarnation of its own record.
  RawPeer(const std::shared_ptr<Store>& store, const std::string& name, wire::Hello hello)
      : hello_(std::move(hello)), directory_(store, "tensorferry", {}) {
    auto listener = listen_unix("");
    EXPECT_TRUE(listener.ok());
    listener_ = std::move(listener->socket);
    auto record = describe_this_process();
    record.name = name;
    record.unix_address = listener->address;
    hello_.incarnation = record.incarnation;
    EXPECT_TRUE(directory_.join(record, [](const Record&) { return false; }).ok());
  }

  struct Accepted {
    RawConnection connection;
    wire::Hello hello;
  };
  /// Accepts the next connection, and performs the handshake and the exchange of hellos. If its dialler has given it
  /// up, because the system held one of the two up, goes on with the connection that the dialler makes then.
  Accepted accept() {
    for (const Since since;;) {
      EXPECT_TRUE(wait_for_socket(listener_.get(), POLLIN, deadline_after(long_enough)).ok());
      RawConnection connection(
          FileDescriptor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
      const Key none;
      auto status =
          handshake_as_acceptor(connection.fd(), raw_terms(none, false), deadline_after(long_enough)).status();
      if (status.ok()) status = connection.write(hello_frame(hello_));
      const auto frame = status.ok() ? connection.read(wire::Kind::hello) : Result<RawConnection::Frame>(status);
      if (frame.status().code() == Code::connection_lost && since.passed() < long_enough) continue;
      EXPECT_TRUE(frame.ok()) << frame.status().text();
      auto hello = frame.ok() ? wire::Hello::decode(frame->body) : Result<wire::Hello>(frame.status());
      EXPECT_TRUE(hello.ok());
      if (hello.ok()) status = raw_go(connection, hello_.incarnation, hello->incarnation, hello->purpose, false);
      if (status.code() == Code::connection_lost && since.passed() < long_enough) continue;
      EXPECT_TRUE(status.ok()) << status.text();
      return {std::move(connection), hello.ok() ? std::move(*hello) : wire::Hello()};
    }
  }
  /// Takes the next connection and closes it at once, as an agent does that has too many in the handshake.
  void refuse() {
    EXPECT_TRUE(wait_for_socket(listener_.get(), POLLIN, deadline_after(long_enough)).ok());
    const FileDescriptor refused(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  }
  void stop_listening() { listener_.reset(); }
  [[nodiscard]] const wire::Hello& hello() const { return hello_; }

 private:
  wire::Hello hello_;
  FileDescriptor listener_;
  Directory directory_;
};

// ---- Frames made by hand

inline Bytes request_frame(std::uint64_t call, std::string_view function, ByteView records = {},
                           std::uint16_t buffers = 0, std::uint64_t trailing = 0, std::string_view payload = {}) {
  Bytes extensions;
  Writer writer(extensions);
  wire::put_extension(writer, wire::extension::function_name, view_of(function));
  wire::Header header;
  header.kind = wire::Kind::request;
  header.call = call;
  header.buffers = buffers;
  header.trailing = trailing;
  return wire::assemble(header, extensions, records, view_of(payload));
}

inline Bytes reply_frame(std::uint64_t call, ByteView records = {}, std::uint16_t buffers = 0,
                         std::uint64_t trailing = 0, std::string_view payload = {}) {
  wire::Header header;
  header.kind = wire::Kind::reply;
  header.call = call;
  header.buffers = buffers;
  header.trailing = trailing;
  return wire::assemble(header, {}, records, view_of(payload));
}

inline Bytes plain_frame(wire::Kind kind, std::uint64_t call = 0) {
  wire::Header header;
  header.kind = kind;
  header.call = call;
  return wire::assemble(header, {}, {}, {});
}

/// Returns the record of a buffer on the sender's first channel (basic), with any ticket.
inline Bytes record_frame(std::uint64_t bytes, ByteView ticket, std::uint8_t channel = 0, ControlId after = 0) {
  wire::BufferRecord record;
  record.channel = channel;
  record.bytes = bytes;
  record.ticket = ticket;
  record.after = after;
  Bytes out;
  Writer writer(out);
  record.encode(writer);
  return out;
}

}  // namespace tensorferry::testing
