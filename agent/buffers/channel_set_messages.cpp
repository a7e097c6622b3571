// The buffers of one message: planning, offering and recording the outgoing ones, pulling the incoming ones.
#include <algorithm>
#include <utility>

#include "agent/buffers/channel_binding.h"
#include "agent/buffers/channel_set.h"
#include "agent/or_end_link.h"
#include "channels/completion.h"
#include "channels/copy.h"

namespace tensorferry {
namespace {

constexpr std::size_t room_for_records = 48 * 1024;  // records and payload of more bytes travel in a buffer (spilled)
constexpr std::size_t typical_ticket = 32;
// Bytes that may follow one frame. Small calls wait behind them, and on a slow network so do heartbeats. More bytes go
// on the bulk connection.
constexpr std::size_t most_behind_frame = 256 * 1024;
constexpr std::size_t copies_elsewhere_from = std::size_t{64} << 10;  // the thread that reads copies less by itself

Buffer buffer_of(Bytes bytes) {
  auto owner = std::make_shared<Bytes>(std::move(bytes));
  return {{}, owner->data(), owner->size(), nullptr, owner};
}

}  // namespace

/// The bundles of a message: the indices of the buffers in each.
struct ChannelSet::Plan {
  std::vector<std::vector<std::uint32_t>> bundles;
  std::size_t record_bytes = 0;  // estimate of the bytes of all records
};

struct ChannelSet::MessageBuilder final : public Outgoing {
  Bytes records;
  std::size_t count = 0;  // of records
  std::vector<FrameStream::Part> trailing;
  std::uint64_t trailing_bytes = 0;
  std::uint64_t offered_bytes = 0;  // of the buffer that the channels are asked for now
  std::vector<std::pair<OfferedBuffers::Id, OfferedBuffers::Offered>> offered;
  std::vector<std::pair<std::size_t, std::uint64_t>> carried;  // by counter of AgentCounters
  bool may_append = true;
  bool last = false;            // no other channel will be asked for this buffer
  bool interim = false;         // a faster channel will probably carry later buffers
  bool spill = false;           // this buffer holds the records of all others
  std::size_t inline_room = 0;  // bytes left in the frame for inline buffers

  [[nodiscard]] bool appends() const override {
    return may_append && (spill || trailing_bytes + offered_bytes <= most_behind_frame);
  }
  void append(Buffer buffer, Completion written) override {
    trailing_bytes += buffer.bytes;
    trailing.push_back({std::move(buffer), std::move(written)});
  }
  bool copy_later(Copier& copier, std::byte* to, ByteView from, const Owner& owner) override {
    if (copier_ != nullptr && copier_ != &copier) return false;
    copier_ = &copier;
    copies_.push_back({to, from.data(), from.size()});
    if (destinations_.empty() || destinations_.back() != owner) destinations_.push_back(owner);
    return true;
  }
  /// Does the copies of copy_later().
  void copy() {
    if (!copies_.empty()) copier_->copy(copies_);
  }
  [[nodiscard]] bool last_resort() const override { return last; }
  [[nodiscard]] bool for_now() const override { return interim; }
  [[nodiscard]] bool leads() const override { return spill; }

