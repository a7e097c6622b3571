#include "tests/rpc/core/values.h"

#include <algorithm>
#include <bit>

#include "rpc/core/published.h"

namespace tensorferry::testing {
namespace {

bool same_bits(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }

bool has_identity(Tag tag) {
  switch (tag) {
    case Tag::bytearray:
    case Tag::tuple:
    case Tag::list:
    case Tag::dict:
    case Tag::set:
    case Tag::frozenset:
    case Tag::tensor:
    case Tag::sparse:
    case Tag::array:
    case Tag::pickled:
    case Tag::reference:
    case Tag::record:
    case Tag::published:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool Value::operator==(const Value& o) const {
  return tag == o.tag && integer == o.integer && same_bits(real, o.real) && same_bits(imaginary, o.imaginary) &&
         negative == o.negative && text == o.text && sizes == o.sizes && tensor == o.tensor && data == o.data &&
         sparse == o.sparse && array == o.array && reference == o.reference && kind == o.kind && schema == o.schema &&
         buffers == o.buffers && children == o.children;
}

bool TreeReader::read_children(Value& out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    auto child = read();
    if (!child) return false;
    out.children.push_back(std::move(*child));
  }
  in_.leave();
  return true;
}

std::optional<Value> TreeReader::read() {
  Value out;
  out.tag = in_.next();
  if (out.tag == Tag::invalid) return std::nullopt;
  if (has_identity(out.tag)) known_[in_.number()] = {identities_++, std::nullopt};
  switch (out.tag) {
    case Tag::tuple:
    case Tag::list:
    case Tag::set:
    case Tag::frozenset:
    case Tag::dict:
      break;
    case Tag::sparse:
      out.sparse = in_.sparse();
      break;
    case Tag::pickled:
      out.text = in_.text();
      for (const auto& each : in_.pickle_buffers()) out.buffers.emplace_back(each.read_only, text_of(each.bytes));
      break;
    case Tag::record:
      out.kind = in_.record_kind();
      out.text = in_.record_name();
      out.schema = in_.schema();
      break;
    case Tag::again: {
      const auto& known = known_.at(in_.referred());
      if (known.string) return *known.string;
      out.integer = known.identity;
      return out;
    }
    default:
      read_leaf(out);
      return out;
  }
  if (!read_children(out, in_.count() * (out.tag == Tag::dict ? 2 : 1))) return std::nullopt;
  return out;
}

void TreeReader::read_leaf(Value& out) {
  switch (out.tag) {
    case Tag::integer:
      out.integer = in_.integer();
      break;
    case Tag::complex:
      out.imaginary = in_.imaginary();
      [[fallthrough]];
    case Tag::real:
      out.real = in_.real();
      break;
    case Tag::big_integer:
      out.negative = in_.negative();
      [[fallthrough]];
    case Tag::text:
    case Tag::bytes:
    case Tag::bytearray:
    case Tag::device:
      out.text = in_.text();
      if (in_.number() != Decoder::unnumbered && !has_identity(out.tag)) known_[in_.number()].string = out;
      break;
    case Tag::dtype:
      out.integer = static_cast<std::int64_t>(in_.dtype());
      break;
    case Tag::layout:
      out.integer = static_cast<std::int64_t>(in_.layout());
      break;
    case Tag::memory_format:
      out.integer = static_cast<std::int64_t>(in_.memory_format());
      break;
    case Tag::size:
      out.sizes.assign(in_.size().begin(), in_.size().end());
      break;
    case Tag::tensor:
      out.tensor = in_.tensor();
      out.data = in_.buffers()[in_.buffer()].data;
      break;
    case Tag::array:
      out.array = in_.array();
      out.text = in_.text();
      break;
    case Tag::reference:
      out.reference = in_.reference();
      break;
    case Tag::published:
      read_published(out);
      break;
    default:  // the tags none, true and false are the whole value
      break;
  }
}

void TreeReader::read_published(Value& out) {
  out.text = in_.text();
  for (const auto& part : in_.parts()) {
    out.sizes.push_back(static_cast<std::int64_t>(part.offset));
    out.sizes.push_back(static_cast<std::int64_t>(part.bytes));
  }
  if (!in_.parts().empty()) out.data = in_.buffers()[in_.buffer()].data;
  // The published bytes are a message of their own.
  const auto buffers = published_buffers(in_);
  Decoder inside(in_.view(), buffers);
  (void)inside.skip();
}

bool TreeWriter::write_children(bool begun, const Value& value) {
  if (!begun) return false;
  for (const auto& child : value.children) {
    if (!write(child)) return false;
  }
  out_.end();
  return true;
}

bool TreeWriter::write_tensor(const Value& value, const void* identity) {
  const auto buffer =
      std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& each) { return each.data == value.data; });
  if (buffer == buffers_.end()) return false;
  const auto [known, first] = indices_.try_emplace(value.data);  // tensors that share a storage share a buffer
  if (first) known->second = out_.add_buffer(*buffer, {value.tensor.device});
  out_.tensor(value.tensor, known->second, identity);
  return !out_.failed();
}

bool TreeWriter::write_pickled(const Value& value, const void* identity) {
  std::vector<Encoder::PickleBuffer> buffers;
  for (const auto& [read_only, bytes] : value.buffers) buffers.push_back({view_of(bytes), read_only, nullptr});
  return write_children(out_.begin_pickled(view_of(value.text), nullptr, buffers, value.children.size(), identity),
                        value);
}

bool TreeWriter::write_published(const Value& value, const void* identity) {
  std::vector<PublishedPart> parts;
  for (std::size_t i = 0; i + 1 < value.sizes.size(); i += 2) {
    parts.push_back({static_cast<std::uint64_t>(value.sizes[i]), static_cast<std::uint64_t>(value.sizes[i + 1])});
  }
  Buffer region;
  for (const auto& buffer : buffers_) {
    if (buffer.data == value.data) region = buffer;
  }
  out_.published(view_of(value.text), parts, region, identity);
  return true;
}

bool TreeWriter::write(const Value& value) {
  const auto nobody = [] { return Owner(); };
  const auto* identity = has_identity(value.tag) ? next_identity() : nullptr;
  const auto values = value.children.size();
  switch (value.tag) {
    case Tag::text:
      out_.text(value.text, nobody);
      return true;
    case Tag::bytes:
      out_.bytes(view_of(value.text), nobody);
      return true;
    case Tag::bytearray:
      out_.bytearray(view_of(value.text), nobody, identity);
      return true;
    case Tag::tuple:
      return write_children(out_.begin_tuple(values, identity), value);
    case Tag::list:
      return write_children(out_.begin_list(values, identity), value);
    case Tag::dict:
      return write_children(out_.begin_dict(values / 2, identity), value);
    case Tag::set:
      return write_children(out_.begin_set(values, identity), value);
    case Tag::frozenset:
      return write_children(out_.begin_frozenset(values, identity), value);
    case Tag::sparse:
      return write_children(out_.begin_sparse(value.sparse, identity), value);
    case Tag::record:
      return write_children(out_.begin_record(value.kind, value.text, value.schema, values, identity), value);
    case Tag::pickled:
      return write_pickled(value, identity);
    case Tag::tensor:
      return write_tensor(value, identity);
    case Tag::array:
      out_.array(value.array, view_of(value.text), nobody, identity);
      return true;
    case Tag::reference:
      out_.reference(value.reference, identity);
      return true;
    case Tag::published:
      return write_published(value, identity);
    case Tag::again:
      return out_.again(reinterpret_cast<const void*>(value.integer + 1)) && !out_.failed();
    default:
      return write_leaf(value);
  }
}

bool TreeWriter::write_leaf(const Value& value) {
  switch (value.tag) {
    case Tag::none:
      out_.none();
      return true;
    case Tag::true_:
    case Tag::false_:
      out_.boolean(value.tag == Tag::true_);
      return true;
    case Tag::integer:
      out_.integer(value.integer);
      return true;
    case Tag::big_integer:
      out_.big_integer(value.negative, view_of(value.text));
      return true;
    case Tag::real:
      out_.real(value.real);
      return true;
    case Tag::complex:
      out_.complex(value.real, value.imaginary);
      return true;
    case Tag::dtype:
      out_.dtype(static_cast<DType>(value.integer));
      return true;
    case Tag::layout:
      out_.layout(static_cast<LayoutNumber>(value.integer));
      return true;
    case Tag::memory_format:
      out_.memory_format(static_cast<MemoryFormatNumber>(value.integer));
      return true;
    case Tag::device:
      out_.device(value.text);
      return true;
    case Tag::size:
      out_.size(value.sizes);
      return true;
    default:
      return false;
  }
}

}  // namespace tensorferry::testing
