// The exchange of a group, and a step on a board. doubling.cpp has a step without one.
#include "rpc/collectives/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/handed_regions.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {
namespace {

/// A reduction reads this much of each rank at a time, so that the bytes stay in the cache.
constexpr std::size_t chunk_bytes = std::size_t{128} << 10;

std::string text_of(const Fingerprint& called) {
  const auto operation = static_cast<Operation>(called.operation);
  if (called.operation == Fingerprint::first_on_device) return "its first operation on a GPU";
  auto text = std::string(called.operation <= static_cast<std::uint8_t>(Operation::last) ? name_of(operation) : "?");
  if (operation == Operation::barrier) return text + "()";
  if (operation == Operation::all_reduce || operation == Operation::reduce || operation == Operation::reduce_scatter) {
    text += formatted("({}", name_of(static_cast<Reduction>(called.reduction_kind())));
    if (called.factor != 1) text += formatted(" of {} times", fixed(called.factor, 6));
    text += ")";
  }
  if (called.elements != ~std::uint64_t{0}) text += formatted(" of {}", called.elements);
  text += formatted(" {} elements", name_of(static_cast<DType>(called.dtype)));
  const bool captured = (called.device & Fingerprint::captured) != 0;
  const auto device = captured ? called.device - Fingerprint::captured : called.device;
  if (device == 1) text += " on a GPU";
  if (device > 1) text += formatted(" on the GPU that it uses as its number {}", device);
  if (captured) text += ", captured into a CUDA graph";
  if (called.root >= 0) text += formatted(" with root {}", called.root);
  if (const auto asked = called.algorithm()) {
    const bool known = *asked <= static_cast<std::uint8_t>(Algorithm::last);
    text += formatted(" by algorithm \"{}\"", known ? name_of(static_cast<Algorithm>(*asked)) : "?");
  }
  return text;
}

}  // namespace

Exchange::Exchange(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group,
                   std::shared_ptr<Mailbox> mailbox, std::string label)
    : agent_(std::move(agent)), group_(std::move(group)), mailbox_(std::move(mailbox)), label_(std::move(label)) {}

Exchange::~Exchange() = default;

void Exchange::use_board(Buffer memory, bool memory_readable) {
  auto board = std::make_unique<Board>(std::move(memory), rank(), size());
  links_ = {true, memory_readable};
  handed_over_ = std::make_shared<HandedRegions>(agent_, group_->id, rank(), group_->names());
  const std::lock_guard lock(mutex_);  // another rank may fail the group now
  board_ = std::move(board);
}

void Exchange::wake() {
  Board* board = nullptr;
  {
    const std::lock_guard lock(mutex_);
    board = board_.get();
  }
  if (board != nullptr) board->wake();
}

Status Exchange::map_region(std::size_t rank, std::uint64_t region, Buffer memory) {
  Buffer replaced;  // dropped after the lock
  const std::lock_guard lock(mutex_);
  const auto known = regions_.find({rank, region});
  const auto of_rank = std::distance(regions_.lower_bound({rank, 0}), regions_.lower_bound({rank + 1, 0}));
  if (known == regions_.end() && static_cast<std::size_t>(of_rank) >= most_regions) {
    return {Code::resource_exhausted, formatted("{} keeps {} regions of {} mapped", mailbox_->named(this->rank()),
                                                most_regions, mailbox_->named(rank))};
  }
  auto& kept = known == regions_.end() ? regions_[{rank, region}] : known->second;
  replaced = std::exchange(kept, std::move(memory));
  return {};
}

void Exchange::unmap_region(std::size_t rank, std::uint64_t region) {
  Buffer dropped;  // after the lock
  const std::lock_guard lock(mutex_);
  if (const auto it = regions_.find({rank, region}); it != regions_.end()) {
    dropped = std::move(it->second);
    regions_.erase(it);
  }
}

std::string Exchange::not_come(const std::vector<std::size_t>& missing) const {
  std::string names;
  for (const auto rank : missing) names += (names.empty() ? "" : ", ") + mailbox_->named(rank);
  return formatted("{} not come. Raise timeout=, or see what {} does", names + (missing.size() == 1 ? " has" : " have"),
                   missing.size() == 1 ? "that rank" : "each of them");
}

Status Exchange::late(const Fingerprint& called, const std::vector<std::size_t>& missing) const {
  return {Code::deadline_exceeded,
          formatted("{} of group \"{}\" reached its timeout before it ended: {}", text_of(called), label_,
                    missing.empty() ? "all ranks have come. Raise timeout=" : not_come(missing))};
}

