#include "rpc/core/reference_mail.h"

namespace tensorferry {
namespace {

using Kind = ReferenceOp::Kind;

constexpr std::size_t longest_reason = 1024;

template <class Id>
void put(Writer& out, const Id& id) {
  out.put(id.incarnation);
  out.put(id.counter);
}

template <class Id>
void get(Reader& in, Id& id) {
  id.incarnation = in.get<std::uint64_t>();
  id.counter = in.get<std::uint64_t>();
}

std::string_view reason_of(const std::string& text) { return std::string_view(text).substr(0, longest_reason); }

void put_op(Writer& out, const ReferenceOp& op) {
  out.put(op.kind);
  if (op.kind == Kind::ping) return;
  put(out, op.fork);
  switch (op.kind) {
    case Kind::fork:
      put(out, op.object);
      out.sized(op.parent.name);
      out.put(op.parent.incarnation);
      break;
    case Kind::remove:
      put(out, op.object);
      break;
    case Kind::abandon:
      put(out, op.object);
      out.sized(reason_of(op.text));
      break;
    case Kind::withdraw:
      out.varint(op.call);
      break;
    case Kind::accept:
    case Kind::ping:
      break;
  }
}

ReferenceOp get_op(Reader& in) {
  ReferenceOp op;
  const auto kind = in.get<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(Kind::ping)) in.fail();
  op.kind = static_cast<Kind>(kind);
  if (op.kind == Kind::ping || in.failed()) return op;
  get(in, op.fork);
  switch (op.kind) {
    case Kind::fork:
      get(in, op.object);
      op.parent.name = in.text();
      op.parent.incarnation = in.get<std::uint64_t>();
      break;
    case Kind::remove:
      get(in, op.object);
      break;
    case Kind::abandon:
      get(in, op.object);
      op.text = in.text();
      break;
    case Kind::withdraw:
      op.call = in.varint();
      break;
    case Kind::accept:
    case Kind::ping:
      break;
  }
  return op;
}

}  // namespace

Bytes write_batch(std::uint64_t receiver, std::uint64_t number, std::span<const ReferenceOp> ops) {
  Bytes bytes;
  Writer out(bytes);
  out.put(receiver);
  out.put(number);
  out.varint(ops.size());
  for (const auto& op : ops) put_op(out, op);
  return bytes;
}

std::optional<ReferenceBatch> read_batch(ByteView bytes) {
  Reader in(bytes);
  ReferenceBatch batch;
  batch.receiver = in.get<std::uint64_t>();
  batch.number = in.get<std::uint64_t>();
  const auto ops = in.count();
  if (ops > ReferenceBatch::most_ops) return std::nullopt;
  for (std::uint64_t i = 0; i < ops && !in.failed(); ++i) batch.ops.push_back(get_op(in));
  if (in.failed() || !in.empty()) return std::nullopt;
  return batch;
}

Bytes write_answer(const ReferenceAnswer& answer) {
  Bytes bytes;
  Writer out(bytes);
  out.put(answer.kind);
  out.varint(answer.results.size());
  for (const auto& result : answer.results) {
    out.put(result.code);
    if (result.code == ReferenceResult::Code::gone) out.sized(reason_of(result.text));
  }
  return bytes;
}

std::optional<ReferenceAnswer> read_answer(ByteView bytes) {
  Reader in(bytes);
  ReferenceAnswer answer;
  const auto kind = in.get<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(ReferenceAnswer::Kind::dead)) return std::nullopt;
  answer.kind = static_cast<ReferenceAnswer::Kind>(kind);
  const auto results = in.count();
  if (results > ReferenceBatch::most_ops) return std::nullopt;
  for (std::uint64_t i = 0; i < results && !in.failed(); ++i) {
    ReferenceResult result;
    const auto code = in.get<std::uint8_t>();
    if (code > static_cast<std::uint8_t>(ReferenceResult::Code::refused)) return std::nullopt;
    result.code = static_cast<ReferenceResult::Code>(code);
    if (result.code == ReferenceResult::Code::gone) result.text = in.text();
    answer.results.push_back(std::move(result));
  }
  if (in.failed() || !in.empty()) return std::nullopt;
  return answer;
}

}  // namespace tensorferry
