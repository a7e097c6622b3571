#include "rpc/collectives/ways.h"

#include <utility>

#include "base/text.h"
#include "rpc/collectives/board.h"

namespace tensorferry::collectives {

void Ways::say_why(std::string no_board, std::string no_memory) {
  no_board_ = std::move(no_board);
  no_memory_ = std::move(no_memory);
}

Algorithm Ways::choose(const Asked& asked, std::optional<Algorithm> wanted, bool staged) {
  const auto algorithm = wanted ? collectives::choose(asked, {{asked.operation, *wanted}}, crossings_)
                                : collectives::choose(asked, prescribed_, crossings_);
  counts_.count(asked.operation, staged, algorithm);
  return algorithm;
}

std::string Ways::explain(const Asked& asked) const {
  const auto choice = explain_choice(asked, prescribed_, crossings_);
  const auto way = !asked.links.board || choice.algorithm == Algorithm::ring
                       ? (choice.algorithm == Algorithm::two_level ? "as messages between hosts" : "as messages") +
                             (no_board_.empty() ? "" : ": " + no_board_)
                   : asked.bytes <= Board::slot_bytes ? std::string("in the slots of the board")
                   : asked.links.memory               ? std::string("read in place from the memory of the ranks")
                                                      : "as messages: " + no_memory_;
  std::function<std::string(Operation, std::size_t)> of_devices;
  {
    const std::lock_guard lock(mutex_);
    of_devices = devices_.explain;
  }
  return formatted("{} of {} bytes over {} ranks: {} ({}), {}{}", name_of(asked.operation), asked.bytes, asked.ranks,
                   name_of(choice.algorithm), choice.reason, way,
                   of_devices ? ". " + of_devices(asked.operation, asked.bytes) : "");
}

void Ways::keep_device_notes(DeviceNotes notes) {
  const std::lock_guard lock(mutex_);
  devices_ = std::move(notes);
}

std::optional<TuningKey> Ways::gpu_tuning_key() const {
  const std::lock_guard lock(mutex_);
  return devices_.key.ranks == 0 ? std::nullopt : std::optional(devices_.key);
}

}  // namespace tensorferry::collectives
