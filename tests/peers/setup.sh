#!/usr/bin/env bash
# An environment for the peers, apart from quantkit's own: setup.sh FOLDER
# GPTQModel asks for a newer torch than it needs: its requirements are installed with torch held, itself without them.
set -euo pipefail
venv=$1
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip"
$pip install --quiet setuptools wheel ninja packaging
$pip install --quiet torch==2.13.0
$pip install --quiet torch==2.13.0 transformers==5.24.0 optimum==2.3.0 'accelerate>=1.15' 'threadpoolctl>=3.7' 'device-smi>=0.5.7' \
  'protobuf>=7.36' 'pillow>=12.3' 'pypcre>=0.6.4' 'tokenicer>=0.0.14' 'logbar>=0.4.15' 'maturin>=1.15' 'datasets>=5.1' 'dill>=0.4.1' 'defuser>=0.0.28'
$pip install --quiet --no-deps torchao==0.18.0
BUILD_CUDA_EXT=0 $pip install --quiet --no-deps --no-build-isolation gptqmodel==7.7.0
# Compiled from source, which takes a compiler, cmake and a quarter of an hour.
$pip install --quiet llama-cpp-python==0.3.36
touch "$venv/.ready"
