/// Finds the GPU memory of a Python value, and makes streams wait for the value of a torch future.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <vector>

#include "python/csrc/interpreter.h"
#include "rpc/tensor.h"

namespace tensorferry::python {

/// Returns the storages of the tensors in `value` that are not on the CPU. Searches tuples, lists and dicts itself, and
/// uses torch's function (which pickles the value) for other objects. Needs the GIL.
std::vector<WeakStorage> device_storages_of(const py::object& value);

/// Sets the current streams for a callback of a completed future. While a CallbackStreams lives, the current stream of
/// each GPU that the future's value is on is a stream of torch's pool, which waits for the value.
///
/// The callback must be added with `uses_future` false. With true, torch would take a stream on every GPU that the
/// future might have used, and create a context on each.
class CallbackStreams final {
 public:
  explicit CallbackStreams(c10::ivalue::Future& future);

 private:
  std::optional<c10::MultiStreamGuard> guard_;
};

}  // namespace tensorferry::python
