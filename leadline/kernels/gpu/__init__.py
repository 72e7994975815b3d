"""The Triton side of `leadline.kernels`: one file per operation, imported when its first GPU tensor comes.

A function here has the name, the arguments and the result of the definition in `leadline/kernels/<operation>.py`,
which calls it for tensors on a GPU. An installation for the CPU needs no Triton.
"""
