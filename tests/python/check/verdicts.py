# SPDX-License-Identifier: MIT
"""Verdicts as the engine writes them, but written by hand."""

from multihead.check.report import Finding


def case(name: str, **facts) -> dict:
    return {
        "name": name,
        "dtype": "float64",
        "tensor": "out",
        "shape": [3, 5, 48],
        "agrees": True,
        "explained": True,
        "bits": False,
        "exercise": True,
        "error": 2.2e-16,
        "pytorch_error": 1.1e-16,
        "allowed": 1e-12,
        "unexplained": 3.3e-16,
        **facts,
    }


def wrong(name: str, error: float | None = 0.4123, **facts) -> dict:
    return case(name, agrees=False, exercise=False, error=error, **facts)


def fault(name: str, stage: str, detail: str = "") -> dict:
    return {
        "name": name,
        "stage": stage,
        "sentence": f"The sentence of {name}.",
        "remedy": f"The remedy of {name}: `masked_fill(mask, -inf)`.",
        "detail": detail,
    }


INVERTED = fault("mask_inverted", "masked scores")
UNSCALED = fault("scale_missing", "scores", "Its detail.")

FAULT = {
    "verdict": "fault",
    "faults": [INVERTED],
    "alternatives": [],
    "assumptions": [{"name": "a", "sentence": "True = keep.", "remedy": "Or say so."}],
    "remarks": [],
    "first_stage": "masked scores",
    "effort": 0.01,
    "where": {
        "case": "causal",
        "tensor": "out",
        "index": [0, 1, 2],
        "got": None,
        "expected": -0.3123,
    },
    "cases": [
        case("no mask"),
        wrong("causal"),
        wrong("causal", 1.2, tensor="dquery"),
        wrong("mask", None, dtype="float32", unexplained=2e-7),
    ],
    "weights": ["query: W_q.weight (out, in)", "key: W_k.weight (out, in)"],
    "unused": [],
}

RIGHT = {
    **FAULT,
    "verdict": "rounding",
    "faults": [],
    "first_stage": None,
    "where": None,
    "cases": [
        case("no mask", bits=True),
        case("causal"),
        case(
            "causal",
            dtype="float32",
            exercise=False,
            error=2.4e-7,
            pytorch_error=2.5e-7,
        ),
    ],
}

RAISES = Finding(
    "raises",
    "ValueError: shape '[2, 5]' is invalid",
    detail="attention.py, line 12, in attend\n`x = x.view(2, 5)`",
)
