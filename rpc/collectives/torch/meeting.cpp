#include "rpc/collectives/torch/meeting.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/long_wait.h"
#include "base/text.h"

namespace tensorferry::collectives {
namespace {

[[noreturn]] void throw_status(const Status& status) { C10_THROW_ERROR(DistBackendError, status.text()); }

}  // namespace

std::uint64_t number_of(const TorchGroupOptions& options, std::size_t rank) {
  const auto& numbers = options.global_ranks_in_group;
  return rank < numbers.size() ? static_cast<std::uint64_t>(numbers[rank]) : rank;
}

Meeting::Meeting(Groups& groups, int rank, int size, const TorchGroupOptions& options)
    : groups_(groups), rank_(static_cast<std::size_t>(rank)), options_(options) {
  for (int each = 0; each < size; ++each) keys_.push_back("tensorferry/agent/" + std::to_string(each));
}

void Meeting::check_members() const {
  for (std::size_t rank = 0; rank < keys_.size(); ++rank) {
    const auto number = number_of(options_, rank);
    const auto name = groups_.name_of(number);
    const auto why = name.empty() ? std::string() : groups_.why_dead(name);
    if (why.empty()) continue;
    throw_status(
        {Code::connection_lost,
         formatted("the process group cannot be formed: rank {} (\"{}\") has died or left: {}", number, name, why)});
  }
}

std::vector<std::string> Meeting::tell(c10d::Store& store) const {
  std::vector<std::string> before;
  for (const auto& key : keys_) {
    if (&key != &keys_[rank_] && store.check({key})) before.push_back(store.get_to_str(key));
  }
  const auto& key = keys_[rank_];
  const auto own = groups_.agent()->self().name;
  std::string holder;
  try {
    holder = store.compareSet(key, std::string(), own);
  } catch (const std::exception&) {  // some stores lack it
    store.set(key, own);
    return before;
  }
  if (holder == own) return before;
  if (groups_.answers(holder)) {
    throw_status({Code::invalid_argument,
                  formatted("rank {} of the process group is taken: \"{}\" has it, and this process, \"{}\", came "
                            "second. Start each process with a rank of its own, and each job with a store of its own",
                            rank_, holder, own)});
  }
  store.set(key, own);  // of a process that has ended
  return before;
}

std::vector<std::string> Meeting::await_names(c10d::Store& store, std::vector<std::string> before) const {
  std::erase_if(before, [&](const std::string& name) { return !groups_.has_ended(name); });
  const auto told = [&](std::vector<std::string>& names) {
    if (!store.check(keys_)) return false;
    names.clear();
    for (const auto& key : keys_) names.push_back(store.get_to_str(key));
    return std::find_first_of(names.begin(), names.end(), before.begin(), before.end()) == names.end();
  };
  std::vector<std::string> names;
  const auto until = std::chrono::steady_clock::now() + options_.timeout;
  auto pause = std::chrono::milliseconds(1);
  auto looks_at = std::chrono::steady_clock::now();
  LongWait long_wait{Clock()};
  while (!told(names)) {
    const auto now = std::chrono::steady_clock::now();
    long_wait.tell([&]() -> std::string {
      constexpr std::size_t large_group = 64;  // its rank 0 alone asks the store for each rank
      if (keys_.size() > large_group && rank_ != 0) return {};
      return formatted("rank {} of process group \"{}\" waits for {} to {}", rank_, options_.group_name,
                       missing(store, before), options_.lazy ? "come to its first operation" : "make it too");
    });
    if (now >= until) throw_missing(store, before);
    if (now >= looks_at) {
      check_members();
      looks_at = now + longest_sleep;
    }
    std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(pause, until - now));
    pause = std::min(2 * pause, std::chrono::milliseconds(20 + keys_.size() / 8));  // one store serves all ranks
  }
  return names;
}

std::string Meeting::missing(c10d::Store& store, const std::vector<std::string>& ended) const {
  std::vector<std::string> out;
  for (std::size_t each = 0; each < keys_.size(); ++each) {
    const auto& key = keys_[each];
    if (store.check({key}) && std::find(ended.begin(), ended.end(), store.get_to_str(key)) == ended.end()) continue;
    const auto name = groups_.name_of(number_of(options_, each));
    out.push_back(name.empty() ? formatted("rank {}", each) : formatted("rank {} (\"{}\")", each, name));
  }
  return joined(out, ", ");
}

void Meeting::throw_missing(c10d::Store& store, const std::vector<std::string>& ended) const {
  const std::string advice =
      options_.lazy ? " to its first operation. See whether they call the same operations"
                    : ". See whether they call the same new_group() or init_process_group(), in the same order";
  C10_THROW_ERROR(DistBackendError,
                  c10::str("DeadlineExceeded: the process group was not formed within ",
                           std::chrono::duration<double>(options_.timeout).count(), " s: of its ", keys_.size(),
                           " ranks, ", missing(store, ended), " did not come", advice, ", or raise timeout="));
}

}  // namespace tensorferry::collectives
