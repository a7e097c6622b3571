// The reference protocol against a model that knows each agent's holds. Agents pass on, drop, fail and die at random.
// No object may be freed early or leak.
//
// Why the rules of docs/codec.md ("Rules", whose numbers stand here) suffice. Not early: a hold comes in a message of
// its parent, and the parent keeps its own hold until it gets `accept`, which is sent only after the owner has answered
// `fork`. So from any living hold a chain of parents leads to one that the owner knows. A hold is removed only after
// all that was made of it has been accepted (4), or can no longer come (5). Only the death of an agent in the middle
// breaks a chain; the holders behind it find the object gone, and report it. No leak: every hold is removed (4), or its
// holder dies (6). Every fork under way is accepted, refused, or its receiver dies (3, 5, 6). Bounds: 65536 refused
// forks per parent, 65536 dead incarnations, and for creations that came, the runs of their consecutive numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <set>

#include "rpc/core/references.h"
#include "tests/agent/patience.h"
#include "tests/rpc/core/reference_world.h"

namespace tensorferry {

void PrintTo(const References::Counts& counts, std::ostream* out) {
  *out << counts.objects << " objects, " << counts.forks << " forks, " << counts.passing << " passing";
  for (const auto& [owner, holds] : counts.holds) *out << ", " << holds << " of " << owner << "'s";
}

namespace {

using testing::Life;
using testing::World;

/// An object, as the model knows it.
struct Thing {
  std::shared_ptr<Life> owner;
  std::weak_ptr<void> value;  // of the outcome
  bool made = false;
  bool doomed = false;  // its creator died, or gave it up, during the creation, so the object need not come to be
};

/// A hold, as the model knows it: at an agent, or on its way there.
struct Holding {
  std::shared_ptr<Thing> thing;
  std::shared_ptr<Life> at;
  std::shared_ptr<Holding> parent;
  std::shared_ptr<Reference> reference;  // null on its way, and after the agent drops it
  bool known_to_owner = false;           // seen confirmed
  bool at_risk = false;                  // the agent that kept it alive died before the owner knew of it

  bool secure() {
    if (reference && reference->confirmed()) {
      known_to_owner = true;
      at_risk = false;
    }
    return known_to_owner;
  }
};

class Model {
 public:
  Model(std::uint32_t seed, bool deaths) : world_(seed), deaths_(deaths) {
    for (const auto* name : {"a", "b", "c", "d"}) world_.start(name);
  }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      operate();
      world_.clock.run_for(world_.clock.pick(30));
      check();
      if (::testing::Test::HasFatalFailure()) return;
    }
    finish();
  }

 private:
  using Entry = std::shared_ptr<Holding>;

  testing::Clockwork& clock() { return world_.clock; }
  int pick(int below) { return clock().pick(below); }

  std::shared_ptr<Life> someone() {
    for (;;) {
      auto life = world_.lives[static_cast<std::size_t>(pick(static_cast<int>(world_.lives.size())))];
      if (life->alive) return life;
    }
  }
  Entry any_held() {
    if (held_.empty()) return nullptr;
    return held_[static_cast<std::size_t>(pick(static_cast<int>(held_.size())))];
  }

  void operate() {
    const int kind = pick(100);
    if (kind < 8) return own();
    if (kind < 20) return create();
    if (kind < 45) return send_in_request();
    if (kind < 60) return send_in_reply();
    if (kind < 82) return drop();
    if (kind < 98) return fetch();
    if (deaths_) return die();
  }

  Outcome make(Thing& thing) {
    auto value = std::make_shared<int>(7);
    thing.value = value;
    thing.made = true;
    return {value, pick(4) == 0};
  }

  Entry hold(std::shared_ptr<Thing> thing, std::shared_ptr<Life> at, Entry parent,
             std::shared_ptr<Reference> reference) {
    auto entry = std::make_shared<Holding>();
    entry->thing = std::move(thing);
    entry->at = std::move(at);
    entry->parent = std::move(parent);
    entry->reference = std::move(reference);
    if (entry->reference) held_.push_back(entry);
    return entry;
  }

  void own() {
    auto thing = std::make_shared<Thing>();
    thing->owner = someone();
    auto reference = thing->owner->references->own(make(*thing));
    hold(thing, thing->owner, nullptr, std::move(reference));
  }