 private:
  Copier* copier_ = nullptr;
  std::vector<Copier::Piece> copies_;
  std::vector<Owner> destinations_;
};

/// Records one buffer: inline in the frame, or with the ticket of the first channel of its pair that accepts it.
/// ChannelUnavailable if none accepts it; the link's own status if it has ended.
Status ChannelSet::offer(MessageBuilder& builder, const Buffer& buffer, Device destination, Sharing sharing,
                         const std::string& require, const std::shared_ptr<void>& held) {
  wire::BufferRecord record;
  record.source = buffer.device;
  record.destination = destination;
  record.bytes = buffer.bytes;
  const bool host = buffer.device.type == DeviceType::cpu && destination.type == DeviceType::cpu;
  if (host && sharing == Sharing::by_value && buffer.bytes <= std::min(inline_bytes, builder.inline_room)) {
    builder.inline_room -= buffer.bytes;
    record.ticket = ByteView(buffer.data, buffer.bytes);
    Writer records(builder.records);
    record.encode(records);
    ++builder.count;
    builder.carried.emplace_back(AgentCounters::inside_frames, buffer.bytes);
    return {};
  }
  builder.offered_bytes = buffer.bytes;
  std::string reasons;
  bool fell_back = false;  // a faster channel failed; a channel that is still being probed does not count
  const auto& order = bindings_.order({buffer.device, destination});
  builder.interim = false;
  for (auto* binding : order.bindings) {
    if (!require.empty() && binding->name() != require) continue;
    if (const auto state = binding->state(); state != ChannelBinding::State::usable) {
      fell_back = fell_back || state == ChannelBinding::State::failed;
      builder.interim = builder.interim || state == ChannelBinding::State::probing;
      reasons += std::string("\n  ") + std::string(binding->name()) + ": " + binding->reason();
      continue;
    }
    builder.last = !require.empty() || binding == order.bindings.back();
    auto offer = binding->channel->offer(buffer, sharing, builder, [held](const Status&) {});
    if (auto* refusal = std::get_if<Refusal>(&offer)) {
      fell_back = fell_back || !refusal->passing;
      builder.interim = builder.interim || refusal->passing;
      reasons += std::string("\n  ") + std::string(binding->name()) + ": " + refusal->reason;
      continue;
    }
    this->record(builder, std::move(record), binding, std::get<Ticket>(std::move(offer)));
    if (fell_back) {
      const auto what = text_of(buffer.device) + " -> " + text_of(destination);
      warn_once(std::string(binding->name()) + what,
                "peer=" + around_.link.peer().name + " channel=" + std::string(binding->name()) +
                    " fallback: faster channels cannot carry " + what + ":" + reasons);
    }
    return {};
  }
  for (const auto& [name, reason] : order.reasons) {
    if (require.empty() || name == require) reasons += "\n  " + name + ": " + reason;
  }
  if (around_.link.closed()) return around_.link.status();  // why its channels refuse
  if (reasons.empty()) reasons = "\n  there is no channel of that name; explain() lists the channels";
  const std::string_view what =
      sharing == Sharing::shared ? "no channel shares memory without a copy, " : "no channel carries ";
  return {Code::channel_unavailable, std::string(what) + text_of(buffer.device) + " -> " + around_.link.peer().name +
                                         " " + text_of(destination) +
                                         (require.empty() ? "" : " with require=\"" + require + "\"") + ":" + reasons};
}

/// Appends the record of an accepted offer, and keeps the offer with its release id.
void ChannelSet::record(MessageBuilder& builder, wire::BufferRecord record, ChannelBinding* binding, Ticket ticket) {
  if (ticket.acknowledge) record.release = offered_.next();
  record.channel = static_cast<std::uint8_t>(binding->driver());
  record.bytes = ticket.bytes;
  record.after = ticket.after;
  record.ticket = ticket.opaque;
  Writer records(builder.records);
  record.encode(records);
  ++builder.count;
  builder.carried.emplace_back(binding->driver(), record.net_bytes());
  builder.offered.emplace_back(record.release, OfferedBuffers::Offered{binding, std::move(ticket)});
}

/// Offers a bundle to the first channel that is ready, and records it. False: there is none, or that channel refuses,
/// so the buffers are offered one by one.
bool ChannelSet::offer_bundle(MessageBuilder& builder, const Message& message, const std::vector<std::uint32_t>& bundle,
                              const std::string& require, const std::shared_ptr<void>& held) {
  wire::BufferRecord record;
  builder.offered_bytes = 0;
  for (const auto index : bundle) builder.offered_bytes += message.buffers[index].bytes;
  std::vector<const Buffer*> parts;
  record.parts.reserve(bundle.size());
  parts.reserve(bundle.size());
  for (const auto index : bundle) {
    record.parts.push_back({index, message.buffers[index].bytes});
    parts.push_back(&message.buffers[index]);
  }
  for (auto* binding : bindings_.order({Device(), Device()}).bindings) {
    if ((!require.empty() && binding->name() != require) || binding->state() != ChannelBinding::State::usable) continue;
    auto offer = binding->channel->offer_bundle(parts, builder, [held](const Status&) {});
    auto* const ticket = std::get_if<Ticket>(&offer);
    if (ticket != nullptr) this->record(builder, std::move(record), binding, std::move(*ticket));
    return ticket != nullptr;
  }
  return false;
}

/// Decides which buffers go in bundles. Buffers small enough to go inline are left out if all of them fit the frame.
ChannelSet::Plan ChannelSet::plan(const Message& message) const {
  constexpr auto usual = wire::BufferRecord::size + typical_ticket;
  constexpr std::size_t usual_part = 6;
  Plan plan;
  plan.record_bytes = message.buffers.size() * usual;
  if (message.buffers.size() < 2 || !bindings_.bundles()) return plan;
  const auto up_to = [&](std::size_t i, std::size_t bytes) {
    const auto& buffer = message.buffers[i];
    return buffer.device == Device() && buffer.bytes <= bytes && message.destination_of(i).device == Device() &&
           message.sharing_of(i) == Sharing::by_value;
  };
  std::size_t inside = 0;
  for (std::size_t i = 0; i < message.buffers.size(); ++i) {
    if (up_to(i, inline_bytes)) inside += message.buffers[i].bytes;
  }
  const bool fits = plan.record_bytes + message.payload.size() + inside <= room_for_records;
  std::vector<std::uint32_t> bundle;
  std::size_t end = 0;
  const auto close_bundle = [&] {
    if (bundle.size() > 1) {
      plan.record_bytes -= (bundle.size() - 1) * usual - bundle.size() * usual_part;
      plan.bundles.push_back(std::move(bundle));
    }
    bundle.clear();
    end = 0;
  };
  for (std::size_t i = 0; i < message.buffers.size(); ++i) {
    const auto& buffer = message.buffers[i];
    if (buffer.bytes == 0 || buffer.data == nullptr || !up_to(i, bundled_bytes)) continue;
    if (fits && buffer.bytes <= inline_bytes) continue;
    if (Bundle::next_part(end) + buffer.bytes > bundle_bytes) close_bundle();
    bundle.push_back(static_cast<std::uint32_t>(i));
    end = Bundle::next_part(end) + buffer.bytes;
  }
  close_bundle();
  return plan;
}

void ChannelSet::withdraw(MessageBuilder& builder) {
  for (auto& [id, offered] : builder.offered) offered.binding->channel->withdraw(offered.ticket);
}

/// Decides the device on which each buffer lands.
Status ChannelSet::place(Message& message, const Placement& placement) {
  for (std::size_t i = 0; i < message.destinations.size(); ++i) {
    auto& destination = message.destinations[i];
    if (!destination.anywhere) continue;
    const auto device = arrival_of(message.buffers[i].device, destination, placement);
    if (!device) return device.status();
    destination = {*device};
  }
  return {};
}

Result<ChannelSet::Built> ChannelSet::build(wire::Header header, Bytes extensions, Message message,
                                            const std::string& require, const Placement& placement,
                                            const std::shared_ptr<void>& held) {
  if (auto status = place(message, placement); !status) return status;
  const auto releases = take_releases(64);
  if (!releases.empty()) {
    Writer writer(extensions);
    wire::put_extension(writer, wire::extension::releases, std::as_bytes(std::span(releases)));
  }
  if (message.buffers.empty() && message.payload.size() + extensions.size() <= room_for_records)
    return Built{wire::assemble(header, extensions, {}, message.payload), {}, -1};
  const auto plan = this->plan(message);
  const bool spill = plan.record_bytes + message.payload.size() > room_for_records;
  auto built = attempt(header, extensions, message, plan, require, held, spill);
  // The tickets were longer than the estimate, so the records do not fit the frame either: spill.
  if (built && built->frame.size() > wire::Header::max_length) {
    built = attempt(header, extensions, message, plan, require, held, true);
  }
  if (!built) acknowledgements_.put_back(releases);
  return built;
}

/// Offers the buffers and assembles the frame. `spill`: records and payload do not fit a frame, so a buffer carries
/// their count, the records and the payload. Then only that buffer may follow the frame, because the frame's reader
/// does not know the other records yet. A frame that is too long comes back with its offers withdrawn.
Result<ChannelSet::Built> ChannelSet::attempt(wire::Header header, const Bytes& extensions, const Message& message,
                                              const Plan& plan, const std::string& require,
                                              const std::shared_ptr<void>& held, bool spill) {
  MessageBuilder builder;
  builder.may_append = !spill;
  builder.records.reserve(plan.record_bytes);
  if (!spill) builder.inline_room = room_for_records - message.payload.size() - plan.record_bytes;
  std::vector<bool> bundled(plan.bundles.empty() ? 0 : message.buffers.size());
  for (const auto& bundle : plan.bundles) {
    if (!offer_bundle(builder, message, bundle, require, held)) continue;
    for (const auto index : bundle) bundled[index] = true;
  }
  Status status;
  for (std::size_t i = 0; i < message.buffers.size() && status.ok(); ++i) {
    if (!bundled.empty() && bundled[i]) continue;
    status = offer(builder, message.buffers[i], message.destination_of(i).device, message.sharing_of(i), require, held);
  }
  ByteView payload = message.payload;
  Buffer whole;  // what is spilled
  header.buffers = static_cast<std::uint16_t>(builder.count);
  if (status.ok() && spill) {
    Bytes body;
    Writer writer(body);
    writer.put(static_cast<std::uint32_t>(builder.count));
    writer.raw(builder.records);
    writer.raw(message.payload);
    payload = {};
    builder.records.clear();
    builder.may_append = builder.spill = true;
    header.buffers = 1;
    header.flags |= wire::flag::spilled;
    whole = buffer_of(std::move(body));
    status = offer(builder, whole, {}, Sharing::by_value, "", held);
  }
  header.trailing = builder.trailing_bytes;
  Built built{{}, std::move(builder.trailing), -1};
  if (status.ok()) built.frame = wire::assemble(header, extensions, builder.records, payload);
  if (!status.ok() || built.frame.size() > wire::Header::max_length) {
    withdraw(builder);
    const Status why = status.ok() ? Status(Code::cancelled, "sent in another way") : status;
    for (auto& part : built.trailing) complete(std::move(part.written), why);
    if (!status.ok()) return status;
    return built;
  }
  builder.copy();
  status = offered_.add(std::move(builder.offered));
  if (!status.ok()) {  // the link has ended: its channels have ended their offers
    for (auto& part : built.trailing) complete(std::move(part.written), status);
    return status;
  }
  for (const auto& [counter, bytes] : builder.carried) {
    around_.counters.bytes_sent[counter] += bytes;
    around_.of_link.bytes_sent += bytes;
  }
  if (!builder.carried.empty()) built.channel = static_cast<int>(builder.carried.front().first);
  return built;
}

/// What receive() was given for a message whose records are still to come.
struct ChannelSet::SpilledMessage {
  /// Tells how the message has ended, unless that has been told or its records have come.
  void end(const Status& status) {
    if (const auto told = std::exchange(arrived, {})) told(status, {});
  }

