#include "channels/shm/layout.h"

#include <utility>

namespace tensorferry::shm {

namespace {

enum class PlaceKind : std::uint8_t { nothing = 0, lending = 1, handed = 2 };
enum class ControlKind : std::uint8_t {
  hello = 1,
  probed = 2,
  segment = 3,
  handover = 4,
  drop = 5,
  unmapped = 6,
  gone = 7,
  missed = 8
};

constexpr std::size_t longest_reason = 1024;

template <class... Cases>
struct Overload : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overload(Cases...) -> Overload<Cases...>;

/// Reads a number below `end`; fails the reader if it is not below.
std::uint32_t below(Reader& in, std::uint32_t end) {
  const auto value = in.varint();
  if (value >= end) in.fail();
  return static_cast<std::uint32_t>(value);
}

std::string reason(Reader& in) { return std::string(in.text().substr(0, longest_reason)); }
std::string_view shortened(const std::string& text) { return std::string_view(text).substr(0, longest_reason); }

template <class T>
std::optional<T> checked(const Reader& in, T value) {
  if (in.failed() || !in.empty()) return std::nullopt;
  return value;
}

}  // namespace

Bytes encode(const ShmTicket& parsed) {
  Bytes ticket;
  Writer out(ticket);
  std::visit(Overload{[&](Nothing) { out.put(PlaceKind::nothing); },
                      [&](const Lending& lending) {
                        out.put(PlaceKind::lending);
                        out.varint(lending.slot);
                        out.varint(lending.block);
                        out.put(lending.generation);
                      },
                      [&](const Handed& handed) {
                        out.put(PlaceKind::handed);
                        out.varint(handed.region);
                        out.varint(handed.offset);
                      }},
             parsed);
  return ticket;
}

std::optional<ShmTicket> parse_ticket(ByteView ticket) {
  Reader in(ticket);
  switch (static_cast<PlaceKind>(in.get<std::uint8_t>())) {
    case PlaceKind::nothing:
      return checked<ShmTicket>(in, Nothing{});
    case PlaceKind::lending: {
      Lending lending;
      lending.slot = below(in, most_slots);
      lending.block = below(in, Geometry::most_blocks);
      lending.generation = in.get<std::uint32_t>();
      if (lending.generation >= Lending::generations) in.fail();
      return checked<ShmTicket>(in, lending);
    }
    case PlaceKind::handed: {
      const auto region = in.varint();
      const Handed handed{region, in.varint()};
      return checked<ShmTicket>(in, handed);
    }
  }
  return std::nullopt;
}

Bytes encode(const Control& control) {
  Bytes message;
  Writer out(message);
  std::visit(Overload{[&](const Hello& hello) {
                        out.put(ControlKind::hello);
                        out.put(hello.nonce);
                      },
                      [&](const Probed& probed) {
                        out.put(ControlKind::probed);
                        out.sized(shortened(probed.failure));
                      },
                      [&](const Segment& segment) {
                        out.put(ControlKind::segment);
                        out.varint(segment.slot);
                        out.varint(segment.geometry.block_bytes);
                        out.varint(segment.geometry.blocks);
                      },
                      [&](const Handover& handover) {
                        out.put(ControlKind::handover);
                        out.varint(handover.region);
                        out.varint(handover.bytes);
                      },
                      [&](const Drop& drop) {
                        out.put(ControlKind::drop);
                        out.varint(drop.slot);
                      },
                      [&](const Unmapped& unmapped) {
                        out.put(ControlKind::unmapped);
                        out.varint(unmapped.slot);
                        out.sized(shortened(unmapped.why));
                      },
                      [&](const Gone& gone) {
                        out.put(ControlKind::gone);
                        out.varint(gone.region);
                        out.varint(gone.tickets);
                      },
                      [&](const Missed& missed) {
                        out.put(ControlKind::missed);
                        out.varint(missed.region);
                        out.sized(shortened(missed.why));
                      }},
             control);
  return message;
}

std::optional<Control> control_of(ByteView message) {
  Reader in(message);
  switch (static_cast<ControlKind>(in.get<std::uint8_t>())) {
    case ControlKind::hello: {
      const Hello hello{in.get<std::uint64_t>()};
      return checked<Control>(in, hello);
    }
    case ControlKind::probed: {
      Probed probed{reason(in)};
      return checked<Control>(in, std::move(probed));
    }
    case ControlKind::segment: {
      Segment segment{below(in, most_slots), {}};
      segment.geometry.block_bytes = in.varint();
      segment.geometry.blocks = below(in, Geometry::most_blocks + 1);
      if (!segment.geometry.valid()) in.fail();
      return checked<Control>(in, segment);
    }
    case ControlKind::handover: {
      const auto region = in.varint();
      const Handover handover{region, in.varint()};
      if (handover.bytes == 0 || handover.bytes > size_class::largest) in.fail();
      return checked<Control>(in, handover);
    }
    case ControlKind::drop: {
      const Drop drop{below(in, most_slots)};
      return checked<Control>(in, drop);
    }
    case ControlKind::unmapped: {
      const auto slot = below(in, most_slots);
      Unmapped unmapped{slot, reason(in)};
      return checked<Control>(in, std::move(unmapped));
    }
    case ControlKind::gone: {
      const auto region = in.varint();
      const Gone gone{region, in.varint()};
      return checked<Control>(in, gone);
    }
    case ControlKind::missed: {
      const auto region = in.varint();
      Missed missed{region, reason(in)};
      return checked<Control>(in, std::move(missed));
    }
  }
  return std::nullopt;
}

}  // namespace tensorferry::shm
