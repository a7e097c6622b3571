#include "tests/rpc/core/reference_world.h"

#include <utility>

namespace tensorferry::testing {

class World::Network final : public References::Network {
 public:
  Network(World& world, const std::shared_ptr<Life>& life) : world_(world), life_(life) {}

  void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) override {
    const auto life = life_.lock();
    if (!life || !life->alive) return;
    // Either end of the call may end it; only the first end counts.
    auto pending = std::make_shared<UniqueFunction<void(Result<Bytes>)>>(std::move(done));
    const auto finish = [this, life, pending](Result<Bytes> result, std::int64_t delay) {
      world_.later(life, delay, [pending, result = std::move(result)] {
        const auto once = std::move(*pending);
        if (once) once(result);
      });
    };
    world_.carry(
        life, peer,
        [this, from = life->id, message = std::move(message), finish](Life& to) {
          auto answer = to.references->receive_mail(from, message);
          if (!world_.clock.chance(world_.trouble_)) return finish(std::move(answer), world_.clock.delay());
          finish(Status(Code::deadline_exceeded, "the answer was lost"), world_.clock.delay());
        },
        [finish](const Status& why) { finish(why, 0); }, true);
  }

  void after(Milliseconds delay, UniqueFunction<void()> what) override {
    const auto life = life_.lock();
    if (!life) return;
    auto shared = std::make_shared<UniqueFunction<void()>>(std::move(what));
    world_.later(life, delay.count(), [shared] { (*shared)(); });
  }

 private:
  World& world_;
  const std::weak_ptr<Life> life_;
};

World::~World() {
  for (auto& life : lives) {
    life->alive = false;
    life->references->close();
  }
}

std::shared_ptr<Life> World::start(const std::string& name) {
  auto life = std::make_shared<Life>();
  life->id = {name, next_incarnation_++};
  life->references =
      References::make(life->id, std::make_shared<Network>(*this, life), {.secret = {1, life->id.incarnation}});
  names_[name] = life;
  lives.push_back(life);
  return life;
}

void World::kill(const std::shared_ptr<Life>& life, bool linked) {
  life->alive = false;
  life->references->close();
  if (find(life->id.name) == life) names_.erase(life->id.name);
  if (!linked) return;
  for (auto& other : lives) {
    if (!other->alive) continue;
    later(other, clock.delay(), [other, id = life->id] {
      other->references->peer_lost(id, Status(Code::connection_lost, "its process ended"));
    });
  }
}

std::shared_ptr<Life> World::find(const std::string& name) const {
  const auto life = names_.find(name);
  return life == names_.end() ? nullptr : life->second;
}

void World::later(const std::shared_ptr<Life>& life, std::int64_t delay_ms, std::function<void()> what) {
  clock.at(delay_ms, [life, what = std::move(what)] {
    if (life->alive) what();
  });
}

void World::carry(const std::shared_ptr<Life>& from, const AgentId& to, std::function<void(Life&)> arrive,
                  std::function<void(Status)> fail, bool repeatable) {
  const auto deliver = [this, from, to, arrive, fail] {
    if (const auto receiver = find(to.name)) return arrive(*receiver);
    later(from, clock.delay(), [fail] { fail(Status(Code::connection_lost, "no process is at its address")); });
  };
  const bool trouble = clock.chance(trouble_);
  const auto kind = trouble ? clock.pick(3) : 0;
  if (trouble) {
    later(from, clock.delay(), [fail] { fail(Status(Code::deadline_exceeded, "no answer in time")); });
    if (kind == 1) return;  // lost
  }
  clock.at(clock.delay(), deliver);
  if (kind == 2 && repeatable) clock.at(clock.delay(), deliver);
}

}  // namespace tensorferry::testing
