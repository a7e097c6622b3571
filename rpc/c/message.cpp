#include "rpc/c/message.h"

#include <string_view>
#include <utility>

#include "rpc/core/codec.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "tensorferry/errors.h"

namespace tensorferry::c {
namespace {

using detail::Reading;

tferry_value& add(tferry_message& out, tferry_kind kind) {
  auto& value = out.values.emplace_back();
  value = {};
  value.kind = static_cast<std::uint8_t>(kind);
  return value;
}

/// Adds a value with bytes, which are copied because the received message does not outlive its handler.
void add_bytes(Reading& in, tferry_message& out, tferry_kind kind, std::string_view bytes) {
  in.charge(bytes.size());
  auto& kept = out.texts.emplace_back(bytes);
  auto& value = add(out, kind);
  value.count = kept.size();
  value.data = kept.data();
}

void add_container(Reading& in, tferry_message& out, tferry_kind kind, std::size_t values_each) {
  const auto count = in.take().count();
  add(out, kind).count = count;
  for (auto left = count * values_each; left != 0; --left) read_value(in, out);
  in.leave();
}

/// Adds a named tuple as a tuple, and a dataclass or TensorDict as a dict. The names of the fields come first, as one
/// text joined by commas.
void add_record(Reading& in, tferry_message& out) {
  const auto& record = in.take();
  const bool as_tuple = record.record_kind() == RecordKind::named_tuple;
  const auto fields = record.count() == 0 ? 0 : record.count() - 1;
  if (in.peek() != Tag::text) in.broken();
  const std::string names(in.take().text());
  add(out, as_tuple ? TFERRY_TUPLE : TFERRY_DICT).count = fields;
  std::string_view left(names);
  for (std::size_t i = 0; i < fields; ++i) {
    const auto name = left.substr(0, left.find(','));
    left.remove_prefix(std::min(left.size(), name.size() + 1));
    if (!as_tuple) add_bytes(in, out, TFERRY_TEXT, name);
    read_value(in, out);
  }
  in.leave();
}

void add_array(Reading& in, tferry_message& out) {
  ValueReader reader(in);
  const auto& tensor = out.tensors.emplace_back(reader.tensor());
  auto& shape = out.shapes.emplace_back(tensor.shape());
  shape.insert(shape.end(), tensor.strides().begin(), tensor.strides().end());
  auto& value = add(out, TFERRY_ARRAY);
  value.dtype = static_cast<std::uint8_t>(tensor.dtype());
  value.dimensions = static_cast<std::uint8_t>(tensor.shape().size());
  value.data = tensor.raw();
  value.shape = shape.data();
}

/// Adds what torch's own constants are for a program without torch. Returns false for another value.
bool add_constant(Reading& in, tferry_message& out, Tag tag) {
  if (tag == Tag::dtype) {
    add_bytes(in, out, TFERRY_TEXT, "torch." + std::string(name_of(in.take().dtype())));
  } else if (tag == Tag::device) {
    add_bytes(in, out, TFERRY_TEXT, in.take().text());
  } else if (tag == Tag::size) {
    const auto& sizes = in.take();
    add(out, TFERRY_TUPLE).count = sizes.size().size();
    for (const auto size : sizes.size()) add(out, TFERRY_INTEGER).integer = size;
  } else {
    return false;
  }
  return true;
}

/// Adds a value that is neither a container nor an array. Returns false for another value.
bool add_leaf(Reading& in, tferry_message& out, Tag tag) {
  switch (tag) {
    case Tag::none:
      in.take();
      add(out, TFERRY_NONE);
      return true;
    case Tag::true_:
    case Tag::false_:
      in.take();
      add(out, TFERRY_BOOL).integer = tag == Tag::true_ ? 1 : 0;
      return true;
    case Tag::integer:
      add(out, TFERRY_INTEGER).integer = in.take().integer();
      return true;
    case Tag::big_integer: {
      const auto& number = in.take();
      add_bytes(in, out, TFERRY_BIG_INTEGER, number.text());
      out.values.back().flags = number.negative() ? 1 : 0;
      return true;
    }
    case Tag::real:
      add(out, TFERRY_REAL).real = in.take().real();
      return true;
    case Tag::complex: {
      const auto& number = in.take();
      auto& value = add(out, TFERRY_COMPLEX);
      value.real = number.real();
      value.imaginary = number.imaginary();
      return true;
    }
    case Tag::text:
      add_bytes(in, out, TFERRY_TEXT, in.take().text());
      return true;
    case Tag::bytes:
    case Tag::bytearray:
      add_bytes(in, out, tag == Tag::bytes ? TFERRY_BYTES : TFERRY_BYTEARRAY, in.take().text());
      return true;
    default:
      return add_constant(in, out, tag);
  }
}

}  // namespace

void read_value(Reading& in, tferry_message& out) {
  const auto tag = in.peek();
  if (add_leaf(in, out, tag)) return;
  switch (tag) {
    case Tag::tuple:
      return add_container(in, out, TFERRY_TUPLE, 1);
    case Tag::list:
      return add_container(in, out, TFERRY_LIST, 1);
    case Tag::dict:
      return add_container(in, out, TFERRY_DICT, 2);
    case Tag::set:
      return add_container(in, out, TFERRY_SET, 1);
    case Tag::frozenset:
      return add_container(in, out, TFERRY_FROZENSET, 1);
    case Tag::record:
      return add_record(in, out);
    case Tag::tensor:
    case Tag::array:
      return add_array(in, out);
    default:
      in.mismatch(Value<Message>::name());
  }
}

// ---- writing

const tferry_value& ValueList::next() {
  if (at_ == end_) throw InvalidArgument("there are fewer values than the containers and the call announce");
  return *at_++;
}

void ValueList::finish() const {
  if (at_ != end_) throw InvalidArgument("there are more values than the containers and the call announce");
}

Tensor ValueList::tensor_of(const tferry_value& value) const {
  if (value.kind != TFERRY_ARRAY)
    throw InvalidArgument("a value of kind " + std::to_string(value.kind) + " is no array");
  const auto* const sizes = value.shape;
  if (value.dimensions != 0 && sizes == nullptr) throw InvalidArgument("an array has no shape");
  const auto dimensions = std::size_t{value.dimensions};
  return Tensor::from_memory(value.data, {sizes, sizes + dimensions}, static_cast<DType>(value.dtype), owner_,
                             {sizes + dimensions, sizes + 2 * dimensions});
}

Tensor ValueList::tensor() { return tensor_of(next()); }

void ValueList::write_inside(ValueWriter& out, std::uint64_t count) {
  for (; count != 0; --count) write(out);
  out.end();
}

void ValueList::write(ValueWriter& out) {
  const auto& value = next();
  auto& encoder = out.encoder();
  const std::string_view text(static_cast<const char*>(value.data), value.kind >= TFERRY_TEXT ? value.count : 0);
  const auto begun = [&](bool is) {
    if (!is) detail::check(encoder.status());
    write_inside(out, value.count);
  };
  switch (value.kind) {
    case TFERRY_NONE:
      return out.none();
    case TFERRY_BOOL:
      return out.boolean(value.integer != 0);
    case TFERRY_INTEGER:
      return out.integer(value.integer);
    case TFERRY_BIG_INTEGER:
      return encoder.big_integer(value.flags != 0, {static_cast<const std::byte*>(value.data), value.count});
    case TFERRY_REAL:
      return out.real(value.real);
    case TFERRY_COMPLEX:
      return out.complex({value.real, value.imaginary});
    case TFERRY_TEXT:
      return out.text(text);
    case TFERRY_BYTES:
      return out.bytes(std::as_bytes(std::span(text)));
    case TFERRY_BYTEARRAY: {
      auto copy = std::make_shared<Bytes>(view_of(text).begin(), view_of(text).end());
      return encoder.bytearray(*copy, [&] { return copy; });
    }
    case TFERRY_TUPLE:
      return begun(encoder.begin_tuple(value.count));
    case TFERRY_LIST:
      return begun(encoder.begin_list(value.count));
    case TFERRY_DICT:
      if (!encoder.begin_dict(value.count)) detail::check(encoder.status());
      return write_inside(out, 2 * value.count);
    case TFERRY_SET:
      return begun(encoder.begin_set(value.count));
    case TFERRY_FROZENSET:
      return begun(encoder.begin_frozenset(value.count));
    case TFERRY_ARRAY:
      return out.tensor(tensor_of(value));
    default:
      throw InvalidArgument("there is no kind " + std::to_string(value.kind) + " of values");
  }
}

}  // namespace tensorferry::c

tensorferry::c::Message tensorferry::Value<tensorferry::c::Message>::read(ValueReader& in) {
  auto out = std::make_unique<tferry_message>();
  c::read_value(in.reading(), *out);
  return out;
}

const tferry_value* tferry_message_values(const tferry_message* message, size_t* count) {
  *count = message->values.size();
  return message->values.data();
}

void tferry_message_free(tferry_message* message) { delete message; }
