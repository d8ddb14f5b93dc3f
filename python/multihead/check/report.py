# SPDX-License-Identifier: MIT
"""What a check found: in code as a program, then by the rules of attention."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from .._call import call
from .._library import diagnosis


@dataclass(frozen=True)
class Finding:
    """One finding about the code under test.

    name: stable, for programs ("raises", "changes_inputs", ...).
    sentence: what was found. remedy: what repairs it. detail: the evidence, such
    as the call and the line of the code under test that raised.
    kind: "failure" (the check does not pass), "limit" (some calls are refused,
    which may be by design), "remark", or "unchecked" (nothing could be told, which is
    not the code's fault).
    """

    name: str
    sentence: str
    remedy: str = ""
    detail: str = ""
    kind: str = "failure"


class Report:
    """A verdict on somebody's attention.

    str(report) is text, a notebook shows HTML, to_json() is for programs;
    bool(report) is `passed`.

    judgement: "right"; "right_if", where it is right only if something is meant that
    nothing states; "wrong"; or "not_judged", where nothing could be told, which is
    not the code's fault. exit_status: 0, 3, 1 and 2, what the command returns.
    conditions: what has to hold of right code, each with name, sentence and remedy.
    Those that `allow` names hold: code with no others is right.

    passed: it is attention, and nothing else is wrong with it.
    unchecked: it could not be called; what was guessed is not the code's fault.
    cause: None where it passed; else the name of the fault ("mask_inverted"), two
    names joined by "+", or "unknown", joined with "changes_inputs" where that may
    be why.
    causes: all of them, faults of attention first.
    cases: for each tensor of each run a dictionary: name, dtype, tensor, shape,
    agrees, bits, error and pytorch_error (largest, against float64), exercise
    (allclose with atol=1e-8, rtol=1e-5).
    first_stage: the first that differs ("masked scores"), or None.
    assumptions: what nobody stated and the numbers show.
    remarks: right, but worth knowing.
    findings: flaws that are no fault of attention (raises, hangs, ...).
    patch: a unified diff that was asked for and repairs it; else "".
    verdict: the engine's own; None where it never came to one.
    """

    def __init__(
        self,
        target: str,
        verdict: dict[str, Any] | None,
        findings: Sequence[Finding] = (),
        understood: Sequence[str] = (),
        seconds: float = 0.0,
        allow: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.verdict = verdict
        self.understood = list(understood)
        self.seconds = seconds
        self.allowed = list(allow)
        engine = verdict or {}
        found = [f for f in findings if f.kind in ("failure", "unchecked")]
        known = {finding.name for finding in found}
        seen = [f for f in engine.get("findings", []) if f["name"] not in known]
        self.findings = found + [
            Finding(f["name"], f["sentence"], f["remedy"], f["detail"]) for f in seen
        ]
        self.cases: list[dict[str, Any]] = engine.get("cases", [])
        self.assumptions: list[dict[str, str]] = engine.get("assumptions", [])
        self.conditions: list[dict[str, str]] = engine.get("conditions", [])
        remarks = engine.get("remarks", [])
        remarks = remarks + [asdict(f) for f in findings if f not in found]
        # Without those that say the same again.
        said = {
            (remark["sentence"], remark.get("remedy")): remark for remark in remarks
        }
        self.remarks = list(said.values())
        self.first_stage: str | None = engine.get("first_stage")
        self.patch = ""
        self.judgement: str
        self.exit_status: int
        text = json.dumps(_plain(self._facts()), ensure_ascii=False)
        self.judgement, self.exit_status = call(diagnosis().outcome.default, text)

    @property
    def passed(self) -> bool:
        """It is right, and on no condition that is not allowed."""
        return self.judgement == "right"

    @property
    def unchecked(self) -> bool:
        """Nothing could be told: it neither passed nor failed."""
        return self.judgement == "not_judged"

    @property
    def causes(self) -> list[str]:
        judgement = (self.verdict or {}).get("verdict")
        faults = self._faults or (["unknown"] if judgement == "unknown" else [])
        flaws = list(dict.fromkeys(finding.name for finding in self.findings))
        if judgement is None and not flaws:
            flaws = ["unchecked"]
        return faults + flaws

    @property
    def cause(self) -> str | None:
        if self._faults:
            return "+".join(self._faults)
        if self.causes[:1] == ["unknown"] and "changes_inputs" in self.causes:
            # It may be why: the verdict is on the inputs as the caller has them.
            return "unknown+changes_inputs"
        return next(iter(self.causes), None)

    @property
    def _faults(self) -> list[str]:
        engine = self.verdict or {}
        named = engine.get("verdict") == "fault"
        return [fault["name"] for fault in engine["faults"]] if named else []

    def __bool__(self) -> bool:
        return self.passed

    def _facts(self) -> dict[str, Any]:
        """What the judgement follows from: the verdict's keys and the report's own."""
        return {
            "verdict": "unchecked",
            "conditions": [],
            **(self.verdict or {}),
            "allowed": self.allowed,
            "findings": [asdict(finding) for finding in self.findings],
            "remarks": self.remarks,
        }

    def to_dict(self) -> dict[str, Any]:
        """What to_json writes."""
        return {
            "target": self.target,
            "passed": self.passed,
            "judgement": self.judgement,
            "cause": self.cause,
            **self._facts(),
            "understood": self.understood,
            "seconds": round(self.seconds, 3),
            **({"patch": self.patch} if self.patch else {}),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """One JSON object; numbers that are not finite become null."""
        return json.dumps(_plain(self.to_dict()), indent=indent, ensure_ascii=False)

    def render(self, form: str = "text", width: int = 80, command: str = "") -> str:
        """The report as "text", "ansi" (text with colours), "html" or "svg".

        width: columns of a line. command: a command line to show above it.
        """
        content = {**self.to_dict(), "command": command}
        text = json.dumps(_plain(content), ensure_ascii=False)
        operator = diagnosis().render_report.default
        rendered: str = call(operator, text, form, width)
        return rendered

    def print(self, file: TextIO | None = None) -> None:
        """Prints it as wide as the terminal, in colour unless NO_COLOR is set."""
        file = file or sys.stdout
        terminal = file.isatty() and os.environ.get("TERM") != "dumb"
        colour = terminal and not os.environ.get("NO_COLOR")
        width = min(shutil.get_terminal_size().columns, 100) if terminal else 80
        file.write(self.render("ansi" if colour else "text", width))

    def __str__(self) -> str:
        return self.render().rstrip("\n")

    def __repr__(self) -> str:
        said = self.cause or ("passed" if self.passed else "right if …")
        return f"<multihead.Report: {self.target}: {said}>"

    def _repr_html_(self) -> str:
        return self.render("html")


def _plain(value: Any) -> Any:
    """As JSON and UTF-8 know it: half characters are "?", infinity and NaN None."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
