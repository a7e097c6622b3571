#include "channels/cuda_basic/messages.h"

namespace tensorferry::cuda_basic {
namespace {

enum class Kind : std::uint8_t { staging = 1, mapped = 2, request = 3 };

struct Write {
  Writer& out;

  void operator()(const Staging&) const { out.put(Kind::staging); }
  void operator()(const Mapped& mapped) const {
    out.put(Kind::mapped);
    out.put(static_cast<std::uint8_t>(mapped.ok));
  }
  void operator()(const Request& request) const {
    out.put(Kind::request);
    out.varint(request.offer);
    out.varint(request.bytes);
    out.put(static_cast<std::uint8_t>(request.ring));
  }
};

}  // namespace

Bytes encode(const Control& control) {
  Bytes bytes;
  Writer out(bytes);
  std::visit(Write{out}, control);
  return bytes;
}

std::optional<Control> control_of(ByteView bytes) {
  Reader in(bytes);
  Control control;
  switch (static_cast<Kind>(in.get<std::uint8_t>())) {
    case Kind::staging:
      control = Staging{};
      break;
    case Kind::mapped:
      control = Mapped{in.flag()};
      break;
    case Kind::request: {
      Request request;
      request.offer = in.varint();
      request.bytes = in.varint();
      request.ring = in.flag();
      control = request;
      break;
    }
    default:
      return std::nullopt;
  }
  if (in.failed() || !in.empty()) return std::nullopt;
  return control;
}

Bytes encode(const Opaque& opaque) {
  Bytes bytes;
  Writer out(bytes);
  out.varint(opaque.offer);
  out.varint(opaque.bytes);
  out.put(static_cast<std::uint8_t>(opaque.ring));
  return bytes;
}

std::optional<Opaque> opaque_of(ByteView bytes) {
  Reader in(bytes);
  Opaque opaque;
  opaque.offer = in.varint();
  opaque.bytes = in.varint();
  opaque.ring = in.flag();
  if (in.failed() || !in.empty()) return std::nullopt;
  return opaque;
}

}  // namespace tensorferry::cuda_basic
