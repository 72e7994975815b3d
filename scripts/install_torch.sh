#!/bin/sh
# Install PyTorch into the environment of the Python given as the first argument, unless it is there already.
#
# On Linux without an NVIDIA GPU PyPI's build would bring gigabytes of CUDA libraries, so a CPU build is taken: from a
# wheel that pip's configuration finds on this machine's disk, else from PyTorch's own index. With a GPU, and on other
# systems, PyPI's build is the right one.
set -eu

python=$1
torch='torch>=2.9'

if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    exit 0
fi

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

if [ "$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
    echo "Installing PyTorch for the CPU"
    pip_install --no-index --no-deps "$torch" 2>/dev/null && exit 0
    pip_install --index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 0 --no-deps "$torch" \
        2>/dev/null && exit 0
    echo "PyTorch's CPU index cannot be reached: installing the build from PyPI"
else
    echo "Installing PyTorch"
fi
pip_install "$torch"
