#include "tests/hostile/session.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace hostile {
namespace {

using std::chrono::milliseconds;

// The memory of a ring (docs/protocol.md, "Rings").
constexpr std::size_t head_at = 64, ring_at = 8512, ring_bytes = 256 << 10, slots_at = 274432, slots = 1024;
constexpr std::size_t slot_bytes = 4096, bytes_of_ring = slots_at + slots * slot_bytes;

/// Returns the names of the channels in a hello, and the incarnation of its sender.
std::pair<std::vector<std::string>, std::uint64_t> read_hello(std::string_view payload) {
  In in(payload);
  in.number(1);
  in.text();
  in.number(4);
  const auto incarnation = in.number(8);
  in.number(8);
  for (auto devices = in.varint(); devices > 0; --devices) in.number(2);
  std::vector<std::string> names;
  for (auto channels = in.varint(); channels > 0; --channels) {
    names.emplace_back(in.text());
    for (auto endpoints = in.varint(); endpoints > 0; --endpoints) {
      in.number(2);
      in.text();
    }
  }
  return {names, incarnation};
}

constexpr std::uint8_t calls_purpose = 1, bulk_purpose = 2;

}  // namespace

Session::Session(const Target& target, Random& random, Meddler& meddler, Score& score, std::string name)
    : target_(target), random_(random), meddler_(meddler), score_(score) {
  facts_.name = std::move(name);
  facts_.mine = random_.next() | 1;
}

std::optional<Connection> Session::dialled(std::uint8_t purpose) {
  const auto& address = random_.one_in(5) ? target_.tcp_address : target_.unix_address;
  auto connection = Connection::dial(address);
  if (!connection.handshake(target_.key, random_.bytes(32))) return {};
  const auto theirs = connection.read(milliseconds(5000));
  if (!theirs) return {};
  std::tie(channel_names_, facts_.theirs) = read_hello(theirs->body);
  Greeting mine;
  mine.purpose = purpose;
  mine.name = facts_.name;
  mine.incarnation = facts_.mine;
  mine.expected = random_.one_in(2) ? 0 : facts_.theirs;
  mine.connection = streams_.number;
  mine.features = random_.one_in(8) ? static_cast<std::uint32_t>(random_.next()) : 15;
  mine.channels = channels_of_this_process();
  Frame frame;
  frame.kind = hello;
  frame.payload = mine.encoded();
  auto bytes = frame.bytes();
  if (random_.one_in(60)) bytes[random_.below(bytes.size())] = static_cast<char>(random_.next());
  if (!connection.write(bytes)) return {};
  if (purpose == calls_purpose && facts_.mine < facts_.theirs) {  // this side decides
    Frame takes;
    takes.kind = go;
    takes.word = streams_.number = random_.one_in(20) ? random_.edge() : 1 + random_.below(3);
    return connection.write(takes.bytes()) ? std::move(connection) : std::optional<Connection>();
  }
  const auto taken = connection.read(milliseconds(5000));
  if (!taken || taken->header.kind != go) return {};
  if (purpose == calls_purpose) streams_.number = taken->header.word;
  return connection;
}

bool Session::begin() {
  streams_.calls = dialled(calls_purpose);
  if (!streams_.calls) return false;
  ++score_.links;
  if (!random_.one_in(3)) streams_.bulk = dialled(bulk_purpose);
  streams_.reads_nothing = random_.one_in(30);
  if (streams_.calls->by_unix_socket() && random_.one_in(2)) offer_ring();
  return true;
}

void Session::offer_ring() {
  const auto nonce = random_.next();
  ring_.pages = SharedPages::make(bytes_of_ring);
  ring_.bell = SharedPages::make(4096);
  if (!ring_.pages || !ring_.bell) return;
  ring_.pages->at<std::uint64_t>(0) = nonce;
  Frame frame;
  frame.kind = ring;
  frame.descriptors = 2;
  frame.payload = Out().u8(1).u64(nonce);
  if (random_.one_in(20)) {
    const auto wrong = wrong_descriptor(random_);
    streams_.calls->write(frame.bytes(), {wrong.get(), ring_.bell->descriptor()});
  } else {
    streams_.calls->write(frame.bytes(), {ring_.pages->descriptor(), ring_.bell->descriptor()});
  }
}

