#include "agent/rendezvous/record.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>

#include "agent/transport/address.h"
#include "base/host.h"
#include "base/text.h"

namespace tensorferry {

namespace {

enum class Seal : std::uint8_t { open = 1, signed_by_key = 2 };
constexpr std::size_t most_unix_address = sizeof(sockaddr_un::sun_path);

bool printable(std::string_view text, std::size_t most) {
  return text.size() <= most && std::none_of(text.begin(), text.end(),
                                             [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

// Skips bytes behind the last field: a later release may add fields.
Result<Record> decode_body(ByteView bytes) {
  if (!bytes.empty() && bytes.front() != std::byte{Record::tag}) {
    return Status(Code::protocol_error, formatted("the record has format {}, and this release reads format {}",
                                                  std::to_integer<int>(bytes.front()), Record::tag));
  }
  Reader in(bytes);
  auto record = read<Record>(in);
  if (in.failed()) return Status(Code::protocol_error, "the record is malformed");
  return record;
}

std::string shown_host() {
  auto name = host_name();
  return printable(name, Record::most_name) ? name : "?";
}

}  // namespace

bool Record::valid() const {
  return check_name(name).ok() && rank >= -1 && incarnation != 0 && printable(host, most_name) &&
         printable(boot_id, most_name) && printable(unix_address, most_unix_address) && version_min <= version_max &&
         std::all_of(tcp_addresses.begin(), tcp_addresses.end(), [](const std::string& address) {
           return printable(address, most_name) && split_host_port(address).ok();
         });
}

Record describe_this_process() {
  Record record;
  while (record.incarnation == 0) fill_random(std::as_writable_bytes(std::span(&record.incarnation, 1)));
  record.host = shown_host();
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
  // Tools show names in terminals, and errors quote them.
  if (!name.empty() && name.size() <= Record::most_name && tensorferry::printable(name) == name) return {};
  return {Code::invalid_argument,
          formatted("an agent's name has 1 to {} bytes of UTF-8, and no characters that control "
                    "a terminal or the direction of text",
                    Record::most_name)};
}

Bytes sealed(ByteView body, const Key& key, std::string_view place) {
  Bytes bytes;
  Writer out(bytes);
  out.put(key.empty() ? Seal::open : Seal::signed_by_key);
  if (!key.empty()) out.raw(sign(key, place, body));
  out.raw(body);
  return bytes;
}

Result<ByteView> unsealed(ByteView bytes, const Key& key, std::string_view place) {
  Reader in(bytes);
  const auto seal = in.get<std::uint8_t>();
  const bool is_signed = seal == static_cast<std::uint8_t>(Seal::signed_by_key);
  if (!is_signed && seal != static_cast<std::uint8_t>(Seal::open)) {
    return Status(Code::protocol_error, "the record is malformed");
  }
  const auto signature = is_signed ? in.raw(sizeof(Digest)) : ByteView{};
  if (!key.empty() && (!is_signed || !verify(key, place, in.rest(), signature))) {
    return Status(Code::unauthenticated, formatted("{}. {}",
                                                   is_signed ? "its record in the store is signed with another key"
                                                             : "its record in the store is not signed: it has no key",
                                                   how_to_set_a_key()));
  }
  return in.rest();
}

Bytes encode_record(const Record& record, const Key& key, std::string_view place) {
  return sealed(encode(record), key, place);
}

Result<Record> decode_record(ByteView bytes, const Key& key, std::string_view place) {
  const auto body = unsealed(bytes, key, place);
  if (!body) return body.status();
  return decode_body(*body);
}

}  // namespace tensorferry
