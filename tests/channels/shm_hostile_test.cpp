/// Tests of `shm` against a hostile peer. It sends arbitrary messages, and writes arbitrary values into the memory that
/// both ends have mapped.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "channels/shm/layout.h"
#include "channels/shm/shm_channel.h"
#include "tests/conformance/outcome.h"

namespace tensorferry::shm {
namespace {

using conformance::Outcome;

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;
constexpr int all_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

/// Records the messages and descriptors that the channel sends.
class RecordingWire final : public Wire {
 public:
  struct Sent {
    Control control;
    FileDescriptor descriptor;
  };
  ControlId control(Bytes message, Descriptors descriptors) override {
    const std::lock_guard lock(mutex_);
    auto parsed = decode<Control>(message);
    EXPECT_TRUE(parsed.has_value());
    sent.push_back({std::move(*parsed), descriptors.empty() ? FileDescriptor() : std::move(descriptors.front())});
    return ++controls_;
  }
  void read(Buffer, Completion) override { ADD_FAILURE(); }
  void send_bulk(std::uint64_t, Buffer, Completion) override { ADD_FAILURE(); }
  void receive_bulk(std::uint64_t, Buffer, Completion) override { ADD_FAILURE(); }
  void ready(Status status) override { probed = std::move(status); }
  [[nodiscard]] std::string_view peer() const override { return "mallory"; }

  /// Returns the next message of this kind, and drops the messages before it.
  template <class Kind>
  std::optional<std::pair<Kind, FileDescriptor>> next() {
    const std::lock_guard lock(mutex_);
    while (!sent.empty()) {
      auto first = std::move(sent.front());
      sent.pop_front();
      if (auto* kind = std::get_if<Kind>(&first.control)) return {{std::move(*kind), std::move(first.descriptor)}};
    }
    return std::nullopt;
  }

  std::deque<Sent> sent;
  std::optional<Status> probed;

 private:
  std::mutex mutex_;
  ControlId controls_ = 0;
};

class Message final : public Outgoing {
 public:
  [[nodiscard]] bool appends() const override { return true; }
  void append(Buffer, Completion) override { ADD_FAILURE(); }
  [[nodiscard]] bool last_resort() const override { return true; }
  bool copy_later(Copier& with, std::byte*, ByteView, const Owner&) override {
    copier = &with;
    return false;
  }
  const Copier* copier = nullptr;  // the one that the channel has chosen
};

/// Keeps the calling thread on the core on which it runs.
class OnOneCore {
 public:
  OnOneCore() {
    EXPECT_EQ(::sched_getaffinity(0, sizeof before_, &before_), 0);
    cpu_set_t one;
    do {
      CPU_ZERO(&one);
      CPU_SET(::sched_getcpu(), &one);
      EXPECT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    } while (!CPU_ISSET(::sched_getcpu(), &one));
  }
  ~OnOneCore() { EXPECT_EQ(::sched_setaffinity(0, sizeof before_, &before_), 0); }
  OnOneCore(const OnOneCore&) = delete;
  OnOneCore& operator=(const OnOneCore&) = delete;

