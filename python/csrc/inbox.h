/// What threads of ours hand to an asyncio event loop: an eventfd that the loop watches (add_reader) and drains at each
/// wake-up. Whoever posts needs no GIL and wakes no other thread than the loop's, which then does all that Python must
/// do: it decodes replies, completes futures, starts and cancels tasks. A hand-over by call_soon_threadsafe costs the
/// poster the GIL, which the loop's thread then waits for.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "channels/file_descriptor.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

class Future;

/// Of one event loop. Posting is thread-safe and never blocks; the rest is for the loop's thread, with the GIL.
class LoopInbox final {
 public:
  LoopInbox();

  /// What the loop watches.
  [[nodiscard]] int fd() const { return eventfd_.get(); }
  /// Does what has been posted, in order; also what is posted meanwhile. What a callable raises goes to
  /// sys.unraisablehook.
  void drain();
  /// The loop is gone: completes the futures whose replies wait here, drops the rest.
  void close();

  /// The reply of `future` has come: Future::complete_arrived. False: closed, nobody will.
  bool post(std::shared_ptr<Future> future);
  /// `callable` is called without arguments. False: closed.
  bool post(std::shared_ptr<py::object> callable);

 private:
  struct Item {
    std::shared_ptr<Future> arrived;
    std::shared_ptr<py::object> callable;
  };
  bool post(Item item);
  std::vector<Item> take();

  FileDescriptor eventfd_;
  std::mutex mutex_;
  std::vector<Item> items_;
  bool closed_ = false;
};

void bind_inbox(py::module_& module);

}  // namespace tensorferry::python
