#include "agent/rendezvous/record.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>

#include "agent/address.h"
#include "base/host.h"
#include "base/text.h"

namespace tensorferry {

namespace {

enum class Seal : std::uint8_t { open = 1, signed_by_key = 2 };
constexpr std::uint8_t kFormat = 1;
constexpr std::uint8_t kLeft = 1;
constexpr std::size_t kMostUnixAddress = sizeof(sockaddr_un::sun_path);

bool printable(std::string_view text, std::size_t most) {
  return text.size() <= most && std::none_of(text.begin(), text.end(),
                                             [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

// The generation comes first: it has no slash, so different pairs give different texts.
std::string context_of(std::string_view slot, std::int64_t generation) {
  return formatted("record/{}/{}", generation, slot);
}

Bytes encode_body(const Record& record) {
  Bytes bytes;
  Writer out(bytes);
  out.put(kFormat);
  out.put(record.left ? kLeft : std::uint8_t{0});
  out.sized(record.name);
  out.put(record.rank);
  out.put(record.incarnation);
  out.sized(record.host);
  out.sized(record.boot_id);
  out.put(record.net_namespace);
  out.put(record.uid);
  out.put(record.pid);
  out.put(record.version_min);
  out.put(record.version_max);
  out.sized(record.unix_address);
  out.varint(record.tcp_addresses.size());
  for (const auto& address : record.tcp_addresses) out.sized(address);
  out.varint(record.world.size());
  for (const auto incarnation : record.world) out.put(incarnation);
  return bytes;
}

// Skips bytes behind the last field: a later release may add fields.
Result<Record> decode_body(ByteView bytes) {
  Reader in(bytes);
  if (const auto format = in.get<std::uint8_t>(); format != kFormat) {
    return Status(Code::protocol_error,
                  formatted("the record has format {}, and this release reads format {}", format, kFormat));
  }
  Record record;
  record.left = (in.get<std::uint8_t>() & kLeft) != 0;
  record.name = in.text();
  record.rank = in.get<std::int32_t>();
  record.incarnation = in.get<std::uint64_t>();
  record.host = in.text();
  record.boot_id = in.text();
  record.net_namespace = in.get<std::uint64_t>();
  record.uid = in.get<std::uint32_t>();
  record.pid = in.get<std::int32_t>();
  record.version_min = in.get<std::uint16_t>();
  record.version_max = in.get<std::uint16_t>();
  record.unix_address = in.text();
  const auto addresses = in.count();
  bool good = addresses <= Record::kMostAddresses;
  for (std::uint64_t i = 0; good && i < addresses; ++i) {
    const auto& address = record.tcp_addresses.emplace_back(in.text());
    good = printable(address, Record::kMostName) && split_host_port(address).ok();
  }
  for (auto members = in.count(sizeof(std::uint64_t)); good && members > 0; --members) {
    record.world.push_back(in.get<std::uint64_t>());
  }
  good = good && !in.failed() && check_name(record.name).ok() && record.rank >= -1 && record.incarnation != 0 &&
         printable(record.host, Record::kMostName) && printable(record.boot_id, Record::kMostName) &&
         printable(record.unix_address, kMostUnixAddress) && record.version_min <= record.version_max;
  if (!good) return Status(Code::protocol_error, "the record is malformed");
  return record;
}

std::string host_name() {
  char name[Record::kMostName + 1] = "";
  ::gethostname(name, sizeof name - 1);
  return printable(name, Record::kMostName) ? name : "?";
}

}  // namespace

Record describe_this_process() {
  Record record;
  while (record.incarnation == 0) fill_random(std::as_writable_bytes(std::span(&record.incarnation, 1)));
  record.host = host_name();
  record.boot_id = boot_id();
  if (record.boot_id.empty()) record.boot_id = record.host;  // a sandbox may hide the boot id
  record.net_namespace = own_namespace("net");
  record.uid = ::geteuid();
  record.pid = ::getpid();
  return record;
}

bool may_share_unix(const Record& mine, const Record& theirs) {
  if (theirs.unix_address.empty() || mine.boot_id != theirs.boot_id) return false;
  return theirs.unix_address.front() != '@' || mine.net_namespace == theirs.net_namespace;
}

Status check_name(std::string_view name) {
  if (!name.empty() && printable(name, Record::kMostName)) return {};
  return {Code::invalid_argument,
          formatted("an agent's name has 1 to {} bytes and no control characters", Record::kMostName)};
}

Bytes encode_record(const Record& record, const Key& key, std::string_view slot, std::int64_t generation) {
  const auto body = encode_body(record);
  Bytes bytes;
  Writer out(bytes);
  out.put(key.empty() ? Seal::open : Seal::signed_by_key);
  if (!key.empty()) out.raw(sign(key, context_of(slot, generation), body));
  out.raw(body);
  return bytes;
}

Result<Record> decode_record(ByteView bytes, const Key& key, std::string_view slot, std::int64_t generation) {
  Reader in(bytes);
  const auto seal = in.get<std::uint8_t>();
  const bool is_signed = seal == static_cast<std::uint8_t>(Seal::signed_by_key);
  if (!is_signed && seal != static_cast<std::uint8_t>(Seal::open)) {
    return Status(Code::protocol_error, "the record is malformed");
  }
  const auto signature = is_signed ? in.raw(sizeof(Digest)) : ByteView{};
  if (!key.empty() && (!is_signed || !verify(key, context_of(slot, generation), in.rest(), signature))) {
    return Status(Code::unauthenticated, formatted("{}. {}",
                                                   is_signed ? "its record in the store is signed with another key"
                                                             : "its record in the store is not signed: it has no key",
                                                   how_to_set_a_key()));
  }
  return decode_body(in.rest());
}

}  // namespace tensorferry
