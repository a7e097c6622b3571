// When an agent dials, and what it does if the peer does not answer. The waits are timers of the reactor; what may run
// the program's code, or asks the store, runs on the pool.
#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "agent/dial/connect.h"
#include "agent/dial/network_paths.h"
#include "agent/handshake/handshake_io.h"
#include "agent/link/dial_link.h"
#include "agent/link/engine.h"
#include "agent/transport/timer.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {
namespace {

namespace asio = boost::asio;
using Purpose = wire::Hello::Purpose;

constexpr std::chrono::seconds longest_bulk_dial{30};
constexpr Milliseconds first_pause{20}, longest_pause{1000};  // between attempts

/// Runs `work` on a thread of the pool, and resumes the coroutine on the reactor with its result. Nullopt: the pool has
/// been stopped, because the agent leaves.
template <class Work>
asio::awaitable<std::optional<std::invoke_result_t<Work>>> on_pool(Engine& engine, Work work) {
  using Value = std::invoke_result_t<Work>;
  /// Wakes the coroutine when the job has ended or is dropped. The agent may have left by then, and its timers be gone.
  struct Waker {
    ~Waker() {
      // If there is no memory, the coroutine sleeps until the agent leaves.
      out_of_memory::with_reserve([&] {
        engine->reactor->post([sleeping = sleeping] {
          if (const auto timer = sleeping.lock()) timer->cancel();
        });
      });
    }
    std::shared_ptr<Engine> engine;
    std::weak_ptr<Timer> sleeping;
  };
  const auto value = std::make_shared<std::optional<Value>>();
  const auto sleeping = std::make_shared<Timer>(engine.reactor->context(), Clock());
  std::unique_ptr<Waker> waker(new Waker{engine.shared_from_this(), sleeping});
  const bool taken =
      engine.pool->submit_long([work = std::move(work), value, last = std::move(waker)] { *value = work(); });
  if (taken) co_await sleeping->wait_until(Clock::time_point::max());
  co_return std::move(*value);
}

Bytes hello_frame(const wire::Hello& hello) {
  wire::Header header;
  header.kind = wire::Kind::hello;
  return wire::assemble(header, {}, {}, encode(hello));
}

/// Reaches the agent, sends this agent's hello for `link`, and reads `go` if the peer decides on the connection.
/// `networks`: feature::several_networks, or 0. It also goes into the peer's hello, for the link.
asio::awaitable<DialResult> dial_agent(std::shared_ptr<Engine> engine, Record record, std::shared_ptr<DialLink> link,
                                       Purpose purpose, std::uint32_t networks, Milliseconds patience) {
  std::string addresses;
  for (const auto& address : record.tcp_addresses) addresses += (addresses.empty() ? "" : ", ") + address;
  link->connections().note_dial("connecting to " + addresses);
  const auto deadline = engine->clock.now() + patience;
  const auto incarnation = record.incarnation;
  auto reached = co_await reach(engine, std::move(record), deadline);
  if (!reached.connected) co_return reached;
  HandshakeIo io(engine->reactor->context(), engine->clock, std::move(reached.connected->port));
  io.set_deadline(deadline);
  const auto last = link->connections().number_for_hello(purpose);
  if (!last) co_return DialResult{Status(Code::cancelled, "another connection carries the calls"), true};
  auto hello = engine->hello(purpose, *last, incarnation);
  hello.features |= networks;
  const auto frame = hello_frame(hello);
  if (const auto status = co_await io.write_all(frame); !status) co_return DialResult{refused_for_now(status), true};
  if (!decides(engine->identity.self, incarnation, purpose, true)) {
    const auto go = co_await read_go(io);
    if (!go.ok()) co_return DialResult{refused_for_now(go.status()), true};
    reached.connected->go = *go;
  }
  reached.connected->port = io.take_port();
  reached.connected->hello.purpose = purpose;
  reached.connected->hello.features &= ~wire::feature::several_networks;
  reached.connected->hello.features |= networks;
  co_return reached;
}

/// Gives the connection to the link, which sends what waited for it; or notes why there is none. On the pool.
Status attach(Engine& engine, DialLink& link, Result<Connected> connected) {
  if (connected.status().code() == Code::cancelled) return connected.status();
  if (!connected) {
    ++engine.counters.dials_failed;
    link.note("not reached: " + std::string(connected.status().what()));
    link.connections().note_dial(std::string(connected.status().what()));
    return connected.status();
  }
  return engine.peers.admit(std::move(*connected));
}

/// Looks the peer of a session up again, and keeps its addresses. Returns why the peer is dead; Ok: the store does not
/// say so; nullopt: it does not answer. On the pool.
std::optional<Status> look_up(Engine& engine, Session& session) {
  if (session.process_ended()) return session.end_of_process(engine.identity.record.host);
  const auto found = engine.directory->find(session.peer().name, Milliseconds(0));
  if (found.status().code() == Code::not_found) return Status(Code::connection_lost, "it left the job");
  if (!found) return std::nullopt;
  if (found->incarnation != session.peer().incarnation) return Status(Code::connection_lost, "it was restarted");
  session.set_record(*found);
  return Status();
}

/// The attempts to dial one connection of a link. Its functions run on the pool, one at a time.
class Dial final {
 public:
  /// What the coroutine does next.
  enum class Next : std::uint8_t {
    attempt,      // dial record() for patience()
    look_around,  // find out whether a process listens at the peer's addresses, then judge()
    pause,        // then prepare() again
    over,         // attached, or given up
  };

