#include "channels/completion.h"

#include <utility>
#include <vector>

#include "base/mutex.h"

namespace tensorferry {

namespace {

struct Postponed {
  Completion completion;
  Status status;
};

// Trivially destructible, so that a completion that runs during thread exit finds them intact. The list lives on the
// stack of the outermost complete().
thread_local int nesting = 0;
thread_local std::vector<Postponed>* postponed = nullptr;

}  // namespace

void complete(Completion completion, Status status) noexcept {
  if (!completion) return;
  assert_no_lock();
  if (nesting == max_nesting) {
    postponed->push_back({std::move(completion), std::move(status)});
    return;
  }
  if (nesting > 0) {
    ++nesting;
    completion(std::move(status));
    --nesting;
    return;
  }
  std::vector<Postponed> later;
  postponed = &later;
  nesting = 1;
  completion(std::move(status));
  while (!later.empty()) {
    for (auto& each : std::exchange(later, {})) each.completion(std::move(each.status));
  }
  nesting = 0;
  postponed = nullptr;
}

}  // namespace tensorferry