 private:
  cpu_set_t before_{};
};

struct Adopting final : Sink {
  std::optional<Buffer> reserve(std::size_t bytes) override {
    auto memory = std::make_shared<std::vector<std::byte>>(bytes);
    buffer = Buffer{Device{}, memory->data(), bytes, nullptr, memory};
    return buffer;
  }
  bool adopt(Buffer lent) override {
    buffer = std::move(lent);
    return true;
  }
  Buffer buffer;
};

FileDescriptor memfd(std::size_t bytes, int seals = all_seals) {
  FileDescriptor fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(seals == 0 ? 0 : ::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

class ShmHostile : public testing::Test {
 protected:
  void SetUp() override {
    auto hello = wire.next<LedgerOffer>();
    ASSERT_TRUE(hello.has_value());
    auto mapped = SharedMemory::map(std::move(hello->second), Ledger::bytes);
    ASSERT_TRUE(mapped.ok());
    ledger = std::move(*mapped);
    nonce = hello->first.nonce;
  }
  ~ShmHostile() override { channel->close(Status(Code::connection_lost, "end of the test")); }

  void tell(const Control& control, FileDescriptor descriptor = {}) {
    Descriptors descriptors;
    if (descriptor) descriptors.push_back(std::move(descriptor));
    channel->control(encode(control), std::move(descriptors));
  }
  /// Sends the other end's ledger as an honest peer would, and checks the channel's answer.
  void greet() {
    auto fd = memfd(Ledger::bytes);
    const std::uint64_t word = 7;
    EXPECT_EQ(::pwrite(fd.get(), &word, sizeof word, Ledger::nonce_at), static_cast<ssize_t>(sizeof word));
    tell(LedgerOffer{7}, std::move(fd));
    const auto answer = wire.next<LedgerProbed>();
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->first.failure, "");
  }
  std::string_view pull(const ShmTicket& parsed, std::uint64_t bytes, Adopting* into = nullptr) {
    Adopting own;
    Outcome landed, consumed;
    channel->pull({.bytes = bytes, .opaque = encode(parsed)}, into ? *into : own, landed.completion(),
                  consumed.completion());
    EXPECT_EQ(landed.runs(), 1);
    EXPECT_EQ(consumed.runs(), 1);
    return landed.wait_name();
  }
  std::optional<Lending> offer(std::size_t bytes, std::byte value = std::byte{1}) {
    std::vector<std::byte> source(bytes, value);
    Outcome released;
    auto offer = channel->offer(Buffer{Device{}, source.data(), bytes, nullptr, nullptr}, Sharing::by_value, message,
                                released.completion());
    if (!std::holds_alternative<Ticket>(offer)) return std::nullopt;
    return std::get<Lending>(*decode<ShmTicket>(std::get<Ticket>(offer).opaque));
  }

  RecordingWire wire;
  Message message;
  ShmDriver driver;
  std::unique_ptr<Channel> channel = driver.open(wire, {});
  SharedMemory ledger;
  std::uint64_t nonce = 0;
};

constexpr Geometry four_blocks{8 * kilobyte, 4};

TEST_F(ShmHostile, TheProbeSucceedsOnlyIfTheMemoryWasFound) {
  word_at(ledger, Ledger::answer_at).store(~nonce);
  tell(LedgerProbed{});
  EXPECT_TRUE(wire.probed && wire.probed->ok());
}

TEST_F(ShmHostile, AnAnswerMissingFromTheMemoryFailsTheProbe) {
  word_at(ledger, Ledger::answer_at).store(nonce);
  tell(LedgerProbed{});
  ASSERT_TRUE(wire.probed.has_value());
  EXPECT_FALSE(wire.probed->ok());
}

TEST_F(ShmHostile, WithoutADescriptorTheProbeFailsWithTheReason) {
  tell(LedgerOffer{5});
  const auto answer = wire.next<LedgerProbed>();
  ASSERT_TRUE(answer.has_value());
  EXPECT_NE(answer->first.failure.find("the link has no unix socket"), std::string::npos);
  tell(LedgerProbed{answer->first.failure});
  EXPECT_EQ(wire.probed->what(), answer->first.failure);
}

TEST_F(ShmHostile, AWrongNonceFailsTheProbe) {
  tell(LedgerOffer{5}, memfd(Ledger::bytes));
  EXPECT_NE(wire.next<LedgerProbed>()->first.failure, "");
}

TEST_F(ShmHostile, MemoryThatCouldShrinkIsNotMapped) {
  greet();
  for (const int seals : {0, all_seals & ~F_SEAL_SHRINK, all_seals & ~F_SEAL_SEAL}) {
    tell(Segment{3, four_blocks}, memfd(four_blocks.bytes(), seals));
    const auto answer = wire.next<Unmapped>();
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->first.slot, 3u);
    EXPECT_NE(answer->first.why.find("sealed"), std::string::npos) << answer->first.why;
    EXPECT_EQ(pull(Lending{3, 0, 1}, 100), "ResourceExhausted");
  }
}

TEST_F(ShmHostile, MemoryOfAnUnannouncedSizeIsNotMapped) {
  greet();
  for (const auto bytes : {four_blocks.bytes() - page, four_blocks.bytes() + page}) {
    tell(Segment{3, four_blocks}, memfd(bytes));
    EXPECT_TRUE(wire.next<Unmapped>().has_value()) << bytes;
    tell(Handover{3, four_blocks.bytes()}, memfd(bytes));
    EXPECT_TRUE(wire.next<Missed>().has_value()) << bytes;
    EXPECT_EQ(pull(Handed{3, 0}, 100), "ResourceExhausted");
  }
  tell(Segment{3, four_blocks});  // a message without a descriptor
  EXPECT_TRUE(wire.next<Unmapped>().has_value());
}

TEST_F(ShmHostile, ForgedTicketsAreProtocolErrors) {
  greet();
  tell(Segment{0, four_blocks}, memfd(four_blocks.bytes()));
  tell(Handover{1, megabyte}, memfd(megabyte));
  EXPECT_EQ(pull(Lending{2, 0, 1}, 100), "ProtocolError") << "an empty slot";
  EXPECT_EQ(pull(Lending{0, 4, 1}, 100), "ProtocolError") << "a block too far";
  EXPECT_EQ(pull(Lending{0, 0, 1}, four_blocks.block_bytes + 1), "ProtocolError") << "more than a block";
  EXPECT_EQ(pull(Lending{0, 0, 1}, ~0ULL), "ProtocolError");
  EXPECT_EQ(pull(Lending{0, 0, 1}, 0), "ProtocolError") << "nothing";
  EXPECT_EQ(pull(Lending{1, 0, 1}, 100), "ProtocolError") << "a region is no slot";
  EXPECT_EQ(pull(Handed{0, 0}, 100), "ProtocolError") << "a slot is no region";
  EXPECT_EQ(pull(Handed{1, 0}, megabyte + 1), "ProtocolError");
  EXPECT_EQ(pull(Handed{1, megabyte}, 1), "ProtocolError");
  EXPECT_EQ(pull(Handed{1, ~0ULL}, 2), "ProtocolError");
  EXPECT_EQ(pull(Handed{1, 1}, ~0ULL), "ProtocolError");
  EXPECT_EQ(pull(EmptyBuffer{}, 1), "ProtocolError");
  EXPECT_EQ(pull(Lending{0, 3, 1}, four_blocks.block_bytes), "Ok");
  EXPECT_EQ(pull(Handed{1, megabyte - 1}, 1), "Ok");
}

TEST_F(ShmHostile, ARegionThatCouldShrinkIsNotMapped) {
  greet();
  for (const int seals : {0, all_seals & ~F_SEAL_SHRINK, all_seals & ~F_SEAL_GROW, all_seals & ~F_SEAL_SEAL}) {
    tell(Handover{7, megabyte}, memfd(megabyte, seals));
    const auto answer = wire.next<Missed>();
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->first.region, 7u);
    EXPECT_NE(answer->first.why.find("sealed"), std::string::npos) << answer->first.why;
    EXPECT_EQ(pull(Handed{7, 0}, 100), "ResourceExhausted");
  }
  tell(Handover{7, megabyte}, memfd(megabyte));  // the peer may send correct memory later
  EXPECT_EQ(pull(Handed{7, 0}, 100), "Ok");
}

TEST_F(ShmHostile, MessagesAboutUnknownRegionsDoNothing) {
  greet();
  tell(RegionEnded{9, 0});
  tell(Missed{9, "why"});
  channel->discard({100, encode(Handed{9, 0}), 0, false});
  EXPECT_EQ(pull(Handed{9, 0}, 100), "ResourceExhausted");
  EXPECT_EQ(pull(Handed{10, 0}, 100), "ProtocolError");
}

TEST_F(ShmHostile, RegionsOfAPeerAreBounded) {
  constexpr std::uint64_t most = 2 * most_regions;
  greet();
  for (std::uint64_t region = 0; region < most; ++region) channel->discard({100, encode(Handed{region, 0}), 0, false});
  tell(Handover{most, megabyte}, memfd(megabyte));
  const auto answer = wire.next<Missed>();
  ASSERT_TRUE(answer.has_value());
  EXPECT_NE(answer->first.why.find("are shared already"), std::string::npos) << answer->first.why;
  EXPECT_EQ(pull(Handed{most, 0}, 100), "ProtocolError");
  tell(RegionEnded{0, 1});  // whose ticket has come
  tell(Handover{most, megabyte}, memfd(megabyte));
  EXPECT_EQ(pull(Handed{most, 0}, 100), "Ok");
}

TEST_F(ShmHostile, ARegionLeavesWithItsLastTicket) {
  greet();
  tell(Handover{7, megabyte}, memfd(megabyte));
  Adopting sink;
  EXPECT_EQ(pull(Handed{7, 0}, 100, &sink), "Ok");
  tell(RegionEnded{7, 3});
  EXPECT_EQ(pull(Handed{7, 4096}, 100), "Ok");
  channel->discard({100, encode(Handed{7, 0}), 0, false});
  EXPECT_EQ(pull(Handed{7, 0}, 100), "ProtocolError");
  sink.buffer.data[99] = std::byte{1};  // the receiver still holds the memory that it pulled
}

TEST_F(ShmHostile, AHeldBlockIsNotLentAgain) {
  greet();
  tell(Segment{0, four_blocks}, memfd(four_blocks.bytes()));
  Adopting sink;
  EXPECT_EQ(pull(Lending{0, 2, 1}, 100, &sink), "Ok");
  EXPECT_EQ(pull(Lending{0, 2, 1}, 100), "ProtocolError");
  EXPECT_EQ(pull(Lending{0, 2, 2}, 100), "ProtocolError");
  sink.buffer = {};
  EXPECT_EQ(pull(Lending{0, 2, 1}, 100), "ProtocolError") << "a ticket is pulled once";
  EXPECT_EQ(pull(Lending{0, 2, 2}, 100), "Ok");
}

TEST_F(ShmHostile, AReturnedBlockTellsTheCoreThatHasReadIt) {
  auto fd = memfd(Ledger::bytes);
  auto theirs = SharedMemory::map(FileDescriptor(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)), Ledger::bytes);
  ASSERT_TRUE(theirs.ok());
  tell(LedgerOffer{0}, std::move(fd));
  tell(Segment{0, four_blocks}, memfd(four_blocks.bytes()));
  const OnOneCore here;
  Adopting sink;
  ASSERT_EQ(pull(Lending{0, 0, 1}, 100, &sink), "Ok");
  EXPECT_EQ(word_at(*theirs, Ledger::core_at).load(), 0u);
  sink.buffer = {};
  EXPECT_EQ(word_at(*theirs, Ledger::core_at).load(), static_cast<std::uint64_t>(::sched_getcpu()) + 1);
}

