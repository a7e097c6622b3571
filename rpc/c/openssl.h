/// OpenSSL of the machine, loaded when an agent asks for TLS, so that the library runs without it.
#pragma once

#include <string>

namespace tensorferry::c {

/// Loads libssl.so.3 with all functions that TLS uses. Returns "", or why it cannot. Must have returned "" before TLS
/// is used. Thread-safe.
std::string load_openssl();

}  // namespace tensorferry::c
