/// Values as a tree. Tests encode and decode it in place of the objects of the layer above the codec.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"

namespace tensorferry::testing {

struct Value {
  Tag tag = Tag::none;
  std::int64_t integer = 0;  // integer; leaves that are numbers; again: the index among the objects with an identity
  double real = 0, imaginary = 0;
  bool negative = false;
  std::string text;                 // text, bytes, bytearray, big_integer, device, array, published: bytes
  std::vector<std::int64_t> sizes;  // size; published: offset and bytes of each part
  TensorLayout tensor;
  const std::byte* data = nullptr;  // tensor, published: its buffer
  SparseLayout sparse;
  ArrayLayout array;
  ReferenceRecord reference;
  RecordKind kind{};
  std::uint32_t schema = 0;
  std::vector<std::pair<bool, std::string>> buffers;  // pickled: read-only, bytes
  std::vector<Value> children;                        // dict: keys and values in turn

  bool operator==(const Value& other) const;
};

/// Reads one value. Returns nullopt if the Decoder has failed.
class TreeReader {
 public:
  explicit TreeReader(Decoder& in) : in_(in) {}
  std::optional<Value> read();

 private:
  bool read_children(Value& out, std::size_t count);
  void read_leaf(Value& out);
  void read_published(Value& out);

  Decoder& in_;
  std::int64_t identities_ = 0;  // count of objects with an identity so far; strings have none here
  struct Known {
    std::int64_t identity = -1;  // -1: a string
    std::optional<Value> string;
  };
  std::map<std::uint32_t, Known> known_;  // key: the Decoder's number of the object
};

/// Writes values. Takes tensors' buffers from `buffers`, which must contain the memory at their `data`.
class TreeWriter {
 public:
  TreeWriter(Encoder& out, std::span<const Buffer> buffers) : out_(out), buffers_(buffers) {}
  /// Returns false if the Encoder refuses the value: it is too deep, or contains itself.
  bool write(const Value& value);

 private:
  bool write_children(bool begun, const Value& value);
  bool write_leaf(const Value& value);
  bool write_tensor(const Value& value, const void* identity);
  bool write_pickled(const Value& value, const void* identity);
  bool write_published(const Value& value, const void* identity);
  /// Returns an address that stands for the next object with an identity.
  const void* next_identity() { return reinterpret_cast<const void*>(++identities_); }

  Encoder& out_;
  std::span<const Buffer> buffers_;
  std::uintptr_t identities_ = 0;
  std::map<const void*, std::uint32_t> indices_;  // the index of the buffer at an address
};

}  // namespace tensorferry::testing
