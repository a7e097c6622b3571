#include "agent/transport/cluster_key.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "agent/transport/secret_file.h"
#include "base/environment.h"
#include "base/text.h"

namespace tensorferry {
namespace {

void wipe(std::span<std::byte> secret) noexcept {
  if (!secret.empty()) OPENSSL_cleanse(secret.data(), secret.size());
}

}  // namespace

// ---- Key

Key::~Key() { wipe(bytes_); }

Result<Key> Key::from_text(std::string_view text) {
  constexpr std::string_view blank = " \t\r\n\v\f";
  const auto from = text.find_first_not_of(blank);
  text =
      from == std::string_view::npos ? std::string_view{} : text.substr(from, text.find_last_not_of(blank) + 1 - from);
  if (text.size() < least_bytes || text.size() > most_bytes) {
    return Status(Code::invalid_argument, formatted("a cluster key has {} to {} bytes, this one {}. {}", least_bytes,
                                                    most_bytes, text.size(), how_to_set_a_key()));
  }
  const auto bytes = view_of(text);
  return Key(Bytes(bytes.begin(), bytes.end()));
}

Result<Key> Key::from_file(const std::string& path) {
  const auto failed = [&path](Code code, std::string_view why) {
    return Status(code, formatted("cluster key file {}: {}", path, why));
  };
  const auto file = open_secret_file(path, SecretReaders::none);
  if (!file.ok()) return failed(file.status().code(), file.status().what());
  Bytes bytes(most_bytes + 1);
  std::size_t size = 0;
  while (size < bytes.size()) {
    const auto got = ::read(file->get(), bytes.data() + size, bytes.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(Code::internal, std::strerror(errno));
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  auto key = from_text(text_of(ByteView(bytes).first(size)));
  wipe(bytes);
  if (!key) return failed(key.status().code(), key.status().what());
  return key;
}

Result<Key> Key::load(std::string_view option) {
  if (!option.empty()) return from_text(option);
  if (const auto path = environment::key_file.value(); !path.empty()) return from_file(std::string(path));
  if (const auto text = environment::key.value(); !text.empty()) {
    auto key = from_text(text);
    if (!key) return Status(key.status().code(), formatted("TENSORFERRY_KEY: {}", key.status().what()));
    return key;
  }
  return Key();
}

Key Key::random() {
  Bytes bytes(32);
  fill_random(bytes);
  return Key(std::move(bytes));
}

std::string_view how_to_set_a_key() noexcept {
  return "Give every host the same file, made once: export TENSORFERRY_KEY_FILE=~/.tensorferry.key; "
         "(umask 077; head -c 32 /dev/urandom | base64 > $TENSORFERRY_KEY_FILE)";
}

// ---- Signatures

Digest hmac(const Key& key, ByteView bytes) {
  static_assert(sizeof(Digest) == 32);
  Digest digest{};
  unsigned int length = 0;
  const auto secret = key.bytes();
  const auto* done = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                          reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                          reinterpret_cast<unsigned char*>(digest.data()), &length);
  // HMAC fails without memory, or if a FIPS policy forbids the key. A digest of zeros must never pass for a proof.
  if (done == nullptr || length != digest.size()) std::abort();
  return digest;
}

bool equal_in_constant_time(ByteView a, ByteView b) noexcept {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void fill_random(std::span<std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const auto got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (errno != EINTR) {
      ::dprintf(STDERR_FILENO, "tensorferry: the kernel gives no random bytes, without which no secret is safe: %s\n",
                std::strerror(errno));
      std::abort();
    }
  }
}

Digest sign(const Key& key, std::string_view context, ByteView bytes) {
  Bytes signed_bytes;
  Writer out(signed_bytes);
  out.sized("tensorferry record 1");  // every part has its length in front, so different inputs give different bytes
  out.sized(context);
  out.sized(bytes);
  return hmac(key, signed_bytes);
}

bool verify(const Key& key, std::string_view context, ByteView bytes, ByteView signature) {
  return equal_in_constant_time(sign(key, context, bytes), signature);
}

Digest derive(const Key& key, std::string_view purpose) {
  Bytes label;
  Writer out(label);
  out.sized("tensorferry derived key 1");
  out.sized(purpose);
  return hmac(key, label);
}

}  // namespace tensorferry