// The root of a gather or scatter says whether the pieces differ in size; the other ranks know their own alone. On a
// device they must know it, because they take other steps then.
void Exchange::leave_sizes_to_the_root(std::vector<Fingerprint>& called) {
  for (std::size_t root = 0; root < called.size(); ++root) {
    const auto& by_root = called[root];
    const auto operation = static_cast<Operation>(by_root.operation);
    const bool uneven = by_root.elements == ~std::uint64_t{0} && by_root.device == 0;
    if (!uneven || (operation != Operation::gather && operation != Operation::scatter)) continue;
    if (by_root.root != static_cast<std::int32_t>(root)) continue;
    for (auto& each : called) {
      if (each.operation == by_root.operation && each.root == by_root.root) each.elements = by_root.elements;
    }
  }
}

Status Exchange::compare(std::vector<Fingerprint> called) const {
  leave_sizes_to_the_root(called);
  // The call that most ranks made counts as the right one; if two are equally frequent, that of the lowest rank.
  std::size_t most = 0, usual = 0;
  for (std::size_t rank = 0; rank < called.size(); ++rank) {
    const auto alike = static_cast<std::size_t>(std::count(called.begin(), called.end(), called[rank]));
    if (alike > most) most = alike, usual = rank;
  }
  if (most == called.size()) return {};
  std::string differ;
  for (std::size_t rank = 0; rank < called.size(); ++rank) {
    if (called[rank] == called[usual]) continue;
    differ += (differ.empty() ? "" : ", ") + mailbox_->named(rank) + " called " + text_of(called[rank]);
  }
  return {Code::invalid_argument,
          formatted("the ranks of group \"{}\" called different operations: {}, but {} called {}", label_, differ,
                    most == 1 ? mailbox_->named(usual) : formatted("{} ranks", most), text_of(called[usual]))};
}

Status Exchange::step(const Fingerprint& called, ExchangeStep step, const WaitLimits& limits) {
  if (auto why = limits.failed(); !why.ok()) return why;
  if (auto status = settle_announced(limits); !status.ok()) return status;
  ++step_;
  return board_ ? step_on_board(called, step, limits) : step_by_messages(called, step, limits);
}

Status Exchange::missing(const Status& status, const Fingerprint& called, std::uint64_t step) const {
  if (!time_is_over(status)) return status;
  std::vector<std::size_t> ranks;
  for (std::size_t from = 0; from < size(); ++from) {
    if (from != rank() && !board_->announced(from, step)) ranks.push_back(from);
  }
  return late(called, ranks);
}

Status Exchange::announce(const Fingerprint& called, std::function<void(const Status&)> differ,
                          const WaitLimits& limits) {
  if (auto why = limits.failed(); !why.ok()) return why;
  if (auto status = settle_announced(limits); !status.ok()) return status;
  ++step_;
  if (const auto slot = board_->slot(step_, limits); !slot.ok()) return missing(slot.status(), called, step_);
  Announcement no_bytes;
  no_bytes.fingerprint = called;
  board_->announce(step_, no_bytes, {});  // no rank reads its parts
  const std::lock_guard lock(mutex_);
  announced_.last = {step_, called, std::move(differ)};
  return {};
}

Status Exchange::settle_announced(const WaitLimits& limits) {
  Fingerprint called;
  std::uint64_t step = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!announced_.last) return announced_.mismatch;
    called = announced_.last->called;
    step = announced_.last->step;
  }
  for (std::size_t from = 0; from < size(); ++from) {
    if (from == rank()) continue;
    if (auto status = missing(board_->await(from, step, limits), called, step); !status.ok()) return status;
  }
  return compare_announced();
}

Status Exchange::compare_announced() {
  std::optional<Announced> compared;
  Status why;
  {
    const std::lock_guard lock(mutex_);
    if (!announced_.last) return announced_.mismatch;
    std::vector<Fingerprint> calls(size(), announced_.last->called);
    for (std::size_t from = 0; from < size(); ++from) {
      if (from == rank()) continue;
      if (!board_->announced(from, announced_.last->step)) return {};
      calls[from] = board_->announcement(from, announced_.last->step).fingerprint;
    }
    if (const auto status = compare(std::move(calls)); !status.ok()) {
      announced_.mismatch = Status(
          status.code(), std::string(status.what()) + ". A GPU had begun the operation, so the group has failed");
    }
    why = announced_.mismatch;
    board_->done(announced_.last->step);
    compared = std::move(announced_.last);
    announced_.last.reset();
  }
  if (!why.ok()) compared->differ(why);
  return why;
}

bool Exchange::has_announced() const {
  const std::lock_guard lock(mutex_);
  return announced_.last.has_value();
}

