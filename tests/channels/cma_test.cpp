#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "channels/cma/cma_channel.h"
#include "channels/cma/messages.h"
#include "channels/completion.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

constexpr cma::CmaOptions here{.within_process = true};

struct CmaFixture {
  static constexpr auto name = "cma";
  static Drivers drivers() { return {std::make_unique<CmaDriver>(here), std::make_unique<CmaDriver>(here)}; }
  static Traits traits() {
    if (auto refusal = cma::own_scope_refusal()) return {.missing = *refusal};
    return {};
  }
};

namespace {

using ::testing::HasSubstr;

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

/// Returns the address of a page that cannot be read.
std::uint64_t unreadable_address() {
  static void* const page = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return reinterpret_cast<std::uintptr_t>(page);
}

// ---- Two honest ends

class Cma : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto refusal = cma::own_scope_refusal()) GTEST_SKIP() << *refusal;
    ASSERT_TRUE(a.wait_ready()->ok()) << a.wait_ready()->text();
    ASSERT_TRUE(b.wait_ready()->ok()) << b.wait_ready()->text();
  }
  CmaDriver driver{here};
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{driver, driver, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;
};

TEST_F(Cma, SmallBuffersAreLeftToOtherChannelsIfThereAreAny) {
  for (const bool only : {false, true}) {
    Letter letter(a);
    letter.only_channel = only;
    auto offer = a.channel().offer(memory->filled(16 * kilobyte - 1, 1), Sharing::by_value, letter, {});
    ASSERT_EQ(std::holds_alternative<Ticket>(offer), only);
    if (only) continue;
    EXPECT_THAT(std::get<Refusal>(offer).reason, HasSubstr("below 16384 bytes"));
    EXPECT_TRUE(std::get<Refusal>(offer).passing) << "it would be warned of";
  }
  Letter letter(a);
  letter.only_channel = false;
  EXPECT_TRUE(letter.offer(memory->filled(16 * kilobyte, 1)));
}

TEST_F(Cma, LargeBuffersArriveWhole) {
  for (const std::size_t bytes : {4 * megabyte - 1, 4 * megabyte, 33 * megabyte + 5}) {
    a.send(memory->filled(bytes, 3));
    const auto arrivals = b.receive();
    ASSERT_EQ(arrivals.size(), 1U);
    EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 3));
  }
}

TEST_F(Cma, TheSourceIsReleasedByTheAcknowledgementOnly) {
  b.behave({.acknowledges = false});
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(100 * kilobyte, 1)));
  EXPECT_TRUE(letter.tickets.front().acknowledge);
  letter.send();
  EXPECT_EQ(b.receive().size(), 1U);
  EXPECT_EQ(letter.released.front().runs(), 0);
  a.channel().acknowledged(letter.tickets.front());
  a.channel().acknowledged(letter.tickets.front());
  EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  EXPECT_EQ(letter.released.front().runs(), 1);
}

TEST_F(Cma, ValuesAreValues) {
  const auto source = memory->filled(megabyte, 1);
  a.send(source);
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1U);
  memory->fill(source, 2);
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 1));
}

TEST_F(Cma, MemoryIsNotShared) {
  Letter letter(a);
  EXPECT_FALSE(letter.offer(memory->filled(megabyte, 1), {}, Sharing::shared));
  EXPECT_THAT(letter.refusal, HasSubstr("cannot share"));
}

TEST_F(Cma, BytesReadFromAReleasedSourceDoNotLand) {
  Letter letter(a);
  const auto source = memory->filled(megabyte, 7);
  ASSERT_TRUE(letter.offer(source));
  const auto arrival = std::make_shared<Arrival>(letter.tickets.front(), Arrival::Number{1, 0}, *memory);
  arrival->on_reserve = [&] {
    a.channel().close(Status(Code::agent_closed, "closed by the test"));
    EXPECT_EQ(letter.released.front().runs(), 1);
    memory->fill(source, 8);  // the source is released, so its owner may write it
  };
  b.pull(arrival);
  EXPECT_EQ(arrival->landed.wait_name(), "ConnectionLost");
  EXPECT_EQ(arrival->landed.runs(), 1);
  EXPECT_EQ(arrival->consumed.runs(), 1);
}

