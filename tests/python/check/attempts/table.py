# SPDX-License-Identifier: MIT
"""Every attempt and what a checker must say of it."""

import dataclasses
import importlib
import inspect
import pathlib

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An object of a file of this folder.

    causes: the names that are true of it; "a+b" are two faults. () = it is right.
    stages: of an unknown fault, the first stages that may be called different.
    stated: what a user says to `check`, because code alone cannot say it.
    """

    file: str
    name: str
    causes: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    stated: dict = dataclasses.field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def path(self) -> str:
        """As the command line names it."""
        return f"{FOLDER / self.file}.py:{self.name}"

    @property
    def target(self):
        return getattr(importlib.import_module(f"attempts.{self.file}"), self.name)

    def is_(self, cause: str | None) -> bool:
        """Whether `cause` is one that is true; two faults come in either order."""
        mine = {frozenset(c.split("+")) for c in self.causes}
        return cause is not None and frozenset(cause.split("+")) in mine


def _attempt(file: str, line: str, stated: dict) -> Attempt:
    """`name`, `name: cause`, `name: cause | cause` or `name: unknown at stage, ...`."""
    name, _, causes = line.partition(":")
    causes, _, stages = causes.partition(" at ")
    return Attempt(
        file,
        name.strip(),
        tuple(c.strip() for c in causes.split("|") if c.strip()),
        tuple(s.strip() for s in stages.split(",") if s.strip()),
        stated,
    )


def attempts(file: str, lines: str, **stated) -> list[Attempt]:
    return [
        _attempt(file, line, stated) for line in inspect.cleandoc(lines).split("\n")
    ]


RIGHT = [
    *attempts(
        "right_functions",
        """exercise_keep
        exercise_blocked
        exercise_bare_parameters
        exercise_random_matrices
        exercise_heads_in_a_loop
        weights_as_arguments
        numpy_multi_head_attention
        numpy_attention
        scaled_dot_product
        manual_softmax_attention
        causal_attention
        unbatched_loops""",
    ),
    *attempts("right_functions", "additive_mask_attention", mask="additive"),
    *attempts(
        "right_modules",
        """SplitAndCombine
        ClonedLinears
        SelfAttentionWithDropout
        ListOfHeads
        Aufmerksamkeit
        AtencionMultiple
        Cross
        KeyBiasLeftOut""",
    ),
    *attempts("right_modules", "SequenceFirst", batch_first=False),
    *attempts(
        "right_fused",
        """nano
        VisionAttention
        DropsTheOutput
        HeadsOutside
        TransposedFused
        OnPyTorchsFunction
        OwnsPyTorchs
        IsPyTorchs
        LikePyTorchs""",
    ),
    *attempts(
        "right_grouped",
        """grouped_query_attention
        GroupedQueryAttention
        GroupsAsAnAxis
        GroupsInPyTorch
        OneHeadForAll
        IndexedGroups
        MaskOfZerosAndInfinities""",
    ),
    *attempts(
        "right_habits",
        """ScaleOnBothSides
        EinsumWithHeadsInTheWeights
        LongRearrangements
        Vmapped
        MaskPerHead
        PaddingAndMask
        SoftmaxInFloat32
        AlwaysFloat32
        DropoutOfTheResult""",
    ),
    *attempts(
        "published",
        """multi_head_attention
        grouped_query_attention
        MultiHeadAttention
        SelfAttention""",
    ),
]

WRONG = [
    *attempts(
        "wrong_weights",
        """query_matrix_without_t: query_weight_transposed
        KeyMatrixWithoutT: key_weight_transposed
        ValueEinsumLettersSwapped: value_weight_transposed
        OutputMatrixWithoutT: output_weight_transposed
        all_matrices_without_t: all_weights_transposed
        FusedReadAsKeyQueryValue: query_key_swapped
        QueryByTheLayerOfKeys: query_key_swapped
        FusedReadAsValueKeyQuery: query_value_swapped
        ValuesFirstInThePair: key_value_swapped
        FusedReadAsValueQueryKey: projections_rotated
        OneLayerForAllThree: one_projection_for_all
        KeysByTheLayerOfQueries: query_weight_for_keys | keys_are_queries
        values_by_the_layer_of_keys: key_weight_for_values
        FourthLayerNeverCalled: output_forgotten
        FirstLayerForEveryInput: one_projection_for_all""",
    ),
    *attempts(
        "wrong_heads",
        """view_straight_to_heads: heads_not_transposed
        ReshapeInsteadOfTranspose: heads_not_transposed
        HeadsInTheLastAxis: heads_interleaved
        StridedHeads: heads_interleaved
        JoinedWithoutTranspose: merge_not_transposed
        FoldedAndNotUnfolded: merge_not_transposed
        JoinedChannelFirst: merge_interleaved
        HeadsAveraged: heads_averaged_together
        WeightsAveraged: weights_averaged
        WeightsTheWrongWayRound: weights_transposed
        transposed_attention: weights_transposed""",
    ),
    *attempts(
        "wrong_groups",
        """Repeated: groups_tiled
        ExpandedOnTheOtherSide: groups_tiled
        GroupAxisFirst: groups_tiled
        tiled_in_a_function: groups_tiled
        FirstHeadForAll: groups_truncated
        IndexClamped: groups_clamped
        ScaledByTheGroupCount: scale_by_group_count""",
    ),
    *attempts(
        "wrong_groups",
        "DividedByTheNumberOfGroups: group_size_wrong",
        embed_dim=24,
        num_heads=6,
        num_kv_heads=3,
    ),
    *attempts(
        "wrong_scale",
        """never_scaled: scale_missing
        HeadsWithoutScale: scale_missing
        unscaled_attention: scale_missing
        ScaledByEmbedding: scale_by_embed_dim
        root_of_d_model: scale_by_embed_dim
        RootForgotten: scale_not_root
        RootOfTheLength: scale_by_length
        RootOfTheHeads: scale_by_heads
        ScaledOnceMore: scale_applied_twice | scale_not_root
        TimesTheRoot: scale_multiplied
        WholeEmbedding: scale_by_embed_dim_not_root
        ScaledWithTheQueriesAndTheScores: scale_applied_twice | scale_not_root
        root_of_the_keys_length: scale_by_length
        numpy_divides_by_d: scale_not_root
        ScaledByHiddenSize: scale_by_embed_dim
        FourthRootOfTheQueriesAlone: scale_wrong_power
        squared_for_rooted: scale_wrong_power
        WeightsDividedByTheRoot: scale_after_softmax
        divided_by_eight: scale_of_another_number
        Temperature: scale_of_another_number""",
    ),
    *attempts(
        "wrong_masks",
        """MaskNeverUsed: mask_ignored
        ResultThrownAway: mask_ignored
        masked_after_it_mattered: mask_ignored
        BlockedReadAsKept: mask_inverted
        WeightsTimesMask: mask_after_softmax
        TinyInsteadOfHuge: mask_sentinel_leaks | mask_multiplied
        minus_ten: mask_sentinel_leaks
        MinusFive: mask_sentinel_leaks
        MaskTransposed: mask_transposed
        MaskTurnedToFit: mask_transposed
        BatchReadAsHeads: mask_batch_as_heads
        HeadsOfTheMaskMixed: mask_head_order
        MaskRepeatedLikeABatch: mask_head_order
        MaskOfTheFirstItem: mask_of_first_item
        MaskOfTheFirstHead: mask_of_first_head""",
    ),
    *attempts(
        "wrong_masks",
        """blocked_handed_to_pytorch: mask_inverted
        BoolMaskAdded: mask_added
        weights_filled_with_zero: mask_after_softmax""",
        mask="blocked",
    ),
    *attempts(
        "wrong_masks",
        """KeptHandedToPyTorchsModule: mask_inverted
        MaskAdded: mask_added
        ScoresTimesMask: mask_multiplied
        core_times_mask: mask_multiplied""",
        mask="keep",
    ),
    *attempts(
        "wrong_causal",
        """FlagNeverRead: causal_ignored
        UpperTriangleKept: causal_inverted
        LowerTriangleBlocked: causal_inverted
        aligned_at_the_end: causal_bottom_right
        DiagonalBlocked: causal_misses_diagonal
        diagonal_blocked_core: causal_misses_diagonal
        numpy_diagonal_blocked: causal_misses_diagonal
        OneTokenAhead: causal_one_too_far
        PaddingNeverUsed: padding_ignored
        PaddingFromTheSecond: padding_off_by_one
        PaddingFromTheLast: padding_off_by_one
        PaddingOnRows: padding_on_queries
        PaddingOnRowsWithInfinity: padding_on_queries
        PaddingReadAsTokens: padding_inverted
        PaddingReadAsRows: mask_batch_as_queries""",
    ),
    *attempts(
        "wrong_causal",
        """BufferNeverRead: causal_ignored
        OneTokenAheadAlways: causal_one_too_far
        TriangleOfOneRow: causal_first_key_only
        CausalAndPadding: masks_joined_loosely""",
        causal=True,
    ),
    *attempts(
        "wrong_softmax",
        """OverQueries: softmax_over_queries
        over_queries_in_a_function: softmax_over_queries
        OverHeads: softmax_over_heads
        DimLeftOut: softmax_over_heads
        heads_normalised_in_einsum: softmax_over_heads
        OverTheBatch: softmax_over_batch
        OneHeadDimLeftOut: softmax_over_batch
        OverThePlane: softmax_over_all
        SumsOfOtherRows: softmax_sums_of_other_rows
        PowersBySumsOfOtherRows: softmax_sums_of_other_rows
        SumsAndMaximaOfOtherRows: softmax_sums_of_other_rows
        MaximaOfOtherRows: softmax_sums_of_other_rows
        OverHeadsAndKeys: softmax_over_heads_and_keys
        Forgotten: softmax_missing
        forgotten_in_the_formula: softmax_missing
        NeverDivided: softmax_not_normalised
        Twice: softmax_twice
        Logarithm: log_softmax
        Sigmoid: sigmoid_instead_of_softmax
        DividedByTheSum: scores_normalised_without_exp""",
    ),
    *attempts(
        "wrong_whole",
        """ValueAdded: input_added
        query_added: input_added
        ReturnsSummedWeights: returned_weights_summed
        ReturnsOneHead: returned_weights_of_one_head
        ReturnsTheFirstHead: returned_weights_of_one_head
        ReturnsScores: returned_weights_before_softmax
        core_returns_scores: returned_weights_before_softmax
        ReturnsUnmaskedWeights: returned_weights_unmasked
        WeightsDetached: gradient_detached
        SoftmaxInNumpy: gradient_detached
        KeysWithoutGradient: gradient_detached
        values_in_no_grad: gradient_detached
        AlwaysBfloat16: computed_in_bfloat16
        core_in_half: computed_in_float16""",
    ),
    *attempts(
        "wrong_whole",
        """BatchFirstForgotten: batch_and_sequence_exchanged
        SequenceReadAsBatch: batch_and_sequence_exchanged""",
        batch_first=True,
    ),
    *attempts(
        "wrong_dropout",
        """OnInEvaluation: dropout_left_on
        OnInPyTorchsFunction: dropout_left_on
        BeforeSoftmax: dropout_before_softmax
        NotRescaled: dropout_not_rescaled
        OnTheContext: dropout_on_context
        OnTheMergedHeads: dropout_on_context
        NeverCalled: dropout_missing
        KeepsWhatItShouldDrop: dropout_keeps_what_it_should_drop""",
    ),
    *attempts(
        "wrong_two",
        """no_scale_no_mask: scale_missing+mask_ignored
        ViewInAndTransposeOut: heads_not_transposed+scale_by_embed_dim
        ViewInAndOut: heads_not_transposed
        InvertedAndUnscaled: mask_inverted+scale_missing
        QueriesNormalisedAndNoOutput: softmax_over_queries+output_forgotten
        TiledAndScaledByWidth: groups_tiled+scale_by_embed_dim
        PairSwappedAndJoinedByView: key_value_swapped+merge_not_transposed
        MaskAfterSoftmaxAndNoRoot: mask_after_softmax+scale_not_root
        NoInputBiasAndSoftmaxOverHeads: input_biases_forgotten+softmax_over_heads
        DiagonalBlockedAndUnscaled: causal_misses_diagonal+scale_missing
        KeysCollectedAndUnscaled: values_are_keys+scale_missing | key_weight_for_values+scale_missing
        QueryTransposedAndMaskLost: query_weight_transposed+mask_ignored
        BothMasksForgotten: mask_ignored+padding_ignored
        core_unscaled_over_queries: softmax_over_queries+scale_missing""",
    ),
    *attempts(
        "wrong_two", "MaskAddedAndNoOutput: mask_added+output_forgotten", mask="keep"
    ),
    *attempts(
        "wrong_several",
        """UnscaledOverQueriesJoinedByView: scale_missing+softmax_over_queries+merge_not_transposed
        ViewInWidthAndInverted: heads_not_transposed+scale_by_embed_dim+mask_inverted
        NothingRight: key_value_swapped+scale_multiplied+softmax_over_heads+merge_not_transposed
        core_with_three: scale_not_root+softmax_over_queries+mask_ignored""",
    ),
    *attempts(
        "wrong_unknown",
        """CubedScores: unknown at scores, masked scores, weights
        KeysOfUnitLength: unknown at projections, heads, scores
        NoiseOnTheContext: unknown at context, merge
        last_key_dropped: unknown at heads, scores, masked scores, weights
        ValuesRectified: unknown at projections, heads""",
    ),
]

MISBEHAVING = [
    *attempts("rotary", "TurnsByHead: turned_alike"),
    *attempts(
        "misbehaving",
        """raises: raises
        asserts: raises
        misspelt: raises
        loops_forever: hangs
        sleeps: hangs
        calls_itself: raises
        forgets_to_return: returns_nothing
        returns_flat: wrong_shape
        returns_the_weights: wrong_shape
        returns_nan: not_finite
        returns_integers: integer_output
        returns_lists: wrong_type
        returns_a_number: wrong_type
        returns_a_dictionary: wrong_type
        returns_half: wrong_type | computed_in_float16
        needs_a_package: missing_package
        seeds: changes_global_state
        switches_gradients_off: changes_global_state
        changes_the_default_dtype: changes_global_state
        changes_the_threads: changes_global_state
        scales_its_input: changes_inputs
        fills_its_input: changes_inputs
        leaves: raises
        leaves_quietly: raises
        asks: raises | hangs
        differs_from_call_to_call: random""",
    ),
    *attempts("misbehaving_import", "attention: missing_package"),
    *attempts("published", "broken_grouped_query_attention: raises"),
]
