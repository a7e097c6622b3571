#!/usr/bin/env bash
# Makes .venv-peers with the libraries of scripts/requirements/peers.txt, for make bench ARGS=--peers. A library that
# cannot be installed here is named, and the others are installed: the benchmark leaves its rows out with the reason.
. "$(dirname "$0")/common.sh"
list=scripts/requirements/peers.txt
folder=$PWD/.venv-peers
key=$(sha256sum <"$list")
[ "$(cat "$folder/.installed" 2>/dev/null)" = "$key" ] && exit

[ -x "$folder/bin/python" ] || "$venv/bin/python" -m venv "$folder"
# Monarch carries torch's tensors: it finds the torch of the other environment, behind its own packages.
packages='import site; print(site.getsitepackages()[0])'
"$venv/bin/python" -c "$packages" >"$("$folder/bin/python" -c "$packages")/torch.pth"
say "installing $list into ${folder##*/}"
while read -r requirement; do
  case $requirement in '' | '#'*) continue ;; esac
  "$folder/bin/python" -m pip install -q --disable-pip-version-check "$requirement" </dev/null || say "left out: $requirement"
done <"$list"
echo "$key" >"$folder/.installed"
