# SPDX-License-Identifier: MIT
"""Steps of recurrent decoders, which are handed a state, what an encoder returned, and
perhaps a token."""

import torch
from torch import nn

import multihead


def conditions(report):
    return [condition["name"] for condition in report.conditions]


class StateAttention(nn.Module):
    """hidden (B, H), encoder_outputs (L, B, 2H): weights (B, L)"""

    def __init__(self, enc_dim, dec_dim):
        super().__init__()
        self.attn = nn.Linear(2 * enc_dim + dec_dim, dec_dim)
        self.v = nn.Linear(dec_dim, 1, bias=False)

    def forward(self, hidden, encoder_outputs):
        memory = encoder_outputs.transpose(0, 1)
        hidden = hidden.unsqueeze(1).expand(-1, memory.shape[1], -1)
        energy = torch.tanh(self.attn(torch.cat((hidden, memory), -1)))
        return self.v(energy).squeeze(-1).softmax(1)


class Decoder(nn.Module):
    """One token with attention over a bidirectional encoder, time first."""

    def __init__(self, output_dim, emb_dim, enc_dim, dec_dim, attention):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.GRU(2 * enc_dim + emb_dim, dec_dim)
        self.out = nn.Linear(dec_dim, output_dim)

    def forward(self, input, hidden, encoder_outputs):
        embedded = self.embedding(input).unsqueeze(0)
        weights = self.attention(hidden, encoder_outputs).unsqueeze(1)
        context = (weights @ encoder_outputs.transpose(0, 1)).transpose(0, 1)
        out, hidden = self.rnn(torch.cat((embedded, context), -1), hidden[None])
        return self.out(out.squeeze(0)), hidden.squeeze(0)


def test_a_step_and_the_weights_that_it_is_handed():
    for kind in (StateAttention, Decoder):
        report = multihead.check(kind)
        assert report.judgement == "right_if", str(report)
        assert "scores_given" in conditions(report)


class LuongDecoder(nn.Module):
    """state = (h, c); encoder_outputs: (S, B, H)"""

    def __init__(self, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size)
        self.general = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(2 * hidden_size, output_size)

    def weights(self, scores):
        """scores (S, B)"""
        return scores.softmax(0)

    def forward(self, input_step, last_state, encoder_outputs):
        out, state = self.lstm(self.embedding(input_step), last_state)
        scores = (out * self.general(encoder_outputs)).sum(2)
        weights = self.weights(scores).t().unsqueeze(1)
        context = weights.bmm(encoder_outputs.transpose(0, 1))
        return self.out(torch.cat((out[0], context[:, 0]), 1)), state


class LuongDecoderOfBatches(LuongDecoder):
    def weights(self, scores):
        return scores.softmax(1)


def test_a_pair_of_states_and_scores_that_are_written_out():
    assert multihead.check(LuongDecoder).judgement == "right_if"
    assert multihead.check(LuongDecoderOfBatches).cause == "softmax_over_batch"


class SeveralSteps(nn.Module):
    """Is handed the state of its cell apart, and loops over words."""

    def __init__(self, hidden_size, vocab_size):
        super().__init__()
        self.energy = nn.Linear(2 * hidden_size, 1)
        self.cell = nn.LSTMCell(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, vocab_size)

    def weights(self, energy):
        return energy.softmax(1)

    def forward(self, hidden, encoder_output, cell_state):
        said = []
        for _ in range(3):
            both = hidden.unsqueeze(1).expand_as(encoder_output)
            energy = self.energy(torch.tanh(torch.cat((both, encoder_output), -1)))
            context = (self.weights(energy) * encoder_output).sum(1)
            hidden, cell_state = self.cell(context, (hidden, cell_state))
            said.append(self.out(hidden))
        return torch.stack(said, 1)


class SeveralStepsOfBatches(SeveralSteps):
    def weights(self, energy):
        return energy.softmax(0)


def test_a_loop_of_steps():
    report = multihead.check(SeveralSteps)
    assert report.judgement == "right_if", str(report)
    assert {"scores_given", "later_attentions"} <= set(conditions(report))
    assert multihead.check(SeveralStepsOfBatches).cause == "softmax_over_batch"


class Masked(nn.Module):
    """hidden (1, B, H), memory (S, B, H), mask (S, B), True = padding"""

    def __init__(self, hidden_size):
        super().__init__()
        self.key, self.query = (nn.Linear(hidden_size, hidden_size) for _ in range(2))
        self.v = nn.Linear(hidden_size, 1)

    def scores(self, scores, mask):
        return scores.masked_fill(mask, float("-inf"))

    def forward(self, hidden, memory, mask=None):
        scores = self.v(torch.tanh(self.key(memory) + self.query(hidden))).squeeze(-1)
        if mask is not None:
            scores = self.scores(scores, mask)
        return (scores.softmax(0).unsqueeze(-1) * memory).sum(0)


class MaskedInversely(Masked):
    """mask (S, B), True = padding"""

    def scores(self, scores, mask):
        return scores.masked_fill(~mask, float("-inf"))


def test_masks_in_the_order_of_the_memory():
    report = multihead.check(Masked)
    assert report.judgement == "right_if", str(report)
    assert any("mask" in case["name"] for case in report.cases)
    report = multihead.check(MaskedInversely)
    assert report.cause in ("mask_inverted", "padding_inverted"), str(report)


def luong(dec_h, enc_out):
    """dec_h: (batch, hid), enc_out: (batch, src_len, hid). Keys and values are what the
    encoder returned."""
    weights = torch.einsum("bh,bsh->bs", dec_h, enc_out).softmax(-1)
    return torch.einsum("bs,bsh->bh", weights, enc_out), weights


def test_a_memory_that_is_keys_and_values():
    report = multihead.check(luong)
    assert report.judgement == "right_if", str(report)
    assert "scores_given" not in conditions(report)


class OfAFixedWidth(nn.Module):
    """Soft attention to an image (Xu et al., 2015): its decoder is 64 wide."""

    axis = 1

    def __init__(self, encoder_dim):
        super().__init__()
        self.u, self.w = nn.Linear(64, 64), nn.Linear(encoder_dim, 64)
        self.v = nn.Linear(64, 1)

    def forward(self, img_features, hidden_state):
        both = self.w(img_features) + self.u(hidden_state).unsqueeze(1)
        weights = self.v(both.tanh()).squeeze(2).softmax(self.axis)
        return (img_features * weights.unsqueeze(2)).sum(1), weights


class OfAFixedWidthOverItems(OfAFixedWidth):
    axis = 0


def test_a_decoder_whose_width_is_written_down():
    report = multihead.check(OfAFixedWidth)
    assert report.judgement == "right_if", str(report)
    report = multihead.check(OfAFixedWidthOverItems)
    assert report.judgement == "wrong", str(report)
