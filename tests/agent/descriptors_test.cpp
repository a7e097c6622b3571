// What strangers and peers do to the descriptors of a process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "base/foreign_descriptor.h"
#include "tests/agent/agents.h"
#include "tests/agent/descriptor_limit.h"
#include "tests/agent/forked.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

const std::string key_text = "the key of the agents";

bool proves_itself(std::uint16_t port, const Key& key) {
  auto socket = start_connect_tcp("127.0.0.1", port);
  // It may be one of those that are shed: then another one is made soon.
  if (!socket || !wait_for_socket(socket->get(), POLLOUT, deadline_after(seconds(5)))) return false;
  return handshake_as_dialler(socket->get(), raw_terms(key, true), deadline_after(seconds(5))).ok();
}

/// Many strangers at both ports, and then a peer with the key. Returns the exit status: 0 if both ports serve it.
int come_as_strangers_and_then_as_a_peer(int ports) {
  std::array<std::uint16_t, 2> port{};  // of the agent, of the store
  if (::read(ports, port.data(), sizeof port) != sizeof port) return 2;
  raise_descriptor_limit();
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 200; ++i) {
    for (const auto each : port) {
      if (auto socket = start_connect_tcp("127.0.0.1", each)) strangers.push_back(std::move(*socket));
    }
  }
  const auto key = *Key::from_text(key_text);
  if (!eventually([&] { return proves_itself(port[0], key); })) return 3;
  const auto store = connect_tcp_store("127.0.0.1", port[1], key_text, long_enough);
  return store && (*store)->set("k", view_of("v")).ok() ? 0 : 4;
}

TEST(OutOfDescriptors, AnAgentAndTheStoreShedStrangersAndGoOnServingPeers) {
  if (under_sanitizer) GTEST_SKIP() << "UBSan's check of a virtual call needs the descriptors of a pipe";
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(come_as_strangers_and_then_as_a_peer(pipe[0]));

  raise_descriptor_limit();
  const auto served = TcpStoreServer::listen("127.0.0.1", 0, key_text);
  ASSERT_TRUE(served.ok()) << served.status().text();
  const auto store = connect_tcp_store("127.0.0.1", (*served)->port(), key_text, long_enough);
  ASSERT_TRUE(store.ok());
  const auto with_key = [](RawAgentOptions& options) { options.key = key_text; };
  const auto target = join(*store, "target", {}, with_key), peer = join(*store, "peer", {}, with_key);
  serve_echo(*target);
  ASSERT_TRUE(call_sync(*peer, "target", "echo", message_of("x")).ok());
  const auto address = split_host_port(record_of(*store, "target", *Key::from_text(key_text)).tcp_addresses.at(0));
  const std::array<std::uint16_t, 2> ports{address->port, (*served)->port()};

  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const FileDescriptor highest(::fcntl(0, F_DUPFD_CLOEXEC, 0));
  const rlimit few{static_cast<rlim_t>(highest.get()) + 8, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  ASSERT_EQ(::write(pipe[1], ports.data(), sizeof ports), static_cast<ssize_t>(sizeof ports));
  int status = -1;
  do {
    const auto reply = call_sync(*peer, "target", "echo", message_of("x"), within(long_enough));
    EXPECT_TRUE(reply.ok()) << reply.status().text();
  } while (::waitpid(child, &status, WNOHANG) == 0);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
}

/// Returns a socket whose close() waits for ten minutes, because its other end reads nothing, and that end.
std::array<FileDescriptor, 2> socket_that_hangs_in_close() {
  auto listener = listen_tcp("127.0.0.1", {});
  EXPECT_TRUE(listener.ok());
  auto socket = start_connect_tcp("127.0.0.1", listener->port);
  EXPECT_TRUE(socket.ok());
  EXPECT_TRUE(wait_for_socket(listener->socket.get(), POLLIN, deadline_after(long_enough)).ok());
  FileDescriptor other(::accept4(listener->socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const linger waits{1, 600};
  ::setsockopt(socket->get(), SOL_SOCKET, SO_LINGER, &waits, sizeof waits);
  const std::string bytes(1 << 20, 'x');
  while (::send(socket->get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  return {std::move(*socket), std::move(other)};
}

void send_with_descriptor(int socket, const Bytes& frame, int descriptor) {
  std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part{const_cast<std::byte*>(frame.data()), frame.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  auto* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  ASSERT_EQ(::sendmsg(socket, &message, MSG_NOSIGNAL), static_cast<ssize_t>(frame.size()));
}

TEST(ForeignDescriptors, WhoseCloseHangsDelayNoPeer) {
  const auto store = std::make_shared<MemoryStore>();
  const auto target = join(store, "target", {"unix", "basic"});
  serve_echo(*target);
  auto mallory = raw_dial(store, "target", raw_hello("mallory"));
  auto [hangs, reads_nothing] = socket_that_hangs_in_close();
  wire::Header header;
  header.kind = wire::Kind::ping;
  header.descriptors = 1;
  send_with_descriptor(mallory.fd(), wire::assemble(header, {}, {}, {}), hangs.get());
  // The target has the last one, unless it has ended the connection already: then it is this close that hangs.
  std::thread closing([mine = std::move(hangs)]() mutable { mine.reset(); });
  const auto peer = join(store, "peer", {"unix", "basic"});
  EXPECT_TRUE(call_sync(*peer, "target", "echo", message_of("x"), within(long_enough)).ok());
  const bool asked = mallory.write(request_frame(1, "echo")).ok();
  EXPECT_TRUE((asked && mallory.read(wire::Kind::reply).ok()) || mallory.ended())
      << "its own reader does not hang either";
  reads_nothing.reset();  // a reset ends the wait
  closing.join();
}

TEST(ForeignDescriptors, AreToldFromMemoryWithoutAskingTheirFileSystem) {
  const FileDescriptor memory(::memfd_create("m", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const FileDescriptor file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const FileDescriptor folder(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_TRUE(foreign_descriptor::closes_at_once(memory.get()));
  for (const auto* each : {&file, &folder, &socket}) EXPECT_FALSE(foreign_descriptor::closes_at_once(each->get()));
}

}  // namespace
}  // namespace tensorferry
