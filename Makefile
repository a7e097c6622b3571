# The commands of the project. Each sets up what it needs first and is quick the second time; scripts/ holds them.
#   make test TORCH=2.11     on another torch, in .venv-2.11 and build/torch-2.11
#   make test PYTHON=python3.12     make .venv with another interpreter
export TORCH PYTHON

.PHONY: help demo test test-torch-rpc test-torch-rpc-gpu test-torch-c10d bench wheel docs format lint soak test-rdma bench-rdma test-gpu bench-gpu sanitize-gpu fuzz asan tsan models nightly clean

help:
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: ## train a model through a parameter server, then measure us beside torch.distributed.rpc
	@scripts/demo.sh
test: ## build and run all tests
	@scripts/test.sh
test-torch-rpc: ## PyTorch's own RPC suite on TensorFerry's backend, without a GPU
	@scripts/test-torch-rpc.sh $(ARGS)
test-torch-rpc-gpu: ## those of its tests that need a GPU
	@scripts/test-torch-rpc.sh gpu $(ARGS)
test-torch-c10d: ## PyTorch's own suite of torch.distributed on our backend of it
	@scripts/test-torch-c10d.sh $(ARGS)
bench: ## every benchmark beside its peer; ARGS="--quick" and others are passed on
	@scripts/bench.sh $(ARGS)
wheel: ## in dist: the package for the torch of .venv, and tensorferry-core; checked, and run in bare environments
	@scripts/wheel.sh
docs: ## the documentation's site, in docs/_build/html
	@scripts/docs.sh
format: ## format C++ and Python in place
	@scripts/format.sh
lint: ## check format, clang-tidy, ruff, mypy
	@scripts/lint.sh
asan tsan: ## the torch-free tests under sanitizers
	@scripts/sanitize.sh $@
fuzz: ## every fuzzer for 30 seconds
	@scripts/fuzz.sh
models: ## check the models of what several processes do to shared memory
	@scripts/models.sh
nightly: ## all that CI checks, with nothing left out: hours
	@scripts/nightly.sh $(ARGS)
soak: ## the long tests
	@scripts/soak.sh
test-rdma: ## the tests that need an RDMA card or the kernel's TLS, in a virtual machine that has both
	@scripts/test-rdma.sh
test-gpu: ## the tests that need a GPU, on a machine that has one
	@scripts/test-gpu.sh
sanitize-gpu: ## the tests of streams and reused memory, under compute-sanitizer
	@scripts/sanitize-gpu.sh
bench-gpu: ## tensors on GPUs beside torch.distributed.rpc, NCCL and bare copies
	@scripts/bench-gpu.sh $(ARGS)
bench-rdma: ## tensors by RDMA beside perftest, in that virtual machine
	@scripts/bench-rdma.sh $(ARGS)
clean: ## remove what was built; .venv stays
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
