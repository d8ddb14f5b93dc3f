# SPDX-License-Identifier: MIT
"""Reports in words, from verdicts written by hand."""

import html.parser
import io
import json
import re
from xml.etree import ElementTree

import pytest
from verdicts import FAULT, INVERTED, RAISES, RIGHT, UNSCALED, case, wrong

from multihead._library import diagnosis
from multihead.check.report import Finding, Report


def shown(*arguments) -> str:
    return f"\n{Report('attend (attention.py:3)', *arguments)}\n"


def test_one_fault():
    assert (
        shown(FAULT)
        == """
✗ attend (attention.py:3) is wrong: it has one fault, in the masked scores.

  The sentence of mask_inverted. (mask_inverted)

  evidence  Attention with this one change reproduces your result in all 4
            cases, to 3.3e-16 in float64. Without it the largest difference is
            1.2.
  repair    The remedy of mask_inverted: masked_fill(mask, -inf).
  where     out[0, 1, 2] in case causal is nan and should be -0.312.

     case                           error  PyTorch's  allclose
  ✓  no mask         f64  3×5×48  2.2e-16    1.1e-16  yes
  ✗  causal          f64  3×5×48    0.412    1.1e-16  no
  ✗  causal: dquery  f64  3×5×48      1.2    1.1e-16  no
  ✗  mask            f32  3×5×48      nan    1.1e-16  no

  assumed   True = keep. Or say so.
  matched   query: W_q.weight (out, in) · key: W_k.weight (out, in)
"""
    )


def test_two_faults_and_a_finding():
    verdict = {**FAULT, "faults": [UNSCALED, INVERTED], "cases": [wrong("mask")]}
    finding = Finding("changes_inputs", "It overwrites query.", "Copy it.")
    assert (
        shown(verdict, [finding])
        == """
✗ attend (attention.py:3) is wrong: it has two faults, in the scores and the
  masked scores; and it changes its inputs.

  1. The sentence of scale_missing. Its detail. (scale_missing)

  repair    The remedy of scale_missing: masked_fill(mask, -inf).

  2. The sentence of mask_inverted. (mask_inverted)

  repair    The remedy of mask_inverted: masked_fill(mask, -inf).
  evidence  Attention with these two changes reproduces your result in the one
            case, to 3.3e-16 in float64. Without them the largest difference is
            0.412.
  where     out[0, 1, 2] in case causal is nan and should be -0.312.

  It overwrites query.

  repair    Copy it.

     case                       error  PyTorch's  allclose
  ✗  mask          f64  3×5×48  0.412    1.1e-16  no

  assumed   True = keep. Or say so.
  matched   query: W_q.weight (out, in) · key: W_k.weight (out, in)
"""
    )


def test_right_within_rounding():
    understood = ["attend(q, k, v)", "weights of its own"]
    assert (
        shown(RIGHT, [], understood)
        == """
✓ attend (attention.py:3) is right: within rounding of PyTorch in all 3 cases,
  bit for bit in 1.

  exercise  allclose(atol=1e-8, rtol=1e-5) fails in 1 of 3 by rounding: in case
            causal your error is 2.4e-07, PyTorch's own 2.5e-07.
  assumed   True = keep. Or say so.
  called    attend(q, k, v) · weights of its own
  matched   query: W_q.weight (out, in) · key: W_k.weight (out, in)
"""
    )


def test_two_cases_are_both():
    cases = [case("no mask", bits=True), case("causal", bits=True)]
    assert "bit for bit, in both cases." in shown({"verdict": "bits", "cases": cases})
    cases = [wrong("mask"), wrong("causal")]
    assert "your result in both cases" in shown({**FAULT, "cases": cases})


def test_right_to_the_bit():
    verdict = {"verdict": "bits", "cases": [case("no mask", bits=True)]}
    assert (
        shown(verdict)
        == """
✓ attend (attention.py:3) is right: PyTorch's, bit for bit, in the one case.

  exercise  allclose(atol=1e-8, rtol=1e-5) holds in every case, too.
"""
    )


def test_unknown():
    verdict = {**FAULT, "verdict": "unknown", "faults": [], "cases": []}
    assert (
        shown(verdict)
        == """
✗ attend (attention.py:3) is wrong, first in the masked scores, and no fault
  that is known here explains it.

  where     out[0, 1, 2] in case causal is nan and should be -0.312.
  way on    Print the masked scores of a small example, yours and by the book:
            multihead/textbook.py has every step with its reason.
  assumed   True = keep. Or say so.
  matched   query: W_q.weight (out, in) · key: W_k.weight (out, in)
"""
    )


