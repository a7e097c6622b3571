/// Calls as ranges of torch's profiler.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tensorferry::python {

/// A call, from when its arguments are written to when its result is there, or the run of its function at the callee.
/// Both have the same sequence number, made of the caller's incarnation and its number for the call, in the trace and
/// in the events of torch.profiler; both name the two agents.
class CallRange {
 public:
  /// Null where no profiler looks at this thread, which costs nothing. `what`: "rpc_sync"; `function`: as a request
  /// names it.
  static std::unique_ptr<CallRange> begin(std::string_view what, std::string_view function, std::string_view caller,
                                          std::string_view callee, std::uint64_t incarnation, std::uint64_t call) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) [[likely]] {
      return nullptr;
    }
    return std::unique_ptr<CallRange>(
        new CallRange(std::move(*callbacks), name_of(what, function, caller, callee), sequence_of(incarnation, call)));
  }
  /// Ends it, on any thread.
  ~CallRange();
  CallRange(const CallRange&) = delete;
  CallRange& operator=(const CallRange&) = delete;

 private:
  CallRange(at::StepCallbacks callbacks, const std::string& name, std::int64_t sequence);
  static std::string name_of(std::string_view what, std::string_view function, std::string_view caller,
                             std::string_view callee);
  static std::int64_t sequence_of(std::uint64_t incarnation, std::uint64_t call);

  std::string name_;  // while the range is open
  at::RecordFunction record_;
  at::ThreadLocalState begun_in_;  // which profiler sees the end
};

}  // namespace tensorferry::python
