# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Linear + GELU + softmax, as PyTorch writes it and as one fused head."""

import torch
from torch import nn

import kokkossoftmax as ks

FULL = {"rows": 1024, "in_features": 8192, "out_features": 8192}
SMALL = {"rows": 64, "in_features": 512, "out_features": 1000}


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = nn.functional.gelu(x)
        return nn.functional.softmax(x, dim=1)


class ModelNew(nn.Module):
    """Forward alone: the result carries no gradient. Multiplies in TF32 where PyTorch is allowed to."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = ks.bias(self.linear.bias) | ks.gelu()
        return ks.linear_softmax(x, self.linear.weight, head, tf32=torch.backends.cuda.matmul.allow_tf32)


def get_init_inputs(size=FULL):
    return [size["in_features"], size["out_features"]]


def get_inputs(size=FULL, device="cpu"):
    return [torch.rand(size["rows"], size["in_features"], device=device)]
