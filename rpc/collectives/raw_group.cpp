#include "rpc/collectives/raw_group.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "agent/observing/flight_recorder.h"
#include "base/background.h"
#include "base/foreign_code.h"
#include "base/per_process.h"
#include "base/text.h"

namespace tensorferry::collectives {
namespace {

/// Runs `run`, which may call code of the program, and returns its status. What it throws becomes an error that begins
/// with `what()`. The thread may be one of ours, and the group would never learn that the operation has ended.
template <class What, class Run>
Status run_programs_code(const What& what, const Run& run) {
  try {
    return run();
  } catch (const ForcedUnwind&) {
    sleep_until_exit();
  } catch (const std::bad_alloc& error) {
    return {Code::resource_exhausted, formatted("{}: {}", what(), error.what())};
  } catch (const std::exception& error) {
    return {Code::invalid_argument, formatted("{}: {}", what(), error.what())};
  } catch (...) {
    return {Code::invalid_argument, formatted("{}: an object that is no std::exception", what())};
  }
}

/// Runs StartOptions::finish. Its errors are those of one rank: the ranks have exchanged their bytes.
Status finished(const std::function<void()>& finish) {
  const auto run = [&]() -> Status {
    if (finish) finish();
    return {};
  };
  return run_programs_code([] { return "the result of the operation cannot be written"; }, run);
}

/// The thread of this process that looks after sends and receives. Never destroyed.
Background& watcher() {
  static auto& background = *new PerProcess<Background>;
  return background.get();
}

}  // namespace

// ---- the group

RawGroup::RawGroup(std::shared_ptr<RawAgent> agent, Membership membership, Settings settings)
    : agent_(std::move(agent)),
      membership_(std::make_shared<const Membership>(std::move(membership))),
      settings_(std::move(settings)),
      names_(membership_->names()),
      mailbox_(std::make_shared<Mailbox>(*agent_, id(), rank(), names_)),
      exchange_(agent_, membership_, mailbox_, settings_.label),
      ways_(settings_.algorithms),
      queue_(agent_->clock()) {}

RawGroup::~RawGroup() { leave(); }

void RawGroup::close() {
  const auto until = clock().now() + std::chrono::seconds(1);
  for (auto& told : leave()) (void)told.wait(until);
}

std::vector<Call> RawGroup::leave() {
  closed_ = true;
  if (size() == 1) return {};
  const Status why(Code::cancelled, formatted("{} has left group \"{}\"", named(rank()), settings_.label));
  const auto ended = fail_here(why, /*by_leaving=*/true);
  return ended ? tell_others(why, *ended + 1) : std::vector<Call>();
}

bool RawGroup::end_started(const std::function<bool()>& interrupted) {
  const auto last = queue_.last();
  bool was_interrupted = false;  // the operation may have ended by that
  const auto check = [&] { return was_interrupted = interrupted(); };
  if (last) last->wait(std::nullopt, interrupted ? std::function<bool()>(check) : nullptr);
  return !was_interrupted;
}

void RawGroup::show_as(std::string label, std::vector<std::size_t> ranks) {
  settings_.label = std::move(label);
  exchange_.show_as(settings_.label);
  mailbox_->show_as(std::move(ranks));
}

void RawGroup::use_levels(Levels levels) {
  const std::lock_guard lock(mutex_);  // another rank may fail the group now
  levels_ = std::move(levels);
}

std::array<std::shared_ptr<RawGroup>, 2> RawGroup::groups_below() {
  const std::lock_guard lock(mutex_);
  return {levels_.host, levels_.leaders};
}

void RawGroup::watch_processes(HostProcesses& processes) {
  const auto died = [weak = weak_from_this()](std::size_t rank, std::string_view why) {
    if (const auto self = weak.lock()) self->rank_died(rank, why);
  };
  ranks_ = RankWatch::start(agent_, membership_, processes, died);
  exchange_.use_watch(ranks_);
}

Links RawGroup::links() const noexcept {
  auto out = exchange_.links();
  out.levels = levels_.host != nullptr;
  return out;
}

std::optional<std::size_t> RawGroup::rank_of(std::string_view name) const {
  const auto it = std::find(names_.begin(), names_.end(), name);
  if (it == names_.end()) return std::nullopt;
  return static_cast<std::size_t>(it - names_.begin());
}

void RawGroup::fail(const Status& why, bool tell) {
  if (fail_here(why) && tell) tell_others(why, 0);
}

std::optional<std::uint64_t> RawGroup::fail_here(const Status& why, bool by_leaving) {
  if (!agent_->usable_here().ok()) return std::nullopt;  // in a forked child the group is the parent's
  const auto ended = queue_.stop_all(why, by_leaving);
  if (!ended) return std::nullopt;
  agent_->note(FlightSubject::group, settings_.label, formatted("failed after {} operations: {}", *ended, why.what()));
  // Cancelled, AgentClosed: this rank leaves, or a rank aborts, and wants nothing more.
  mailbox_->fail(why, /*keep_arrived=*/why.code() != Code::cancelled && why.code() != Code::agent_closed);
  exchange_.wake();
  for (const auto& below : groups_below()) {
    if (below) below->fail(why, false);
  }
  return ended;
}

void RawGroup::end_without(std::size_t rank, const Status& why) {
  if (!agent_->usable_here().ok()) return;
  queue_.stop(why);
  if (ranks_) ranks_->leave_out(rank);
  mailbox_->leave(rank, why);
  exchange_.wake();
  for (const auto& below : groups_below()) {  // parts of operations of all ranks
    if (below) below->fail(why, false);
  }
}

std::vector<Call> RawGroup::tell_others(const Status& why, std::uint64_t after) {
  std::vector<Call> told;
  const GroupFailed failed{id(), static_cast<std::uint8_t>(why.code()), std::string(why.what()), after};
  for (std::size_t to = 0; to < size(); ++to) {
    if (to == rank() || mailbox_->has_left(to)) continue;
    Message message;
    message.payload = encode(GroupMessage(failed));
    RawCallOptions options;
    options.timeout = Milliseconds(10000);
    told.push_back(agent_->call(names_[to], group_function, std::move(message), std::move(options)));
  }
  return told;
}

void RawGroup::rank_failed(std::size_t rank, const Status& why) {
  auto here = why;
  if (why.code() == Code::deadline_exceeded) {
    auto text = formatted("{} gave up: {}", named(rank), why.what());
    const auto own = named(this->rank());
    if (auto at = text.find(own, named(rank).size()); at != std::string::npos) {
      text.insert(at + own.size() - 1, ", this rank");  // before the bracket
      // It may have come since.
      for (const std::string_view present : {" has not come", " have not come"}) {
        if (const auto found = text.find(present, at); found != std::string::npos)
          text.replace(found, present.size(), " had not come");
      }
    }
    here = Status(why.code(), std::move(text));
  }
  (void)fail_here(here);
}

// No rank ends an operation before all have begun it, except for one that is announced (Exchange::announce), after
// which a rank drains its devices before it leaves. So this rank runs the last one that the other rank has ended, or
// has ended it too; and in that one it needs nothing more from the other rank.
void RawGroup::rank_left(std::size_t rank, std::uint64_t after, const Status& why) {
  if (queue_.has_ended(after)) return end_without(rank, why);
  mailbox_->let_go(rank);
  if (!queue_.keep({rank, after, why})) return end_without(rank, why);
  // These end with this group, whose operation theirs are a part of.
  for (const auto& below : groups_below()) {
    const auto there = below ? below->rank_of(names_[rank]) : std::nullopt;
    if (there) below->rank_left(*there, ~std::uint64_t{0}, why);
  }
}

void RawGroup::rank_died(std::size_t rank, std::string_view why) {
  if (mailbox_->has_left(rank)) return;
  fail({Code::connection_lost, formatted("{} of group \"{}\" has died or left: {}", named(rank), settings_.label, why)},
       true);
}

void RawGroup::abort(const std::string& why) {
  fail({Code::cancelled, formatted("{} aborted group \"{}\": {}", named(rank()), settings_.label, why)}, true);
}

// ---- running operations

RawGroup::Work RawGroup::start(StartOptions options, Run run) {
  const auto timeout = options.timeout.count() > 0 ? options.timeout : settings_.timeout;
  auto work = std::make_shared<GroupWork>(shared_from_this(), std::move(run), clock().now() + timeout);
  if (options.keep) work->on_done([keep = std::move(options.keep)](const Status&) {});
  work->steps_.arrived = std::move(options.arrived);
  work->steps_.finish = std::move(options.finish);
  work->steps_.earlier = std::move(options.earlier);
  if (auto usable = agent_->usable_here(); !usable.ok()) {  // in a forked child the board is the parent's
    work->end(std::move(usable));
    return work;
  }
  queue_.add(work);
  if (options.background) run_in_background();
  return work;
}

void RawGroup::run_in_background() {
  Message message;
  message.payload = encode(GroupMessage(RunOperations{id()}));
  RawCallOptions options;
  options.timeout = Milliseconds(0);
  agent_->call(agent_->self().name, group_function, std::move(message), std::move(options))
      .on_done([self = shared_from_this()](const Result<Received>& reply) {
        if (reply.ok()) return;
        // The agent has left, so the operations fail at once.
        self->fail(reply.status(), false);
        self->run_queue();
      });
}

WaitLimits RawGroup::limits_of(GroupWork::Deadline until, std::function<bool()> interrupted) {
  return {until,
          [this] {
            look_for_the_dead();
            return failed();
          },
          std::move(interrupted), clock()};
}

Status RawGroup::await_inputs(const std::function<bool()>& arrived, const WaitLimits& limits) const {
  if (!arrived) return {};
  constexpr std::chrono::microseconds looking{100}, pause{50};
  const auto sleeps_from = std::chrono::steady_clock::now() + looking;
  try {
    while (!arrived()) {
      if (std::chrono::steady_clock::now() < sleeps_from) {
        std::this_thread::yield();
        continue;
      }
      auto ended = why_ended(limits);
      if (time_is_over(ended)) {
        return {Code::deadline_exceeded,
                formatted("an operation of group \"{}\" reached its timeout before its inputs were in host memory: the "
                          "work before it on the device's stream has not ended",
                          settings_.label)};
      }
      if (!ended.ok()) return ended;
      std::this_thread::sleep_for(pause);
    }
  } catch (const std::exception& error) {
    return {Code::internal, formatted("the inputs of the operation cannot be copied to host memory: {}", error.what())};
  }
  return {};
}

void RawGroup::run_queue() {
  while (const auto work = queue_.begin()) run_one(work, {});
}

bool RawGroup::run_for(const GroupWork& wanted, const std::function<bool()>& interrupted) {
  for (;;) {
    if (wanted.has_ended()) return true;
    if (!queue_.wait_for_turn(wanted.number(), longest_sleep)) return false;
    // None behind it: that one may need what the program does after this wait.
    if (const auto work = queue_.begin(wanted.number())) run_one(work, interrupted);
  }
}

// A rank that gives an operation up tells the others why. Its word may come after what it causes: data that is
// withdrawn, links that end. So those wait for the reason, here and nowhere else.
Status RawGroup::first_reason(Status status) {
  const bool withdrawn = status.code() == Code::cancelled && status.what() != interruption().what();
  const bool lost = status.code() == Code::connection_lost;  // looking for the dead finds it out soon
  const auto until = clock().now() + std::chrono::seconds(withdrawn ? 10 : lost ? 1 : 0);
  for (;;) {
    look_for_the_dead();
    if (auto why = failed(); !why.ok()) return why;
    if (clock().now() >= until) return status;
    queue_.wait_for_stop(std::chrono::milliseconds(20));
  }
}

void RawGroup::run_one(const Work& work, const std::function<bool()>& interrupted) {
  const auto limits = limits_of(work->deadline_, interrupted);
  auto status = failed();
  exchange_.begin();
  if (status.ok()) status = await_inputs(work->steps_.arrived, limits);
  if (status.ok()) {
    const auto what = [&] {
      return formatted("{} of group \"{}\" has thrown in an operation", named(rank()), settings_.label);
    };
    status = run_programs_code(what, [&] { return work->steps_.run(limits); });
  }
  work->steps_.run = {};
  // All ranks know that they disagree. All other errors leave the others waiting, or out of step.
  if (!status.ok() && !exchange_.disagreed()) {
    status = first_reason(std::move(status));
    if (failed().ok()) fail(status, true);
  }
  if (status.ok()) status = finished(work->steps_.finish);
  if (const auto earlier = std::move(work->steps_.earlier); status.ok() && earlier) status = earlier->status();
  const auto ended = queue_.end(*work);
  for (const auto& leaver : ended.leavers) end_without(leaver.rank, leaver.why);
  work->end(std::move(status));
  // Another thread may have found this one running, and left the rest of the queue to it.
  if (ended.more) run_in_background();
}

// ---- sends and receives

RawGroup::Work RawGroup::transfer(StartOptions options, std::string text, const BeginTransfer& begin) {
  const auto timeout = options.timeout.count() > 0 ? options.timeout : settings_.timeout;
  auto work = std::make_shared<GroupWork>(shared_from_this(), clock().now() + timeout, std::move(text));
  if (options.keep) work->on_done([keep = std::move(options.keep)](const Status&) {});
  auto ready = agent_->usable_here();
  if (ready.ok()) {
    auto limits = limits_of(work->deadline_, {});
    limits.failed = [this] { return over(); };
    ready = await_inputs(options.arrived, limits);
  }
  if (!ready.ok()) {
    work->end(std::move(ready));
    return work;
  }
  work->delivery_ = begin([work, finish = std::move(options.finish)](Status status) {
    if (status.ok()) status = finished(finish);
    work->end(std::move(status));
  });
  return work;
}

void RawGroup::look_after(const std::shared_ptr<GroupWork>& transfer) {
  const std::lock_guard lock(mutex_);
  transfers_.push_back(transfer);
  if (transfers_.size() > 1) return;
  watcher().submit(
      [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->look_after_transfers();
      },
      std::chrono::steady_clock::now() + longest_sleep);
}

void RawGroup::look_after_transfers() {
  std::vector<Work> going;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : std::exchange(transfers_, {})) {
      if (auto work = each.lock()) going.push_back(std::move(work));
    }
  }
  look_for_the_dead();
  for (const auto& work : going) {
    work->end_if_late();
    if (!work->has_ended()) look_after(work);
  }
}