TEST_F(Cma, BytesThatTheKernelCannotReadArriveByTheSocket) {
  for (const std::size_t bytes : {kilobyte, 5 * megabyte}) {
    Letter letter(a);
    ASSERT_TRUE(letter.offer(memory->filled(bytes, 4)));
    auto& ticket = letter.tickets.front();
    auto address_in = std::get<cma::SourceAddress>(*decode<cma::CmaTicket>(ticket.opaque));
    address_in.address = unreadable_address();
    ticket.opaque = encode(address_in);
    letter.send();
    const auto arrivals = b.receive();
    ASSERT_EQ(arrivals.size(), 1U);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 4));
    EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  }
  EXPECT_TRUE(b.wait_ready()->ok()) << "one buffer is no reason to fall away";
}

// ---- Descriptors

class CmaReach : public testing::Test {
 protected:
  void SetUp() override {
    auto made = driver.descriptor({});
    if (const auto* refusal = std::get_if<Refusal>(&made)) GTEST_SKIP() << refusal->reason;
    mine = std::get<Bytes>(made);
  }
  /// Returns the driver's reason against a peer whose descriptor differs from this process's in byte `at`, or "" if it
  /// reaches the peer.
  std::string reason_with_byte(std::size_t at) {
    auto theirs = mine;
    theirs.at(at) ^= std::byte{1};
    const auto refusal = driver.reaches(mine, theirs), back = driver.reaches(theirs, mine);
    EXPECT_EQ(refusal.has_value(), back.has_value()) << "the two ends disagree";
    return refusal ? refusal->reason : "";
  }
  CmaDriver driver;
  Bytes mine;
};

TEST_F(CmaReach, EachObstacleBetweenProcessesIsNamed) {
  EXPECT_THAT(reason_with_byte(0), HasSubstr("version"));
  EXPECT_THAT(reason_with_byte(1), HasSubstr("another user: uid"));
  EXPECT_THAT(reason_with_byte(5), HasSubstr("another pid namespace"));
  EXPECT_THAT(reason_with_byte(13), HasSubstr("another user namespace"));
  EXPECT_THAT(reason_with_byte(mine.size() - 1), HasSubstr("another host"));
  EXPECT_EQ(reason_with_byte(21), "") << "another pid is reached";
  EXPECT_EQ(reason_with_byte(25), "") << "and a process that began at another time";
}

TEST_F(CmaReach, TheSameProcessIsLeftToXth) {
  const auto refusal = driver.reaches(mine, std::get<Bytes>(CmaDriver().descriptor({})));
  ASSERT_TRUE(refusal.has_value());
  EXPECT_THAT(refusal->reason, HasSubstr("xth"));
}

TEST_F(CmaReach, TruncatedOrOverlongDescriptorsAreRefused) {
  for (std::size_t kept = 0; kept < mine.size(); ++kept)
    EXPECT_TRUE(driver.reaches(mine, ByteView(mine).first(kept)).has_value()) << kept;
  auto longer = mine;
  longer.push_back({});
  EXPECT_TRUE(driver.reaches(mine, longer).has_value());
}

TEST(CmaScope, TheKernelsPtraceScopeIsNamedWithAdvice) {
  EXPECT_FALSE(cma::scope_refusal(0, false).has_value());
  EXPECT_FALSE(cma::scope_refusal(1, true).has_value());
  EXPECT_FALSE(cma::scope_refusal(2, true).has_value());
  EXPECT_THAT(cma::scope_refusal(1, false).value_or(""), HasSubstr("ptrace_scope is 1"));
  EXPECT_THAT(cma::scope_refusal(2, false).value_or(""), HasSubstr("CAP_SYS_PTRACE"));
  EXPECT_THAT(cma::scope_refusal(3, true).value_or(""), HasSubstr("and reboot"));
}

