/// A channel as a user might register one. It carries buffers in control messages, and a ticket's `after` names the
/// last of them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "channels/channel.h"
#include "channels/completion.h"

namespace tensorferry::testing {

struct MailBehaviour {
  bool refuses_every_second = false;  // each refusal has a different reason
  /// Is given `answer`, which ends the other end's probe, and may run it at once, later or never.
  std::function<void(std::function<void()> answer)> asked = [](const auto& answer) { answer(); };
  Status probe{};                     // the result of this end's probe
  bool consumes_on_progress = false;  // progress() completes `consumed`: acknowledgements wait until then
  bool any_device = false;            // treats all memory as the CPU's; GPU memory in a test may be a label alone
  bool wanted = true;                 // false: this end alone decides that the pair does not fit
  bool immediate = false;             // carries from the first message on, without a probe
};

class MailChannel final : public Channel {
 public:
  MailChannel(Wire& wire, MailBehaviour behaviour) : wire_(wire), behaviour_(std::move(behaviour)) {
    if (behaviour_.immediate) {
      wire_.ready({});
      return;
    }
    wire_.control({static_cast<std::byte>('?'), static_cast<std::byte>(42)}, {});
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing&, Completion released) override {
    if (sharing == Sharing::shared) return Refusal{"mail copies"};
    const auto number = offers_++;
    if (behaviour_.refuses_every_second && number % 2 == 1)
      return Refusal{"no stamp for letter " + std::to_string(number)};
    Ticket ticket{.bytes = buffer.bytes, .opaque = {}};
    Writer(ticket.opaque).put(number);
    std::size_t sent = 0;
    do {
      const auto some = std::min<std::size_t>(buffer.bytes - sent, 30'000);
      Bytes letter;
      Writer writer(letter);
      writer.put('d');
      writer.put(number);
      writer.raw(ByteView(buffer.data + sent, some));
      ticket.after = wire_.control(std::move(letter), {});
      sent += some;
    } while (sent < buffer.bytes);
    if (!behaviour_.consumes_on_progress) {
      complete(std::move(released), {});
      return ticket;
    }
    ticket.acknowledge = true;
    if (const auto ended = keep([&] { unreleased_.emplace(number, std::move(released)); }); !ended.ok())
      complete(std::move(released), ended);
    return ticket;
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto status = deliver(ticket, sink);
    // Before `landed`, because the reply, which calls progress(), may then be sent at once.
    const bool later =
        behaviour_.consumes_on_progress && keep([&] { unconsumed_.push_back(std::move(consumed)); }).ok();
    complete(std::move(landed), status);
    if (!later) complete(std::move(consumed), status);
  }
  void progress() override {
    std::vector<Completion> consumed;
    {
      const std::lock_guard lock(mutex_);
      consumed.swap(unconsumed_);
    }
    for (auto& each : consumed) complete(std::move(each), {});
  }
  void discard(const Ticket& ticket) override { (void)take(ticket); }
  void withdraw(const Ticket& ticket) override {
    Completion released;
    {
      const std::lock_guard lock(mutex_);
      const auto it = unreleased_.find(Reader(ticket.opaque).get<std::uint32_t>());
      if (it == unreleased_.end()) return;
      released = std::move(it->second);
      unreleased_.erase(it);
    }
    complete(std::move(released), {});
  }

  void control(ByteView message, Descriptors) override {
    Reader in(message);
    switch (in.get<char>()) {
      case '?':
        behaviour_.asked([this, nonce = static_cast<std::byte>(in.get<std::uint8_t>())] {
          wire_.control({static_cast<std::byte>('!'), nonce}, {});
        });
        break;
      case '!':
        wire_.ready(in.get<std::uint8_t>() == 42 ? behaviour_.probe : Status(Code::protocol_error, "another nonce"));
        break;
      case 'd': {
        const auto number = in.get<std::uint32_t>();
        const std::lock_guard lock(mutex_);
        auto& letter = letters_[number];
        if (!letter) letter = std::make_shared<Bytes>();
        const auto bytes = in.rest();
        letter->insert(letter->end(), bytes.begin(), bytes.end());
        break;
      }
      default:
        break;
    }
  }
  void close(Status status) noexcept override {
    std::map<std::uint32_t, Completion> unreleased;
    {
      const std::lock_guard lock(mutex_);
      if (!ended_.ok()) return;
      ended_ = status;
      unreleased.swap(unreleased_);
    }
    progress();  // keep() adds nothing from here on
    for (auto& [number, released] : unreleased) complete(std::move(released), status);
  }

 private:
  /// Runs `add`, which keeps a completion, unless the channel is closed: close() has run all completions then, and one
  /// that is kept later would keep its link for good. Returns why the channel is closed.
  template <class Add>
  Status keep(const Add& add) {
    const std::lock_guard lock(mutex_);
    if (ended_.ok()) add();
    return ended_;
  }

  std::shared_ptr<Bytes> take(const Ticket& ticket) {
    Reader in(ticket.opaque);
    const std::lock_guard lock(mutex_);
    const auto found = letters_.find(in.get<std::uint32_t>());
    if (in.failed() || found == letters_.end()) return nullptr;
    auto letter = std::move(found->second);
    letters_.erase(found);
    return letter;
  }

  Status deliver(const Ticket& ticket, Sink& sink) {
    const auto letter = take(ticket);
    {
      const std::lock_guard lock(mutex_);
      if (!ended_.ok()) return ended_;
    }
    if (!letter || letter->size() != ticket.bytes)
      return {Code::protocol_error, "a ticket for a letter that did not come"};
    if (!behaviour_.any_device && sink.adopt({{}, letter->data(), letter->size(), nullptr, letter})) return {};
    const auto memory = sink.reserve(ticket.bytes);
    if (!memory) return {Code::resource_exhausted, "no memory for a letter"};
    std::copy(letter->begin(), letter->end(), memory->data);
    return {};
  }

  Wire& wire_;
  const MailBehaviour behaviour_;
  std::atomic<std::uint32_t> offers_{0};
  std::mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<Bytes>> letters_;
  std::map<std::uint32_t, Completion> unreleased_;
  std::vector<Completion> unconsumed_;
  Status ended_;
};

class MailDriver final : public Driver {
 public:
  explicit MailDriver(MailBehaviour behaviour) : behaviour_(std::move(behaviour)) {}
  [[nodiscard]] std::string_view name() const override { return "mail"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override {
    if (device.type != DeviceType::cpu && !behaviour_.any_device) return Refusal{"mail carries CPU memory"};
    return Bytes(1, static_cast<std::byte>(1));
  }
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override {
    if (!behaviour_.wanted) return Refusal{"this end takes no letters"};
    if (text_of(mine) == text_of(theirs)) return std::nullopt;
    return Refusal{"another post office"};
  }
  [[nodiscard]] bool immediate() const override { return behaviour_.immediate; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair) override {
    return std::make_unique<MailChannel>(wire, behaviour_);
  }

 private:
  const MailBehaviour behaviour_;
};

/// Returns the built-in channels with mail at a higher priority.
inline Registry with_mail(MailBehaviour behaviour = {}) {
  auto registry = Registry::built_in();
  registry.add("mail", 1000, [behaviour] { return std::make_unique<MailDriver>(behaviour); });
  return registry;
}

}  // namespace tensorferry::testing
