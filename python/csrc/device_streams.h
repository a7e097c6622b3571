/// Values on GPUs that travel through futures: where their memory is, and streams that wait for them.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <vector>

#include "python/csrc/interpreter.h"
#include "rpc/tensor.h"

namespace tensorferry::python {

/// The storages of the tensors in `value` that are not on the CPU: found in tuples, lists and dicts, and by torch's
/// own means (which pickle it) in anything else.
std::vector<WeakStorage> device_storages_of(const py::object& value);

/// For a callback of a completed future, which is to be added with `uses_future` false: torch would take streams on
/// every GPU that the future might have used, and make a context on each. While one lives, the current streams of those
/// that its value is on are streams of torch's pool that wait for it.
class CallbackStreams final {
 public:
  explicit CallbackStreams(c10::ivalue::Future& future);

 private:
  std::optional<c10::MultiStreamGuard> guard_;
};

}  // namespace tensorferry::python