  Dial(std::shared_ptr<Engine> engine, std::shared_ptr<DialLink> link, Purpose purpose)
      : engine_(std::move(engine)), link_(std::move(link)), purpose_(purpose), since_(engine_->clock.now()) {}

  /// Finds out whether an attempt is needed, and where the peer is.
  Next prepare() {
    if (!link_->connections().keep_dialling(purpose_)) return Next::over;
    session_ = link_->session();
    const auto next = session_ ? prepare_known() : prepare_stranger();
    if (next == Next::attempt) choose_network();
    return next;
  }
  /// The attempt has ended.
  Next conclude(DialResult result) {
    const bool reached = result.connected.ok();
    auto why = attach(*engine_, *link_, std::move(result.connected));
    if (reached && why.code() == Code::connection_lost) {  // it ended as soon as it was made
      why = refused_for_now(why);
      result.may_answer = true;
    }
    const auto met = why.ok() && !session_ ? link_->session() : nullptr;
    if (met) met->set_record(*record_);
    if (why.ok() || connected()) return Next::over;
    if (session_) return missed_known();
    missed_ = why;
    may_answer_ = result.may_answer;
    return why.code() == Code::connection_lost && !engine_->leaving ? Next::look_around : judge(false);
  }
  /// The peer is dead, or not: `no_listener` tells whether its addresses refuse.
  Next judge(bool no_listener) {
    if (connected()) return Next::over;
    if (!session_)
      return missed_stranger(no_listener ? process_has_ended(record_->pid, record_->host) : missed_, may_answer_);
    auto dead = dead_;
    if (dead.ok() && no_listener) dead = process_has_ended(record_->pid, record_->host);
    const auto silence = engine_->clock.now() - session_->last_heard();
    if (dead.ok() && silence > engine_->options.peer_timeout) {
      dead = {Code::connection_lost, formatted("it could not be reached for {} s",
                                               std::chrono::duration_cast<std::chrono::seconds>(silence).count())};
    }
    if (dead.ok()) return again();
    engine_->peers.mark_dead(session_, dead);
    if (link_->connections().leave_session(*session_)) return again();
    link_->give_up(dead, Loss::peer);
    return Next::over;
  }

  /// Returns whether the peer has dialled the connection for calls meanwhile.
  [[nodiscard]] bool connected() const { return purpose_ == Purpose::calls && link_->connections().connected(); }
  [[nodiscard]] const std::optional<Record>& record() const { return record_; }
  [[nodiscard]] Milliseconds patience() const { return patience_; }
  /// Returns feature::several_networks for a connection for calls if there are several paths to the peer, else 0.
  [[nodiscard]] std::uint32_t networks() const { return networks_; }

