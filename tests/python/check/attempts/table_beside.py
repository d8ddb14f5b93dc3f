# SPDX-License-Identifier: MIT
"""Attempts with something beside attention, and what is wrong beside it.

The loops of oracle.py have neither norms nor blocks of keys.
"""

from attempts.table import attempts

RIGHT = [
    *attempts(
        "right_beside",
        """PostNorm
        PreNorm
        PreNormOfQueries
        RmsFirst
        AnnotatedSublayer
        NormThenResidual
        NormAlone
        QueriesAndKeysNormed
        NormedBeforeTheyAreSplit
        NormedWithoutParameters
        NormalisedBeforeTheOutput
        SharedByTheHeads
        Rotary
        RotaryInPairs
        RectifiedProjections
        RectifiedAndNormed
        rounded_attention
        LearnedTemperature
        FusedFeatureByFeature
        RelativePositions
        ScaledShortcut
        ScaledFeatureByFeature
        GatedOutput
        ResidualInside
        ResidualInPlace
        OfPixelsNormedByGroup
        StridedInAndOut
        scaled_where_asked
        ScaledWhereAsked""",
    ),
    *attempts(
        "places",
        """FoldedHeadsFirst
        EachHeadDropsItsResult
        DropsResultsAndOutput
        DropsWeightsAndResults
        ReturnsKeysAndValues
        dot_attention
        cached
        windowed""",
    ),
    *attempts(
        "capped",
        """SoftlyCapped
        CappedTightly
        ScoresInFloat
        LearnedSinks
        SoftmaxPlusOne
        Alibi
        AlibiOfTheKeys
        AlibiFused
        AlibiOfTokens
        AlibiRises
        LaterKeysFavoured
        DistancePenalty
        AlibiOfSomeHeads
        AlibiClipped
        CausalWithLengths
        CappedFarOff
        ReluOfTheSum
        PaddedPairs
        StackedWeights""",
    ),
    *attempts(
        "rotary",
        """Turned
        TurnedBackwards
        TurnedInPart
        ScaledAndTurned
        TurnedBySums
        TurnedForOneKey
        OfOneHead
        TablesOfItems
        TablesBesideHeads
        ValuesTurnedToo""",
    ),
    *attempts(
        "cuts",
        """HeadByHead
        HeadByHeadNormedAndTurned
        HeadByHeadNormed
        HeadsLast
        NormsNamedInShort
        NormsThatAreNumbered
        PairsLaidInHalves""",
    ),
]

WRONG = [
    *attempts(
        "wrong_beside",
        """CausalSelfAttention: causal_without_effect
        TriangleKept: causal_without_effect
        TriangleThrownAway: causal_without_effect
        FusedViewedStraight: fused_view_without_permute
        FusedWithoutPermute: fused_view_without_permute
        KeysTiled: groups_tiled
        ValuesTiled: groups_tiled
        QueryMatrixByItsData: weights_without_gradient
        MatricesDetached: weights_without_gradient
        OutputAlwaysDropped: dropout_left_on
        ItemsReadAsHeads: merge_of_batch_and_heads
        LastHeadCleared: head_left_out
        online_never_corrected: online_softmax_not_corrected
        online_values_not_corrected: online_softmax_not_corrected
        online_small_blocks: online_softmax_not_corrected
        online_whole_blocks_only: last_block_left_out
        online_filled_up: last_block_filled_up
        WindowTooLong: window_off_by_one
        WindowAhead: window_on_wrong_side
        WindowAheadAndAllBefore: window_on_wrong_side
        WindowForgotten: window_ignored
        UnscaledAndNormed: scale_missing
        ScaledByEmbeddingBehindANorm: scale_by_embed_dim""",
    ),
    *attempts(
        "places",
        """DropsResultsAndSeesTheNext: causal_one_too_far
        NeverDropsAsConfigured: dropout_missing
        DropsResultsAndAlwaysTheOutput: dropout_left_on
        dot_product_attention: scale_missing
        cached_from_the_first: causal_top_left
        windowed_by_one_more: window_off_by_one
        AnyMaskMakesItCausal: mask_taken_for_causal
        FirstHeadEverywhere: one_head_for_all
        ViewedInAndOutUnscaled: heads_not_transposed+scale_missing
        OneHeadOfFullWidth: heads_not_split""",
    ),
    *attempts(
        "capped",
        """CappedUnscaled: scale_missing
        CappedUnsplit: heads_not_transposed
        CappedOnceMasked: mask_sentinel_leaks
        PaddedPairsInverted: padding_inverted
        PaddedToPadded: padding_ignored
        SinksUnscaled: scale_missing
        FirstKeyLeftOut: sink_weight_kept
        AlibiUnscaled: scale_missing
        AlibiUnsplit: heads_not_transposed
        ReluOfTheSumUnsplit: heads_not_transposed""",
    ),
    *attempts(
        "rotary",
        """RotatedQueriesOnly: rotary_misapplied
        ValuesTurnedForKeys: rotary_misapplied
        KeysTurnedBackwards: rotary_misapplied
        TablesOfOtherPairs: rotary_misapplied
        TablesOfOtherHalves: rotary_misapplied
        OneSumTurnedBackwards: rotary_misapplied
        TurnedAndUnscaled: scale_missing""",
    ),
    *attempts(
        "cuts",
        """ViewedAndNormed: heads_not_transposed
        HeadByHeadUnscaled: scale_missing
        HeadByHeadJoinedStraight: merge_not_transposed""",
    ),
    *attempts(
        "wrong_sums",
        """ScoresOfSums: scores_summed_apart
        ValuesOfSums: values_summed_apart
        OneLetterForBothLengths: own_value_only
        SummedOverTheQueries: own_value_only
        WeightsSummedApart: own_value_only
        ValuesOfTheQueries: own_value_only
        DividedOnceMasked: scale_of_another_number
        PaddedQueries: padding_on_queries
        DetachedWhereMasked: gradient_detached
        ScoresRoundedDown: scores_floored""",
    ),
]