// ---- One hostile end

/// Records the channel's calls to its wire.
class RecordingWire final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors) override {
    const auto parsed = decode<cma::Control>(message);
    EXPECT_TRUE(parsed.has_value());
    if (parsed) sent.push_back(*parsed);
    return sent.size();
  }
  void read(Buffer, Completion) override { ADD_FAILURE(); }
  void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) override {
    bulk.emplace_back(sequence, buffer.bytes);
    complete(std::move(written), {});
  }
  void receive_bulk(std::uint64_t sequence, Buffer, Completion landed) override {
    expected.emplace_back(sequence, std::move(landed));
  }
  void ready(Status status) override { probed.push_back(std::move(status)); }
  [[nodiscard]] std::string_view peer() const override { return "mallory"; }

  template <class Kind>
  [[nodiscard]] std::optional<Kind> last() const {
    for (auto at = sent.rbegin(); at != sent.rend(); ++at) {
      if (const auto* kind = std::get_if<Kind>(&*at)) return *kind;
    }
    return std::nullopt;
  }
  std::vector<cma::Control> sent;
  std::vector<std::pair<std::uint64_t, std::size_t>> bulk;
  std::vector<std::pair<std::uint64_t, Completion>> expected;
  std::vector<Status> probed;
};

class Message final : public Outgoing {
 public:
  [[nodiscard]] bool appends() const override { return true; }
  void append(Buffer, Completion) override { ADD_FAILURE(); }
  [[nodiscard]] bool last_resort() const override { return true; }
};

class CmaHostile : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto refusal = cma::own_scope_refusal()) GTEST_SKIP() << *refusal;
    self = cma::own_identity().value();
  }
  ~CmaHostile() override { channel->close(Status(Code::connection_lost, "end of the test")); }

  void tell(const cma::Control& control) { channel->control(encode(control), {}); }
  /// Answers the probe as an honest peer in this process would.
  void answer() {
    tell(cma::Challenge{1});
    word = ~wire.last<cma::Challenge>().value().random;
    tell(cma::WordAddress{self, address_of(word)});
  }
  static std::uint64_t address_of(const auto& thing) { return reinterpret_cast<std::uintptr_t>(&thing); }
  Status pull(Ticket ticket) {
    Arrival arrival(ticket, {1, 0}, *memory);
    Outcome landed, consumed;
    channel->pull(ticket, arrival, landed.completion(), consumed.completion());
    EXPECT_EQ(landed.runs(), consumed.runs());
    const auto status = landed.wait(std::chrono::milliseconds(0));
    return status.value_or(Status(Code::internal, "under way"));
  }
  static Ticket ticket_of(std::uint64_t address, std::uint64_t bytes) {
    return {.bytes = bytes, .opaque = encode(cma::SourceAddress{1, address}), .acknowledge = true};
  }

  RecordingWire wire;
  CmaDriver driver{here};
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  std::unique_ptr<Channel> channel = driver.open(wire, {});
  cma::Identity self;
  std::uint64_t word = 0;
};

TEST_F(CmaHostile, AnHonestAnswerEndsTheProbe) {
  answer();
  ASSERT_EQ(wire.probed.size(), 1U);
  EXPECT_TRUE(wire.probed[0].ok()) << wire.probed[0].text();
  tell(cma::WordAddress{{}, 0});
  EXPECT_EQ(wire.probed.size(), 1U) << "a second answer";
}

TEST_F(CmaHostile, AProcessWithAReusedPidIsNotRead) {
  word = ~wire.last<cma::Challenge>().value().random;
  tell(cma::WordAddress{{self.pid, self.started - 1}, address_of(word)});
  ASSERT_EQ(wire.probed.size(), 1U);
  EXPECT_EQ(wire.probed[0].code(), Code::channel_unavailable);
  EXPECT_THAT(std::string(wire.probed[0].what()), HasSubstr("is a later process with the same pid"));
}

