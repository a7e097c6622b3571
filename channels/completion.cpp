#include "channels/completion.h"

#include <new>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "base/out_of_memory.h"

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

/// Runs one completion. If it has no memory, what it holds is destroyed: a call in it then fails, see Reply.
void run(Completion completion, Status status) noexcept {
  out_of_memory::run_or([&] { completion(std::move(status)); },
                        [] { log_warning("out of memory: the end of a transfer or of a call was not told"); });
}

}  // namespace

void complete(Completion completion, Status status) noexcept {
  if (!completion) return;
  assert_no_lock();
  if (nesting == max_nesting) {
    try {
      postponed->push_back({std::move(completion), std::move(status)});
    } catch (const std::bad_alloc&) {  // the list has grown by nothing: the stack goes one deeper
      out_of_memory::release_reserve();
      run(std::move(completion), std::move(status));
    }
    return;
  }
  if (nesting > 0) {
    ++nesting;
    run(std::move(completion), std::move(status));
    --nesting;
    return;
  }
  std::vector<Postponed> later;
  postponed = &later;
  nesting = 1;
  run(std::move(completion), std::move(status));
  while (!later.empty()) {
    for (auto& each : std::exchange(later, {})) run(std::move(each.completion), std::move(each.status));
  }
  nesting = 0;
  postponed = nullptr;
}

}  // namespace tensorferry
