// Agents whose TCP connections use TLS.
#include <gmock/gmock.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>

#include "agent/rendezvous/tcp_store.h"
#include "base/log.h"
#include "tests/agent/agents.h"
#include "tests/agent/certificates.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"
#include "tests/agent/sockets.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* our_key = "the cluster key of agents over TLS";

std::string what(const Status& status) { return std::string(status.what()); }

/// Runs `work`, and returns what the process has logged meanwhile. The listener at `address` logs what it refuses after
/// the refused end knows, on one thread: so when it has refused one more connection, it has logged all before.
template <class Work>
std::string log_of(const std::string& address, const Work& work) {
  log_rate::forget();
  ::testing::internal::CaptureStderr();
  work();
  Record record;
  record.tcp_addresses = {address};
  auto last = raw_connect(record, false);
  EXPECT_TRUE(last.write(std::string(100, '?')).ok());
  EXPECT_TRUE(last.ended());
  return ::testing::internal::GetCapturedStderr();
}

class TlsAgents : public ::testing::Test {
 protected:
  std::shared_ptr<RawAgent> agent(const std::string& name, const std::string& tls, const std::string& key = our_key) {
    auto made = join(store, name, {"tcp", "basic"}, [&](RawAgentOptions& options) {
      options.tls = tls;
      options.key = key;
    });
    serve_echo(*made);
    return made;
  }
  /// Returns the address of an agent that has our key.
  std::string address_of(const std::string& name) {
    return record_of(store, name, *Key::from_text(our_key)).tcp_addresses.at(0);
  }
  static Status echo(RawAgent& from, const std::string& to, std::size_t bytes = 0) {
    auto message = message_of("x");
    if (bytes != 0) message.buffers = {patterned(bytes)};
    const auto reply = call_sync(from, to, "echo", message, within(long_enough));
    if (reply.ok() && bytes != 0) {
      EXPECT_TRUE(same_bytes(reply->buffers.at(0), message.buffers[0]));
    }
    return reply.status();
  }
  TemporaryFolder folder;
  Authority ours{folder.path(), "ours"}, foreign{folder.path(), "foreign"};
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
};

// ---- What matches works

class TlsForms : public TlsAgents, public ::testing::WithParamInterface<const char*> {
 protected:
  std::string tls_of(const std::string& name) { return GetParam() == std::string("key") ? "key" : ours.issue(name); }
  std::shared_ptr<RawAgent> a = agent("a", tls_of("a")), b = agent("b", tls_of("b"));
};

