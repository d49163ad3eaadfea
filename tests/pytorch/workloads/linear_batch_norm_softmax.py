# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Linear + BatchNorm1d + scale + softmax, as PyTorch writes it and as one fused head."""

import torch
from torch import nn

import kokkossoftmax as ks

FULL = {"rows": 1024, "in_features": 8192, "out_features": 8192}
SMALL = {"rows": 64, "in_features": 512, "out_features": 1000}


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, bn_eps=1e-5, bn_momentum=0.1, scale_shape=(1,)):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = self.bn(x)
        x = self.scale * x
        return nn.functional.softmax(x, dim=1)


class ModelNew(nn.Module):
    """Forward alone: the result carries no gradient. In training mode the statistics are those of the batch, and the
    running ones move, as BatchNorm1d's do. Multiplies in TF32 where PyTorch is allowed to."""

    def __init__(self, in_features: int, out_features: int, bn_eps=1e-5, bn_momentum=0.1, scale_shape=(1,)):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bn = self.bn
        # The scale lies on the device and is not read back: scale (gamma z + beta) = (scale gamma) z + scale beta.
        gamma, beta = self.scale * bn.weight, self.scale * bn.bias
        if bn.training:
            bn.num_batches_tracked.add_(1)
            norm = ks.batch_norm_training(gamma, beta, bn.eps, bn.running_mean, bn.running_var, bn.momentum)
        else:
            norm = ks.batch_norm(bn.running_mean, bn.running_var, gamma, beta, bn.eps)
        head = ks.bias(self.linear.bias) | norm
        return ks.linear_softmax(x, self.linear.weight, head, tf32=torch.backends.cuda.matmul.allow_tf32)


def get_init_inputs(size=FULL):
    return [size["in_features"], size["out_features"]]


def get_inputs(size=FULL, device="cpu"):
    return [torch.rand(size["rows"], size["in_features"], device=device)]
