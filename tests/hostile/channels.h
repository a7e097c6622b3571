/// The hostile peer's ends of the channels basic, shm and cma: their control messages and tickets, true ones and
/// others.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/hostile/connection.h"
#include "tests/hostile/memory.h"
#include "tests/hostile/random.h"
#include "tests/hostile/wire.h"

namespace hostile {

/// This side's numbers of the channels, and one that it does not have.
enum Numbered : std::uint8_t { basic = 0, shm = 1, cma = 2, none = 3, inlined = 255 };

/// Returns the channels of this host, in that order, for the hello.
std::vector<Channel> channels_of_this_process();

/// A control frame to send.
struct Control {
  Frame frame;
  std::vector<Descriptor> descriptors;
  std::shared_ptr<SharedPages> pages;  // or the memory whose descriptor goes along
};

/// The channels of one link. Used by one thread.
class Channels {
 public:
  Channels(Random& random, Meddler& meddler) : random_(random), meddler_(meddler) {}

  /// Returns one control message that a peer may send at this moment.
  Control control();
  /// Handles a control message of the agent, and returns the answers.
  std::deque<Control> answer(std::string_view payload, std::vector<Descriptor> descriptors,
                             const std::vector<std::string>& names);

  /// A buffer of a message: its record, and its bytes behind the frame or on the bulk connection.
  struct Sent {
    Record record;
    std::string trailing, bulk;
    std::uint64_t sequence = 0;  // of the bulk bytes; 0: none
  };
  /// `may_trail`: bytes may follow the frame. `may_bulk`: a bulk connection is there.
  Sent buffer(bool may_trail, bool may_bulk);

 private:
  Control numbered(std::uint8_t operation, std::uint8_t channel, const std::string& payload);
  Control message_of_shm();
  Control segment();
  void shm_ticket(Record& record);
  void cma_ticket(Record& record);
  std::uint64_t maybe(std::uint64_t right) { return random_.one_in(60) ? random_.edge() : right; }

  struct Segment {
    std::shared_ptr<SharedPages> pages;
    std::uint64_t block_bytes = 0, blocks = 0, told = 0, next = 0;
  };
  Random& random_;
  Meddler& meddler_;
  std::uint64_t controls_ = 0, sequences_ = 0, offers_ = 0, generations_ = 0;
  std::shared_ptr<SharedPages> ledger_;
  std::vector<Segment> segments_;                                                // by slot
  std::vector<std::pair<std::shared_ptr<SharedPages>, std::uint64_t>> regions_;  // with the controls that told them
  std::uint64_t answered_ = 0;  // the control that answered cma's challenge
  std::uint64_t word_ = 0;      // the complement of that challenge
  std::string source_ = std::string(1 << 16, 's');
};

}  // namespace hostile
