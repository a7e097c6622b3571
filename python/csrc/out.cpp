#include "python/csrc/out.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "python/csrc/agent.h"
#include "python/csrc/devices.h"
#include "python/csrc/errors.h"

namespace tensorferry::python {
namespace {

constexpr std::size_t long_copy = std::size_t{1} << 20;  // bytes; copies of this size and more release the GIL

std::string text_of_kind(const at::Tensor& tensor) {
  std::ostringstream out;
  out << "torch." << c10::getDtypeNames(tensor.scalar_type()).first << " of shape " << tensor.sizes();
  return std::move(out).str();
}

/// Whether the elements lie contiguously, in the order of their indices, without lazy conjugation or negation.
bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

bool lies_in(const at::Tensor& tensor, const at::Tensor& memory) {
  const auto* begin = static_cast<const std::byte*>(memory.const_data_ptr());
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return data >= begin && data < begin + memory.nbytes();
}

void copy_into(const at::Tensor& out, const at::Tensor& result) {
  std::optional<GilReleased> gil;
  if (out.nbytes() >= long_copy) gil.emplace();
  const c10::NoGradGuard no_grad;
  // The result may have landed in `out` in another order of elements, or be (a view of) `out` itself.
  const bool overlaps = lies_in(result, out) || result.is_alias_of(out);
  out.copy_(overlaps ? result.clone() : result);
}

}  // namespace

at::Tensor checked_out(py::handle object, const PythonAgent& agent) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("out must be a tensor, not " + py::repr(py::type::of(object)).cast<std::string>());
  }
  const auto& out = THPVariable_Unpack(object.ptr());
  const auto& gpus = agent.gpus();
  const bool reached = out.is_cpu() || std::find(gpus.begin(), gpus.end(), out.device()) != gpus.end();
  if (out.layout() != at::kStrided || !reached || out.is_quantized()) {
    throw py::value_error("out must be a dense tensor on the CPU or on a GPU that the agent uses");
  }
  if (out.requires_grad())
    throw py::value_error("out must not require grad: pass out.detach() to overwrite its values");
  return out;
}

void land_in(const at::Tensor& out, const PythonAgent& agent, RawCallOptions& options) {
  const auto device = device_of(out.device());
  if (!agent.gpus().empty()) options.results = {.all = device, .map = {}};
  if (out.nbytes() == 0 || !is_plain(out)) return;
  auto* data = static_cast<std::byte*>(out.mutable_data_ptr());
  if (out.is_cpu()) {
    options.into = {Buffer{{}, data, out.nbytes(), nullptr, std::make_shared<c10::Storage>(out.storage())}};
    return;
  }
  auto buffer = value_or_raise(agent.codec().converters().find(device.type)->to_buffer(out.storage(), 0, out.nbytes()));
  buffer.data = data;
  options.into = {std::move(buffer)};
}

py::object bring_into(const at::Tensor& out, const py::object& result) {
  if (!THPVariable_Check(result.ptr())) {
    throw py::type_error("out= takes a result that is one tensor, and this is a " +
                         py::repr(py::type::of(result)).cast<std::string>());
  }
  const auto came = THPVariable_Unpack(result.ptr());
  if (came.layout() != at::kStrided || came.scalar_type() != out.scalar_type() || came.sizes() != out.sizes()) {
    throw py::value_error("out is a tensor of " + text_of_kind(out) + ", but the result is one of " +
                          text_of_kind(came) + (came.layout() == at::kStrided ? "" : ", and sparse"));
  }
  const bool landed = is_plain(out) && is_plain(came) && came.const_data_ptr() == out.const_data_ptr();
  if (!landed) {
    copy_into(out, came);
  } else if (!out.is_inference()) {
    out.unsafeGetTensorImpl()->bump_version();  // tells autograd that it has been written
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(out));
}

}  // namespace tensorferry::python
