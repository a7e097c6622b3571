#include "python/csrc/inbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <set>
#include <utility>

#include "base/per_process.h"
#include "python/csrc/future.h"

namespace tensorferry::python {
namespace {

/// The inbox that this thread is draining. The running drain() finds items posted from this thread, so they need no
/// wake-up.
thread_local const LoopInbox* draining = nullptr;

struct Inboxes {
  std::mutex mutex;
  std::set<LoopInbox*> all;
};
Inboxes& inboxes() {
  static auto& of_this_process = *new PerProcess<Inboxes>;
  return of_this_process.get();
}

void call(const py::object& callable) {
  try {
    (void)call_object(callable, py::tuple(), {});
  } catch (py::error_already_set& error) {
    error.restore();
    PyErr_WriteUnraisable(callable.ptr());
  }
}

}  // namespace

LoopInbox::LoopInbox() : eventfd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!eventfd_) throw std::runtime_error("no file descriptor is left for an event loop's inbox");
  auto& [mutex, all] = inboxes();
  const std::lock_guard lock(mutex);
  all.insert(this);
}

LoopInbox::~LoopInbox() {
  auto& [mutex, all] = inboxes();
  const std::lock_guard lock(mutex);
  all.erase(this);
}

void LoopInbox::complete_posted(const PythonAgent& agent) {
  std::vector<std::shared_ptr<PythonFuture>> posted;
  {
    auto& [mutex, all] = inboxes();
    const std::lock_guard lock(mutex);
    for (auto* const inbox : all) {
      const std::lock_guard lock_items(inbox->mutex_);
      for (const auto& item : inbox->items_) {
        if (item.arrived && item.arrived->is_of(agent)) posted.push_back(item.arrived);
      }
    }
  }
  for (const auto& future : posted) future->complete_arrived();
}

bool LoopInbox::post(std::shared_ptr<PythonFuture> future) { return post(Item{std::move(future), nullptr}); }
bool LoopInbox::post(std::shared_ptr<py::object> callable) { return post(Item{nullptr, std::move(callable)}); }

bool LoopInbox::post(Item item) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    wake = items_.empty() && draining != this;
    items_.push_back(std::move(item));
  }
  if (wake) {
    const std::uint64_t one = 1;
    (void)!::write(eventfd_.get(), &one, sizeof one);
  }
  return true;
}

std::vector<LoopInbox::Item> LoopInbox::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(items_, {});
}

void LoopInbox::drain() {
  std::uint64_t count = 0;
  (void)!::read(eventfd_.get(), &count, sizeof count);
  const auto* outer = std::exchange(draining, this);
  for (auto items = take(); !items.empty(); items = take()) {
    for (auto& item : items) {
      if (item.arrived)
        item.arrived->complete_arrived();
      else
        call(*item.callable);
      item = {};
    }
  }
  draining = outer;
}

void LoopInbox::close() {
  std::vector<Item> left;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    left.swap(items_);
  }
  for (const auto& item : left) {
    if (item.arrived) item.arrived->complete_arrived();
  }
}

void bind_inbox(py::module_& module) {
  py::class_<LoopInbox, std::shared_ptr<LoopInbox>>(
      module, "_LoopInbox", "The completed futures and callables that other threads pass to an event loop.")
      .def(py::init<>())
      .def("fileno", &LoopInbox::fd)
      .def("drain", &LoopInbox::drain)
      .def("close", &LoopInbox::close)
      .def("post",
           [](LoopInbox& self, py::object callable) { return self.post(share_with_any_thread(std::move(callable))); });
}

}  // namespace tensorferry::python
