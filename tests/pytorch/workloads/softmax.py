# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Softmax along dimension 1 of long rows, as PyTorch writes it and with kokkossoftmax."""

import torch
from torch import nn

import kokkossoftmax as ks

FULL = {"rows": 4096, "columns": 393216}
SMALL = {"rows": 24, "columns": 39321}


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=1)


class ModelNew(nn.Module):
    """Forward alone: the result carries no gradient."""

    def __init__(self):
        super().__init__()

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ks.softmax(x, dim=1)


def get_init_inputs(size=FULL):
    return []


def get_inputs(size=FULL, device="cpu"):
    return [torch.rand(size["rows"], size["columns"], device=device)]
