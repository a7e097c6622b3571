#include "python/csrc/device_streams.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "python/csrc/errors.h"

namespace tensorferry::python {
namespace {

constexpr int deepest = 32;  // torch's function searches deeper values

void add(const at::Tensor& tensor, std::vector<WeakStorage>& found) {
  if (tensor.device().is_cpu() || !tensor.has_storage()) return;
  found.emplace_back(tensor.storage().getWeakStorageImpl());
}

/// Adds the tensors in `value` to `found`. False: it holds objects other than tensors in plain containers.
bool collect(PyObject* value, int depth, std::vector<WeakStorage>& found) {
  if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyUnicode_CheckExact(value) || PyBytes_CheckExact(value)) {
    return true;
  }
  if (THPVariable_Check(value)) {
    const auto& tensor = THPVariable_Unpack(value);
    if (tensor.layout() != at::kStrided) return tensor.device().is_cpu();
    add(tensor, found);
    return true;
  }
  if (depth == deepest) return false;
  const auto each = [&](PyObject* item) { return collect(item, depth + 1, found); };
  bool plain = true;
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) plain = each(PyTuple_GET_ITEM(value, i)) && plain;
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) plain = each(PyList_GET_ITEM(value, i)) && plain;
  } else if (PyDict_Check(value)) {
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) plain = each(item) && plain;
  } else {
    plain = false;
  }
  return plain;
}

/// Whether this process can hold memory of a GPU: torch has initialised its CUDA allocator.
bool uses_gpus() {
  const auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(at::kCUDA));
  return allocator != nullptr && const_cast<c10::DeviceAllocator*>(allocator)->initialized();
}

}  // namespace

std::vector<WeakStorage> device_storages_of(const py::object& value) {
  std::vector<WeakStorage> found;
  if (!uses_gpus() || collect(value.ptr(), 0, found)) return found;
  try {
    const auto tensors = attribute_of("torch._jit_internal", "_extract_tensors")(value);
    for (const auto tensor : tensors) add(THPVariable_Unpack(tensor.ptr()), found);
  } catch (const py::error_already_set&) {
    // The value cannot be pickled, so its tensors stay unknown here.
  }
  return found;
}

CallbackStreams::CallbackStreams(c10::ivalue::Future& future) {
  if (future.devices().empty() || !future.hasValue()) return;
  std::vector<c10::Stream> streams;
  for (const auto& weak : future.storages()) {
    const auto storage = weak.lock();
    if (!storage || storage->device().is_cpu()) continue;
    const auto device = storage->device();
    const bool has = std::any_of(streams.begin(), streams.end(),
                                 [device](const c10::Stream& stream) { return stream.device() == device; });
    if (!has) streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  if (streams.empty()) return;
  guard_.emplace(streams);
  future.wait();  // the future has completed, so only the streams wait
}

}  // namespace tensorferry::python