TEST_F(ShmHostile, TheCoreThatReadsNextChoosesTheCopierWhateverThePeerSays) {
  const OnOneCore here;
  std::map<std::uint64_t, const Copier*> chosen;
  for (const std::uint64_t core : {std::uint64_t{0}, current_core(), current_core() + 1, ~std::uint64_t{0}}) {
    word_at(ledger, Ledger::core_at).store(core);
    ASSERT_TRUE(offer(6 * kilobyte).has_value());
    chosen[core] = message.copier;
  }
  EXPECT_NE(chosen.at(current_core()), chosen.at(0));
  EXPECT_EQ(chosen.at(current_core() + 1), chosen.at(0));
  EXPECT_EQ(chosen.at(~std::uint64_t{0}), chosen.at(0));
}

TEST_F(ShmHostile, ADroppedOrReplacedSlotDoesNotDisturbHeldBlocks) {
  greet();
  auto fd = memfd(four_blocks.bytes());
  const std::byte value{42};
  ASSERT_EQ(::pwrite(fd.get(), &value, 1, 0), 1);
  tell(Segment{0, four_blocks}, std::move(fd));
  Adopting sink;
  ASSERT_EQ(pull(Lending{0, 0, 1}, 100, &sink), "Ok");
  tell(Segment{0, four_blocks}, memfd(four_blocks.bytes()));
  EXPECT_EQ(pull(Lending{0, 0, 1}, 100), "Ok") << "another memory";
  tell(SegmentDropped{0});
  EXPECT_EQ(pull(Lending{0, 0, 2}, 100), "ProtocolError");
  EXPECT_EQ(sink.buffer.data[0], value);
  sink.buffer = {};
}

