// In place of openssl.cpp if there is no static libcrypto: the library is linked to OpenSSL, and needs it on the
// machine.
#include "rpc/c/openssl.h"

namespace tensorferry::c {

std::string load_openssl() { return {}; }

}  // namespace tensorferry::c
