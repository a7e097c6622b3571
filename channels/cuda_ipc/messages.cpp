#include "channels/cuda_ipc/messages.h"

#include <algorithm>
#include <span>

namespace tensorferry::cuda_ipc {
namespace {

enum class Kind : std::uint8_t { words = 1, probe = 2, probed = 3, handle = 4, chunk = 5, opened = 6, gone = 7 };

struct Write {
  Writer& out;

  void operator()(const Words&) const { out.put(Kind::words); }
  void operator()(const Probe& probe) const {
    out.put(Kind::probe);
    out.put(probe.nonce);
    out.varint(probe.bytes);
    out.raw(probe.gpu);
  }
  void operator()(const Probed&) const { out.put(Kind::probed); }
  void operator()(const Handle& handle) const {
    out.put(Kind::handle);
    out.varint(handle.id);
    out.varint(handle.bytes);
    out.raw(handle.handle);
  }
  void operator()(const Chunk& chunk) const {
    out.put(Kind::chunk);
    for (const auto number : {chunk.id, chunk.window, chunk.offset, chunk.bytes}) out.varint(number);
  }
  void operator()(const Opened& opened) const {
    out.put(Kind::opened);
    out.varint(opened.id);
    out.put(static_cast<std::uint8_t>(opened.ok));
  }
  void operator()(const Gone& gone) const {
    out.put(Kind::gone);
    out.varint(gone.id);
  }
};

void fill(std::span<std::byte> out, Reader& in) {
  const auto bytes = in.raw(out.size());
  std::copy(bytes.begin(), bytes.end(), out.begin());
}

Control read(Reader& in) {
  switch (static_cast<Kind>(in.get<std::uint8_t>())) {
    case Kind::words:
      return Words{};
    case Kind::probe: {
      Probe probe;
      probe.nonce = in.get<std::uint64_t>();
      probe.bytes = in.varint();
      fill(probe.gpu, in);
      return probe;
    }
    case Kind::probed:
      return Probed{};
    case Kind::handle: {
      Handle handle;
      handle.id = in.varint();
      handle.bytes = in.varint();
      fill(handle.handle, in);
      return handle;
    }
    case Kind::chunk: {
      Chunk chunk;
      for (auto* const number : {&chunk.id, &chunk.window, &chunk.offset, &chunk.bytes}) *number = in.varint();
      return chunk;
    }
    case Kind::opened: {
      Opened opened;
      opened.id = in.varint();
      opened.ok = in.flag();
      return opened;
    }
    case Kind::gone:
      return Gone{in.varint()};
    default:
      in.fail();
      return Words{};
  }
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
  auto control = read(in);
  if (in.failed() || !in.empty()) return std::nullopt;
  return control;
}

Bytes encode(const CudaIpcTicket& parsed) {
  Bytes bytes;
  Writer out(bytes);
  out.varint(parsed.offer);
  out.varint(parsed.bytes);
  out.put(static_cast<std::uint8_t>(parsed.chunked));
  out.varint(parsed.base);
  out.varint(parsed.offset);
  out.put(parsed.value);
  out.put(parsed.word);
  return bytes;
}

std::optional<CudaIpcTicket> parse_ticket(ByteView bytes) {
  Reader in(bytes);
  CudaIpcTicket parsed;
  parsed.offer = in.varint();
  parsed.bytes = in.varint();
  parsed.chunked = in.flag();
  parsed.base = in.varint();
  parsed.offset = in.varint();
  parsed.value = in.get<std::uint32_t>();
  parsed.word = in.get<std::uint32_t>();
  if (in.failed() || !in.empty() || parsed.offset + parsed.bytes < parsed.offset) return std::nullopt;
  return parsed;
}

}  // namespace tensorferry::cuda_ipc