TEST_F(ShmHostile, NoMemoryOfAPeerIsMappedBeforeItsLedger) {
  tell(Segment{0, four_blocks}, memfd(four_blocks.bytes()));
  EXPECT_EQ(pull(Lending{0, 0, 1}, 100), "ProtocolError");
}

/// A receiver that writes arbitrary values into the list of blocks that it returns.
class ShmHostileReceiver : public ShmHostile {
 protected:
  void SetUp() override {
    ShmHostile::SetUp();
    for (int i = 0; i < 40; ++i) {  // a segment of 256 KB has blocks of 6 KB
      lendings.push_back(*offer(6 * kilobyte));
      geometries.try_emplace(lendings.back().slot);
    }
    for (auto& [slot, mapped] : geometries) {
      auto segment = wire.next<Segment>();
      ASSERT_TRUE(segment && segment->first.slot == slot);
      auto memory = SharedMemory::map(std::move(segment->second), segment->first.geometry.bytes());
      ASSERT_TRUE(memory.ok());
      mapped = {segment->first.geometry, std::move(*memory)};
    }
  }
  void put(const Lending& lending, const Returned& returned) {
    const auto& [geometry, memory] = geometries.at(lending.slot);
    word_at(memory, geometry.words_at() + lending.block * sizeof(std::uint64_t)).store(returned.word());
  }
  void point_at(std::uint64_t head) { word_at(ledger, Ledger::returned_at).store(head); }
  std::size_t held() { return driver.usage().held.load() / (6 * kilobyte); }