INSTANTIATE_TEST_SUITE_P(Of, TlsForms, ::testing::Values("key", "certificates"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(TlsForms, CarryCallsAndLargeBuffersBothWays) {
  for (const std::size_t bytes : {0UL, 1UL, 5000UL, 300'000UL, 16UL << 20}) {
    for (const auto& status : {echo(*a, "b", bytes), echo(*b, "a", bytes)})
      EXPECT_TRUE(status.ok()) << bytes << ": " << status.text();
  }
  EXPECT_EQ(a->explain("b")->transport, "tcp");
}

TEST_P(TlsForms, CarryManyCallsAtOnce) {
  std::vector<Call> calls;
  for (unsigned i = 0; i < 400; ++i) {
    auto message = message_of(std::to_string(i));
    if (i % 10 == 0) message.buffers = {patterned(200'000 + i, i)};
    calls.push_back((i % 2 == 0 ? a : b)->call(i % 2 == 0 ? "b" : "a", "echo", std::move(message)));
  }
  for (unsigned i = 0; i < calls.size(); ++i) {
    ASSERT_TRUE(calls[i].wait());
    const auto reply = calls[i].take();
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_EQ(text_of(reply->payload), std::to_string(i));
    if (i % 10 == 0) {
      EXPECT_TRUE(same_bytes(reply->buffers.at(0), patterned(200'000 + i, i)));
    }
  }
}

TEST_P(TlsForms, RunOrderedCallsInOrder) {
  std::vector<int> seen;
  b->serve("note", [&](Request request, Reply reply) {
    seen.push_back(std::stoi(std::string(text_of(request.arguments.payload))));
    reply.send({});
  });
  RawCallOptions options;
  options.order = 7;
  std::vector<Call> calls;
  for (int i = 0; i < 200; ++i) calls.push_back(a->call("b", "note", message_of(std::to_string(i)), options));
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok());
  }
  ASSERT_EQ(seen.size(), 200U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
}

TEST_P(TlsForms, DialAgainWhenTheConnectionsAreLost) {
  ASSERT_TRUE(echo(*a, "b", 1 << 20).ok());
  for (int round = 0; round < 3; ++round) {
    sever_connections();
    EXPECT_TRUE(eventually([&] { return echo(*a, "b", 1 << 20).ok() && echo(*b, "a", 1 << 20).ok(); }));
  }
}

TEST_P(TlsForms, EndTheLinkAtForgedBytesByName) {
  std::promise<Reply> asked;
  b->serve("hang", [&](const Request&, Reply reply) { asked.set_value(std::move(reply)); });
  auto call = a->call("b", "hang", {}, within(long_enough));
  const auto held = asked.get_future().get();
  // Any process that can write to the path could send these.
  const std::string forged("\x17\x03\x03\x00\x20 these bytes were not encrypted.", 37);
  for (const int fd : sockets_of_this_process()) {
    if (!listens(fd)) (void)!::send(fd, forged.data(), forged.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto why = call.take().status();
  EXPECT_EQ(why.code(), Code::connection_lost) << why.text();
  EXPECT_THAT(what(why), HasSubstr("\"b\""));
  EXPECT_TRUE(eventually([&] { return echo(*a, "b").ok(); }));
}

// ---- What does not match is refused by name at both ends

TEST_F(TlsAgents, OfAnotherKeyAreRefusedByNameAtBothEnds) {
  const auto a = agent("a", "key");
  const auto b = agent("b", "key", "another cluster key, also long enough");
  const auto why = echo(*a, "b");
  EXPECT_EQ(why.code(), Code::unauthenticated) << why.text();  // the record's signature tells already
  const auto address = record_of(store, "b", *Key::from_text("another cluster key, also long enough")).tcp_addresses[0];
  // An agent with that record's address and our signature shows what the handshake says.
  auto record = describe_this_process();
  record.name = "c";
  record.tcp_addresses = {address};
  ASSERT_TRUE(
      Directory(store, "tensorferry", *Key::from_text(our_key)).join(record, [](const Record&) { return false; }).ok());
  Status refused;
  const auto log = log_of(address, [&] { refused = echo(*a, "c"); });
  EXPECT_EQ(refused.code(), Code::unauthenticated) << refused.text();
  EXPECT_THAT(what(refused), AllOf(HasSubstr("\"c\""), HasSubstr(address), HasSubstr("another cluster key")));
  EXPECT_THAT(
      log, AllOf(HasSubstr("refused a connection: transport=tcp from=127.0.0.1:"), HasSubstr("another cluster key")));
}

TEST_F(TlsAgents, AndAgentsWithoutTlsRefuseEachOtherByName) {
  const auto a = agent("a", "key"), b = agent("b", "off");
  const auto address_a = address_of("a"), address_b = address_of("b");
  Status there, back;
  const auto log_there = log_of(address_b, [&] { there = echo(*a, "b"); });
  const auto log_back = log_of(address_a, [&] { back = echo(*b, "a"); });
  EXPECT_EQ(there.code(), Code::unauthenticated);
  EXPECT_EQ(back.code(), Code::unauthenticated);
  EXPECT_THAT(what(there), AllOf(HasSubstr("\"b\""), HasSubstr(address_b),
                                 HasSubstr("this process uses TLS, and the peer does not"), HasSubstr("tls=")));
  EXPECT_THAT(what(back), AllOf(HasSubstr("\"a\""), HasSubstr(address_a),
                                HasSubstr("the peer uses TLS, and this process does not"), HasSubstr("tls=")));
  EXPECT_THAT(log_there,
              AllOf(HasSubstr("from=127.0.0.1:"), HasSubstr("the peer uses TLS, and this process does not")));
  EXPECT_THAT(log_back, AllOf(HasSubstr("from=127.0.0.1:"), HasSubstr("this process uses TLS, and the peer does not")));
  EXPECT_EQ(a->counters().calls_served + b->counters().calls_served, 0U);
}

TEST_F(TlsAgents, WithAForeignOrExpiredCertificateAreRefusedByNameAtBothEnds) {
  const auto a = agent("a", ours.issue("a"));
  const auto b = agent("b", foreign.issue("b")), c = agent("c", ours.issue("c", -60));
  for (const auto& [name, reason] : {std::pair{"b", "self-signed certificate"}, {"c", "certificate has expired"}}) {
    Status why;
    const auto log = log_of(address_of(name), [&] { why = echo(*a, name); });
    EXPECT_EQ(why.code(), Code::unauthenticated) << why.text();
    EXPECT_THAT(what(why), AllOf(HasSubstr("127.0.0.1:"), HasSubstr("the peer's certificate was refused"),
                                 HasSubstr("/CN=" + std::string(name)), HasSubstr(reason)));
    EXPECT_THAT(log, HasSubstr("the peer refused this process's certificate"));
  }
  Status back;
  const auto log = log_of(address_of("a"), [&] { back = echo(*c, "a"); });
  EXPECT_EQ(back.code(), Code::unauthenticated) << back.text();
  EXPECT_THAT(what(back), HasSubstr("refused this process's certificate: certificate expired"));
  EXPECT_THAT(log, AllOf(HasSubstr("/CN=c"), HasSubstr("certificate has expired")));
}

TEST_F(TlsAgents, StillNeedTheKeyInsideTls) {
  const auto a = agent("a", ours.issue("a"));
  const auto b = agent("b", ours.issue("b"), "another cluster key, also long enough");
  EXPECT_EQ(echo(*a, "b").code(), Code::unauthenticated);
}

TEST_F(TlsAgents, DoNotBeginWithAnOptionThatMakesNoSense) {
  const auto refusal = [&](const std::string& tls, const std::string& key) {
    RawAgentOptions options;
    options.name = "refused";
    options.store = store;
    options.tls = tls;
    options.key = key;
    return RawAgent::join(options).status();
  };
  EXPECT_EQ(refusal("key", "").code(), Code::invalid_argument);
  EXPECT_EQ(refusal("sometimes", our_key).code(), Code::invalid_argument);
  ::setenv("TENSORFERRY_TLS", "key", 1);
  EXPECT_EQ(refusal("", "").code(), Code::invalid_argument) << "the variable counts";
  EXPECT_TRUE(refusal("off", "").ok()) << "the option goes before it";
  ::unsetenv("TENSORFERRY_TLS");
}

TEST_F(TlsAgents, OfOneHostKeepTheirUnixSockets) {
  const auto by = [&](const std::string& name) {
    return join(store, name, {"ring", ""}, [](RawAgentOptions& options) {
      options.tls = "key";
      options.key = our_key;
    });
  };
  const auto a = by("a"), b = by("b");
  serve_echo(*b);
  ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("x")).ok());
  EXPECT_EQ(a->explain("b")->transport, "ring");
}

// ---- Strangers

TEST_F(TlsAgents, CutSilentStrangersOffAndServeOthersMeanwhile) {
  const auto a = agent("a", "key"), b = agent("b", "key");
  const auto record = record_of(store, "b", *Key::from_text(our_key));
  std::vector<RawConnection> strangers;
  strangers.reserve(30);
  for (int i = 0; i < 30; ++i) strangers.push_back(raw_connect(record, false));
  // The beginning of a client hello, which never goes on.
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(strangers[i].write(std::string("\x16\x03\x01\x02\x00\x01", 6)).ok());
  for (int i = 10; i < 20; ++i) EXPECT_TRUE(strangers[i].write("GET / HTTP/1.1\r\n\r\n").ok());
  EXPECT_TRUE(echo(*a, "b").ok());
  for (auto& stranger : strangers) EXPECT_TRUE(stranger.ended());
  EXPECT_TRUE(echo(*a, "b").ok());
}

// ---- New files

TEST_F(TlsAgents, ReadCertificateFilesAgainAtTheNextConnection) {
  const auto a = agent("a", ours.issue("a")), b = agent("b", ours.issue("b"));
  ASSERT_TRUE(echo(*a, "b").ok());
  // Both get certificates of the other authority, in the same files.
  const auto replace = [&](const std::string& name) {
    (void)foreign.issue("new-" + name);
    for (const auto* ending : {".crt", ".key"})
      std::filesystem::rename(folder.path() + "/new-" + name + ending, folder.path() + "/" + name + ending);
  };
  replace("a");
  replace("b");
  std::filesystem::copy_file(foreign.file(), ours.file(), std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(echo(*a, "b").ok()) << "the connection that is open stays";
  sever_connections();
  EXPECT_TRUE(eventually([&] { return echo(*a, "b").ok(); }));
  const auto c = agent("c", foreign.issue("c"));
  EXPECT_TRUE(echo(*c, "b").ok()) << "b has a certificate of the other authority now, and trusts it";
}

TEST_F(TlsAgents, KeepTheirCertificatesIfTheNewFilesAreBroken) {
  const auto a = agent("a", ours.issue("a")), b = agent("b", ours.issue("b"));
  ASSERT_TRUE(echo(*a, "b").ok());
  std::ofstream(folder.path() + "/b.crt") << "no certificate";
  const auto log = log_of(address_of("b"), [&] {
    for (int round = 0; round < 3; ++round) {
      sever_connections();
      EXPECT_TRUE(eventually([&] { return echo(*a, "b").ok(); }));
    }
  });
  const std::string warning = "the files of TLS have changed, and the earlier ones stay in use";
  const auto first = log.find(warning);
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find(warning, first + 1), std::string::npos) << "once: " << log;
  EXPECT_THAT(log, HasSubstr("b.crt"));
}

// ---- The built-in store

TEST_F(TlsAgents, MeetAtAStoreWithTls) {
  for (const auto& [mine, theirs] :
       {std::pair<std::string, std::string>{"key", "key"}, {ours.issue("server"), ours.issue("client")}}) {
    const auto server = TcpStoreServer::listen("127.0.0.1", 0, our_key, {}, mine);
    ASSERT_TRUE(server.ok()) << server.status().text();
    const auto client = connect_tcp_store("127.0.0.1", (*server)->port(), our_key, long_enough, {}, theirs);
    ASSERT_TRUE(client.ok()) << client.status().text();
    const auto value = bytes_of(std::string(300'000, 'v'));
    ASSERT_TRUE((*client)->set("key", value).ok());
    for (int i = 0; i < 3; ++i) {
      const auto got = (*client)->get("key", seconds(5));
      ASSERT_TRUE(got.ok()) << got.status().text();
      EXPECT_TRUE(*got == value);
    }
    auto waits = std::async(std::launch::async, [&] { return (*client)->get("later", seconds(20)); });
    ASSERT_TRUE((*client)->set("later", bytes_of("come")).ok());
    EXPECT_TRUE(waits.get().ok());
    EXPECT_EQ(*(*client)->add("count", 2), 2);
  }
}

TEST_F(TlsAgents, AndStoresThatDoNotMatchRefuseEachOtherByName) {
  const auto refusal = [](const std::string& server_tls, const std::string& client_tls, std::string* log) {
    const auto server = TcpStoreServer::listen("127.0.0.1", 0, our_key, {}, server_tls);
    EXPECT_TRUE(server.ok());
    Status why;
    *log = log_of(join_host_port("127.0.0.1", (*server)->port()), [&] {
      why = connect_tcp_store("127.0.0.1", (*server)->port(), our_key, long_enough, {}, client_tls).status();
    });
    return why;
  };
  std::string log;
  const auto plain_client = refusal("key", "off", &log);
  EXPECT_EQ(plain_client.code(), Code::unauthenticated) << plain_client.text();
  EXPECT_THAT(what(plain_client), AllOf(HasSubstr("store at 127.0.0.1:"), HasSubstr("the peer uses TLS")));
  EXPECT_THAT(log, HasSubstr("this process uses TLS, and the peer does not"));
  const auto plain_server = refusal("off", "key", &log);
  EXPECT_EQ(plain_server.code(), Code::unauthenticated) << plain_server.text();
  EXPECT_THAT(what(plain_server), HasSubstr("this process uses TLS, and the peer does not"));
  EXPECT_THAT(log, HasSubstr("the peer uses TLS, and this process does not"));
}

}  // namespace
}  // namespace tensorferry
