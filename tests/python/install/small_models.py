# SPDX-License-Identifier: MIT
"""Small random models of transformers, what to feed them, and their attention in
float64: the implementation "exact"."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip(
    "transformers",
    minversion="5.23",
    reason="transformers is absent (requirements/models.txt)",
)

VOCABULARY = 97
# In the names that most models share.
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = SHAPE | dict(num_key_value_heads=2, head_dim=16)
# A window that is shorter than the inputs and leaves its mark.
WINDOW = 6


@dataclass(frozen=True)
class Family:
    """One architecture: its configuration, its model, and one batch of inputs."""

    config: Callable[..., Any]
    model: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    generates: bool = False
    refuses_sdpa: bool = False


def decoder_inputs() -> dict[str, Tensor]:
    """Tokens (2, 12), the first sequence padded on the left."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    return {"input_ids": tokens(2, 12), "attention_mask": mask}


def encoder_inputs() -> dict[str, Tensor]:
    """Tokens (2, 12), the first sequence padded on the right."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    return {"input_ids": tokens(2, 12), "attention_mask": mask}


def t5_inputs() -> dict[str, Tensor]:
    return encoder_inputs() | {"decoder_input_ids": tokens(2, 5)}


def whisper_inputs() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(2, 8, 32),
        "decoder_input_ids": tokens(2, 5),
    }


def vit_inputs() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


FAMILIES = {
    "llama": Family(
        transformers.LlamaConfig, "LlamaForCausalLM", GROUPED, decoder_inputs, True
    ),
    "mistral": Family(
        transformers.MistralConfig,
        "MistralForCausalLM",
        GROUPED | dict(sliding_window=WINDOW),
        decoder_inputs,
        True,
    ),
    "gemma2": Family(
        transformers.Gemma2Config,
        "Gemma2ForCausalLM",
        GROUPED
        | dict(
            sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
        ),
        decoder_inputs,
        True,
        refuses_sdpa=True,
    ),
    "gpt2": Family(
        transformers.GPT2Config,
        "GPT2LMHeadModel",
        dict(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        ),
        decoder_inputs,
        True,
    ),
    "bert": Family(
        transformers.BertConfig,
        "BertForMaskedLM",
        SHAPE | dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0),
        encoder_inputs,
    ),
    "vit": Family(
        transformers.ViTConfig,
        "ViTForImageClassification",
        {
            name: SHAPE[name]
            for name in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
            )
        }
        | dict(image_size=32, patch_size=8, num_labels=10),
        vit_inputs,
    ),
    "t5": Family(
        transformers.T5Config,
        "T5ForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        t5_inputs,
        True,
    ),
    "whisper": Family(
        transformers.WhisperConfig,
        "WhisperForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        whisper_inputs,
        True,
    ),
    "gpt-oss": Family(
        transformers.GptOssConfig,
        "GptOssForCausalLM",
        GROUPED
        | dict(sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
        decoder_inputs,
        True,
        refuses_sdpa=True,
    ),
    "modernbert": Family(
        transformers.ModernBertConfig,
        "ModernBertForMaskedLM",
        SHAPE | dict(num_hidden_layers=4, local_attention=WINDOW),
        encoder_inputs,
    ),
}
GENERATING = [name for name, family in FAMILIES.items() if family.generates]


def make(name: str, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, eager and in eval mode, and its inputs: the same at every call."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    config = family.config(**family.settings | settings)
    model = getattr(transformers, family.model)._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than usual, so that attention is far from uniform; sinks too.
            if parameter.dim() > 1 or parameter.shape == (4,):
                parameter.normal_(std=0.15)
    return model.eval(), family.inputs()


def logits_of(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What the model says of each token that is none of padding, (N, classes)."""
    logits = model(**inputs, **options).logits
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != logits.shape[:2]:
        return logits.flatten(0, -2)
    return logits[mask.bool()]


# ---- Attention in float64 ---------------------------------------------------


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """By the book, without dropout, rounded once at the end. attention_mask is bool."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias.double()
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -1e300)
    if s_aux is not None:
        sinks = s_aux.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    out = (weights @ v).to(query.dtype).transpose(1, 2).contiguous()
    return out, weights.to(query.dtype)


def exact_mask(**arguments: Any) -> Tensor:
    arguments |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return transformers.masking_utils.sdpa_mask(**arguments)


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", exact_mask)