Announcement Exchange::place(ExchangeStep& step, std::byte* slot, std::vector<Part>& parts,
                             std::vector<std::byte>& copy) {
  Announcement out;
  std::size_t used = 0;
  std::span<const std::byte> last;  // several ranks may take the same bytes
  for (std::size_t to = 0; to < size(); ++to) {
    const auto given = step.give[to];
    if (to == rank() || given.empty()) continue;
    if (given.data() != last.data() || given.size() != last.size()) used += given.size();
    last = given;
    parts[to] = {used - given.size(), given.size()};
  }
  if (used == 0) return out;
  if (used <= Board::slot_bytes) {
    out.place = Place::slot;
    for (std::size_t to = 0; to < size(); ++to) {
      if (parts[to].bytes != 0) std::memcpy(slot + parts[to].offset, step.give[to].data(), parts[to].bytes);
    }
    return out;
  }
  if (overwrites_given(step, rank())) copy_given(step, rank(), copy);
  out.place = links_.memory ? Place::memory : Place::mail;
  for (std::size_t to = 0; to < size(); ++to) parts[to].offset = reinterpret_cast<std::uintptr_t>(step.give[to].data());
  return out;
}

Status Exchange::step_on_board(const Fingerprint& called, ExchangeStep& step, const WaitLimits& limits) {
  const auto missing = [&](const Status& status) { return this->missing(status, called, step_); };
  const auto slot = board_->slot(step_, limits);
  if (!slot.ok()) return missing(slot.status());
  std::vector<Part> parts(size());
  std::vector<std::byte> copy;
  auto placed = place(step, *slot, parts, copy);
  if (placed.place == Place::memory || placed.place == Place::mail) {
    auto others = step.give;
    others[rank()] = {};
    if (auto handed = handed_over_->hand_over(others, limits)) {
      placed.place = Place::region;
      placed.region = handed->region;
      for (std::size_t to = 0; to < size(); ++to) parts[to].offset = handed->offsets[to];
    }
  }
  placed.fingerprint = called;
  board_->announce(step_, placed, parts);
  std::vector<std::shared_ptr<Delivery>> posts;
  for (std::size_t to = 0; placed.place == Place::mail && to < size(); ++to) {
    if (parts[to].bytes != 0) posts.push_back(mailbox_->post(to, {false, step_}, step.give[to], called));
  }

  std::vector<Announcement> announced(size());
  std::vector<Fingerprint> calls(size(), called);
  Status status;
  for (std::size_t from = 0; from < size(); ++from) {
    if (from == rank()) continue;
    status = missing(board_->await(from, step_, limits));
    if (!status.ok()) break;  // the rank may announce at this very moment
    announced[from] = board_->announcement(from, step_);
    calls[from] = announced[from].fingerprint;
  }
  if (status.ok()) status = agree(calls);
  if (status.ok()) status = take_parts(step, announced, limits);
  board_->done(step_);
  for (std::size_t to = 0; status.ok() && placed.place != Place::slot && to < size(); ++to) {
    if (to != rank() && parts[to].bytes != 0) status = missing(board_->await_done(to, step_, limits));
  }
  for (const auto& post : posts) {
    if (status.ok()) status = post->wait(limits);
    if (!status.ok()) mailbox_->withdraw(post, status);
  }
  if (!status.ok()) board_->withdraw(step_);  // the caller may write its memory again
  return status;
}

Result<Buffer> Exchange::find_part(std::size_t rank, const Announcement& announced, const Part& part) const {
  const auto outside = [&] {
    return Status(Code::protocol_error, mailbox_->named(rank) + " announced bytes outside of its memory");
  };
  Buffer out;
  out.bytes = part.bytes;
  switch (announced.place) {
    case Place::slot:
      if (part.offset > Board::slot_bytes || part.bytes > Board::slot_bytes - part.offset) return outside();
      out.data = const_cast<std::byte*>(board_->slot_of(rank, step_)) + part.offset;
      return out;
    case Place::memory:
      // Also if that is this very process: read_memory() fails, and does not crash, if the rank gives up and frees it.
      if (!links_.memory || watch_->process(rank) == nullptr) return outside();
      return out;
    case Place::region: {
      const std::lock_guard lock(mutex_);
      const auto it = regions_.find({rank, announced.region});
      if (it == regions_.end() || it->second.device.type != DeviceType::cpu || part.offset > it->second.bytes ||
          part.bytes > it->second.bytes - part.offset) {
        return outside();
      }
      out.data = it->second.data + part.offset;
      out.owner = it->second.owner;
      return out;
    }
    default:
      return outside();
  }
}

Status Exchange::read_memory(std::size_t rank, std::byte* to, std::uint64_t from, std::size_t bytes) const {
  const auto error = watch_->process(rank)->read(to, from, bytes);
  if (error == 0) return {};
  if (board_->withdrawn(rank, step_)) return withdrawn_by(rank);
  if (error == ESRCH || watch_->has_ended(rank)) {
    return {Code::connection_lost, formatted("{} of group \"{}\" has died or left: {}", mailbox_->named(rank), label_,
                                             watch_->end_of_process(rank))};
  }
  return {Code::channel_unavailable,
          formatted("cannot read the memory of {}: {}", mailbox_->named(rank), cma::text_of_refusal(error))};
}

