# SPDX-License-Identifier: MIT
"""Attempts of unusual shapes, as classes and as what somebody has built from them.

The loops of oracle.py do not have their sizes. Right and wrong differ by one method.
"""

from attempts.table import attempts

RIGHT = [
    *attempts(
        "unusual_widths",
        """MultiHeadAttention
        small
        wide
        wide_biased
        SelfAttentionV1
        CausalAttention
        MultiHeadAttentionWrapper
        self_attention
        causal_attention
        wrapper
        GeneralForm
        general
        general_of_three_heads
        general_of_wide_values""",
    ),
    *attempts(
        "unusual_weights",
        """WeightNormed
        WeightNormedByHook
        SpectrallyNormed
        weight_normed
        weight_normed_by_hook
        PlainTensors
        plain_tensors
        NumpyAttention
        numpy_attention
        NumpyOfOneSequence
        numpy_of_one_sequence
        PartsOfOneParameter
        HeadsOfOneParameter
        heads_of_one_parameter
        HeadsInTheWeights
        ByConvolutions
        by_convolutions
        OfPixels
        of_pixels
        params_attention
        params_of_three
        NumberedProjections
        NamesThatMislead
        native_dropout""",
    ),
]

WRONG = [
    *attempts(
        "unusual_widths",
        """Unscaled: scale_missing
        ScaledByAllHeads: scale_by_embed_dim
        ViewedStraightToHeads: heads_not_transposed
        wide_unscaled: scale_missing
        wide_scaled_by_all_heads: scale_by_all_heads
        wide_viewed_straight: heads_not_transposed
        SelfAttentionV1Unscaled: scale_missing
        self_attention_unscaled: scale_missing
        GeneralUnscaled: scale_missing
        GeneralJoinedStraight: merge_not_transposed
        general_unscaled: scale_missing
        general_scaled_by_values: scale_by_value_width
        general_joined_straight: merge_not_transposed
        general_viewed_straight: heads_not_transposed""",
    ),
    *attempts(
        "unusual_widths",
        """OneTokenAhead: causal_one_too_far
        wide_one_token_ahead: causal_one_too_far""",
        causal=True,
    ),
    *attempts(
        "unusual_weights",
        """WeightNormedUnscaled: scale_missing
        WeightNormedByHookUnscaled: scale_missing
        WeightNormedViewedStraight: heads_not_transposed
        weight_normed_by_hook_unscaled: scale_missing
        weight_normed_viewed_straight: heads_not_transposed
        PlainViewedStraight: heads_not_transposed
        PlainWithoutQueryBias: query_bias_forgotten
        plain_viewed_straight: heads_not_transposed
        NumpyUnscaled: scale_missing
        NumpyReshapedStraight: heads_not_transposed
        numpy_unscaled: scale_missing
        HeadsOfOneParameterUnscaled: scale_missing
        heads_of_one_parameter_unscaled: scale_missing
        ByConvolutionsUnscaled: scale_missing
        by_convolutions_unscaled: scale_missing
        params_unscaled: scale_missing
        params_viewed_straight: heads_not_transposed
        TransposedInside: scale_missing+sigmoid_instead_of_softmax""",
    ),
]
