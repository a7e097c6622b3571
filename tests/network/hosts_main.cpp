// Makes an emulated network for programs of any language (tests/python/network.py):
//
//   network_hosts NAME...
//
// Prints a line for each host: its name, its address, and the path of its network namespace, for `nsenter --net=PATH`.
// Then reads commands from the standard input, and answers each with "ok" or an error:
//
//   path FROM TO BITS_PER_SECOND DELAY_IN_MICROSECONDS LOSS
//   cut FROM TO | mend FROM TO
//   open NAME FIRST LAST [FIRST LAST]...    (the ports that can be dialled there)
//   reset                                   (all TCP connections)
//
// The network ends with the standard input.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/network/emulated_network.h"

namespace {

using namespace tensorferry::testing;

void obey(EmulatedNetwork& network, const std::string& line) {
  std::istringstream in(line);
  std::string command, from, to;
  in >> command;
  if (command == "path") {
    Path path;
    std::int64_t delay = 0;
    in >> from >> to >> path.bits_per_second >> delay >> path.loss;
    path.delay = std::chrono::microseconds(delay);
    network.set_path(from, to, path);
  } else if (command == "cut" || command == "mend") {
    in >> from >> to;
    network.cut(from, to, command == "cut");
  } else if (command == "open") {
    std::vector<std::pair<std::uint16_t, std::uint16_t>> ranges;
    std::uint16_t first = 0, last = 0;
    in >> from;
    while (in >> first >> last) ranges.emplace_back(first, last);
    network.open_ports(from, std::move(ranges));
  } else if (command == "reset") {
    network.reset_connections();
  } else {
    throw std::invalid_argument("no command " + line);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  if (const auto reason = cannot_emulate(); !reason.empty()) {
    std::fprintf(stderr, "%s\n", reason.c_str());
    return 77;
  }
  EmulatedNetwork network(std::vector<HostOptions>(argv + 1, argv + argc));
  for (const auto& name : network.names()) {
    std::cout << name << ' ' << network.address(name) << " /proc/" << ::getpid() << "/fd/" << network.host(name).fd()
              << std::endl;
  }
  for (std::string line; std::getline(std::cin, line);) {
    try {
      obey(network, line);
      std::cout << "ok" << std::endl;
    } catch (const std::exception& error) {
      std::cout << error.what() << std::endl;
    }
  }
}
