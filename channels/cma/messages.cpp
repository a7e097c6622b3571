#include "channels/cma/messages.h"

namespace tensorferry::cma {

namespace {

enum class Kind : std::uint8_t { challenge = 1, answer = 2, resend = 3 };
enum class Form : std::uint8_t { nothing = 0, address_in = 1 };

void put(Writer& out, const Challenge& challenge) {
  out.put(Kind::challenge);
  out.put(challenge.random);
}
void put(Writer& out, const WordAddress& answer) {
  out.put(Kind::answer);
  out.put(answer.process.pid);
  out.put(answer.process.started);
  out.put(answer.address);
}
void put(Writer& out, const Resend& resend) {
  out.put(Kind::resend);
  out.varint(resend.sequence);
  out.varint(resend.offer);
  out.varint(resend.bytes);
}

}  // namespace

Bytes encode(const Control& control) {
  Bytes bytes;
  Writer out(bytes);
  std::visit([&](const auto& each) { put(out, each); }, control);
  return bytes;
}

std::optional<Control> control_of(ByteView bytes) {
  Reader in(bytes);
  std::optional<Control> control;
  switch (static_cast<Kind>(in.get<std::uint8_t>())) {
    case Kind::challenge:
      control = Challenge{in.get<std::uint64_t>()};
      break;
    case Kind::answer: {
      WordAddress answer;
      answer.process.pid = in.get<std::int32_t>();
      answer.process.started = in.get<std::uint64_t>();
      answer.address = in.get<std::uint64_t>();
      control = answer;
      break;
    }
    case Kind::resend: {
      Resend resend;
      resend.sequence = in.varint();
      resend.offer = in.varint();
      resend.bytes = in.varint();
      control = resend;
      break;
    }
  }
  if (in.failed() || !in.empty()) return std::nullopt;
  return control;
}

Bytes encode(const Opaque& opaque) {
  Bytes bytes;
  Writer out(bytes);
  const auto* address_in = std::get_if<SourceAddress>(&opaque);
  out.put(address_in == nullptr ? Form::nothing : Form::address_in);
  if (address_in != nullptr) {
    out.varint(address_in->offer);
    out.put(address_in->address);
  }
  return bytes;
}

std::optional<Opaque> opaque_of(ByteView bytes) {
  Reader in(bytes);
  std::optional<Opaque> opaque;
  switch (static_cast<Form>(in.get<std::uint8_t>())) {
    case Form::nothing:
      opaque = Nothing{};
      break;
    case Form::address_in: {
      SourceAddress address_in;
      address_in.offer = in.varint();
      address_in.address = in.get<std::uint64_t>();
      opaque = address_in;
      break;
    }
  }
  if (in.failed() || !in.empty()) return std::nullopt;
  return opaque;
}

}  // namespace tensorferry::cma
