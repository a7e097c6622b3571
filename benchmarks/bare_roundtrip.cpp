/// The floor: 64 bytes there and 64 bytes back between two processes by blocking reads and writes, and nothing else.
/// No RPC over the same kind of socket can be faster than this.

#include "benchmarks/samples.h"
#include "benchmarks/socket_ends.h"

namespace tensorferry::benchmarks {
namespace {

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix", "tcp"});
  return bounce(64, arguments);
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