TEST_F(CmaHostile, AnUnusedPidIsNotRead) {
  for (const std::int32_t pid : {0, -1, INT32_MAX}) {
    RecordingWire other;
    const auto end = driver.open(other, {});
    end->control(encode(cma::WordAddress{{pid, 0}, 4096}), {});
    ASSERT_EQ(other.probed.size(), 1U);
    EXPECT_FALSE(other.probed[0].ok()) << pid;
  }
}

TEST_F(CmaHostile, APeerThatNamesAnotherProcessIsDetected) {
  const auto bystander = ::fork();
  if (bystander == 0) {
    ::pause();
    ::_exit(0);
  }
  const auto started = cma::started_of(bystander);
  for (const std::uint64_t address : {address_of(word), std::uint64_t{0}, unreadable_address(), ~std::uint64_t{0}}) {
    RecordingWire other;
    const auto end = driver.open(other, {});
    end->control(encode(cma::WordAddress{{bystander, started.value()}, address}), {});
    ASSERT_EQ(other.probed.size(), 1U);
    EXPECT_THAT(std::string(other.probed[0].what()), HasSubstr("is not the peer"));
  }
  ::kill(bystander, SIGKILL);
  ::waitpid(bystander, nullptr, 0);
}

TEST_F(CmaHostile, ThePidOfThisProcessIsAcceptedOnlyInTests) {
  RecordingWire other;
  CmaDriver ordinary;
  const auto end = ordinary.open(other, {});
  word = ~other.last<cma::Challenge>().value().random;
  end->control(encode(cma::WordAddress{self, address_of(word)}), {});
  ASSERT_EQ(other.probed.size(), 1U);
  EXPECT_THAT(std::string(other.probed[0].what()), HasSubstr("this process"));
}

TEST_F(CmaHostile, ATicketBeforeTheProbeIsAProtocolError) {
  EXPECT_EQ(pull(ticket_of(address_of(word), 8)).code(), Code::protocol_error);
}

TEST_F(CmaHostile, AddressesThatWrapAreProtocolErrors) {
  answer();
  for (const std::uint64_t bytes : {std::uint64_t{4096}, ~std::uint64_t{0}, std::uint64_t{1} << 63})
    EXPECT_EQ(pull(ticket_of(~std::uint64_t{0} - 4094, bytes)).code(), Code::protocol_error) << bytes;
}

TEST_F(CmaHostile, SizesWithoutAnAddressAndAddressesWithoutASizeAreProtocolErrors) {
  answer();
  EXPECT_EQ(pull(ticket_of(address_of(word), 0)).code(), Code::protocol_error);
  EXPECT_EQ(pull({.bytes = 8, .opaque = encode(EmptyBuffer{})}).code(), Code::protocol_error);
}

TEST_F(CmaHostile, UnmappedMemoryIsRequestedAgainByTheSocket) {
  answer();
  for (const std::uint64_t address :
       {std::uint64_t{0}, unreadable_address(), std::uint64_t{1} << 62, ~std::uint64_t{0} - 10'000}) {
    EXPECT_THAT(std::string(pull(ticket_of(address, 5000)).what()), HasSubstr("under way"));
    const auto asked = wire.last<Resend>();
    ASSERT_TRUE(asked.has_value());
    EXPECT_EQ(asked->sequence, wire.expected.back().first);
    EXPECT_EQ(asked->offer, 1U);
    EXPECT_EQ(asked->bytes, 5000U);
  }
  EXPECT_EQ(wire.expected.size(), 4U);
  for (auto& [sequence, landed] : wire.expected) complete(std::move(landed), Status(Code::connection_lost, "the end"));
  EXPECT_EQ(wire.probed.size(), 1U) << "it fell away for one buffer";
}

TEST_F(CmaHostile, APeerThatChangesItsProbeWordIsNotTrusted) {
  answer();
  const auto source = memory->filled(kilobyte, 1);
  EXPECT_TRUE(pull(ticket_of(reinterpret_cast<std::uintptr_t>(source.data), kilobyte)).ok());
  word = 0;
  const auto status = pull(ticket_of(reinterpret_cast<std::uintptr_t>(source.data), kilobyte));
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()), HasSubstr("mallory"));
  EXPECT_THAT(std::string(status.what()), HasSubstr("cma"));
}

