"""Reference depthwise causal convolution with SiLU over a mixed batch.

The last W - 1 inputs of a sequence are its state: a chunk starts from them and leaves its own behind.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram_kernels.metadata import StepMetadata


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, meta: StepMetadata) -> Tensor:
    """x [T, C], weight [C, W], bias [C] or None -> silu(conv(x)) [T, C] in x's dtype.

    conv_state [slots, C, W - 1] (a view of one layer is fine) is read where `has_state` is set, taken as zeros where
    it is not, and written at `written_slots`; other slots do not change.
    """
    window = torch.where(meta.has_state[:, None, None], conv_state[meta.state_slots], 0.0).to(x.dtype)
    taps, bias_fp32 = weight.float(), None if bias is None else bias.float()
    keep = weight.shape[1] - 1
    decodes = meta.decode_tokens
    pieces, tails = [], []
    if decodes:
        inputs = torch.cat((window[:decodes], x[:decodes, :, None]), dim=-1)
        y = (inputs.float() * taps).sum(-1)
        pieces.append(y if bias_fp32 is None else y + bias_fp32)
        tails.append(inputs[:, :, 1:])
    start = decodes
    for sequence in range(decodes, meta.num_sequences):
        end = start + meta.query_lens_host[sequence]
        inputs = torch.cat((window[sequence], x[start:end].T), dim=-1)
        y = F.conv1d(inputs[None].float(), taps[:, None], bias_fp32, groups=inputs.shape[0])
        pieces.append(y[0].T)
        tails.append(inputs[None, :, inputs.shape[1] - keep :])
        start = end
    if not pieces:
        return torch.empty_like(x)
    conv_state[meta.written_slots] = torch.cat(tails).to(conv_state.dtype)
    return F.silu(torch.cat(pieces)).to(x.dtype)