RawGroup::Work RawGroup::send(InBytes data, DType dtype, std::size_t to, std::uint64_t tag, StartOptions options) {
  Fingerprint called;
  called.dtype = static_cast<std::uint8_t>(dtype);
  called.elements = data.size() / size_of(dtype);
  return transfer(std::move(options),
                  formatted("a send to {} of group \"{}\" with tag {}", named(to), settings_.label, tag),
                  [&](UniqueFunction<void(Status)> told) {
                    return mailbox_->post(to, {true, tag}, data, called, std::move(told));
                  });
}

RawGroup::Work RawGroup::receive(OutBytes data, DType dtype, std::size_t from, std::uint64_t tag,
                                 StartOptions options) {
  const auto whom = from == Mailbox::any_rank ? std::string("any rank") : named(from);
  return transfer(std::move(options),
                  formatted("a receive from {} of group \"{}\" with tag {}", whom, settings_.label, tag),
                  [&](UniqueFunction<void(Status)> told) {
                    return mailbox_->receive(from, {true, tag}, data.data(), data.size(), std::move(told), dtype);
                  });
}

// The errors begin with the text that torch's documentation gives them, because programs and people look for it.
Status RawGroup::monitored_barrier(Milliseconds timeout, bool name_all) {
  // Tags of the library's own: the upper half of the numbers. Two of them, for coming and going.
  const auto base = (std::uint64_t{1} << 63U) + 2 * ++barriers_;
  std::byte token{};
  const StartOptions options{timeout, false, nullptr};
  if (size() == 1) return {};
  if (timeout.count() <= 0) {
    return {Code::deadline_exceeded, formatted("Rank {} timed out in monitoredBarrier: its timeout of 0 ms leaves the "
                                               "other ranks of group \"{}\" no time to come. Raise timeout=",
                                               rank(), settings_.label)};
  }
  if (rank() != 0) {
    send({&token, 1}, DType::uint8, 0, base, options)->wait();
    const auto gone = receive({&token, 1}, DType::uint8, 0, base + 1, options);
    gone->wait();
    if (gone->status().code() != Code::deadline_exceeded) return gone->status();
    return {
        Code::deadline_exceeded,
        formatted("Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                  "from rank 0: {} did not let it go within {} ms. Perhaps another rank has not come, or rank 0 itself",
                  rank(), named(0), timeout.count())};
  }
  Status other;
  std::vector<std::size_t> missing, here{0};
  std::vector<Work> came;
  std::vector<std::byte> tokens(size());
  for (std::size_t from = 1; from < size(); ++from) {
    came.push_back(receive({&tokens[from], 1}, DType::uint8, from, base, options));
  }
  for (std::size_t from = 1; from < size(); ++from) {
    came[from - 1]->wait();
    const auto status = came[from - 1]->status();
    if (status.code() == Code::deadline_exceeded) missing.push_back(from);
    if (status.ok()) here.push_back(from);
    if (!status.ok() && status.code() != Code::deadline_exceeded && other.ok()) other = status;
  }
  if (!other.ok()) return other;
  if (!name_all && missing.size() > 1) missing.resize(1);
  if (!missing.empty()) {
    const auto listed = [](const std::vector<std::size_t>& ranks) {
      std::string out;
      for (const auto each : ranks) out += (out.empty() ? "" : ", ") + std::to_string(each);
      return out;
    };
    return {Code::deadline_exceeded,
            formatted("{} {} failed to pass monitoredBarrier in {} ms: in group \"{}\", {}. {} {} came",
                      missing.size() == 1 ? "Rank" : "Ranks", listed(missing), timeout.count(), settings_.label,
                      exchange_.not_come(missing), here.size() == 1 ? "Rank" : "Ranks", listed(here))};
  }
  for (std::size_t to = 1; to < size(); ++to) {
    const auto let_go = send({&token, 1}, DType::uint8, to, base + 1, options);
    let_go->wait();
    if (!let_go->status().ok()) return let_go->status();
  }
  return {};
}

}  // namespace tensorferry::collectives
