#include "tests/hostile/channels.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace hostile {
namespace {

constexpr std::uint8_t open = 1, ready = 2, failed = 3, message = 4;

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::uint64_t inode_of(const char* path) {
  struct stat file {};
  ::stat(path, &file);
  return file.st_ino;
}

/// Field 22 of /proc/self/stat.
std::uint64_t started() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream fields(line.substr(line.rfind(')') + 2));  // from field 3 on
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return std::stoull(field);
}

}  // namespace

std::vector<Channel> channels_of_this_process() {
  const auto uid = ::geteuid();
  const std::string of_shm = Out().u8(1).u32(uid).text(boot_id());
  Out of_cma;
  of_cma.u8(1).u32(uid).u64(inode_of("/proc/self/ns/pid")).u64(inode_of("/proc/self/ns/user"));
  of_cma.u32(static_cast<std::uint32_t>(::getpid())).u64(started()).text(boot_id());
  return {{"basic", {}}, {"shm", of_shm}, {"cma", of_cma}};
}

Control Channels::numbered(std::uint8_t operation, std::uint8_t channel, const std::string& payload) {
  Control made;
  made.frame.kind = control_kind;
  made.frame.word = ++controls_;
  made.frame.payload = Out().u8(operation).u32(std::uint32_t{channel} << 24).raw(payload);
  return made;
}

Control Channels::segment() {
  Segment one;
  one.block_bytes = 4096 << random_.below(4);
  one.blocks = 1 + random_.below(16);
  const auto bytes = (one.block_bytes * one.blocks + one.blocks * 8 + 4095) / 4096 * 4096;
  one.pages = SharedPages::make(bytes);
  const auto slot =
      segments_.size() < 40 && !random_.one_in(4) ? segments_.size() : random_.below(segments_.size() + 1);
  auto made =
      numbered(message, shm, Out().u8(3).varint(maybe(slot)).varint(maybe(one.block_bytes)).varint(maybe(one.blocks)));
  made.pages = one.pages;
  one.told = controls_;
  meddler_.add(one.pages, bytes);
  if (slot < segments_.size())
    segments_[slot] = std::move(one);
  else
    segments_.push_back(std::move(one));
  return made;
}

Control Channels::message_of_shm() {
  if (!ledger_) {
    const auto nonce = random_.next();
    ledger_ = SharedPages::make(4096);
    ledger_->at<std::uint64_t>(0) = maybe(nonce);
    meddler_.add(ledger_, 128);
    auto made = numbered(message, shm, Out().u8(1).u64(nonce));
    made.pages = ledger_;
    return made;
  }
  switch (random_.below(8)) {
    case 0:
      return numbered(message, shm, Out().u8(2).text(random_.one_in(9) ? "no" : ""));
    case 1: {
      const auto bytes = 4096 * (1 + random_.below(8));
      auto region = SharedPages::make(bytes);
      auto made = numbered(message, shm, Out().u8(4).varint(maybe(regions_.size())).varint(maybe(bytes)));
      regions_.emplace_back(region, controls_);
      made.pages = std::move(region);
      return made;
    }
    case 2:
      return numbered(message, shm, Out().u8(5).varint(maybe(random_.below(segments_.size() + 1))));
    case 3:
      return numbered(message, shm, Out().u8(random_.one_of({6, 8})).varint(random_.below(5)).text("why"));
    case 4:
      return numbered(message, shm, Out().u8(7).varint(random_.below(regions_.size() + 1)).varint(random_.below(9)));
    default:
      return segment();
  }
}

Control Channels::control() {
  const auto channel = static_cast<std::uint8_t>(random_.one_in(200) ? random_.next() : random_.below(3));
  Control made;
  switch (random_.below(12)) {
    case 0:
      made = numbered(open, channel, {});
      break;
    case 1:
      made = numbered(ready, channel, {});
      break;
    case 2:
      made = random_.one_in(20) ? numbered(failed, channel, Out().text("no")) : numbered(ready, channel, {});
      break;
    case 3:
      made = numbered(message, cma, Out().u8(1).u64(random_.next()));
      break;
    case 4:  // [send this buffer again] of an offer
      made =
          numbered(message, cma, Out().u8(3).varint(random_.below(9)).varint(random_.below(9)).varint(random_.edge()));
      break;
    case 5:
      made = random_.one_in(100) ? numbered(message, basic, random_.bytes(random_.below(30))) : numbered(open, shm, {});
      break;
    default:
      made = message_of_shm();
  }
  if (random_.one_in(80)) {
    made.pages = nullptr;
    made.descriptors.clear();
    for (auto count = random_.below(4); count > 0; --count) made.descriptors.push_back(wrong_descriptor(random_));
  }
  return made;
}

