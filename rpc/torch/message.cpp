#include "rpc/torch/message.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"

namespace tensorferry::torch_rpc {
namespace {

namespace rpc = torch::distributed::rpc;

/// How the tensors of a message travel.
enum class Form : std::uint8_t { records = 0, byte_stream = 1 };

void write_head(Encoder& out, const rpc::Message& message, Form form) {
  out.raw_u8(static_cast<std::uint8_t>(form));
  out.raw_varint(static_cast<std::uint64_t>(message.type()));
  out.raw_varint(static_cast<std::uint64_t>(message.id()));
}

/// Returns the number of elements between the first and the last element of a view, both included; 0 if it is empty.
std::int64_t extent_of(const at::Tensor& view) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < view.dim(); ++dim) {
    if (view.size(dim) == 0) return 0;
    last += (view.size(dim) - 1) * view.stride(dim);
  }
  return last + 1;
}

/// Notes the memory around a view with gaps, so that the view shares it and keeps its strides, as with TensorPipe. Not
/// for a view of more than 8 KB that is mostly gaps: only its elements are worth sending.
void note_gaps(TensorWriter& writer, const at::Tensor& view) {
  constexpr std::int64_t always{8 * 1024};
  if (view.layout() != at::kStrided || view.is_non_overlapping_and_dense() || !view.has_storage()) return;
  const auto extent = extent_of(view);
  const auto bytes = extent * view.element_size();
  if (extent == 0 || (bytes > always && extent > 2 * view.numel())) return;
  const at::AutoDispatchBelowADInplaceOrView no_history;
  writer.note(view.as_strided({extent}, {1}, view.storage_offset()));
}

Status write_tensors(Encoder& out, const std::vector<at::Tensor>& tensors, const Converters& converters) {
  TensorWriter writer(converters, out);
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    writer.note(tensor);
    note_gaps(writer, tensor);
  }
  writer.prepare();
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      out.none();
    } else if (auto written = writer.write(tensor, /*parameter=*/false); !written.ok()) {
      return written;
    }
  }
  return {};
}

bool on_cpu(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu()) return false;
  }
  return true;
}

Result<Message> encode_as_byte_stream(const TorchMessage& message, const Status& why) {
  // torch would copy a tensor to the CPU, and forget on which device it was.
  if (!on_cpu(message->tensors())) return why;
  Encoder out;
  write_head(out, *message, Form::byte_stream);
  try {
    const auto bytes = std::make_shared<std::string>(rpc::wireSerialize(message->payload(), message->tensors()));
    out.bytes(view_of(*bytes), [&] { return bytes; });
  } catch (const std::exception& error) {
    return Status(Code::invalid_argument, std::string(why.what()) + "; nor can torch serialise it: " + error.what());
  }
  if (out.failed()) return out.status();
  return out.take();
}

TorchMessage make_message(std::uint64_t type, std::uint64_t id, std::vector<char> payload,
                          std::vector<at::Tensor> tensors) {
  return c10::make_intrusive<rpc::Message>(std::move(payload), std::move(tensors), static_cast<rpc::MessageType>(type),
                                           static_cast<std::int64_t>(id));
}

Status read_tensors(Decoder& in, std::uint64_t count, TensorReader& reader, std::vector<at::Tensor>& tensors) {
  tensors.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto tag = in.next();
    if (tag == Tag::none) {
      tensors.emplace_back();
      continue;
    }
    if (tag != Tag::tensor && tag != Tag::sparse) {
      in.fail("has another value where a tensor should be");
      return in.status();
    }
    auto tensor = reader.read(in, tag);
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(*std::move(tensor));
  }
  return {};
}

}  // namespace

Result<Message> encode(const TorchMessage& message, const Converters& converters) {
  Encoder out;
  write_head(out, *message, Form::records);
  out.raw_varint(message->tensors().size());
  if (const auto written = write_tensors(out, message->tensors(), converters); !written.ok())
    return encode_as_byte_stream(message, written);
  const auto& payload = message->payload();
  out.bytes(std::as_bytes(std::span(payload)), [&] { return std::make_shared<TorchMessage>(message); });
  if (out.failed()) return out.status();
  return out.take();
}

Result<Decoded> decode(const Received& received, const Converters& converters) {
  Decoder in(received.payload, received.buffers);
  TensorReader reader(converters, received.buffers);
  const auto form = in.raw_u8();
  const auto type = in.raw_varint();
  const auto id = in.raw_varint();
  std::vector<at::Tensor> tensors;
  if (form == static_cast<std::uint8_t>(Form::records)) {
    if (auto read = read_tensors(in, in.raw_count(), reader, tensors); !read.ok()) return read;
  } else if (form != static_cast<std::uint8_t>(Form::byte_stream)) {
    in.fail("has an unknown form");
    return in.status();
  }
  if (in.next() != Tag::bytes) {
    in.fail("has no payload");
    return in.status();
  }
  const auto bytes = text_of(in.view());
  if (auto finished = in.finish(); !finished.ok()) return finished;
  if (form == static_cast<std::uint8_t>(Form::records)) {
    return Decoded{make_message(type, id, {bytes.begin(), bytes.end()}, std::move(tensors)),
                   reader.take_device_storages()};
  }
  try {
    auto [payload, read] = rpc::wireDeserialize(bytes.data(), bytes.size());
    return Decoded{make_message(type, id, std::move(payload), std::move(read)), {}};
  } catch (const std::exception& error) {
    return Status(Code::protocol_error, std::string("a message that torch cannot read: ") + error.what());
  }
}

}  // namespace tensorferry::torch_rpc
