#include "python/csrc/devices.h"

#include <torch/csrc/Device.h>

#include <string>

namespace tensorferry::python {
namespace {

c10::Device parsed(PyObject* object) {
  if (THPDevice_Check(object)) return reinterpret_cast<THPDevice*>(object)->device;
  if (PyUnicode_Check(object)) {
    try {
      return c10::Device(py::handle(object).cast<std::string>());
    } catch (const c10::Error& error) {
      throw py::value_error(error.what_without_backtrace());
    }
  }
  if (!PyLong_Check(object) || PyBool_Check(object)) {
    throw py::type_error("a device is a torch.device, its name, or the index of a GPU, not " +
                         py::repr(object).cast<std::string>());
  }
  const auto index = py::handle(object).cast<int>();
  if (index < 0 || index > 127) throw py::value_error("there is no GPU " + std::to_string(index));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace

Device device_of(const c10::Device& device) {
  if (device.is_cpu()) return {};
  if (!device.is_cuda()) throw py::value_error("a tensor can land on the CPU or a GPU, not on " + device.str());
  return {DeviceType::cuda, static_cast<std::uint8_t>(device.has_index() ? device.index() : 0)};
}

c10::Device torch_device(Device device) {
  if (device.type == DeviceType::cpu) return c10::kCPU;
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(device.index)};
}

Device device_of(PyObject* object) { return device_of(parsed(object)); }

Placement placement_of(PyObject* device) {
  Placement placement;
  if (!PyDict_Check(device)) {
    placement.all = device_of(device);
    return placement;
  }
  if (PyDict_GET_SIZE(device) > 64) throw py::value_error("a device map has at most 64 entries");
  PyObject* local = nullptr;
  PyObject* remote = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(device, &at, &local, &remote) != 0;) {
    const std::pair entry(device_of(local), device_of(remote));
    for (const auto& [from, to] : placement.map) {
      if (from == entry.first || to == entry.second) {
        throw py::value_error("a device map is one to one: " + text_of(entry.first) + " to " + text_of(entry.second) +
                              " and " + text_of(from) + " to " + text_of(to) + " cannot both be");
      }
    }
    placement.map.push_back(entry);
  }
  return placement;
}

Placement reversed(const Placement& placement) {
  Placement back;
  for (const auto& [from, to] : placement.map) back.map.emplace_back(to, from);
  return back;
}

}  // namespace tensorferry::python
