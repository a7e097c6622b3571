/// The calls of cpp_typed by gRPC's C++ library: its synchronous server and stub, over a unix socket.

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "benchmarks/samples.h"
#include "echo.grpc.pb.h"

namespace tensorferry::benchmarks {
namespace {

class Service final : public Echo::Service {
  grpc::Status Call(grpc::ServerContext* /*context*/, const Payload* request, Payload* response) override {
    response->set_data(request->data());
    return grpc::Status::OK;
  }
};

std::string address_of(pid_t parent) { return "unix-abstract:tensorferry-grpc-" + std::to_string(parent); }

void serve(int socket, const SampleArguments& arguments) {
  pin(arguments.callee_cpu);
  Service service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address_of(getppid()), grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  char byte = server ? 1 : 0;
  if (write(socket, &byte, 1) != 1) return;
  while (read(socket, &byte, 1) > 0) {
  }
  server->Shutdown();
}

int call(int socket, const SampleArguments& arguments) {
  pin(arguments.caller_cpu);
  char serving = 0;
  if (read(socket, &serving, 1) != 1 || serving != 1) return std::fprintf(stderr, "the server did not start\n"), 1;
  grpc::ChannelArguments options;
  options.SetMaxReceiveMessageSize(-1);
  const auto channel = grpc::CreateCustomChannel(address_of(getpid()), grpc::InsecureChannelCredentials(), options);
  const auto stub = Echo::NewStub(channel);
  Payload request;
  if (arguments.kind == "text") request.set_data(std::string(64, 'x'));
  if (arguments.kind == "tensor") request.set_data(std::string(arguments.bytes, 'x'));
  const auto once = [&] {
    grpc::ClientContext context;
    Payload response;
    if (const auto status = stub->Call(&context, request, &response); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.error_message().c_str());
      std::exit(1);
    }
  };
  once();
  print(arguments.callers == 1 ? repeat(once, arguments.seconds)
                               : repeat_at_once(once, arguments.callers, arguments.seconds));
  return 0;
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix"});
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return std::perror("socketpair"), 1;
  const pid_t child = fork();  // before gRPC has a thread
  if (child < 0) return std::perror("fork"), 1;
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[1]);
    serve(ends[0], arguments);
    return 0;
  }
  close(ends[0]);
  const int failed = call(ends[1], arguments);
  close(ends[1]);
  waitpid(child, nullptr, 0);
  return failed;
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