bool Session::push_into_ring(const std::string& frame) {
  constexpr std::uint32_t pending = 1;
  const auto slot = ring_.slot++ % slots;
  const auto generation = 1 + ring_.slot / slots;
  ring_.pages->at<std::uint32_t>(slots_at + slot * slot_bytes) = generation << 4 | pending;
  std::string entry = Out().u32(frame.size()).u32(slot).u32(generation).u32(0).raw(frame);
  if (random_.one_in(200)) entry[random_.below(16)] = static_cast<char>(random_.next());
  entry.resize((entry.size() + 15) / 16 * 16);
  const auto tail = ring_.pages->at<std::uint64_t>(2 * head_at).load();
  if (ring_.head - tail > ring_bytes - entry.size()) return true;  // no room
  for (std::size_t i = 0; i < entry.size(); ++i)
    ring_.pages->data()[ring_at + (ring_.head + i) % ring_bytes] = entry[i];
  ring_.head += entry.size();
  ring_.pages->at<std::uint64_t>(head_at) = ring_.head;
  if (ring_.agents_bell) {
    auto sequence = ring_.agents_bell->at<std::uint32_t>(0);
    ++sequence;
    ::syscall(SYS_futex, ring_.agents_bell->data(), FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
  ++score_.in_rings;
  return true;
}

bool Session::send_control(Control control) {
  std::vector<int> descriptors;
  const bool local = streams_.calls->by_unix_socket();
  if (local && control.pages) descriptors.push_back(control.pages->descriptor());
  for (const auto& each : control.descriptors) {
    if (local && each.get() >= 0) descriptors.push_back(each.get());
  }
  control.frame.descriptors = static_cast<std::uint8_t>(descriptors.size());
  return streams_.calls->write(control.frame.bytes(), descriptors);
}

bool Session::send(Next next) {
  auto& calls = *streams_.calls;
  std::vector<int> descriptors;
  if (calls.by_unix_socket()) {
    if (next.pages) descriptors.push_back(next.pages->descriptor());
    for (const auto& each : next.descriptors) {
      if (each.get() >= 0) descriptors.push_back(each.get());
    }
  }
  next.frame.descriptors = static_cast<std::uint8_t>(descriptors.size());
  const bool is_whole = next.bytes.empty();
  const auto bytes = is_whole ? next.frame.bytes() : next.bytes;
  const bool fits_a_ring =
      ring_.accepted && is_whole && next.frame.kind == request && next.frame.trailing.empty() && next.frame.order == 0;
  ++score_.frames;
  streams_.may_be_out_of_step |= !is_whole;
  if (fits_a_ring && descriptors.empty() && random_.one_in(2)) return push_into_ring(bytes);
  if (!calls.write(bytes, descriptors)) return false;
  for (const auto& buffer : next.buffers) {
    if (buffer.sequence == 0 || !streams_.bulk || streams_.bulk_is_stuck) continue;
    Frame frame;
    frame.kind = bulk;
    frame.word = buffer.sequence;
    frame.trailing = buffer.bulk;
    if (random_.one_in(150)) {  // bytes that no record names: the agent reads nothing more there
      frame.word = random_.edge();
      streams_.bulk_is_stuck = true;
    }
    ++score_.frames;
    streams_.bulk->write(frame.bytes());
  }
  return true;
}

void Session::take(Connection::Incoming frame) {
  constexpr std::uint8_t accepted = 2;
  switch (frame.header.kind) {
    case pong:
      streams_.got_pong = true;
      break;
    case reply:
      ++score_.replies;
      break;
    case request:
      if (called_.size() < 64) called_.push_back(frame.header.word);
      ++score_.calls_back;
      break;
    case ring:
      if (static_cast<std::uint8_t>(frame.body[0]) == accepted && !frame.descriptors.empty() && ring_.pages) {
        ring_.accepted = true;
        ring_.agents_bell = SharedPages::map(std::move(frame.descriptors[0]), 4096);
        if (ring_.agents_bell && random_.one_in(10)) meddler_.add(ring_.agents_bell, 192);
        if (random_.one_in(4)) meddler_.add(ring_.pages, random_.one_in(3) ? bytes_of_ring : 4096);
      }
      break;
    case control_kind:
      for (auto& answer : channels_.answer(std::string_view(frame.body).substr(frame.header.extensions),
                                           std::move(frame.descriptors), channel_names_))
        send_control(std::move(answer));
      break;
    default:
      break;
  }
}

void Session::drain(Connection& from, milliseconds for_a_pong) {
  while (auto frame = from.read(streams_.got_pong ? milliseconds(0) : for_a_pong)) take(std::move(*frame));
}

bool Session::attack(std::uint64_t frames) {
  for (std::uint64_t sent = 0; sent < frames; ++sent) {
    if (!send(next())) break;
  }
  auto& calls = *streams_.calls;
  if (streams_.reads_nothing) return !calls.ended();
  Frame asks;
  asks.kind = ping;
  streams_.got_pong = false;
  calls.write(asks.bytes());
  drain(calls, milliseconds(streams_.may_be_out_of_step ? 100 : 5000));
  if (!streams_.got_pong) return false;
  for (const auto call : std::exchange(called_, {})) calls.write(answer_to(call).frame.bytes());
  return !calls.ended();
}

}  // namespace hostile
