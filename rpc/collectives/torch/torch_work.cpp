#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/foreign_code.h"
#include "base/text.h"
#include "rpc/collectives/torch/interruptions.h"
#include "rpc/collectives/torch/process_group.h"
#include "rpc/collectives/torch/unused_thread.h"
#include "rpc/torch_futures.h"

namespace tensorferry::collectives {
namespace {

[[noreturn]] void throw_status(const Status& status) { C10_THROW_ERROR(DistBackendError, status.text()); }

c10::IValue value_of(const std::vector<std::vector<at::Tensor>>& results) {
  if (results.size() == 1) return results[0];
  return results;
}

}  // namespace

#ifdef TENSORFERRY_COMPLETION_HOOKS
void CompletionHooks::add(std::int64_t id, c10d::CompletionHook hook) {
  const std::lock_guard lock(mutex_);
  hooks_.insert_or_assign(id, std::move(hook));
}

void CompletionHooks::remove(std::int64_t id) {
  const std::lock_guard lock(mutex_);
  hooks_.erase(id);
}

void CompletionHooks::watch(const std::shared_ptr<CompletionHooks>& self, GroupWork& work, std::uint64_t key) {
  {
    const std::lock_guard lock(self->mutex_);
    if (self->hooks_.empty()) return;
  }
  work.on_done([self, key, began = std::chrono::steady_clock::now()](const Status& status) {
    if (!status.ok()) return;
    const std::chrono::duration<float, std::milli> took = std::chrono::steady_clock::now() - began;
    std::map<std::int64_t, c10d::CompletionHook> hooks;
    {
      const std::lock_guard lock(self->mutex_);
      hooks = self->hooks_;
    }
    for (const auto& [id, hook] : hooks) hook({key, took.count()});
  });
}
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
void AbortHooks::add(std::int64_t id, c10d::AbortHook hook) {
  auto added = std::make_shared<const c10d::AbortHook>(std::move(hook));
  const std::lock_guard lock(mutex_);
  hooks_[id].swap(added);  // an earlier one is destroyed after the lock is released
}

void AbortHooks::remove(std::int64_t id) {
  Shared removed;
  const std::lock_guard lock(mutex_);
  if (const auto found = hooks_.find(id); found != hooks_.end()) {
    removed = std::move(found->second);
    hooks_.erase(found);
  }
}

void AbortHooks::clear() {
  std::map<std::int64_t, Shared> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(hooks_);
}

void AbortHooks::run() {
  thread_local bool runs = false;  // a hook may abort its group, or another one whose hook aborts this one
  if (runs || tensors_are_kept()) return;
  runs = true;
  const std::unique_ptr<bool, void (*)(bool*)> over(&runs, [](bool* flag) { *flag = false; });
  std::map<std::int64_t, Shared> hooks;
  {
    const std::lock_guard lock(mutex_);
    hooks = hooks_;
  }
  for (const auto& [id, hook] : hooks) {
    run_foreign(formatted("abort hook {} of a process group", id), [&] { (*hook)(); });
  }
}

void AbortHooks::watch(const std::shared_ptr<AbortHooks>& self, RawGroup& group, GroupWork& work) {
  work.before_end([self, &group] {  // which the work keeps
    if (!group.over().ok() && !group.closed()) self->run();
  });
}
#endif

TorchWork::TorchWork(std::shared_ptr<GroupWork> work, const TorchAccess& access, c10d::OpType type, const char* title,
                     std::vector<std::vector<at::Tensor>> results, const std::vector<at::Tensor>& inputs,
                     std::uint64_t sequence, std::uint64_t key, std::chrono::milliseconds timeout)
    : Work(-1, type, title, inputs),
      work_(std::move(work), access),
      results_(std::move(results)),
      sequence_(sequence),
      key_(key),
      timeout_(timeout) {
  // The profiler may be stopped, and its records freed, as soon as wait() has returned.
  if (recordFunctionEndCallback_) work_.group_work()->before_end(std::move(recordFunctionEndCallback_));
}

bool TorchWork::isCompleted() { return work_.done(); }
bool TorchWork::isSuccess() const { return work_.done() && work_.status().ok(); }

std::exception_ptr TorchWork::exception() const {
  const auto why = work_.status();
  if (why.ok()) return nullptr;
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, why.text()));
}

int TorchWork::sourceRank() const {
  const auto type = retrieveOpType();
  TORCH_CHECK(type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE,
              "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call.");
  return static_cast<int>(work_.group_work()->letter().from);
}

std::vector<at::Tensor> TorchWork::result() {
  TORCH_CHECK(work_.group_work()->done(),
              "the operation has not ended, so it has no result yet: call wait() before result()");
  if (const auto why = work_.status(); !why.ok()) throw_status(why);
  std::vector<at::Tensor> out;
  for (const auto& list : results_) out.insert(out.end(), list.begin(), list.end());
  return out;
}

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  const Returning to_the_caller;
  const bool bounded = timeout != kNoTimeout;
  const auto until = std::chrono::steady_clock::now() + timeout;
  WaitInterruption interruption;
  const bool ended = work_.wait(bounded ? std::optional(until) : std::nullopt, interruption.check());
  interruption.rethrow();
  if (!ended) {
    C10_THROW_ERROR(DistBackendError, c10::str("DeadlineExceeded: the operation did not end within ", timeout.count(),
                                               " ms; it goes on"));
  }
  if (const auto why = work_.status(); !why.ok()) throw_status(why);
  work_.block_current_stream();
  // torch keeps the works that a compiled graph may wait for, until a thread has waited for them.
  if (c10d::allow_inflight_collective_as_graph_input())
    c10d::unregister_work(c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this));
  return true;
}

void TorchWork::time_from_now() {
  took_ = std::make_shared<std::atomic<float>>(-1.0F);
  work_.group_work()->on_done([took = took_, began = std::chrono::steady_clock::now()](const Status&) {
    took->store(std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - began).count());
  });
}

float TorchWork::getDuration() const {
  const auto took = took_ ? took_->load() : -1.0F;
  TORCH_CHECK(took >= 0, took_ ? "the operation has not ended"
                               : "the process group does not time its operations: call "
                                 "_enable_collectives_timing() before it");
  return took;
}

void TorchWork::abort() {
  const auto type = retrieveOpType();
  TORCH_CHECK(c10d::isP2POp(type), "an operation of all ranks cannot be aborted at one of them: abort the group");
  work_.group_work()->withdraw({Code::cancelled, "the program aborted the operation"});
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  const auto type = results_.size() == 1 ? c10::ListType::create(c10::TensorType::get())
                                         : c10::ListType::create(c10::ListType::create(c10::TensorType::get()));
  const auto& order = work_.order();
  const auto devices = order ? std::vector<c10::Device>{order->device()} : std::vector<c10::Device>();
  const auto& state = state_of_unused_thread();  // before future_ is set: it may throw
  future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
  work_.group_work()->on_done([future = future_, results = results_, order, &state](const Status& status) {
    const at::ThreadLocalStateGuard unused(state);
    settle(*future, [&] {
      if (status.ok() && order) return order->on_stream([&] { future->markCompleted(value_of(results)); });
      if (status.ok()) return future->markCompleted(value_of(results));
      throw_status(status);
    });
  });
  return future_;
}

}  // namespace tensorferry::collectives