  void create() {
    const auto creator = someone();
    auto thing = std::make_shared<Thing>();
    thing->owner = someone();
    const auto entry = hold(thing, creator, nullptr, creator->references->begin_creation(thing->owner->id));
    const auto ids = entry->reference->ids();
    // The call has no hold of its own, but must report its end, when the handle may already be gone.
    const std::weak_ptr<Reference> weak = entry->reference;
    const auto end = [creator, weak, thing,
                      keep = std::make_shared<std::shared_ptr<Reference>>(entry->reference)](const Status& status) {
      if (!*keep) return;
      if (!status.ok()) thing->doomed = true;
      creator->references->end_creation(**keep, status);
      keep->reset();
    };
    creating_.emplace_back(creator, thing);
    world_.carry(
        creator, thing->owner->id,
        [this, creator, thing, ids, end](Life& at) {
          if (&at != thing->owner.get()) return reply(creator, [end] { end({Code::connection_lost, "restarted"}); });
          const auto admitted = at.references->create(creator->id, ids);
          if (!admitted.ok()) return reply(creator, [end, admitted] { end(admitted); });
          // Runs for a while, then replies; the reply may be lost.
          world_.later(thing->owner, clock().delay(), [this, creator, thing, ids, end] {
            thing->owner->references->fulfil(ids.object, make(*thing));
            const bool lost = clock().chance(10);
            reply(creator, [end, lost] { end(lost ? Status(Code::deadline_exceeded, "late") : Status()); });
          });
        },
        end);
    world_.later(creator, 60000, [end] { end({Code::deadline_exceeded, "no answer"}); });
  }

  void reply(const std::shared_ptr<Life>& to, std::function<void()> what) {
    world_.later(to, clock().delay(), std::move(what));
  }

  struct Carried {
    Entry entry;  // the hold at the receiver
    ReferenceRecord record;
  };

  /// Puts up to three references that `from` holds into a message.
  std::vector<Carried> load(const std::shared_ptr<Life>& from, const std::shared_ptr<Life>& to,
                            ReferenceTransfer& transfer) {
    std::vector<Carried> load;
    for (const auto& entry : std::vector(held_)) {
      if (entry->at != from || load.size() == 3 || pick(3) == 0) continue;
      const auto record = transfer.add(*entry->reference);
      if (!record.ok()) continue;  // the reference or the receiver is lost
      auto carried = hold(entry->thing, to, entry, nullptr);
      carried->at_risk = entry->at_risk && !entry->secure();
      flying_.insert(carried);
      load.push_back({carried, *record});
    }
    return load;
  }

  /// Lets the receiver decode the references. `failed`: the sender was told that the message failed, so the receiver
  /// may refuse them.
  void land(const std::shared_ptr<Life>& from, Life& to, const std::vector<Carried>& load, bool failed) {
    for (const auto& [entry, record] : load) {
      flying_.erase(entry);
      auto reference = to.references->receive(record, from->id);
      if (&to != entry->at.get()) {  // a later incarnation of the receiver
        EXPECT_EQ(reference.status().code(), Code::protocol_error);
        continue;
      }
      if (!reference.ok()) {
        const bool allowed = failed || entry->at_risk || entry->thing->doomed;
        EXPECT_TRUE(allowed) << reference.status().text();
        continue;
      }
      entry->reference = *reference;
      held_.push_back(entry);
    }
  }

  void send_in_request() {
    const auto from = someone(), to = someone();
    auto transfer = std::make_shared<ReferenceTransfer>(from->references->pass_to(to->id));
    const auto load = this->load(from, to, *transfer);
    if (clock().chance(10)) {  // the rest of the message could not be encoded
      for (const auto& each : load) flying_.erase(each.entry);
      return;
    }
    transfer->sent();
    const auto failed = std::make_shared<bool>(false);
    const auto end = [transfer, failed](const Status& status) {
      if (!status.ok()) *failed = true;
      transfer->ended(status);
    };
    world_.carry(
        from, to->id,
        [this, from, load, end, failed](Life& at) {
          land(from, at, load, *failed);
          reply(from, [end] { end({}); });
        },
        end);
    world_.later(from, 60000, [end] { end({Code::deadline_exceeded, "no answer"}); });
  }

  void send_in_reply() {
    const auto from = someone(), to = someone();
    const auto call = to->references->begin_call();
    auto transfer = std::make_shared<ReferenceTransfer>(from->references->pass_to(to->id));
    const auto load = this->load(from, to, *transfer);
    transfer->sent();
    transfer->replied(call);
    const auto over = std::make_shared<bool>(false);
    const auto end = [to, call, over] {
      if (std::exchange(*over, true)) return;
      to->references->end_call(call);
    };
    const bool unread = clock().chance(10);  // the caller reads the future much later
    if (!unread && clock().chance(20)) {     // the call times out, and its reply is dropped
      for (const auto& each : load) flying_.erase(each.entry);
      return world_.later(to, clock().delay(), end);
    }
    world_.later(to, clock().delay() + (unread ? 50000 : 0), [this, from, to, load, end] {
      land(from, *to, load, false);
      end();
    });
  }