  std::vector<Lending> lendings;
  std::map<std::uint32_t, std::pair<Geometry, SharedMemory>> geometries;
};

TEST_F(ShmHostileReceiver, AValidListIsAccepted) {
  put(lendings[0], {0, lendings[0].generation, false});
  put(lendings[1], {lendings[0].number(), lendings[1].generation, false});
  point_at(lendings[1].number());
  EXPECT_EQ(offer(6 * kilobyte)->number(), lendings[1].number());
  EXPECT_EQ(offer(6 * kilobyte)->number(), lendings[0].number());
  EXPECT_EQ(held(), 40u);
}

TEST_F(ShmHostileReceiver, ACycleInTheListEnds) {
  put(lendings[0], {lendings[1].number(), lendings[0].generation, false});
  put(lendings[1], {lendings[0].number(), lendings[1].generation, false});
  point_at(lendings[1].number());
  ASSERT_TRUE(offer(6 * kilobyte).has_value());
  EXPECT_EQ(held(), 39u);
}

TEST_F(ShmHostileReceiver, UnknownNumbersEndTheList) {
  for (const std::uint64_t head : {std::uint64_t{1} << 31, std::uint64_t{most_slots} * Geometry::most_blocks + 5,
                                   std::uint64_t{Geometry::most_blocks}, ~std::uint64_t{0}}) {
    point_at(head);
    ASSERT_TRUE(offer(6 * kilobyte).has_value());
  }
  put(lendings[0], {0xffffffff, lendings[0].generation, false});
  point_at(lendings[0].number());
  ASSERT_TRUE(offer(6 * kilobyte).has_value());
  EXPECT_EQ(held(), 44u);
}

TEST_F(ShmHostileReceiver, AnEarlierGenerationReturnsNoBlock) {
  put(lendings[0], {0, lendings[0].generation - 1, false});
  point_at(lendings[0].number());
  ASSERT_TRUE(offer(6 * kilobyte).has_value());
  EXPECT_EQ(held(), 41u);
}

TEST_F(ShmHostileReceiver, ASpentBlockIsNotReused) {
  put(lendings[0], {0, lendings[0].generation, true});
  point_at(lendings[0].number());
  for (int i = 0; i < 100; ++i) {
    const auto next = offer(6 * kilobyte);
    ASSERT_TRUE(next.has_value());
    EXPECT_NE(next->slot, lendings[0].slot);
  }
}

TEST_F(ShmHostileReceiver, RandomWordsNeverLendABlockTwice) {
  std::mt19937_64 random(11);
  std::map<std::uint32_t, std::uint32_t> generations;
  for (const auto& lending : lendings) generations[lending.number()] = lending.generation;
  for (int round = 0; round < 2000; ++round) {
    for (int i = 0; i < 5; ++i) {
      const auto& victim = lendings[random() % lendings.size()];
      const auto& next = lendings[random() % lendings.size()];
      put(victim, {random() % 4 ? next.number() : static_cast<std::uint32_t>(random()),
                   random() % 4 ? generations[victim.number()] : static_cast<std::uint32_t>(random() & 0x7fffffff),
                   random() % 50 == 0});
    }
    point_at(lendings[random() % lendings.size()].number());
    const auto lent = offer(6 * kilobyte);
    ASSERT_TRUE(lent.has_value());
    auto& known = generations[lent->number()];
    EXPECT_NE(known, lent->generation);
    known = lent->generation;
  }
}

