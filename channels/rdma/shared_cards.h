/// The cards of this host as the drivers of one agent share them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/background.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/channel.h"
#include "channels/rdma/cards.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/options.h"
#include "channels/shared_state.h"

namespace tensorferry::rdma {

/// Finds the usable ports once, and opens their cards once. Thread-safe.
///
/// The drivers hold it, and outlive their channels. So a channel may refer to it until it is destroyed. Its end waits
/// for the job that runs, then destroys the queue pairs that are left, and completes their work with an error.
class SharedCards final {
 public:
  static constexpr std::size_t usual_staging_bytes = std::size_t{32} << 20;

  /// `options`: nullopt for those of the environment. `staging_bytes`: the size of the staging memory.
  explicit SharedCards(std::optional<Options> options = std::nullopt, std::size_t staging_bytes = usual_staging_bytes)
      : options_(std::move(options)), staging_bytes_(staging_bytes) {}
  ~SharedCards() = default;
  SharedCards(const SharedCards&) = delete;
  SharedCards& operator=(const SharedCards&) = delete;

  /// Returns those of an agent, with the options of the environment.
  static std::shared_ptr<SharedCards> of(SharedState& agent);

  /// Returns the usable ports, at most `most_ports`, or why there are none. The first call looks for them.
  std::variant<std::vector<CardPort>, Refusal> usable_ports();
  /// Returns the open cards. The first call opens them, which takes some milliseconds.
  Result<std::shared_ptr<LocalCards>> open();

  /// Runs the jobs that connect queue pairs.
  Background& connecting() noexcept { return connecting_; }
  /// Runs the jobs that register memory.
  Background& registering() noexcept { return registering_; }

 private:
  /// The open cards, or nullptr.
  struct Opened {
    Opened() = default;
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    ~Opened() {
      if (cards != nullptr) cards->end();
    }
    std::shared_ptr<LocalCards> cards;
  };

  const std::optional<Options> options_;
  const std::size_t staging_bytes_;
  Mutex mutex_;  // guards the next three
  std::optional<std::variant<std::vector<CardPort>, Refusal>> ports_;
  Options prescribed_;
  Opened opened_;
  // Destroyed first. Their jobs use what is above, and one may be opening the cards.
  Background connecting_;
  Background registering_;
};

}  // namespace tensorferry::rdma
