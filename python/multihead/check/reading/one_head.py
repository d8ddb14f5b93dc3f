# SPDX-License-Identifier: MIT
"""Code whose steps fit together with one head alone."""

import re
from dataclasses import replace

from ..capture.runner import Run, Runner
from ..report import Finding

# What PyTorch says of tensors whose shapes do not fit together.
OF_SHAPES = re.compile(
    r"RuntimeError: (?:mat1 and mat2 shapes|shape '.*' is invalid|Expected size|"
    r"view size is not compatible|"
    r"The (?:expanded )?size of|einsum\(\)|size mismatch|batch1 and batch2|"
    r"Sizes of tensors must match|Given normalized_shape)|"
    r"ValueError: (?:operands could not be broadcast|matmul: Input operand|"
    r"shapes .* not aligned)"
)


def with_several_heads(runner: Runner, base: Run) -> list[Finding]:
    """Why a call like `base`, of one head, is refused with as many as the code has by
    itself: sizes that fit by chance hide a fault."""
    built, sizes = runner.construction, base.case.sizes
    heads = built.default_of("num_heads") if built is not None else None
    if sizes.heads > 1 or not heads or heads == 1 or sizes.embed % heads:
        return []
    several = replace(base.case, sizes=replace(sizes, heads=heads), gradients=False)
    said = runner.run(several).findings[:1]
    is_fault = bool(said) and OF_SHAPES.match(said[0].sentence) is not None
    return [unless("it has one head", said[0])] if is_fault else []


def unless(words: str, refusal: Finding) -> Finding:
    """That a call is refused but where sizes hide a fault."""
    sentence = f"It raises unless {words}. {refusal.sentence}"
    return replace(refusal, sentence=sentence, kind="failure", remedy="")