 private:
  /// Finds the paths to the peer. A bulk connection first tries the one that carries the fewest of its kind.
  void choose_network() {
    auto& theirs = record_->tcp_addresses;
    const auto paths = separate_paths(engine_->identity.record.tcp_addresses, theirs, route_to);
    networks_ = paths.empty() || purpose_ != Purpose::calls ? 0 : wire::feature::several_networks;
    if (paths.empty() || purpose_ == Purpose::calls) return;
    const auto used = link_->connections().networks(dialled_role(purpose_));
    const auto first = std::find(theirs.begin(), theirs.end(), least_used(paths, used).to);
    std::rotate(theirs.begin(), first, first + 1);
  }

  /// Dials a peer of which no incarnation is known.
  Next prepare_stranger() {
    // The directory waits for an absent peer only as long as the link's calls allow, and in short slices, because a
    // later call may allow less.
    const auto in_store = std::clamp(link_->connections().patience(), Milliseconds(0), Milliseconds(100));
    const auto found = engine_->directory->find(link_->peer().name, in_store);
    if (!found) {
      // A record signed with another key is permanent, so dialling stops. If the record is good and another key answers
      // at its address, a retry may succeed: another process has the port of a peer that has ended.
      if (found.status().code() != Code::unauthenticated) return missed_stranger(found.status(), false);
      link_->give_up(found.status(), Loss::connection);
      return Next::over;
    }
    record_ = *found;
    patience_ = next_patience(false);
    return Next::attempt;
  }

  Next missed_stranger(const Status& why, bool may_answer) {
    if (engine_->leaving) {
      link_->give_up(why, Loss::connection);
      return Next::over;
    }
    const bool refused = why.code() == Code::resource_exhausted;  // for now
    const bool goes_on = may_answer && engine_->clock.now() - since_ < engine_->options.peer_timeout;
    const auto shown = refused ? Status(Code::connection_lost, std::string(why.what())) : why;
    return link_->unreachable(shown, goes_on) ? Next::over : again();
  }

  /// Dials the peer of a session.
  Next prepare_known() {
    if (!session_->record()) (void)look_up(*engine_, *session_);
    record_ = session_->record();
    if (!record_) return missed_known();
    patience_ = next_patience(true);
    return Next::attempt;
  }

  Next missed_known() {
    if (engine_->leaving) return Next::over;
    if (purpose_ != Purpose::calls) return again();  // the connection for calls tells if the peer is dead
    const auto found = look_up(*engine_, *session_);
    if (!found) return again();
    dead_ = *found;
    record_ = session_->record();
    return dead_.ok() ? Next::look_around : judge(false);
  }

  /// Tries again after a pause, unless bulk data has waited for too long.
  Next again() {
    if (purpose_ == Purpose::calls || engine_->clock.now() - since_ <= longest_bulk_dial) return Next::pause;
    // The receiver waits for bytes that cannot come, so their calls could not end otherwise.
    if (link_->connections().awaits(purpose_)) {
      link_->give_up({Code::connection_lost, formatted("the bulk connection to \"{}\" could not be dialled in {} s",
                                                       link_->peer().name, longest_bulk_dial.count())},
                     Loss::connection);
    }
    return Next::over;
  }