std::deque<Control> Channels::answer(std::string_view payload, std::vector<Descriptor> descriptors,
                                     const std::vector<std::string>& names) {
  In in(payload);
  const auto operation = in.number(1);
  const auto number = in.number(4) >> 24;
  const std::string name = number < names.size() ? names[number] : "";
  const auto mine = name == "shm" ? shm : name == "cma" ? cma : basic;
  std::deque<Control> answers;
  if (operation == open && mine != basic) {
    answers.push_back(mine == shm ? message_of_shm() : numbered(message, cma, Out().u8(1).u64(random_.next())));
    answers.push_back(numbered(ready, mine, {}));
  }
  if (operation != message) return answers;
  const auto kind = in.number(1);
  if (mine == shm && kind == 1 && !descriptors.empty()) {
    const auto nonce = in.number(8);
    if (const auto pages = SharedPages::map(std::move(descriptors[0]), 4096)) {
      pages->at<std::uint64_t>(8) = ~nonce;
      if (random_.one_in(4)) meddler_.add(regions_.emplace_back(pages, 0).first, 4096);
    }
    answers.push_back(numbered(message, shm, Out().u8(2).text("")));
    answers.push_back(numbered(ready, shm, {}));
  } else if (mine == cma && kind == 1) {
    word_ = ~in.number(8);
    Out body;
    body.u8(2).u32(static_cast<std::uint32_t>(::getpid())).u64(maybe(started()));
    answers.push_back(numbered(message, cma, body.u64(maybe(reinterpret_cast<std::uint64_t>(&word_)))));
    answered_ = controls_;
    answers.push_back(numbered(ready, cma, {}));
  }
  return answers;
}

void Channels::shm_ticket(Record& record) {
  record.channel = shm;
  const bool by_region = !regions_.empty() && random_.one_in(3);
  if (by_region) {
    const auto which = random_.below(regions_.size());
    record.bytes = maybe(1 + random_.below(4096));
    record.ticket = Out().u8(2).varint(maybe(which)).varint(maybe(0));
    record.after = regions_[which].second;
  } else if (!segments_.empty()) {
    const auto slot = random_.below(segments_.size());
    auto& one = segments_[slot];
    const auto block = maybe(one.next++ % one.blocks);
    record.bytes = maybe(1 + random_.below(one.block_bytes));
    record.ticket = Out().u8(1).varint(maybe(slot)).varint(block).u32(++generations_);
    record.after = one.told;
  } else {
    record.ticket = Out().u8(0);
  }
}

void Channels::cma_ticket(Record& record) {
  record.channel = cma;
  record.after = answered_;
  record.bytes = 1 + random_.below(source_.size());
  const auto address = random_.one_in(10) ? random_.edge() : reinterpret_cast<std::uint64_t>(source_.data());
  record.ticket = Out().u8(1).varint(maybe(++offers_)).u64(address);
}

Channels::Sent Channels::buffer(bool may_trail, bool may_bulk) {
  Sent sent;
  auto& record = sent.record;
  record.release = random_.one_in(2) ? 0 : random_.below(1000);
  switch (random_.below(8)) {
    case 0:
      record.channel = inlined;
      record.behind = random_.bytes(random_.below(100));
      record.bytes = record.behind.size();
      break;
    case 1:
    case 2:
      shm_ticket(record);
      break;
    case 3:
      if (answered_ == 0) {
        record.ticket = Out().u8(0);
        break;
      }
      cma_ticket(record);
      break;
    case 4:
      record.ticket = Out().u8(0);
      break;
    case 5:
      if (may_bulk) {
        sent.bulk.assign(1 + random_.below(random_.one_in(20) ? 200'000 : 3000), 'b');
        sent.sequence = ++sequences_;
        record.bytes = sent.bulk.size();
        record.ticket = Out().u8(2).varint(sent.sequence);
        break;
      }
      [[fallthrough]];
    default:
      if (!may_trail) {
        record.ticket = Out().u8(0);
        break;
      }
      sent.trailing.assign(1 + random_.below(random_.one_in(20) ? 100'000 : 2000), 't');
      record.bytes = sent.trailing.size();
      record.ticket = Out().u8(1);
  }
  if (random_.one_in(300)) record.after = random_.edge();  // perhaps of a message that never comes
  if (random_.one_in(400)) record.channel = none;          // a channel that was not announced
  if (random_.one_in(400)) record.ticket += random_.bytes(1 + random_.below(4));
  return sent;
}

}  // namespace hostile
