# SPDX-License-Identifier: MIT
"""Blocks of T5, which scales no scores, and adds masks and a bias of positions at once."""

from test_check_blocks import Decoder, Heads

import multihead


class OfT5(Heads):
    def root(self) -> float:
        return 1.0

    def forward(self, q, k, v, mask=None, position_bias=None):
        return super().forward(q, k, v, mask)


class DecoderOfT5(Decoder):
    def __init__(self, d_model: int, num_heads: int):
        super().__init__(d_model, num_heads)
        self.self_attn = OfT5(d_model, num_heads)
        self.cross_attn = OfT5(d_model, num_heads)


def test_a_block_of_t5_is_not_accused_of_its_scale():
    report = multihead.check(DecoderOfT5)
    assert report.judgement != "wrong", str(report)