  /// Returns how long the next attempt may take. The first ones are short: on a path that was cut, a new connection is
  /// made sooner than TCP would repeat its first packet.
  Milliseconds next_patience(bool session) {
    return std::min(Milliseconds(3000) * ++attempts_, Milliseconds(session ? 5000 : 10000));
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<DialLink> link_;
  const Purpose purpose_;
  const Clock::time_point since_;
  int attempts_ = 0;
  std::shared_ptr<Session> session_;
  std::optional<Record> record_;
  std::uint32_t networks_ = 0;
  Milliseconds patience_{0};
  Status dead_;    // why the store says that the peer is dead
  Status missed_;  // why the attempt to dial a peer without a session has failed
  bool may_answer_ = false;
};

/// Sleeps until `until`, or until a connection of the link is made or the link ends.
class DialPause final {
 public:
  DialPause(Engine& engine, DialLink& link, Purpose purpose)
      : engine_(engine),
        link_(link),
        role_(dialled_role(purpose)),
        timer_(std::make_shared<Timer>(engine.reactor->context(), engine.clock)) {
    link.connections().wake_at_change(role_, [weak = std::weak_ptr(timer_), by = engine.weak_from_this()] {
      const auto alive = by.lock();
      if (!alive) return;
      alive->reactor->post([weak] {
        if (const auto timer = weak.lock()) timer->cancel();
      });
    });
  }
  ~DialPause() { link_.connections().wake_at_change(role_, {}); }
  DialPause(const DialPause&) = delete;
  DialPause& operator=(const DialPause&) = delete;

  /// Waits between attempts: 20 ms at first, twice as long each time, 1 s at most.
  asio::awaitable<void> back_off() {
    const auto until = engine_.clock.now() + next_;
    next_ = std::min(2 * next_, longest_pause);
    while (!link_.closed() && engine_.clock.now() < until) co_await timer_->wait_until(until);
  }

 private:
  Engine& engine_;
  DialLink& link_;
  const ConnectionRole role_;
  const std::shared_ptr<Timer> timer_;
  Milliseconds next_ = first_pause;
};

// Every object in an expression with co_await has a name here: GCC 12 destroys temporaries there twice.

/// Opens a connection of `purpose` to the link's peer and attaches it. Tries again, with backoff; see Engine::dial.
asio::awaitable<void> dial_until_attached(std::shared_ptr<Engine> engine, std::shared_ptr<DialLink> link,
                                          Purpose purpose) {
  using Next = Dial::Next;
  const auto dial = std::make_shared<Dial>(engine, link, purpose);
  const auto prepare = [dial] { return dial->prepare(); };
  DialPause pause(*engine, *link, purpose);
  for (std::optional<Next> next(Next::pause); next != Next::over;) {
    next = co_await on_pool(*engine, prepare);
    if (next == Next::attempt) {
      auto reached = co_await dial_agent(engine, *dial->record(), link, purpose, dial->networks(), dial->patience());
      const auto result = std::make_shared<DialResult>(std::move(reached));
      const auto conclude = [dial, result] { return dial->conclude(std::move(*result)); };
      next = co_await on_pool(*engine, conclude);
    }
    if (next == Next::look_around) {
      const bool no_listener = co_await finds_no_listener(engine, *dial->record());
      const auto judge = [dial, no_listener] { return dial->judge(no_listener); };
      next = co_await on_pool(*engine, judge);
    }
    if (next == Next::pause) co_await pause.back_off();
    if (!next && engine->leaving) co_return;
    if (!next) throw std::bad_alloc();  // the job was dropped
  }
}

}  // namespace

void Engine::dial(std::shared_ptr<DialLink> link, Purpose purpose) {
  // If there is no memory for the coroutine, the link ends. The last reference to a link may run the program's code, so
  // a pool thread drops it, if there is memory to tell one.
  const bool begun = !leaving && reactor->post([engine = shared_from_this(), link, purpose] {
    const auto end = [engine](const std::shared_ptr<DialLink>& ended, bool failed) {
      const auto job = [link = ended, failed] {
        if (failed) link->give_up(out_of_memory::status(), Loss::connection);
      };
      if (!out_of_memory::with_reserve([&] { engine->pool->submit(job); })) job();
    };
    out_of_memory::run_or(
        [&] {
          asio::co_spawn(engine->reactor->context(), dial_until_attached(engine, link, purpose),
                         [end, link](const std::exception_ptr& failure) { end(link, failure != nullptr); });
        },
        [&] { end(link, true); });
  });
  if (!begun)
    link->give_up({Code::agent_closed, "the agent \"" + identity.self.name + "\" was shut down"}, Loss::connection);
}

}  // namespace tensorferry
