/// Shows calls as ranges of torch's profiler.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tensorferry::python {

/// The range of one call. At the caller it spans from the encoding of the arguments to the decoded result; at the
/// callee, the run of the function. Both ranges have the same sequence number in the trace and in the events of
/// torch.profiler. It is derived from the caller's incarnation and its number for the call. Both name the two agents.
class CallRange {
 public:
  /// Begins a range on this thread. Null if no profiler observes this thread; that case costs nothing. `what` is the
  /// kind of call ("rpc_sync"); `function` is the function's name in the request.
  static std::unique_ptr<CallRange> begin(std::string_view what, std::string_view function, std::string_view caller,
                                          std::string_view callee, std::uint64_t incarnation, std::uint64_t call) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) [[likely]] {
      return nullptr;
    }
    return std::unique_ptr<CallRange>(
        new CallRange(std::move(*callbacks), name_of(what, function, caller, callee), sequence_of(incarnation, call)));
  }
  /// Ends the range, on any thread.
  ~CallRange();
  CallRange(const CallRange&) = delete;
  CallRange& operator=(const CallRange&) = delete;

 private:
  CallRange(at::StepCallbacks callbacks, const std::string& name, std::int64_t sequence);
  static std::string name_of(std::string_view what, std::string_view function, std::string_view caller,
                             std::string_view callee);
  static std::int64_t sequence_of(std::uint64_t incarnation, std::uint64_t call);

  std::string name_;  // read by the profiler while the range is open
  at::RecordFunction record_;
  at::ThreadLocalState begun_in_;  // the profiler state of the beginning thread, for the end
};

}  // namespace tensorferry::python
