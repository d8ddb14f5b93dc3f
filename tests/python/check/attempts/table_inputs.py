# SPDX-License-Identifier: MIT
"""Attempts that project, or multiply, one thing for another, or leave it out."""

from attempts.table import attempts

WRONG = [
    *attempts(
        "wrong_inputs",
        """KeysFromTheQuery: key_from_query
        NothingFromTheContext: key_from_query
        OnlyKeysFromTheQuery: key_from_query
        ValuesFromTheKey: value_from_key
        WeightsTimesKeys: values_are_keys
        QueriesAgainstValues: keys_are_values
        ValuesAgainstKeys: queries_are_values
        ValuesAgainstKeysForKeys: queries_are_values+values_are_keys
        QueriesAgainstQueries: keys_are_queries | query_weight_for_keys
        ProjectionsNeverCalled: input_projection_forgotten
        ValuesNeverProjected: input_projection_forgotten
        OutputNeverCalled: output_forgotten
        OutputCalledTwice: output_projection_twice
        OutputHeadByHead: output_per_head
        OutputByTheDiagonal: output_diagonal
        NoBiasAnywhere: biases_forgotten
        NoBiasAtTheInput: input_biases_forgotten
        NoBiasAtTheOutput: output_bias_forgotten
        NoBiasOfTheQuery: query_bias_forgotten
        NoBiasOfTheValue: value_bias_forgotten""",
    ),
    *attempts(
        "wrong_roles",
        """KeysByTheLayerOfValues: value_weight_for_keys
        queries_by_the_layer_of_keys: key_weight_for_queries
        QueriesByTheLayerOfValues: value_weight_for_queries
        numpy_values_by_the_matrix_of_queries: query_weight_for_values
        KeysFromTheValue: key_from_value
        ValuesFromTheQuery: value_from_query
        QueriesFromTheKey: query_from_key
        PassedOnInAnotherOrder: inputs_swapped
        HelperTakesValuesFirst: keys_and_values_exchanged
        NumHeadsNeverUsed: heads_not_split
        only_the_scale_knows_heads: heads_not_split
        WeightsTimesQueries: values_are_queries
        KeysAgainstKeys: queries_are_keys
        KeysTimesQueries: queries_and_keys_exchanged
        KeysReshapedToFit: keys_reshaped
        core_keys_reshaped: keys_reshaped""",
    ),
]
