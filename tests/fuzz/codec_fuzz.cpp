// Fuzzes the decoding of values, requests, replies and fetches. Arbitrary bytes decode or fail. A decoded value encodes
// to bytes that decode to the same value.
#include <array>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "rpc/core/method_target.h"
#include "tests/fuzz/record_input.h"
#include "tests/rpc/core/values.h"

namespace {

using namespace tensorferry;
using tensorferry::fuzzing::must;
using tensorferry::testing::TreeReader;
using tensorferry::testing::TreeWriter;

/// Returns three buffers: an empty one, one of host memory, and one whose bytes must not be accessed.
std::array<Buffer, 3> buffers() {
  static std::array<std::byte, 256> memory{};
  static std::byte nothing;
  return {Buffer{Device{}, &nothing, 0, nullptr, nullptr},
          Buffer{Device{}, memory.data(), memory.size(), nullptr, nullptr},
          Buffer{{DeviceType::cuda, 1}, reinterpret_cast<std::byte*>(4096), 1024, nullptr, nullptr}};
}

void values(ByteView payload) {
  const auto given = buffers();
  Decoder in(payload, given);
  const auto once = TreeReader(in).read();
  Decoder skipped(payload, given);
  must(skipped.skip() == once.has_value());
  if (!once) return must(in.failed() && in.finish().code() == Code::protocol_error);

  Encoder out;
  must(TreeWriter(out, given).write(*once) && out.status().ok());
  const auto message = out.take();
  Decoder again(message.payload, message.buffers);
  const auto twice = TreeReader(again).read();
  must(again.finish().ok() && twice == once);

  Encoder third;
  must(TreeWriter(third, given).write(*twice));
  must(third.take().payload == message.payload);
}

void skip_all(Decoder& in, std::size_t values) {
  for (; values != 0 && in.skip(); --values) {
  }
}

void envelopes(std::uint8_t kind, ByteView payload) {
  const auto given = buffers();
  Decoder in(payload, given);
  if (kind == 1) {
    const auto head = read_request(in);
    if (head.packed) {
      in.skip();
    } else {
      skip_all(in, head.positional);
      for (auto keywords = read_keywords(in); keywords != 0 && !in.failed(); --keywords) {
        in.raw_text();
        in.skip();
      }
    }
  } else if (kind == 2) {
    if (read_reply(in) == ReplyKind::exception) {
      const auto exception = read_exception(in);
      static_cast<void>(exception.describe());
      if (exception.rebuildable) in.skip();
    } else {
      in.skip();
    }
  } else {
    read_fetch(in);
    fuzzing::fuzz_records<Fetch, Creation, ReferenceRecord, RemoteException, MethodTarget>(payload);
    static_cast<void>(parse_function(text_of(payload)));
  }
  const auto status = in.finish();
  must(status.ok() || status.code() == Code::protocol_error);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto payload = ByteView(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  if (data[0] % 4 == 0) {
    values(payload);
  } else {
    envelopes(data[0] % 4, payload);
  }
  return 0;
}
