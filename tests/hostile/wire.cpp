#include "tests/hostile/wire.h"

#include <openssl/hmac.h>

#include <algorithm>
#include <array>

namespace hostile {

Out& Out::number(std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i));
  return *this;
}

Out& Out::varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) u8((value & 0x7f) | 0x80);
  return u8(value);
}

std::string_view In::raw(std::size_t bytes) {
  const auto taken = rest_.substr(0, bytes);
  rest_.remove_prefix(taken.size());
  return taken;
}

std::uint64_t In::number(std::size_t bytes) {
  std::uint64_t value = 0;
  int shift = 0;
  for (const char each : raw(bytes)) {
    value |= std::uint64_t{static_cast<unsigned char>(each)} << shift;
    shift += 8;
  }
  return value;
}

std::uint64_t In::varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
    const auto each = number(1);
    value |= (each & 0x7f) << shift;
    if (each < 0x80) break;
  }
  return value;
}

std::string Frame::bytes() const {
  return Out()
      .u8(kind)
      .u8(flags)
      .u16(buffers)
      .u16(extensions.size())
      .u8(descriptors)
      .u8(0)
      .u32(extensions.size() + records.size() + payload.size())
      .u32(function)
      .u64(word)
      .u32(remaining)
      .u32(order)
      .u64(trailing.size())
      .raw(extensions)
      .raw(records)
      .raw(payload)
      .raw(trailing);
}

Header header_of(std::string_view bytes) {
  In in(bytes);
  Header header;
  header.kind = static_cast<std::uint8_t>(in.number(1));
  in.number(3);
  header.extensions = static_cast<std::uint16_t>(in.number(2));
  header.descriptors = static_cast<std::uint8_t>(in.number(1));
  in.number(1);
  header.length = static_cast<std::uint32_t>(in.number(4));
  in.number(4);
  header.word = in.number(8);
  in.number(8);
  header.trailing = in.number(8);
  return header;
}

std::string extension(std::uint16_t id, std::string_view bytes) { return Out().u16(id).u16(bytes.size()).raw(bytes); }

std::string Record::encoded() const {
  Out out;
  out.u8(channel).u16(0).u16(0).u8(form).u16(ticket.size());
  return out.u64(bytes).u64(release).u64(after).raw(ticket).raw(behind);
}

std::string preamble(std::string_view random_bytes) {
  constexpr std::uint8_t demands_a_proof = 1, has_a_key = 2;
  Out out;
  out.raw("TFRY").u16(1).u16(1).u32(0).u8(demands_a_proof | has_a_key).u16(0).u8(0);
  return out.raw(random_bytes.substr(0, 32));
}

std::string proof(std::string_view key, bool dialler, std::string_view diallers, std::string_view acceptors) {
  const std::string text =
      Out().text("tensorferry greeting 1").u8(dialler ? 1 : 2).text("link").raw(diallers).raw(acceptors);
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), digest.data(), &length);
  return {reinterpret_cast<const char*>(digest.data()), length};
}

std::string Greeting::encoded() const {
  Out out;
  out.u8(purpose).text(name).u32(~0U).u64(incarnation).u64(expected);
  out.varint(1).u8(0).u8(0);  // one device: the CPU
  out.varint(channels.size());
  for (const auto& channel : channels) out.text(channel.name).varint(1).u8(0).u8(0).text(channel.descriptor);
  return out.u32(features).u64(connection);
}

}  // namespace hostile
