#include "tests/hostile/values.h"

#include "tests/hostile/wire.h"

namespace hostile {
namespace {

std::string text(Random& random) { return random.bytes(random.below(24)); }

/// A number of 24 bytes: of an object or of a fork.
std::string number(Random& random, const Facts& facts) {
  return Out().u64(random.one_of({facts.mine, facts.theirs, random.edge()})).u64(random.below(40)).u64(random.edge());
}

std::string sizes(Random& random) {
  Out out;
  const auto count = random.one_in(30) ? random.below(256) : random.below(4);
  out.u8(count);
  for (std::uint64_t i = 0; i < count; ++i) out.varint(random.one_in(4) ? random.edge() : random.below(8));
  return out;
}

std::string tensor(Random& random, std::uint64_t buffers) {
  constexpr std::uint8_t has_offset = 0x20, has_device = 0x40, has_strides = 0x80;
  const auto flags = random.one_in(3) ? random.next() & 0xff : 0;
  const auto shape = sizes(random);
  Out out;
  out.u8(0x0f).u8(random.below(16)).u8(flags);
  if ((flags & has_device) != 0) out.u8(random.below(3)).u8(random.below(3));
  out.raw(shape);
  if ((flags & has_strides) != 0) {
    for (int i = 0; i < static_cast<unsigned char>(shape[0]); ++i) out.varint(random.edge());
  }
  if ((flags & has_offset) != 0) out.varint(random.edge());
  return out.varint(random.one_in(8) ? random.edge() : random.below(buffers + 1));
}

std::string array(Random& random, std::uint64_t buffers) {
  const auto* const dtype = random.one_of({"<f4", "|u1", "|S0", "<U0", "<M8[s]", "|O", "V", ">i2"});
  Out out;
  out.u8(0x11).u8(random.below(8)).text(dtype).varint(random.one_in(4) ? random.edge() : 4).raw(sizes(random));
  return random.one_in(2) ? out.varint(random.below(buffers + 1) * 2 + 1) : out.varint(0);
}

std::string reference(Random& random, std::uint64_t /*buffers*/) {
  const Facts facts{random.next(), random.next(), 0, "x"};
  return Out()
      .u8(0x13)
      .text("target")
      .u64(random.edge())
      .raw(number(random, facts))
      .raw(number(random, facts))
      .text(text(random))
      .u64(random.edge())
      .u64(random.edge())
      .text("type");
}

std::string container(Random& random, std::uint64_t buffers, int depth) {
  Out out;
  const auto tag = 0x0a + random.below(5);
  const auto count = random.below(4);
  out.u8(tag).varint(random.one_in(40) ? random.edge() : count);
  for (std::uint64_t i = 0; i < count * (tag == 0x0c ? 2 : 1); ++i) out.raw(value(random, buffers, depth + 1));
  return out;
}

}  // namespace

std::string value(Random& random, std::uint64_t buffers, int depth) {
  if (depth > 4) return Out().u8(0x80 + random.below(0x80));
  switch (random.below(16)) {
    case 0:
      return Out().u8(3).varint(random.edge());
    case 1:
      return Out().u8(4).u8(random.below(3)).text(random.bytes(random.below(40)));
    case 2:
      return Out().u8(5).u64(random.edge());
    case 3:
      return Out().u8(7).varint(random.one_in(2) ? 0 : random.below(buffers + 1) * 2 + 1);
    case 4: {
      const auto bytes = random.bytes(random.below(60));
      return Out().u8(random.one_of({7, 8, 9})).varint(bytes.size() * 2).raw(bytes);
    }
    case 5:
    case 6:
      return container(random, buffers, depth);
    case 7:
    case 8:
      return tensor(random, buffers);
    case 9:
      return Out().u8(0x10).u8(random.below(6)).u8(random.below(8)).raw(sizes(random)).raw(tensor(random, buffers));
    case 10:
      return array(random, buffers);
    case 11:
      return Out().u8(0x12).varint(8).raw(random.bytes(4)).varint(random.below(2)).varint(random.below(2));
    case 12:
      return reference(random, buffers);
    case 13:
      return Out()
          .u8(0x14)
          .u8(random.below(4))
          .varint(random.below(3))
          .text("a:B")
          .varint(1)
          .raw(value(random, buffers, depth + 1));
    case 14:
      return random.one_in(2) ? Out().u8(0x1a).varint(random.below(5))
                              : Out().u8(0x1b).text("\x01\x02").varint(random.below(2));
    default: {
      const auto bytes = random.bytes(random.below(32));
      return Out().u8(0x40 + bytes.size()).raw(bytes);
    }
  }
}

std::string tensor_value(std::uint64_t bytes, std::uint64_t buffer) {
  return Out().u8(0x0f).u8(0).u8(0).u8(1).varint(bytes).varint(buffer);
}

std::string arguments(const std::string& values, std::uint64_t count) {
  return Out().u8(0).varint(count).raw(values).varint(0);
}

std::string mail(Random& random, Facts& facts) {
  Out out;
  const auto operations = random.below(6);
  out.u64(random.one_in(20) ? random.edge() : facts.theirs);
  out.u64(random.one_in(10) ? random.edge() : ++facts.mails);
  out.varint(random.one_in(60) ? random.edge() : operations);
  for (std::uint64_t i = 0; i < operations; ++i) {
    out.u8(random.one_in(30) ? random.next() : random.below(6)).raw(number(random, facts)).raw(number(random, facts));
    out.text(random.one_in(2) ? facts.name : text(random)).u64(random.edge()).varint(random.edge()).text(text(random));
  }
  return out;
}

std::string group_record(Random& random, const Facts& facts) {
  Out out;
  const auto record = 1 + random.below(13);
  const auto group = random.below(3);
  out.u8(record);
  if (record != 1)
    return out.u64(group)
        .varint(random.below(4))
        .u8(random.below(2))
        .varint(random.edge())
        .raw(random.bytes(random.below(60)));
  const auto ranks = random.one_in(30) ? random.edge() : 2;
  out.text("group" + std::to_string(random.below(50)))
      .varint(ranks)
      .text("target")
      .text(facts.name)
      .varint(random.below(3));
  out.text(facts.name)
      .u64(facts.mine)
      .text("boot")
      .u32(0)
      .u64(1)
      .u64(1)
      .u32(1)
      .u64(1)
      .u64(random.edge())
      .u64(random.edge());
  return out;
}

std::string use_of_object(Random& random, const Facts& facts) {
  Out object;
  object.u64(random.one_in(4) ? random.edge() : facts.theirs).raw(number(random, facts)).raw(number(random, facts));
  if (random.one_in(3)) return object.varint(random.below(9));  // a fetch
  object.raw(random.one_of({"__next__", "add", "", "__class__"}));
  const auto& target = object.bytes();
  return arguments(Out().u8(8).varint(target.size() * 2).raw(target).u8(0x85), 2);
}

}  // namespace hostile
