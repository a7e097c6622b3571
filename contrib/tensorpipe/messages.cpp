#include "contrib/tensorpipe/messages.h"

#include <arpa/inet.h>

#include <charconv>
#include <cstring>

namespace tensorferry::tp {
namespace {

bool is_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port != 0;
}

}  // namespace

std::optional<std::uint64_t> offer_of(const Ticket& ticket) {
  const auto parsed = decode<TensorpipeTicket>(ticket.opaque);
  if (!parsed || parsed->bytes != ticket.bytes) return std::nullopt;
  return parsed->offer;
}

std::string text_of(const Secret& secret) {
  return std::string(tensorferry::text_of(std::as_bytes(std::span(secret))));
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
