/// The inbox of an asyncio event loop: an eventfd that the loop watches (add_reader) and drains at each wake-up.
///
/// A thread that posts needs no GIL and wakes only the loop's thread. The loop's thread then does all the work that
/// needs Python: it decodes replies, completes futures, starts and cancels tasks. With call_soon_threadsafe, the
/// posting thread would take the GIL, and the loop's thread would then wait for it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/file_descriptor.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

class PythonAgent;
class PythonFuture;

/// The inbox of one event loop. Any thread may post, and posting never blocks. Only the loop's thread drains, with the
/// GIL. Any thread with the GIL may close the inbox of a loop that has ended.
class LoopInbox final {
 public:
  LoopInbox();
  ~LoopInbox();
  LoopInbox(const LoopInbox&) = delete;
  LoopInbox& operator=(const LoopInbox&) = delete;

  /// Completes the futures of calls of `agent` whose replies are posted to any inbox. Any thread, with the GIL.
  static void complete_posted(const PythonAgent& agent);

  /// Returns the descriptor that the loop watches.
  [[nodiscard]] int fd() const { return eventfd_.get(); }
  /// Processes the posted items in order, including those posted meanwhile. An exception that a callable raises goes to
  /// sys.unraisablehook.
  void drain();
  /// Closes the inbox when its loop has ended: completes the futures whose replies are posted, and drops the rest.
  void close();

  /// Posts a future whose reply has come: drain() calls PythonFuture::complete_arrived. False if closed: the caller
  /// must complete the future.
  bool post(std::shared_ptr<PythonFuture> future);
  /// Posts `callable`, which drain() calls without arguments. False if closed.
  bool post(std::shared_ptr<py::object> callable);

 private:
  struct Item {
    std::shared_ptr<PythonFuture> arrived;
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
