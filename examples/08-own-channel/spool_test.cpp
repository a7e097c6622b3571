// The conformance suite with `spool`, and the tests of what spool alone does.
#include <gtest/gtest.h>
#include <tensorferry/conformance/channel_suite.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "spool_channel.h"

namespace tensorferry::conformance {

/// A folder that goes with the object.
struct Folder {
  Folder() { (void)::mkdtemp(path.data()); }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path = "/tmp/spool-test-XXXXXX";
};

const Folder common;  // made before a test forks; takes the names that killed processes leave behind

struct SpoolFixture {
  static constexpr auto name = "spool";
  static Drivers drivers() { return {std::make_unique<SpoolDriver>(common.path)}; }
  static Traits traits() { return {}; }
};

class Spool : public testing::Test {
 protected:
  void SetUp() override {
    for (auto* end : {pair.a.get(), pair.b.get()}) {
      const auto probed = end->wait_ready();
      ASSERT_TRUE(probed && probed->ok());
    }
  }
  Folder folder;
  SpoolDriver driver{folder.path, /*most_bytes=*/1000};
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{driver, driver, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;
};

TEST_F(Spool, LeavesNoNameInTheFolder) { EXPECT_TRUE(std::filesystem::is_empty(folder.path)); }

TEST_F(Spool, AFullFileRefusesUntilAPlaceIsFree) {
  Letter first(a);
  ASSERT_TRUE(first.offer(memory->filled(600, 1))) << first.refusal;
  Letter second(a);
  EXPECT_FALSE(second.offer(memory->filled(600, 2)));
  EXPECT_EQ(second.refusal, "the file holds as much as it may");
  first.drop();
  EXPECT_TRUE(second.offer(memory->filled(600, 2))) << second.refusal;
}

TEST_F(Spool, ATicketBeyondTheFileReservesNoMemory) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(600, 1))) << letter.refusal;
  letter.tickets.front().bytes = std::uint64_t{1} << 40;
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1U);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "ProtocolError");
  EXPECT_EQ(arrivals.front()->filled, 0);
}

/// Returns what the end `b` of a link answers to a probe that names a file `name`.
std::string answer_to(const std::string& name) {
  struct OneAnswer final : Wire {
    ControlId control(Bytes message, Descriptors) override { return last = std::move(message), ++count; }
    void read(Buffer, Completion) override {}
    void send_bulk(std::uint64_t, Buffer, Completion) override {}
    void receive_bulk(std::uint64_t, Buffer, Completion) override {}
    void ready(Status) override {}
    [[nodiscard]] std::string_view peer() const override { return "peer"; }
    Bytes last;
    ControlId count = 0;
  } wire;
  const Folder folder;
  SpoolDriver driver(folder.path);
  const auto channel = driver.open(wire, {});
  Bytes probe;
  Writer out(probe);
  out.put(std::uint8_t{1});
  out.put(std::uint64_t{42});
  out.sized(name);
  channel->control(probe, {});
  Reader in(wire.last);
  (void)in.get<std::uint8_t>();
  return std::string(in.text());
}

TEST(SpoolProbe, OpensNothingOutsideTheFolder) {
  EXPECT_EQ(answer_to("../etc/passwd"), "the name of the file has a slash");
  EXPECT_EQ(answer_to(".."), "that is no regular file");
  EXPECT_EQ(answer_to("absent"), "there is no such file in its folder");
}

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(SpoolFixture);