Status Exchange::withdrawn_by(std::size_t rank) const {
  return {Code::cancelled, formatted("{} of group \"{}\" has withdrawn the data", mailbox_->named(rank), label_)};
}

Status Exchange::take_parts(const ExchangeStep& step, const std::vector<Announcement>& announced,
                            const WaitLimits& limits) {
  std::vector<Part> parts(size());
  std::vector<const std::byte*> here(size());
  std::vector<Buffer> memory;                 // of mail, and of regions that may end meanwhile
  for (std::size_t i = 0; i < size(); ++i) {  // each rank goes on with another one
    const auto from = (rank() + i) % size();
    if (from == rank()) {
      here[from] = step.give[from].data();
      parts[from].bytes = step.give[from].size();
    } else {
      parts[from] = board_->part(from, step_, rank());
    }
    if (parts[from].bytes != step.take[from]) {
      return {Code::invalid_argument, formatted("{} gives {} bytes to {}, which expects {}", mailbox_->named(from),
                                                parts[from].bytes, mailbox_->named(rank()), step.take[from])};
    }
    if (from == rank() && step.reduction == nullptr) take_own(step, rank());
    if (parts[from].bytes == 0 || from == rank()) continue;
    if (announced[from].place == Place::mail) {
      auto* to = step.reduction != nullptr ? nullptr : step.into[from];
      if (to == nullptr) {
        auto working = working_memory(parts[from].bytes);
        if (!working.ok()) return working.status();
        to = memory.emplace_back(*std::move(working)).data;
      }
      const auto delivery = mailbox_->receive_exactly(from, step_, to, parts[from].bytes);
      auto status = delivery->wait(limits);
      if (!status.ok()) mailbox_->withdraw(delivery, status);
      if (!status.ok()) return status;
      here[from] = to;
      continue;
    }
    auto found = find_part(from, announced[from], parts[from]);
    if (!found.ok()) return found.status();
    here[from] = memory.emplace_back(*std::move(found)).data;
    if (step.reduction != nullptr && reinterpret_cast<std::uintptr_t>(here[from]) % size_of(step.dtype) != 0) {
      auto aligned = working_memory(parts[from].bytes);  // a reduction reads whole elements
      if (!aligned.ok()) return aligned.status();
      std::memcpy(aligned->data, here[from], parts[from].bytes);
      here[from] = memory.emplace_back(*std::move(aligned)).data;
    }
    if (step.reduction != nullptr) continue;
    if (here[from] != nullptr) {
      std::memmove(step.into[from], here[from], parts[from].bytes);
    } else if (auto status = read_memory(from, step.into[from], parts[from].offset, parts[from].bytes); !status.ok()) {
      return status;
    }
  }
  if (step.reduction != nullptr) {
    if (auto status = reduce_parts(step, here, parts); !status.ok()) return status;
  }
  for (std::size_t from = 0; from < size(); ++from) {
    if (from == rank() || parts[from].bytes == 0 || !board_->withdrawn(from, step_)) continue;
    return withdrawn_by(from);
  }
  return {};
}

Result<Buffer> Exchange::working_memory(std::size_t bytes) const {
  auto out = agent_->allocate(bytes);
  if (out.data != nullptr || bytes == 0) return out;
  return Status(Code::resource_exhausted,
                formatted("the system has no {} bytes for an operation of group \"{}\"", bytes, label_));
}

Status Exchange::reduce_parts(const ExchangeStep& step, const std::vector<const std::byte*>& here,
                              const std::vector<Part>& parts) {
  const auto item = size_of(step.dtype);
  const auto chunk = std::max<std::size_t>(1, chunk_bytes / item);
  const auto far = static_cast<std::size_t>(std::count(here.begin(), here.end(), nullptr));
  if (step.count != 0 && far != 0) scratch_.resize(std::max(scratch_.size(), far * chunk * item));
  std::vector<const std::byte*> inputs(size());
  for (std::size_t at = 0; at < step.count; at += chunk) {
    const auto n = std::min(chunk, step.count - at);
    auto* next = scratch_.data();
    for (std::size_t from = 0; from < size(); ++from) {
      if (here[from] != nullptr) {
        inputs[from] = here[from] + at * item;
        continue;
      }
      if (auto status = read_memory(from, next, parts[from].offset + at * item, n * item); !status.ok()) return status;
      inputs[from] = next;
      next += chunk * item;
    }
    collectives::reduce(*step.reduction, step.dtype, inputs, step.out + at * item, n);
  }
  return {};
}

}  // namespace tensorferry::collectives
