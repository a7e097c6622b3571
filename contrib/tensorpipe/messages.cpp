#include "contrib/tensorpipe/messages.h"

#include <arpa/inet.h>

#include <charconv>
#include <cstring>

namespace tensorferry::tp {
namespace {

enum class Kind : std::uint8_t { hello = 1, listening = 2, request = 3 };

constexpr std::size_t longest_text = 256;  // of a host or an address

struct Write {
  Writer& out;

  void operator()(const Hello& hello) const {
    out.put(Kind::hello);
    for (const auto word : hello.secret) out.put(word);
    out.sized(hello.host);
  }
  void operator()(const Listening& listening) const {
    out.put(Kind::listening);
    out.sized(listening.address);
  }
  void operator()(const Request& request) const {
    out.put(Kind::request);
    out.varint(request.offer);
    out.varint(request.bytes);
  }
};

std::string short_text(Reader& in) {
  const auto text = in.text();
  if (text.size() > longest_text) in.fail();
  return in.failed() ? std::string() : std::string(text);
}

bool is_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port != 0;
}

}  // namespace

Bytes encode(const Endpoint& endpoint) {
  Bytes bytes;
  Writer out(bytes);
  out.put(version);
  out.put(endpoint.type);
  for (const auto word : endpoint.agent) out.put(word);
  return bytes;
}

std::optional<Endpoint> endpoint_of(ByteView bytes) {
  Reader in(bytes);
  const auto said = in.get<std::uint8_t>();
  Endpoint endpoint;
  endpoint.type = static_cast<DeviceType>(in.get<std::uint8_t>());
  for (auto& word : endpoint.agent) word = in.get<std::uint64_t>();
  if (in.failed() || !in.empty() || said != version) return std::nullopt;
  return endpoint;
}

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
    case Kind::hello: {
      Hello hello;
      for (auto& word : hello.secret) word = in.get<std::uint64_t>();
      hello.host = short_text(in);
      control = std::move(hello);
      break;
    }
    case Kind::listening:
      control = Listening{short_text(in)};
      break;
    case Kind::request: {
      Request request;
      request.offer = in.varint();
      request.bytes = in.varint();
      control = request;
      break;
    }
    default:
      return std::nullopt;
  }
  if (in.failed() || !in.empty()) return std::nullopt;
  return control;
}

Bytes opaque_of(std::uint64_t offer, std::uint64_t bytes) {
  Bytes opaque;
  Writer out(opaque);
  out.varint(offer);
  out.varint(bytes);
  return opaque;
}

std::optional<std::uint64_t> offer_of(const Ticket& ticket) {
  Reader in(ticket.opaque);
  const auto offer = in.varint();
  const auto bytes = in.varint();
  if (in.failed() || !in.empty() || bytes != ticket.bytes || (offer == 0) != (bytes == 0)) return std::nullopt;
  return offer;
}

std::string text_of(const Secret& secret) {
  return std::string(tensorferry::text_of(std::as_bytes(std::span(secret))));
}

std::string metadata_of(std::uint64_t offer) {
  Bytes bytes;
  Writer(bytes).varint(offer);
  return std::string(tensorferry::text_of(bytes));
}

std::optional<std::uint64_t> offer_of(std::string_view metadata) {
  Reader in(view_of(metadata));
  const auto offer = in.varint();
  if (in.failed() || !in.empty()) return std::nullopt;
  return offer;
}

bool is_address(std::string_view address) {
  const auto colon = address.rfind(':');
  if (address.size() > longest_text || colon == std::string_view::npos || !is_port(address.substr(colon + 1)))
    return false;
  std::string host(address.substr(0, colon));
  if (host.find('\0') != std::string::npos) return false;
  std::array<unsigned char, sizeof(in6_addr)> parsed{};
  if (!host.starts_with('[')) return ::inet_pton(AF_INET, host.c_str(), parsed.data()) == 1;
  if (!host.ends_with(']')) return false;
  host = host.substr(1, host.size() - 2);
  return ::inet_pton(AF_INET6, host.c_str(), parsed.data()) == 1;
}

}  // namespace tensorferry::tp