  std::vector<Buffer> into;
  IncomingMessage::Arrived arrived;
  Admit admit;
};

/// The stream of the frame whose buffers this thread pulls, while it lives.
class ChannelSet::ReadingFrom final {
 public:
  explicit ReadingFrom(FrameStream* stream) { ChannelBinding::reading = stream; }
  ReadingFrom(const ReadingFrom&) = delete;
  ReadingFrom& operator=(const ReadingFrom&) = delete;
  ~ReadingFrom() { ChannelBinding::reading = nullptr; }
};

void ChannelSet::receive(FrameStream* stream, const wire::Frame& frame, const std::vector<Buffer>& into,
                         IncomingMessage::Arrived arrived, Admit admit) {
  const bool spilled = (frame.header.flags & wire::flag::spilled) != 0;
  Bytes payload(frame.payload.begin(), frame.payload.end());
  if (frame.buffers.empty()) return arrived({}, {std::move(payload), {}});
  if (spilled) {
    const auto message = std::make_shared<SpilledMessage>(into, std::move(arrived), std::move(admit));
    arrived = [this, held = around_.link.hold(), message](const Status& status, const Received& spill) {
      if (status.ok()) return land_spilled(spill, *message);
      message->end(status);
      // The tickets in it are lost with it. So they can end only with the link.
      or_end_link(around_.link, [&] {
        around_.link.fail({Code::connection_lost,
                           formatted("the rest of a message could not be received: {}", std::string(status.what()))});
      });
    };
    payload = {};
  }
  const std::vector<Buffer> nowhere;
  std::shared_ptr<IncomingMessage> message_in;
  {
    const ReadingFrom reading(stream);
    message_in = land(frame.buffers, std::move(payload), spilled ? nowhere : into, std::move(arrived), spilled);
  }
  message_in->landed({});
}

/// Starts a pull for each record. The caller then calls landed() once for the frame itself. Throws std::bad_alloc only
/// before the first pull, and then leaves `arrived` alone unless the message has taken it.
std::shared_ptr<IncomingMessage> ChannelSet::land(const std::vector<wire::BufferRecord>& records, Bytes&& payload,
                                                  const std::vector<Buffer>& into, IncomingMessage::Arrived&& arrived,
                                                  bool spill) {
  std::vector<BufferSink*> sinks;
  sinks.reserve(records.size());
  auto message_in = std::make_shared<IncomingMessage>(std::move(payload), into, std::move(arrived));
  for (const auto& record : records) {
    auto& sink = message_in->add(around_.memory.of(record.destination.type), record);
    if (spill) sink.copy();
    sinks.push_back(&sink);
  }
  or_end_link(around_.link, [&] {
    std::vector<std::function<void()>> copies;
    for (std::size_t i = 0; i < records.size(); ++i) pull(records[i], *sinks[i], message_in, copies);
    if (!copies.empty()) copy_elsewhere(std::move(copies));
  });
  return message_in;
}

void ChannelSet::discard(FrameStream* stream, const wire::Frame& frame) {
  if ((frame.header.flags & wire::flag::spilled) != 0) {
    // The records are inside the buffer, so it must be pulled before their tickets can be ended.
    return receive(
        stream, frame, {}, [](const Status&, const Received&) {},
        [](std::size_t) { return Status(Code::cancelled, "the call has ended"); });
  }
  const ReadingFrom reading(stream);
  discard(frame.buffers);
}

void ChannelSet::discard(const std::vector<wire::BufferRecord>& records) {
  for (const auto& record : records) {
    if (record.channel == wire::BufferRecord::inline_channel) continue;
    const auto named = bindings_.of_peer(record.channel, {record.source, record.destination});
    if (!named.ok()) continue;
    auto* const binding = *named;
    if (binding == nullptr || !binding->channel) {
      want_release(record.release);
      continue;
    }
    // As a pull does, it comes after the control message that the ticket needs.
    auto end = [this, held = around_.link.hold(), binding,
                ticket = Ticket{record.bytes, Bytes(record.ticket.begin(), record.ticket.end()), record.after,
                                record.release != 0},
                id = record.release](const Status& failed) {
      if (failed.code() == Code::protocol_error) around_.link.fail(failed);
      if (!failed.ok()) return;
      binding->channel->discard(ticket);
      want_release(id);
    };
    if (record.after == 0)
      end({});
    else
      incoming_controls_.when_received(record.after, std::move(end));
  }
}

void ChannelSet::land_spilled(const Received& spill, SpilledMessage& message) {
  or_end_link(around_.link, [&] {
    const auto& body = spill.buffers.front();
    Reader in(ByteView(body.data, body.bytes));
    const auto count = in.get<std::uint32_t>();
    std::vector<wire::BufferRecord> records;
    auto status = in.failed() ? Status(Code::protocol_error,
                                       "malformed frame: the buffer is too short to hold the rest of the frame")
                              : wire::BufferRecord::decode_all(in, count, records);
    if (!status.ok()) {
      around_.link.fail(status);
      return message.end(status);
    }
    const auto payload = in.rest();
    if (message.admit) status = message.admit(wire::message_bytes(payload.size(), records));
    if (!status.ok()) {
      discard(records);
      return message.end(status);
    }
    land(records, Bytes(payload.begin(), payload.end()), message.into, std::move(message.arrived))->landed({});
  });
  message.end(out_of_memory::status());
}

/// Runs pulls that copy, on a pool thread that neither reads messages nor is inside the executor.
void ChannelSet::copy_elsewhere(std::vector<std::function<void()>> copies) {
  const auto all = std::make_shared<std::vector<std::function<void()>>>(std::move(copies));
  const auto run = [this, held = around_.link.hold(), all] {
    or_end_link(around_.link, [&] {
      for (const auto& copy : *all) copy();
    });
  };
  if (!around_.link.run_long(run)) run();
}

/// Pulls one buffer, or adds its pull to `copies`.
void ChannelSet::pull(const wire::BufferRecord& record, BufferSink& sink,
                      const std::shared_ptr<IncomingMessage>& message_in, std::vector<std::function<void()>>& copies) {
  // A peer that broke the protocol may never send the rest of the message, so the link closes at once.
  const auto landed = [this, held = around_.link.hold(), message_in](const Status& status) {
    if (status.code() == Code::protocol_error) around_.link.fail(status);
    message_in->landed(status);
  };
  if (record.channel == wire::BufferRecord::inline_channel) {
    if (record.destination != Device()) {  // the host copies inline bytes, so only its memory may be the destination
      return landed({Code::protocol_error, "bytes inside a frame for " + text_of(record.destination)});
    }
    const auto memory = sink.reserve(record.bytes);
    if (memory && record.bytes != 0) std::memcpy(memory->data, record.ticket.data(), record.bytes);
    around_.counters.bytes_received[AgentCounters::inside_frames] += record.bytes;
    around_.of_link.bytes_received += record.bytes;
    return landed(memory ? Status() : Status(Code::resource_exhausted, "no memory for a received buffer"));
  }
  const auto named = bindings_.of_peer(record.channel, {record.source, record.destination});
  if (!named.ok()) return landed({Code::protocol_error, "the ticket is of " + std::string(named.status().what())});
  auto* const binding = *named;
  if (binding == nullptr || !binding->channel) {
    want_release(record.release);
    return landed({Code::channel_unavailable, "the buffer came by a channel that its receiver does not want"});
  }
  Ticket ticket{record.bytes, Bytes(record.ticket.begin(), record.ticket.end()), record.after, record.release != 0};
  around_.counters.bytes_received[binding->driver()] += record.net_bytes();
  around_.of_link.bytes_received += record.net_bytes();
  auto pull = [this, held = around_.link.hold(), binding, ticket = std::move(ticket), &sink, landed,
               id = record.release](const Status& failed) {
    if (!failed.ok()) return landed(failed);
    if (id == 0) return binding->channel->pull(ticket, sink, landed, {});
    acknowledgements_.begin_reading();
    binding->channel->pull(ticket, sink, landed, [this, held, id](const Status&) {
      acknowledgements_.end_reading();
      or_end_link(around_.link, [&] { want_release(id); });
    });
  };
  if (record.bytes >= copies_elsewhere_from && binding->channel->copies_into(sink)) {
    if (record.after == 0) {
      copies.emplace_back([pull = std::move(pull)] { pull({}); });
      return;
    }
    return incoming_controls_.when_received(record.after, [this, pull = std::move(pull)](const Status& failed) {
      if (!failed.ok()) return pull(failed);
      copy_elsewhere({[pull] { pull({}); }});
    });
  }
  if (record.after == 0)
    pull({});
  else
    incoming_controls_.when_received(record.after, std::move(pull));
}

}  // namespace tensorferry