def test_alternatives():
    verdict = {
        "verdict": "fault",
        "faults": [INVERTED],
        "alternatives": [["mask_ignored"], ["mask_added", "scale_missing"]],
        "cases": [wrong("mask")],
    }
    assert (
        shown(verdict)
        == """
✗ attend (attention.py:3) is wrong: it has one fault, in the masked scores.

  The sentence of mask_inverted. (mask_inverted)

  evidence  Attention with this one change reproduces your result in the one
            case, to 3.3e-16 in float64. Without it the largest difference is
            0.412.
  repair    The remedy of mask_inverted: masked_fill(mask, -inf).
  or else   These inputs cannot tell it from mask_ignored or mask_added +
            scale_missing. Sizes that all differ, and a mask, can.

     case                       error  PyTorch's  allclose
  ✗  mask          f64  3×5×48  0.412    1.1e-16  no
"""
    )


def test_alternatives_of_a_check_are_one_line():
    verdict = {
        "verdict": "fault",
        "faults": [INVERTED],
        "alternatives": [["mask_ignored"]],
        "cases": [],
    }
    text = str(Report("attend", verdict, understood=["attend(q)"]))
    assert "or else   mask_ignored, which is the same here.\n" in text


def test_there_is_no_figure_where_nothing_can_be_compared():
    apart = {"error": None, "pytorch_error": None, "allowed": 0.0}
    verdict = {
        "verdict": "fault",
        "faults": [INVERTED],
        "cases": [case("no mask", agrees=False, exercise=False, **apart)],
    }
    text = shown(verdict)
    assert "Without it there is no result to compare with." in " ".join(text.split())
    assert "no mask       f64  3×5×48      –          –  no" in text
    assert "nan" not in text


def test_a_difference_that_is_no_number_is_not_called_zero():
    nan = case("no mask", agrees=False, exercise=False, error=None)
    text = shown({**FAULT, "cases": [nan]})
    assert "Without it the difference is NaN." in " ".join(text.split())


def test_the_exercise_is_asked_where_pytorch_has_numbers():
    dropped = case("training", exercise=False, pytorch_error=None)
    text = shown({**RIGHT, "cases": [case("no mask"), dropped]})
    assert "holds in every case, too." in text and "nan" not in text


def test_code_that_raises():
    assert (
        shown(None, [RAISES])
        == """
✗ attend (attention.py:3) is wrong: it raises an error.

  ValueError: shape '[2, 5]' is invalid

  where     attention.py, line 12, in attend
            x = x.view(2, 5)
"""
    )


def test_right_but_for_a_finding():
    first = shown(RIGHT, [Finding("changes_inputs", "It overwrites query.")])
    assert first.splitlines()[1] == (
        "✗ attend (attention.py:3) is wrong: it computes attention, but it changes its"
    )


def test_remarks_and_limits_do_not_fail():
    findings = [Finding("prints", "It prints.", kind="remark")]
    report = Report("f", RIGHT, findings)
    assert report.passed and report and report.cause is None and report.causes == []
    assert report.findings == []
    assert [remark["name"] for remark in report.remarks] == ["prints"]
    assert "It prints." in str(report)


def test_causes():
    two = {**FAULT, "faults": [UNSCALED, INVERTED]}
    report = Report("f", two, [RAISES, RAISES])
    assert not report.passed and not report
    assert report.cause == "scale_missing+mask_inverted"
    assert report.causes == ["scale_missing", "mask_inverted", "raises"]
    assert Report("f", RIGHT, [RAISES]).cause == "raises"
    assert Report("f", {**FAULT, "verdict": "unknown"}).cause == "unknown"
    assert Report("f", None, [RAISES]).causes == ["raises"]
    assert Report("f", None).cause == "unchecked"
    assert report.first_stage == "masked scores"


def test_json_is_strict_and_complete():
    verdict = {**FAULT, "cases": [wrong("mask", float("nan"))]}
    text = Report("half a \ud800 character", verdict, [RAISES]).to_json()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert content["cases"][0]["error"] is None
    assert content["target"] == "half a ? character"
    assert content["cause"] == "mask_inverted" and content["passed"] is False
    assert content["findings"][0]["name"] == "raises"
    assert set(FAULT) <= set(content)


def test_many_cases_show_what_is_wrong():
    cases = [case(f"right {i}") for i in range(40)] + [wrong("late")]
    rows = str(Report("f", {**FAULT, "cases": cases})).splitlines()
    shown = [row for row in rows if re.match("  [✓✗]", row)]
    assert len(shown) == 16
    assert "late" in shown[-1]
    assert any("… and 25 more" in row for row in rows)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("verdict", [FAULT, RIGHT, None], ids=str)
