// Which frames the hostile peer sends: most of them are right, so that the link lives to see the others.
#include <algorithm>
#include <utility>

#include "tests/hostile/session.h"

namespace hostile {

void Session::add_buffers(Frame& frame, std::vector<Channels::Sent>& sent, std::uint64_t count, bool may_trail) {
  for (std::uint64_t i = 0; i < count; ++i) {
    auto one = channels_.buffer(may_trail, streams_.bulk && !streams_.bulk_is_stuck);
    frame.records += one.record.encoded();
    frame.trailing += one.trailing;
    ++frame.buffers;
    sent.push_back(std::move(one));
  }
}

void Session::add_extensions(Frame& frame) {
  if (random_.one_in(6)) {
    Out released;
    for (auto count = random_.below(20); count > 0; --count)
      released.u64(random_.one_in(9) ? random_.edge() : random_.below(500));
    frame.extensions += extension(3, released.bytes());
  }
  if (random_.one_in(12)) frame.extensions += extension(4, random_.bytes(4 * random_.below(4)));
  if (random_.one_in(20))
    frame.extensions += extension(static_cast<std::uint16_t>(5 + random_.below(1000)), random_.bytes(random_.below(9)));
}

std::string Session::payload_for(std::string_view function, const std::vector<Channels::Sent>& buffers) {
  if (function == "tf:ref") return mail(random_, facts_);
  if (function == "tf:group") return group_record(random_, facts_);
  if (function.starts_with("tf:")) return use_of_object(random_, facts_);
  if (function == "echo" && !buffers.empty() && !random_.one_in(4))
    return arguments(tensor_value(buffers[0].record.bytes, 0), 1);
  if (function == "numbers") return arguments(Out().u8(3).varint(random_.below(40'000)), 1);
  std::string values;
  const auto count = random_.below(3);
  for (std::uint64_t i = 0; i < count; ++i) values += value(random_, buffers.size());
  return arguments(values, count);
}

Session::Next Session::generated_request() {
  Next made;
  auto& frame = made.frame;
  frame.kind = request;
  const std::string function = random_.one_of({"echo", "echo", "numbers", "text", "fail", "make", "call back", "tf:ref",
                                               "tf:group", "tf:method", "tf:next", "tf:fetch", "tf:here", "?"});
  frame.word = random_.one_in(400) ? random_.below(calls_ + 2) : ++calls_;
  frame.remaining = random_.one_in(3) ? static_cast<std::uint32_t>(random_.below(200)) : 10'000;
  frame.order = random_.one_in(10) ? static_cast<std::uint32_t>(random_.below(4)) : 0;
  if (random_.one_in(12))
    frame.function = static_cast<std::uint32_t>(random_.one_in(8) ? random_.edge() : 1 + random_.below(8));
  else
    frame.extensions = extension(1, random_.one_in(100) ? random_.bytes(random_.below(5000)) : function);
  add_extensions(frame);
  const auto buffers = random_.one_in(40) ? random_.below(60) : random_.below(3);
  if (random_.one_in(30)) {  // spilled: records and payload lie in a buffer behind the frame
    Frame inner;
    add_buffers(inner, made.buffers, buffers, false);
    Channels::Sent spill;
    spill.trailing = Out()
                         .u32(random_.one_in(50) ? random_.edge() : inner.buffers)
                         .raw(inner.records)
                         .raw(payload_for(function, made.buffers));
    spill.record.bytes = spill.trailing.size();
    spill.record.ticket = Out().u8(1);
    frame.flags = flag_spilled;
    frame.buffers = 1;
    frame.records = spill.record.encoded();
    frame.trailing = spill.trailing;
  } else {
    add_buffers(frame, made.buffers, buffers, true);
    frame.payload = payload_for(function, made.buffers);
  }
  return made;
}

/// Frames beside requests and control messages. Most of them refer to nothing.
Session::Next Session::odd_frame() {
  Next made;
  auto& frame = made.frame;
  frame.word = random_.one_in(3) ? random_.edge() : random_.below(calls_ + 2);
  frame.kind = random_.one_of({cancel, cancel, release, ping, pong, status});
  if (random_.one_in(60)) frame.kind = random_.one_of({ring, hello, reply, bulk, goodbye, go, want_bulk});
  if (frame.kind == release) add_extensions(frame);
  if (frame.kind == reply) add_buffers(frame, made.buffers, random_.below(2), true);
  if (frame.kind == ring || frame.kind == hello) frame.payload = random_.bytes(random_.below(40));
  return made;
}

Session::Next Session::answer_to(std::uint64_t call) {
  Next made;
  auto& frame = made.frame;
  frame.kind = reply;
  frame.word = random_.one_in(30) ? random_.edge() : call;
  if (random_.one_in(4)) {
    frame.flags = flag_error;
    frame.payload = Out().u8(random_.below(16)).text(random_.bytes(random_.below(40)));
    return made;
  }
  if (random_.one_in(3)) frame.extensions = extension(2, Out().u32(random_.edge()).bytes());
  frame.payload = Out().u8(random_.below(2)).raw(value(random_, 0));
  return made;
}

/// Makes a frame that breaks the protocol, or that may.
void Session::break_it(Next& made) {
  ++score_.broken;
  auto& bytes = made.bytes;
  bytes = made.frame.bytes();
  switch (random_.below(7)) {
    case 0:  // any byte of the header
      bytes[random_.below(header_bytes)] = static_cast<char>(random_.next());
      break;
    case 1:  // a byte behind it
      bytes[random_.below(bytes.size())] ^= static_cast<char>(1 << random_.below(8));
      break;
    case 2: {  // a number of the header, at an edge
      const std::string number = Out().u64(random_.edge());
      const auto at = random_.one_of<std::size_t>({2, 4, 8, 12, 16, 24, 28, 32});
      std::copy_n(number.begin(),
                  at < 8                 ? 2
                  : at == 16 || at == 32 ? 8
                                         : 4,
                  bytes.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
    case 3:  // the rest of the frame never comes
      bytes.resize(header_bytes + random_.below(bytes.size() - header_bytes + 1));
      break;
    case 4:  // twice
      bytes += bytes;
      break;
    case 5:
      bytes[0] = static_cast<char>(random_.one_in(2) ? random_.below(last_kind + 2U) : random_.next());
      break;
    default:  // descriptors where none belong
      for (auto count = 1 + random_.below(8); count > 0; --count) made.descriptors.push_back(wrong_descriptor(random_));
      bytes[6] = static_cast<char>(random_.one_in(2) ? made.descriptors.size() : random_.below(256));
  }
}

Session::Next Session::next() {
  Next made;
  const auto kind = random_.below(10);
  if (kind < 5) {
    made = generated_request();
  } else if (kind < 8) {
    auto control = channels_.control();
    made.frame = std::move(control.frame);
    made.descriptors = std::move(control.descriptors);
    made.pages = std::move(control.pages);
  } else {
    made = odd_frame();
  }
  if (random_.one_in(150)) break_it(made);
  return made;
}

}  // namespace hostile