TEST_F(CmaHostile, AnEmptyBufferNeedsNoProcess) {
  EXPECT_TRUE(pull({.bytes = 0, .opaque = encode(EmptyBuffer{})}).ok());
}

TEST_F(CmaHostile, APeerKilledBetweenProbeAndPullIsNamed) {
  const auto source = memory->filled(8 * megabyte, 1);
  word = ~wire.last<cma::Challenge>().value().random;
  const auto peer = ::fork();  // the child has `word` and `source` at the same addresses
  if (peer == 0) {
    ::pause();
    ::_exit(0);
  }
  tell(cma::WordAddress{{peer, cma::started_of(peer).value()}, address_of(word)});
  ASSERT_EQ(wire.probed.size(), 1U);
  ASSERT_TRUE(wire.probed[0].ok()) << wire.probed[0].text();
  const auto ticket = ticket_of(reinterpret_cast<std::uintptr_t>(source.data), source.bytes);
  EXPECT_TRUE(pull(ticket).ok());
  ::kill(peer, SIGKILL);
  for (const bool reaped : {false, true}) {
    if (reaped) ::waitpid(peer, nullptr, 0);
    const auto status = pull(ticket);
    EXPECT_TRUE(reaped || status.ok() || status.code() == Code::connection_lost) << "it may be about to end";
    if (!reaped) continue;
    EXPECT_EQ(status.code(), Code::connection_lost);
    EXPECT_THAT(std::string(status.what()), HasSubstr("mallory"));
    EXPECT_THAT(std::string(status.what()), HasSubstr("cma"));
  }
}

TEST_F(CmaHostile, OnlyOfferedBuffersAreResentAndEachOnce) {
  answer();
  Message message;
  Outcome released;
  auto offer = channel->offer(memory->filled(kilobyte, 1), Sharing::by_value, message, released.completion());
  const auto ticket = std::get<Ticket>(offer);
  const auto address_in = std::get<cma::SourceAddress>(*decode<cma::CmaTicket>(ticket.opaque));
  tell(Resend{1, address_in.offer + 1, kilobyte});
  tell(Resend{1, address_in.offer, kilobyte + 1});
  tell(Resend{1, address_in.offer, ~std::uint64_t{0}});
  EXPECT_TRUE(wire.bulk.empty());
  for (int i = 0; i < 3; ++i) tell(Resend{5, address_in.offer, kilobyte});
  EXPECT_EQ(wire.bulk, (std::vector<std::pair<std::uint64_t, std::size_t>>{{5, kilobyte}}));
  EXPECT_EQ(released.runs(), 0);
  channel->acknowledged(ticket);
  EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_F(CmaHostile, AChallengeIsAnsweredOnceAndItsWordEndsWithTheChannel) {
  tell(cma::Challenge{77});
  const auto answered = wire.last<cma::WordAddress>();
  ASSERT_TRUE(answered.has_value());
  EXPECT_EQ(answered->process, self);
  const auto* const there = reinterpret_cast<const volatile std::uint64_t*>(answered->address);
  EXPECT_EQ(*there, ~std::uint64_t{77});
  tell(cma::Challenge{78});
  EXPECT_EQ(*there, ~std::uint64_t{77});
  channel->close(Status(Code::connection_lost, "the end"));
  EXPECT_EQ(*there, 0U);
}

}  // namespace

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CmaFixture);
