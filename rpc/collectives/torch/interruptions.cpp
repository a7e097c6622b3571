#include "rpc/collectives/torch/interruptions.h"

#include <atomic>

namespace tensorferry::collectives {
namespace {

std::atomic<bool (*)() noexcept> handled_here{nullptr};
std::atomic<void (*)()> run_handlers{nullptr};

}  // namespace

void handle_signals_by(const SignalHandling& handling) noexcept {
  run_handlers = handling.run_handlers;
  handled_here = handling.handled_here;
}

std::function<bool()> WaitInterruption::check() {
  const auto here = handled_here.load();
  if (here == nullptr || !here()) return {};
  return [this, run = run_handlers.load()] {
    try {
      run();
    } catch (...) {
      raised_ = std::current_exception();
    }
    return raised_ != nullptr;
  };
}

}  // namespace tensorferry::collectives
