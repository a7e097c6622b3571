#include "python/csrc/devices.h"

#include <torch/csrc/Device.h>

#include <string>

#include "agent/buffers/placement.h"

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
  PyObject* local = nullptr;
  PyObject* remote = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(device, &at, &local, &remote) != 0;) {
    placement.map.emplace_back(device_of(local), device_of(remote));
  }
  if (const auto good = check_map(placement.map); !good.ok()) throw py::value_error(std::string(good.what()));
  return placement;
}

}  // namespace tensorferry::python
