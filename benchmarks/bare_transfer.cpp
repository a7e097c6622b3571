/// The floor of tensors over sockets: `bytes` bytes there and as many back between two processes, by blocking writes
/// and reads of whole tensors, from and into memory that both have touched before. No RPC over one socket of that kind
/// can be faster than this, unless it copies less.

#include "benchmarks/samples.h"
#include "benchmarks/socket_ends.h"

namespace tensorferry::benchmarks {
namespace {

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix", "tcp"});
  if (arguments.bytes == 0) usage(argv[0]);
  return bounce(arguments.bytes, arguments);
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
