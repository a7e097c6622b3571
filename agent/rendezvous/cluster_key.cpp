#include "agent/rendezvous/cluster_key.h"

#include <openssl/crypto.h>

#include "base/text.h"

namespace tensorferry {

namespace {

std::string random_text() {
  std::array<std::byte, 32> bytes{};
  fill_random(bytes);
  std::string text;
  for (const auto byte : bytes) text += hex(std::to_integer<std::uint64_t>(byte), 2);
  return text;
}

}  // namespace

Result<ClusterKey> cluster_key(Store& store, const std::string& prefix, std::string_view option,
                               std::chrono::milliseconds timeout) {
  auto own = Key::load(option);
  if (!own) return own.status();
  if (!own->empty()) return ClusterKey{std::move(*own), true};
  if (!store.loopback()) {
    return Status(Code::unauthenticated,
                  formatted("the rendezvous can be reached from other hosts, and there is no cluster key. {}. For one "
                            "host alone, let the rendezvous be at 127.0.0.1 (MASTER_ADDR)",
                            how_to_set_a_key()));
  }
  const auto first = store.add(prefix + "/key/claim", 1);
  if (!first) return first.status();
  if (*first == 1) {
    auto text = random_text();
    const auto status = store.set(prefix + "/key/value", view_of(text));
    OPENSSL_cleanse(text.data(), text.size());
    if (!status) return status;
  }
  auto made = store.get(prefix + "/key/value", timeout);
  if (!made) {
    return Status(made.status().code(),
                  formatted("waiting for the cluster key that the first agent makes: {}", made.status().what()));
  }
  auto key = Key::from_text(text_of(*made));
  OPENSSL_cleanse(made->data(), made->size());
  if (!key) return key.status();
  return ClusterKey{std::move(*key), false};
}

}  // namespace tensorferry
