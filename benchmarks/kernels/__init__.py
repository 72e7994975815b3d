"""One table of times per operation. Run as modules, `python -m benchmarks.kernels.project`: as a script, a file of this
folder would put `select.py` in front of Python's own `select`."""
