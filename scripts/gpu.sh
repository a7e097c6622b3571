# Sourced after common.sh by scripts that need a GPU. Sets $python, an interpreter whose torch finds a GPU. Needs no
# network if python3 (or PYTHON=) already has torch.
python=${PYTHON:-python3}
if ! "$python" -c 'import torch, numpy, pytest' 2>/dev/null; then
  scripts/system.sh build
  scripts/venv.sh
  python=$venv/bin/python
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  die "no GPU that torch can use here (torch.cuda.is_available() is False): nothing was done. make test needs none."
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.device_count(), "x", torch.cuda.get_device_name(0))'
interpreter=-DPython_EXECUTABLE=$(command -v "$python")

# Builds only these targets, in build/gpu.
build_targets() {
  cmake --preset release -B build/gpu "$interpreter" >/dev/null
  cmake --build build/gpu -j "$jobs" --target "$@"
}
