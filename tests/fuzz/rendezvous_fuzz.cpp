/// Fuzzes an agent's rendezvous through a store that a stranger writes: the input gives each answer of the store. These
/// operations must end, with a valid result or an error: join, find, wait for a world, barrier, and the cluster key.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "agent/rendezvous/directory.h"
#include "tests/fuzz/record_input.h"

using namespace tensorferry;
using fuzzing::must;
using std::chrono::milliseconds;

namespace {

/// A store that takes its answers from the input. When the input is used up, each operation fails with ConnectionLost.
class StrangersStore final : public Store {
 public:
  StrangersStore(Reader& in, Record self) : in_(in), self_(std::move(self)) {}
  Status set(std::string_view /*key*/, ByteView /*value*/) override { return in_.empty() ? gone() : Status(); }
  Result<Bytes> get(std::string_view key, milliseconds /*timeout*/) override {
    if (in_.empty()) return gone();
    const auto kind = in_.get<std::uint8_t>();
    if (kind % 4 == 0) return Status(Code::deadline_exceeded, "not set");
    if (kind % 4 == 1) return encode_record(self_, Key(), key);
    if (kind >= 0x80) {
      const auto record = fuzzing::RecordInput(in_).make<Record>();
      return encode_record(record, Key(), key);
    }
    const auto bytes = in_.sized();
    return Bytes(bytes.begin(), bytes.end());
  }
  Result<std::int64_t> add(std::string_view /*key*/, std::int64_t /*amount*/) override {
    if (in_.empty()) return gone();
    const auto sum = in_.get<std::int8_t>();
    return sum == -128 ? in_.get<std::int64_t>() : sum;
  }
  [[nodiscard]] bool loopback() const override { return true; }

 private:
  static Status gone() { return {Code::connection_lost, "the store is gone"}; }

  Reader& in_;
  const Record self_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Reader in(std::as_bytes(std::span(data, size)));
  Record self;
  self.name = "agent";
  self.rank = 0;
  self.incarnation = 7;
  const auto rank = in.get<std::uint8_t>() % 2;  // rank 0 leads a barrier, rank 1 follows
  auto mine = self;
  mine.rank = rank;
  const auto store = std::make_shared<StrangersStore>(in, self);
  Directory directory(store, "p", Key());
  const bool lives = in.get<std::uint8_t>() % 2 != 0;
  static_cast<void>(directory.join(mine, [lives](const Record&) { return lives; }));
  if (const auto found = directory.find("agent", milliseconds(0))) must(found->name == "agent" && !found->left);
  if (const auto found = directory.find(3, milliseconds(0))) must(found->rank == 3 && !found->left);
  if (const auto world = directory.wait_for_world(1 + rank, milliseconds(1))) {
    must(world->size() == static_cast<std::size_t>(1 + rank));
    static_cast<void>(directory.barrier("end", milliseconds(1)));
  }
  directory.leave();
  return 0;
}
