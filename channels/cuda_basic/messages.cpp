#include "channels/cuda_basic/messages.h"

namespace tensorferry::cuda_basic {
namespace {

enum class Kind : std::uint8_t { staging = 1, mapped = 2, withdrawn = 3, broken = 4 };

struct Write {
  Writer& out;

  void operator()(const Staging&) const { out.put(Kind::staging); }
  void operator()(const Mapped& mapped) const {
    out.put(Kind::mapped);
    out.put(static_cast<std::uint8_t>(mapped.ok));
  }
  void operator()(const Withdrawn& withdrawn) const {
    out.put(Kind::withdrawn);
    out.put(withdrawn.kind);
    out.varint(withdrawn.first);
    out.varint(withdrawn.bytes);
  }
  void operator()(const Broken& broken) const {
    out.put(Kind::broken);
    out.put(broken.kind);
  }
};

std::optional<FlowKind> flow_kind_of(std::uint8_t byte) {
  if (byte > static_cast<std::uint8_t>(FlowKind::bulk)) return std::nullopt;
  return static_cast<FlowKind>(byte);
}

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
    case Kind::withdrawn: {
      const auto kind = flow_kind_of(in.get<std::uint8_t>());
      const auto first = in.varint(), size = in.varint();
      if (!kind || *kind == FlowKind::nowhere || size == 0) return std::nullopt;
      control = Withdrawn{*kind, first, size};
      break;
    }
    case Kind::broken: {
      const auto kind = flow_kind_of(in.get<std::uint8_t>());
      if (!kind || *kind == FlowKind::nowhere) return std::nullopt;
      control = Broken{*kind};
      break;
    }
    default:
      return std::nullopt;
  }
  if (in.failed() || !in.empty()) return std::nullopt;
  return control;
}

Bytes encode(const CudaBasicTicket& parsed) {
  Bytes bytes;
  Writer out(bytes);
  out.put(parsed.kind);
  out.varint(parsed.first);
  return bytes;
}

std::optional<CudaBasicTicket> parse_ticket(ByteView bytes) {
  Reader in(bytes);
  const auto kind = flow_kind_of(in.get<std::uint8_t>());
  const auto first = in.varint();
  if (!kind || in.failed() || !in.empty()) return std::nullopt;
  return CudaBasicTicket{*kind, first};
}

}  // namespace tensorferry::cuda_basic
