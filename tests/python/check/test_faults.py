# SPDX-License-Identifier: MIT
"""Names and codes of faults, and the page that each has."""

import json
import pathlib
import re
import runpy

import pytest

from multihead._library import diagnosis

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/faults"
CATALOGUE = json.loads(diagnosis().fault_catalogue())


def test_every_fault_has_a_code():
    names, _, _ = diagnosis().faults()
    coded = {fault["name"] for fault in CATALOGUE}
    missing = sorted(set(names) - coded)
    assert missing == [], "diagnosis/report/codes.cpp"


def test_findings_have_codes():
    """Those that a check gives the program around attention."""
    sources = [p.read_text() for p in ROOT.glob("python/multihead/check/**/*.py")]
    given = set(re.findall(r'Finding\(\s*"(\w+)"', "\n".join(sources)))
    coded = {fault["name"] for fault in CATALOGUE}
    remarks = {
        "limit",
        "file_stops",
        "forms_left",
        "others_left",
        "heads_right",
        "other_weights",
    }
    remarks |= {"dropout_unused", "settings_undefined", "imports_missing"}
    remarks |= {"mask_left_out", "parameters_unset"}
    assert given - coded <= remarks


def test_codes_are_unique_and_ordered():
    codes = [fault["code"] for fault in CATALOGUE]
    assert codes == sorted(set(codes))
    assert all(re.fullmatch(r"MH[1-9]\d\d", code) for code in codes)
    names = [fault["name"] for fault in CATALOGUE]
    assert len(names) == len(set(names))


def test_codes_stay():
    codes = {fault["name"]: fault["code"] for fault in CATALOGUE}
    kept = {
        "query_weight_transposed": "MH101",
        "heads_not_transposed": "MH201",
        "scale_missing": "MH301",
        "mask_inverted": "MH402",
        "softmax_over_queries": "MH501",
        "output_forgotten": "MH603",
        "raises": "MH901",
        "unknown": "MH999",
    }
    assert {name: codes[name] for name in kept} == kept


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault["name"])
def test_every_fault_says_what_it_does(fault):
    assert fault["hurts"].endswith(".")
    for place in fault["places"]:
        assert place["sentence"] and place["remedy"]


def test_pages_are_those_of_the_table():
    """`./run python docs/faults/write.py` writes them."""
    pages = runpy.run_path(str(FOLDER / "write.py"))["pages"]()
    written = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.md")}
    assert sorted(written) == sorted(pages)
    assert [name for name in pages if pages[name] != written[name]] == []
