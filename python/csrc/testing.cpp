#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "channels/host_memory.h"
#include "converters/cpu.h"
#include "python/csrc/codec.h"
#include "python/csrc/errors.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {
namespace {

/// Test references: each object has a number, which its record carries. Replaces the binding of remote references.
class NumberedReferences final : public MessageReferences {
 public:
  bool write(PyObject* object, ReferenceRecord& record) override {
    record.owner.name = "owner";
    record.object = {1, number(py::handle(object)).cast<std::uint64_t>()};
    record.fork = {1, 1};
    return true;
  }
  PyObject* read(const ReferenceRecord& record) override { return make(record.object.counter).release().ptr(); }

  py::function number;
  py::function make;
};

/// A codec with its own receive memory, in place of an agent.
struct CodecFixture {
  CodecFixture() {
    const auto converters = std::make_shared<Converters>();
    converters->add(DeviceType::cpu, std::make_shared<CpuConverter>(memory, &closing));
    codec = std::make_unique<Codec>(converters);
  }
  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();
  std::unique_ptr<Codec> codec;
  std::unique_ptr<NumberedReferences> references;
};

/// An encoded message, which keeps alive the objects that it was made of.
struct Encoded {
  Message message;
};

/// Returns the message as a channel would deliver it: with the bytes in memory of the receiver.
Received deliver(const Message& message, HostMemory& memory) {
  Received received;
  received.payload = message.payload;
  for (const auto& source : message.buffers) {
    auto buffer = memory.allocate(source.bytes, Device{});
    if (source.bytes != 0 && buffer.data == nullptr) throw std::bad_alloc();
    if (source.bytes != 0) std::memcpy(buffer.data, source.data, source.bytes);
    received.buffers.push_back(std::move(buffer));
  }
  return received;
}

py::object steal(Object object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object.release());
}

py::object or_none(Object object) { return object ? steal(std::move(object)) : py::none(); }

Encoded encode(const CodecFixture& fixture, const py::object& value) {
  Encoded encoded;
  if (!fixture.codec->write_result(value.ptr(), fixture.references.get(), encoded.message))
    throw py::error_already_set();
  return encoded;
}

py::object decode(const CodecFixture& fixture, const Received& received) {
  Codec::DecodedReply outcome;
  if (!fixture.codec->read_reply(received, fixture.references.get(), outcome)) throw py::error_already_set();
  return steal(std::move(outcome.value));
}

Received received_from(const py::bytes& payload, const std::vector<py::bytes>& buffers, HostMemory& memory) {
  Message message;
  const auto bytes = view_of(std::string_view(payload));
  message.payload.assign(bytes.begin(), bytes.end());
  for (const auto& buffer : buffers) {
    const std::string_view view(buffer);
    message.buffers.push_back(
        {Device{}, reinterpret_cast<std::byte*>(const_cast<char*>(view.data())), view.size(), nullptr, nullptr});
  }
  return deliver(message, memory);
}

Encoded encode_request(const CodecFixture& fixture, const py::tuple& args, const py::object& kwargs,
                       const py::object& first) {
  Encoded encoded;
  const Codec::Invocation call{first.is_none() ? nullptr : first.ptr(), args.ptr(),
                               kwargs.is_none() ? nullptr : kwargs.ptr(), Creation{{1, 2}, {3, 4}}, 5};
  if (!fixture.codec->write_request(call, fixture.references.get(), encoded.message)) throw py::error_already_set();
  return encoded;
}

py::tuple decode_request(const CodecFixture& fixture, const Encoded& encoded) {
  Codec::Arguments arguments;
  const auto received = deliver(encoded.message, *fixture.memory);
  if (!fixture.codec->read_request(received, fixture.references.get(), arguments)) throw py::error_already_set();
  if (arguments.creation != Creation{{1, 2}, {3, 4}} || arguments.call != 5)
    throw py::value_error("the request has another head");
  return py::make_tuple(steal(std::move(arguments.args)), or_none(std::move(arguments.kwargs)));
}

