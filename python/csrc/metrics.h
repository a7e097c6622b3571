/// What tensorferry.metrics and tensorferry.recorder read: the metrics of an agent and the events of its flight
/// recorder.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/csrc/agent.h"

namespace tensorferry::python {

void bind_metrics(py::class_<PythonAgent, std::shared_ptr<PythonAgent>>& agent);

}  // namespace tensorferry::python