TEST_F(ShmHostileReceiver, AnUnmappableSegmentIsNotOfferedAgain) {
  tell(Unmapped{lendings[0].slot, "no room"});
  const auto next = offer(6 * kilobyte);
  ASSERT_TRUE(next.has_value());
  EXPECT_NE(next->slot, lendings[0].slot);
  tell(Unmapped{most_slots - 1, "no such"});
  EXPECT_TRUE(offer(6 * kilobyte).has_value());
}

TEST(ShmDescriptor, GivesTheReasonIfAnotherProcessIsNotReached) {
  ShmDriver driver;
  const auto mine = std::get<Bytes>(driver.descriptor({}));
  EXPECT_FALSE(driver.reaches(mine, mine).has_value());
  auto other = mine;
  other.back() ^= std::byte{1};
  EXPECT_EQ(driver.reaches(mine, other)->reason, "another host");
  other = mine;
  other[1] ^= std::byte{1};
  EXPECT_NE(driver.reaches(mine, other)->reason.find("another user"), std::string::npos);
  other = mine;
  other[0] ^= std::byte{1};
  EXPECT_NE(driver.reaches(mine, other)->reason.find("version"), std::string::npos);
  for (std::size_t kept = 0; kept < mine.size(); ++kept) {
    EXPECT_TRUE(driver.reaches(mine, ByteView(mine).first(kept)).has_value()) << kept;
  }
  EXPECT_TRUE(std::holds_alternative<Refusal>(driver.descriptor({DeviceType::cuda, 0})));
}

TEST(ShmLayout, RecordsRoundTripAndOtherBytesAreRefused) {
  for (const ShmTicket& parsed :
       {ShmTicket(EmptyBuffer{}), ShmTicket(Lending{most_slots - 1, Geometry::most_blocks - 1, 12345}),
        ShmTicket(Handed{3, ~0ULL})}) {
    const auto bytes = encode(parsed);
    const auto read = decode<ShmTicket>(bytes);
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(encode(*read), bytes);
    for (std::size_t kept = 0; kept < bytes.size(); ++kept)
      EXPECT_FALSE(decode<ShmTicket>(ByteView(bytes).first(kept)));
    auto longer = bytes;
    longer.push_back({});
    EXPECT_FALSE(decode<ShmTicket>(longer));
  }
  for (const Control& control :
       {Control(LedgerOffer{1}), Control(LedgerProbed{"why"}), Control(Segment{1, four_blocks}),
        Control(Handover{2, 4096}), Control(SegmentDropped{3}), Control(Unmapped{4, std::string(5000, 'x')}),
        Control(RegionEnded{5, ~0ULL}), Control(Missed{~0ULL, "why"})}) {
    const auto bytes = encode(control);
    const auto read = decode<Control>(bytes);
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(encode(*read), bytes);
    for (std::size_t kept = 0; kept < bytes.size(); ++kept) EXPECT_FALSE(decode<Control>(ByteView(bytes).first(kept)));
  }
  EXPECT_FALSE(decode<ShmTicket>(encode(Lending{most_slots, 0, 0})));
  EXPECT_FALSE(decode<ShmTicket>(encode(Lending{0, Geometry::most_blocks, 0})));
  EXPECT_FALSE(decode<ShmTicket>(encode(Lending{0, 0, Lending::generations})));
  for (const auto geometry : {Geometry{0, 1}, Geometry{4096, 0}, Geometry{4096, Geometry::most_blocks + 1},
                              Geometry{4097, 1}, Geometry{size_class::largest * 2, 1}}) {
    EXPECT_FALSE(decode<Control>(encode(Segment{0, geometry})));
  }
  EXPECT_FALSE(decode<Control>(encode(Handover{0, 0})));
}

}  // namespace
}  // namespace tensorferry::shm