def test_lines_fit(width, verdict):
    long = "no mask, but a name that goes on and on, until no column is left for it"
    if verdict:
        verdict = {**verdict, "cases": [*verdict["cases"], wrong(long)]}
    text = Report("f", verdict, [RAISES], ["called so"] * 9).render("text", width)
    table = {line for line in text.splitlines() if re.match("  [ ✓✗]  ", line)}
    others = set(text.splitlines()) - table
    assert max(map(len, others)) <= width
    assert max(map(len, table), default=0) <= max(width, 62)


def test_colour_only_adds_colour():
    report = Report("f", FAULT, [RAISES])
    coloured = report.render("ansi")
    assert "\033[1;31m✗" in coloured
    assert re.sub("\033\\[[0-9;]*m", "", coloured) == report.render("text")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_print_colours_terminals_that_want_it(monkeypatch):
    report = Report("f", FAULT)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def printed(file) -> str:
        report.print(file)
        return file.getvalue()

    assert "\033[" in printed(Terminal())
    assert "\033[" not in printed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in printed(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\033[" not in printed(Terminal())


def test_foreign_text_cannot_command_a_terminal():
    finding = Finding("raises", "Error: \033]0;title\007 \x7f", detail="\033[2J")
    text = Report("\033[31m", None, [finding]).render("ansi")
    plain = re.sub("\033\\[[0-9]+;?[0-9]*m", "", text)
    assert r"Error: \x1b]0;title\x07" in plain
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", plain)


class Elements(html.parser.HTMLParser):
    """Opened and closed elements, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.names.append(tag)
        assert all(not name.startswith("on") for name, _ in attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_is_escaped_and_whole():
    evil = "<script>alert('&amp;')</script>"
    finding = Finding("raises", evil, evil, f"`{evil}`")
    verdict = {**FAULT, "cases": [wrong(evil)], "weights": [evil]}
    page = Report(evil, verdict, [finding], [evil])._repr_html_()
    elements = Elements(page)
    assert elements.open == []
    assert "script" not in elements.names
    assert elements.text.count(evil) == 7
    assert {"style", "table", "dl", "code"} <= set(elements.names)
    assert "http" not in page  # nothing is fetched


def test_passing_html_folds_its_cases():
    names = Elements(Report("f", RIGHT)._repr_html_()).names
    assert "details" in names and "table" in names
    assert "details" not in Elements(Report("f", FAULT)._repr_html_()).names


def test_svg_shows_the_text():
    report = Report("a & b", FAULT, [RAISES])
    picture = ElementTree.fromstring(report.render("svg", command="multihead check x"))
    texts = ["".join(t.itertext()) for t in picture.iterfind(".//{*}text")]
    assert texts[:2] == ["$", "multihead check x"]
    assert "a & b is wrong: it has one fault" in " ".join(texts)
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    for text in picture.iterfind(".//{*}text"):
        assert 0 < float(text.get("x")) < width
        assert float(text.get("x")) + float(text.get("textLength")) < width
        assert 0 < float(text.get("y")) < height


@pytest.mark.parametrize("report", ["", "[]", "{", '{"verdict"', "null", '{"a": 1}'])
def test_what_is_no_report_is_refused(report):
    with pytest.raises(ValueError, match="render_report: report must be a JSON object"):
        diagnosis().render_report(report)


@pytest.mark.parametrize("verdict", ['"xx"', "5", "null", '["bits"]'])
def test_unknown_verdicts_are_refused(verdict):
    with pytest.raises(ValueError, match="render_report: verdict must be bits, round"):
        diagnosis().render_report(f'{{"verdict": {verdict}}}')


def test_what_is_nested_deeply_is_left_out():
    report = '{"verdict": "bits", "a": ' + "[" * 10**6 + "]" * 10**6 + "}"
    assert diagnosis().render_report(report)


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="render_report: format must be"):
        diagnosis().render_report('{"verdict": "bits"}', "pdf")


@pytest.mark.parametrize("width", [-5, 0, 2**40])
def test_absurd_widths_are_borne(width):
    assert diagnosis().render_report('{"verdict": "bits"}', "text", width)


def test_reports_of_odd_shape_are_borne():
    """Whatever JSON says: other programs may write reports, too."""
    odd = [None, 3, "x", [], {}, [None], [3], [["x"]], [{}], {"name": 3}]
    for key in ("faults", "findings", "cases", "where", "alternatives", "weights"):
        for value in odd:
            report = json.dumps({"verdict": "fault", key: value})
            for form in ("text", "html", "svg"):
                assert diagnosis().render_report(report, form)
