/// A channel whose staged bytes go by `ibv` (Wire::carrier), both on one end of a test link.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "channels/ibv/ibv_channel.h"

namespace tensorferry::conformance {

/// Two channels on one wire, which tells the tests of the first one that it is ready when the second one is. The first
/// byte of a control message says whose it is; the sequences of bulk data are even or odd.
class OverIbv final : public Channel {
 public:
  OverIbv(Wire& wire, Driver& driver, IbvDriver& cards, DevicePair pair)
      : wire_(wire), carrier_(cards.open(cards_wire_, {})), channel_(driver.open(wire_of_channel_, pair)) {}

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    return channel_->offer(buffer, sharing, message, std::move(released));
  }
  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    channel_->pull(ticket, sink, std::move(landed), std::move(consumed));
  }
  void discard(const Ticket& ticket) override { channel_->discard(ticket); }
  void withdraw(const Ticket& ticket) override { channel_->withdraw(ticket); }
  void acknowledged(const Ticket& ticket) override { channel_->acknowledged(ticket); }
  void progress() override { channel_->progress(); }
  [[nodiscard]] std::string describe() const override { return channel_->describe(); }
  void control(ByteView message, Descriptors descriptors) override {
    if (message.empty()) return;
    auto& whose = message.front() == std::byte{0} ? channel_ : carrier_;
    whose->control(message.subspan(1), std::move(descriptors));
  }
  void close(Status status) noexcept override {
    for (auto* each : {carrier_.get(), channel_.get()}) each->close(status);
  }

  /// Returns whether the carrier takes chunks at this end.
  [[nodiscard]] bool carries() const { return up_.load(); }
  [[nodiscard]] std::uint64_t bytes_sent() const { return bytes_sent_.load(); }
  [[nodiscard]] std::uint64_t bytes_received() const { return bytes_received_.load(); }

 private:
  class Share final : public Wire {
   public:
    Share(OverIbv& both, std::uint8_t index) : both_(both), index_(index) {}
    ControlId control(Bytes message, Descriptors descriptors) override {
      message.insert(message.begin(), std::byte{index_});
      return both_.wire_.control(std::move(message), std::move(descriptors));
    }
    void read(Buffer destination, Completion landed) override {
      both_.wire_.read(std::move(destination), std::move(landed));
    }
    void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) override {
      both_.wire_.send_bulk(2 * sequence + index_, std::move(buffer), std::move(written));
    }
    void receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) override {
      both_.wire_.receive_bulk(2 * sequence + index_, std::move(destination), std::move(landed));
    }
    void ready(Status probed) override {
      if (index_ == 0) return;
      both_.up_.store(probed.ok());
      if (!both_.told_.exchange(true)) both_.wire_.ready(std::move(probed));
    }
    [[nodiscard]] bool may_share_memory() const override { return false; }  // no ring
    [[nodiscard]] std::string_view peer() const override { return both_.wire_.peer(); }
    [[nodiscard]] Carrier carrier() override { return both_.carries() ? carrier_named("ibv") : Carrier(); }
    [[nodiscard]] Carrier carrier_named(std::string_view name) override {
      return name == "ibv" && index_ == 0 ? Carrier{both_.carrier_.get(), "ibv"} : Carrier();
    }
    void carried(std::string_view, std::uint64_t sent, std::uint64_t received) override {
      both_.bytes_sent_ += sent;
      both_.bytes_received_ += received;
    }

   private:
    OverIbv& both_;
    const std::uint8_t index_;
  };

  Wire& wire_;
  std::atomic<bool> up_{false}, told_{false};
  std::atomic<std::uint64_t> bytes_sent_{0}, bytes_received_{0};
  Share wire_of_channel_{*this, 0}, cards_wire_{*this, 1};
  const std::unique_ptr<Channel> carrier_;  // outlives the next one, which uses it
  const std::unique_ptr<Channel> channel_;
};

/// Opens OverIbv. `Of` is the driver of the first channel.
template <class Of>
class OverIbvDriver final : public Driver {
 public:
  explicit OverIbvDriver(std::unique_ptr<IbvDriver> cards) : cards_(std::move(cards)) {}
  [[nodiscard]] std::string_view name() const override { return driver_.name(); }
  std::variant<Bytes, Refusal> descriptor(Device device) override { return driver_.descriptor(device); }
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override { return driver_.reaches(mine, theirs); }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override {
    return std::make_unique<OverIbv>(wire, driver_, *cards_, pair);
  }

 private:
  const std::unique_ptr<IbvDriver> cards_;
  Of driver_;
};

}  // namespace tensorferry::conformance