  void drop() {
    const auto entry = any_held();
    if (!entry) return;
    entry->secure();
    entry->reference.reset();
    std::erase(held_, entry);
  }

  void fetch() {
    const auto entry = any_held();
    if (!entry) return;
    const auto object = entry->reference->object();
    const auto fork = entry->reference->ids().fork;
    const auto stranger = someone();
    const auto done = [this, entry](const Result<Outcome>& outcome) {
      --fetching_;
      if (outcome.ok()) {
        EXPECT_EQ(*std::static_pointer_cast<int>(outcome->value), 7);
        return;
      }
      const bool allowed = !entry->reference || entry->at_risk || entry->thing->doomed || !entry->thing->owner->alive ||
                           !entry->at->alive || !entry->reference->status().ok();
      EXPECT_TRUE(allowed) << outcome.status().text();
    };
    world_.carry(
        entry->at, entry->thing->owner->id,
        [this, entry, object, fork, stranger, done](Life& at) {
          if (&at != entry->thing->owner.get() || !entry->reference) return;
          // Every holder may use the object, also before the owner has heard of the hold, and by it no other agent may.
          EXPECT_TRUE(at.references->may_use(entry->at->id, object, fork).ok());
          if (stranger != entry->at && stranger->id != at.id) {
            EXPECT_FALSE(at.references->may_use(stranger->id, object, fork).ok());
          }
          ++fetching_;
          at.references->fetch(object, std::nullopt, done, fork);
        },
        [](const Status&) {});
  }

  void die() {
    const auto life = someone();
    auto doomed_by = [&](const Entry& entry) {
      // Until the owner knows of a hold, the hold's parent keeps the object alive, and so on up to a hold that the
      // owner knows.
      for (auto* at = entry.get(); at != nullptr && !at->secure(); at = at->parent.get()) {
        if (at->parent && at->parent->at == life) return true;
        if (at->parent == nullptr) return false;
      }
      return false;
    };
    std::vector<Entry> risky;
    for (const auto& entry : held_) {
      if (doomed_by(entry)) risky.push_back(entry);
    }
    for (const auto& entry : flying_) {
      if (doomed_by(entry)) risky.push_back(entry);
    }
    for (const auto& entry : risky) entry->at_risk = true;
    for (const auto& [creator, thing] : creating_) {
      if (creator == life && !thing->made) thing->doomed = true;
    }
    world_.kill(life);
    for (const auto& entry : std::vector(held_)) {
      if (entry->at != life) continue;
      entry->reference.reset();
      std::erase(held_, entry);
    }
    std::string newcomer("x");
    world_.start(newcomer.append(std::to_string(world_.lives.size())));
    if (clock().chance(50)) world_.start(life->id.name);  // restarts under the same name
  }

  /// Checks that no object with a hold was freed.
  void check() {
    for (const auto& entry : held_) {
      const auto& thing = *entry->thing;
      if (!thing.owner->alive || thing.doomed) continue;
      entry->secure();
      if (entry->at_risk) continue;
      ASSERT_TRUE(entry->reference->status().ok()) << entry->reference->status().text();
      ASSERT_FALSE(thing.made && thing.value.expired()) << "freed, and held on " << entry->at->id.name;
    }
  }

  /// Drops all holds, and checks that no object and no table entry is left.
  void finish() {
    clock().run_for(200000);
    check();
    while (!held_.empty()) {
      drop();
      if (clock().chance(20)) clock().run_for(pick(100));
      check();
    }
    clock().run_for(500000);
    for (const auto& life : world_.lives) {
      if (!life->alive) continue;
      EXPECT_EQ(life->references->counts(), References::Counts()) << life->id.name;
      EXPECT_TRUE(life->references->settled()) << life->id.name;
    }
    if (!deaths_) {
      EXPECT_EQ(fetching_, 0);
    }
  }

  World world_;
  const bool deaths_;
  std::vector<Entry> held_;
  std::set<Entry> flying_;
  std::vector<std::pair<std::shared_ptr<Life>, std::shared_ptr<Thing>>> creating_;
  int fetching_ = 0;
};

constexpr std::uint32_t seeds = testing::under_sanitizer ? 500 : 2000;

TEST(ReferencesModel, FreesNothingEarlyAndLeaksNothing) {
  for (std::uint32_t seed = 0; seed < seeds; ++seed) {
    Model(seed, false).run(60);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST(ReferencesModel, FreesNothingEarlyAndLeaksNothingWhenAgentsDie) {
  for (std::uint32_t seed = 0; seed < seeds; ++seed) {
    Model(seed, true).run(60);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tensorferry
