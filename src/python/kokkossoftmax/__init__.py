# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Softmax, log-softmax, logsumexp and fused classification heads, on the CPU and on CUDA.

    import kokkossoftmax as ks

    y = ks.softmax(x)                                          # x: PyTorch, NumPy, CuPy, JAX, ...
    y = ks.softmax(x, dim=0, transform=ks.scale(0.125) | ks.causal(), out=y)
    y = ks.linear_softmax(x, weight, ks.bias(b) | ks.gelu())   # softmax(gelu(x @ weight.T + b))

No compiled extension: ctypes over the C library, which KOKKOSSOFTMAX_LIBRARY may name.
"""

from ._calls import (
    PackedWeight,
    forget_stream,
    has_backend,
    has_linear,
    last_implementation,
    linear_log_softmax,
    linear_softmax,
    log_softmax,
    logsumexp,
    reserve,
    softmax,
    version,
)
from ._transforms import (
    Transform,
    batch_norm,
    batch_norm_training,
    bias,
    causal,
    gelu,
    gelu_tanh,
    mask,
    relu,
    scale,
    temperature,
)

__all__ = [
    "PackedWeight",
    "Transform",
    "batch_norm",
    "batch_norm_training",
    "bias",
    "causal",
    "forget_stream",
    "gelu",
    "gelu_tanh",
    "has_backend",
    "has_linear",
    "last_implementation",
    "linear_log_softmax",
    "linear_softmax",
    "log_softmax",
    "logsumexp",
    "mask",
    "relu",
    "reserve",
    "scale",
    "softmax",
    "temperature",
    "version",
]
