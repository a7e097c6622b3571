/// Certificates that a test makes: authorities, and what they issue, as PEM files in a folder of the test's own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

namespace tensorferry::testing {

/// A folder that ends with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> made{0};
    path_ = ::testing::TempDir() + "tensorferry-tls-" + std::to_string(::getpid()) + "-" + std::to_string(made++);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A certificate authority. It writes its certificate to FOLDER/NAME.pem.
class Authority {
 public:
  Authority(std::string folder, const std::string& name)
      : folder_(std::move(folder)), file_(folder_ + "/" + name + ".pem"), key_(new_key()) {
    certificate_ = certificate_of(name, key_.get(), 3600);
    add(*certificate_, NID_basic_constraints, "critical,CA:TRUE");
    sign(*certificate_);
    write(file_, [&](FILE* to) { return PEM_write_X509(to, certificate_.get()); });
  }

  /// Issues a certificate that is valid from an hour ago until so many seconds from now, writes FOLDER/NAME.crt and
  /// FOLDER/NAME.key, and returns the option `tls` with these files and this authority.
  [[nodiscard]] std::string issue(const std::string& name, long seconds = 3600) const {
    const auto key = new_key();
    const auto certificate = certificate_of(name, key.get(), seconds);
    X509_set_issuer_name(certificate.get(), X509_get_subject_name(certificate_.get()));
    sign(*certificate);
    const auto base = folder_ + "/" + name;
    write(base + ".crt", [&](FILE* to) { return PEM_write_X509(to, certificate.get()); });
    write(base + ".key",
          [&](FILE* to) { return PEM_write_PrivateKey(to, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
    return option(base);
  }
  /// Returns the option with the files of that base name, and this authority.
  [[nodiscard]] std::string option(const std::string& base) const {
    return "certificate=" + base + ".crt,private_key=" + base + ".key,ca=" + file_;
  }
  [[nodiscard]] const std::string& file() const { return file_; }

 private:
  struct Free {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(X509* certificate) const { X509_free(certificate); }
  };
  using KeyPair = std::unique_ptr<EVP_PKEY, Free>;
  using Certificate = std::unique_ptr<X509, Free>;

  static KeyPair new_key() { return KeyPair(EVP_EC_gen("P-256")); }
  static Certificate certificate_of(const std::string& name, EVP_PKEY* key, long seconds) {
    static std::atomic<long> serial{1};
    Certificate certificate(X509_new());
    auto* const raw = certificate.get();
    X509_set_version(raw, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(raw), serial++);
    X509_gmtime_adj(X509_getm_notBefore(raw), -3600);
    X509_gmtime_adj(X509_getm_notAfter(raw), seconds);
    X509_set_pubkey(raw, key);
    auto* const subject = X509_get_subject_name(raw);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(name.c_str()), -1,
                               -1, 0);
    X509_set_issuer_name(raw, subject);
    return certificate;
  }
  static void add(X509& certificate, int extension, const char* value) {
    auto* const made = X509V3_EXT_conf_nid(nullptr, nullptr, extension, value);
    X509_add_ext(&certificate, made, -1);
    X509_EXTENSION_free(made);
  }
  void sign(X509& certificate) const { EXPECT_NE(X509_sign(&certificate, key_.get(), EVP_sha256()), 0); }
  template <class Write>
  static void write(const std::string& path, Write content) {
    const int made = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    FILE* const file = ::fdopen(made, "w");
    ASSERT_NE(file, nullptr) << path;
    EXPECT_EQ(content(file), 1);
    std::fclose(file);
  }

  const std::string folder_, file_;
  const KeyPair key_;
  Certificate certificate_;
};

}  // namespace tensorferry::testing