/// Returns the exception as the caller of the function gets it: (text, the rebuilt exception or None).
py::tuple deliver_exception(const CodecFixture& fixture, const py::object& exception) {
  RemoteException described;
  described.text = py::str(exception).cast<std::string>();
  Message message;
  if (!fixture.codec->write_exception(described, exception.ptr(), fixture.references.get(), message))
    throw py::error_already_set();
  Codec::DecodedReply outcome;
  if (!fixture.codec->read_reply(deliver(message, *fixture.memory), fixture.references.get(), outcome))
    throw py::error_already_set();
  return py::make_tuple(outcome.described->text, or_none(std::move(outcome.exception)));
}

/// Makes objects of `type` travel as references. number(object) returns the object's number; make(number) returns an
/// object.
void reference_type(CodecFixture& fixture, const py::type& type, const py::function& number, const py::function& make) {
  fixture.codec->register_reference_type(reinterpret_cast<PyTypeObject*>(type.ptr()));
  fixture.references = std::make_unique<NumberedReferences>();
  fixture.references->number = number;
  fixture.references->make = make;
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Returns the median times, in nanoseconds, to encode `args` as a request and to decode it (without the delivery).
std::pair<double, double> measure(const CodecFixture& fixture, const py::tuple& args, int times) {
  using Clock = std::chrono::steady_clock;
  const auto nanoseconds = [](Clock::duration taken) {
    return std::chrono::duration<double, std::nano>(taken).count();
  };
  std::vector<double> encoding;
  std::vector<double> decoding;
  for (int i = 0; i < times; ++i) {
    const auto start = Clock::now();
    Message message;
    const Codec::Invocation call{nullptr, args.ptr(), nullptr, std::nullopt, 0};
    if (!fixture.codec->write_request(call, nullptr, message)) throw py::error_already_set();
    encoding.push_back(nanoseconds(Clock::now() - start));
    const auto received = deliver(message, *fixture.memory);
    const auto delivered = Clock::now();
    {
      Codec::Arguments arguments;
      if (!fixture.codec->read_request(received, nullptr, arguments)) throw py::error_already_set();
    }
    decoding.push_back(nanoseconds(Clock::now() - delivered));
  }
  return {median(encoding), median(decoding)};
}

}  // namespace

void bind_testing(py::module_& module) {
  auto testing = module.def_submodule("_testing", "The codec without an agent, for tests.");
  py::class_<Encoded>(testing, "Encoded")
      .def_property_readonly("payload",
                             [](const Encoded& self) { return py::bytes(std::string(text_of(self.message.payload))); })
      .def_property_readonly("buffers",
                             [](const Encoded& self) {
                               py::list buffers;
                               for (const auto& buffer : self.message.buffers) {
                                 buffers.append(py::bytes(reinterpret_cast<const char*>(buffer.data), buffer.bytes));
                               }
                               return buffers;
                             })
      .def_property_readonly("addresses",
                             [](const Encoded& self) {
                               std::vector<std::uintptr_t> addresses;
                               for (const auto& buffer : self.message.buffers) {
                                 addresses.push_back(reinterpret_cast<std::uintptr_t>(buffer.data));
                               }
                               return addresses;
                             })
      .def("drop_without_gil", [](Encoded& self) {
        const GilReleased released;
        self.message = {};
      });
  py::class_<CodecFixture>(testing, "Codec")
      .def(py::init<>())
      .def("encode", &encode)
      .def("decode", [](const CodecFixture& self,
                        const Encoded& encoded) { return decode(self, deliver(encoded.message, *self.memory)); })
      .def("decode",
           [](const CodecFixture& self, const py::bytes& payload, const std::vector<py::bytes>& buffers) {
             return decode(self, received_from(payload, buffers, *self.memory));
           })
      .def("encode_request", &encode_request, py::arg("args"), py::arg("kwargs") = py::none(),
           py::arg("first") = py::none())
      .def("decode_request", &decode_request)
      .def("deliver_exception", &deliver_exception)
      .def("reference_type", &reference_type)
      .def("refuse_pickle", [](CodecFixture& self) { self.codec->refuse_pickle(); })
      .def("held_bytes", [](const CodecFixture& self) { return self.memory->usage().held_bytes; })
      .def("measure", &measure);
}

}  // namespace tensorferry::python
