# SPDX-License-Identifier: MIT
"""multihead.show of weights: what is measured, drawn and written."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
import stat
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from layout import collisions, outside
from pictures import can_draw_png, decode_png

import multihead

TOKENS = ["[CLS]", "the", "cat", "sat", "[SEP]"]


def random_weights(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.softmax(3 * torch.randn(shape, generator=generator), -1)


def data_of(pictures: multihead.Pictures) -> dict:
    """What the page holds."""
    text = re.search(r'id="data">(.*?)</script>', pictures.html(), re.DOTALL)
    assert text
    return json.loads(text[1])


def test_maps_are_the_weights_and_their_mean():
    weights = random_weights(3, 5, 5)
    shown = multihead.show(weights, tokens=TOKENS)
    assert torch.equal(shown.map(2), weights[1])
    torch.testing.assert_close(shown.map(), weights.mean(0))
    entropy = torch.special.entr(weights.double()).sum(-1).mean(-1)
    torch.testing.assert_close(
        torch.tensor(shown.entropies[0][1:], dtype=torch.float64), entropy
    )
    assert repr(shown) == (
        "<multihead.Pictures: attention weights: 3 heads, 5 queries × 5 keys>"
    )


@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5), (2, 3, 5, 5)], ids=str)
def test_weights_of_any_rank(shape):
    weights = random_weights(*shape)
    shown = multihead.show(weights, item=shape[0] - 1 if len(shape) == 4 else 0)
    last = weights if len(shape) == 2 else weights[-1]
    last = last if last.dim() == 2 else last[0]
    head = min(len(shown.entropies[0]) - 1, 1)
    if len(shape) == 3:
        last = weights[0]
    assert torch.equal(shown.map(head), last)


def test_layers_are_counted_named_and_taken_apart():
    layers = [random_weights(1, 2, 5, 5) for _ in range(3)]
    shown = multihead.show(layers, tokens=TOKENS, title="a model")
    assert len(shown) == 3 and shown.names == ["layer 0", "layer 1", "layer 2"]
    assert repr(shown[2]).startswith("<multihead.Pictures: a model, layer 2: 2 heads")
    assert torch.equal(shown[-1].map(1), layers[2][0, 0])
    named = multihead.show({"encoder": layers[0], "decoder": layers[1]})
    assert named.names == ["encoder", "decoder"]
    with pytest.raises(IndexError, match="show: layer must be from -3 to 2, got 3"):
        shown[3]


def test_tokens_that_are_left_out():
    weights = random_weights(2, 5, 5)
    rest = weights[:, 1:4, 1:4]
    ends = ("[CLS]", "[SEP]")
    shown = multihead.show(weights, tokens=TOKENS, without=ends)
    torch.testing.assert_close(shown.map(1), (rest / rest.sum(-1, keepdim=True))[0])
    assert [
        x["labels"] for x in (data_of(shown)["layers"][0]["items"][0]["keys"],)
    ] == [TOKENS[1:4]]
    raw = multihead.show(weights, tokens=TOKENS, without=ends, scaled=False)
    torch.testing.assert_close(raw.map(1), rest[0])
    assert "left out: [CLS], [SEP] (2 keys)" in shown.svg()
    assert "rows are scaled" in shown.svg() and "rows are scaled" not in raw.svg()
    by_number = multihead.show(weights, without=["0", "4"])
    torch.testing.assert_close(by_number.map(1), shown.map(1))


def test_a_mask_goes_along_with_what_is_left_out():
    blocked = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights = random_weights(1, 5, 5).masked_fill(blocked, 0)
    weights /= weights.sum(-1, keepdim=True)
    shown = multihead.show(weights, tokens=TOKENS, blocked=blocked, without=["[CLS]"])
    hatched = ElementTree.fromstring(shown.svg()).iter(
        "{http://www.w3.org/2000/svg}path"
    )
    runs = [p.get("d") for p in hatched if "url(" in (p.get("fill") or "")]
    assert runs[0].count("M") == 3


def test_differences_are_of_layers_of_one_name():
    one, two = random_weights(1, 3, 3), random_weights(2, 3, 3)[:1]
    shown = multihead.show({"a": one, "b": two}, reference={"b": two, "a": one})
    assert shown.names == ["a", "b"]
    assert all(torch.equal(layer.map(), torch.zeros(3, 3)) for layer in shown)


def test_differences():
    ours, theirs = random_weights(2, 5, 5), random_weights(2, 5, 5).flip(0)
    shown = multihead.show(ours, reference=theirs)
    torch.testing.assert_close(shown.map(1), (ours - theirs)[0])
    assert "yours − reference" in shown.svg()
    with pytest.raises(
        ValueError, match="reference must have weights of the same shape"
    ):
        multihead.show(ours, reference=theirs[:1])
    with pytest.raises(
        ValueError, match="reference must have as many layers, 1, got 2"
    ):
        multihead.show(ours, reference=[theirs, theirs])


# ---- Paths through layers ---------------------------------------------------


def with_residual(mean: torch.Tensor) -> torch.Tensor:
    return (mean.double() + torch.eye(len(mean))) / 2


def least_cut(layers: list[torch.Tensor], source: int, sink: int) -> float:
    """What the narrowest cut lets pass, found by trying all: the greatest flow."""
    length, count = len(layers[0]), len(layers)
    inner = [(level, i) for level in range(count + 1) for i in range(length)]
    inner = [node for node in inner if node not in ((count, source), (0, sink))]
    least = float("inf")
    for chosen in itertools.product((0, 1), repeat=len(inner)):
        above = {node for node, side in zip(inner, chosen) if side} | {(count, source)}
        passed = sum(
            layers[level - 1][i, j].item()
            for level, i in above
            if level > 0
            for j in range(length)
            if (level - 1, j) not in above
        )
        least = min(least, passed)
    return least


def test_rollout_is_the_product_of_layers():
    layers = [random_weights(1, 4, 5, 5), random_weights(1, 4, 5, 5).flip(1)] * 2
    shown = multihead.show(layers, tokens=TOKENS)
    product = torch.eye(5, dtype=torch.float64)
    for layer in layers:
        product = with_residual(layer[0].mean(0)) @ product
    assert shown.paths is not None
    torch.testing.assert_close(
        shown.paths.map(1).double(), product, atol=1e-6, rtol=1e-5
    )
    mean = torch.cat(layers).mean((0, 1))
    torch.testing.assert_close(shown.paths.map(0), mean)
    assert multihead.show(layers[0]).paths is None


def test_flow_is_what_the_narrowest_cut_lets_pass():
    layers = [random_weights(1, 1, 3, 3), random_weights(2, 2, 3, 3)[1:]]
    shown = multihead.show(layers).paths
    assert shown is not None
    means = [with_residual(layer[0].mean(0)) for layer in layers]
    expected = torch.tensor(
        [[least_cut(means, i, j) for j in range(3)] for i in range(3)]
    )
    torch.testing.assert_close(shown.map(2), expected)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -1.0])
def test_there_are_no_paths_of_what_are_no_shares(number):
    layers = [random_weights(1, 3, 3)] * 3
    layers[1] = torch.full((1, 3, 3), number)
    shown = multihead.show(layers)
    assert shown.paths is None and len(data_of(shown)["layers"]) == 3


def test_paths_say_what_they_leave_out():
    layers = [random_weights(1, 2, 80, 80)] * 2
    shown = multihead.show(layers)
    assert shown.paths is not None and "follow weights alone" in shown.paths.svg()
    assert "flow is left out" in shown.paths.svg()
    paths = [x for x in data_of(shown)["layers"] if x.get("path")]
    assert len(paths) == 1 and "follow weights" in paths[0]["items"][0]["remarks"][0]
    assert multihead.show([random_weights(1, 1, 300, 300)] * 2).paths is None


# ---- Files, notebooks -------------------------------------------------------


@pytest.mark.parametrize("ending", ["svg", "html", "png"])
def test_files_by_their_ending(tmp_path, ending):
    if ending == "png" and not can_draw_png():
        pytest.skip("no librsvg-2.so.2 is there (Debian: librsvg2-2)")
    path = tmp_path / f"picture.{ending}"
    path.write_text("old")
    shown = multihead.show([random_weights(1, 2, 5, 5)] * 2, tokens=TOKENS)
    shown.save(path)
    begins = {"svg": b"<svg ", "html": b"<!doctype html>", "png": b"\x89PNG"}
    assert path.read_bytes().startswith(begins[ending])
    assert list(tmp_path.iterdir()) == [path]
    if ending == "png":
        root = ElementTree.fromstring(shown.svg())
        assert decode_png(path.read_bytes()).shape[1] == 2 * float(root.get("width"))


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    shown = multihead.show(random_weights(1, 5, 5))
    with pytest.raises(
        ValueError, match=r"path must end in .html, .svg, .png, got 'a.x'"
    ):
        shown.save("a.x")
    missing = tmp_path / "none" / "a.svg"
    with pytest.raises(FileNotFoundError) as error:
        shown.save(missing)
    assert error.value.filename == str(missing) and error.value.filename2 is None
    for path in (3, b"a.svg"):
        with pytest.raises(TypeError, match="show: path must be a str or os.PathLike"):
            shown.save(path)
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        shown.save(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_files_keep_their_permissions_and_links_lead_on(tmp_path):
    shown = multihead.show(random_weights(1, 5, 5))
    file, link = tmp_path / "file.svg", tmp_path / "link.SVG"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to("file.svg")
    shown.save(link)
    assert link.is_symlink() and file.read_text() == shown.svg()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    longest = tmp_path / ("x" * 251 + ".svg")
    shown.save(longest)
    usual = tmp_path / "usual"
    usual.touch()
    assert longest.stat().st_mode == usual.stat().st_mode


def test_a_notebook_gets_a_frame_that_needs_nothing_else():
    shown = multihead.show(random_weights(1, 5, 5), title='"><script>alert(1)</script>')
    frame = shown._repr_html_()
    attributes = {}
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda _, found: attributes.update(found)
    parser.feed(frame)
    assert attributes["srcdoc"] == shown.html()
    assert attributes["title"] == '"><script>alert(1)</script>'
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=|<link", attributes["srcdoc"])
    assert "default-src 'none'" in attributes["srcdoc"]


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("heads", [1, 12, 144])
def test_no_letters_of_a_model_stand_on_others(layers, heads):
    scripts = ["The", "שלום", "مرحبا", "日本語", "👩‍👩‍👧"]
    weights = {f"layer {i} مرحبا": random_weights(heads, 5, 5) for i in range(layers)}
    svg = multihead.show(weights, tokens=scripts, title="שלום " * 40).svg()
    assert collisions(svg) == [] and outside(svg) == []


def test_a_page_of_many_maps_stays_small():
    shown = multihead.show([random_weights(1, 32, 128, 128)] * 12)
    assert len(shown.html()) < 8e6
    assert data_of(shown)["layers"][0]["items"][0]["pooling"]


# ---- Errors -----------------------------------------------------------------

W = torch.full((2, 3, 3), 1 / 3)
ERRORS = [
    (dict(subject=3), TypeError, "subject must be weights, a sequence or mapping of"),
    (dict(subject=[]), ValueError, "subject must hold weights, got none"),
    (dict(subject=[3]), TypeError, "subject must be tensors, got 3"),
    (dict(subject=W.int()), ValueError, "weights must be floating and have the shape"),
    (dict(subject=W[0, 0]), ValueError, "weights must be floating and have the shape"),
    (dict(subject=W[:0]), ValueError, "weights must be floating and have the shape"),
    (dict(subject=W, tokens=3), TypeError, "tokens must be strings or None, got 3"),
    (dict(subject=W, tokens=[3]), TypeError, "tokens must be strings or None, got 3"),
    (
        dict(subject=W, tokens="a b"),
        ValueError,
        "tokens must have one entry for each of the 3 positions, got 2 entries",
    ),
    (dict(subject=W, query_tokens="a"), ValueError, "query_tokens must have one entry"),
    (dict(subject=W, item=1), ValueError, "item must be from 0 to 0, got 1"),
    (dict(subject=W, item="x"), TypeError, "item must be an int, got 'x'"),
    (dict(subject=W, title=3), TypeError, "title must be a str, got 3"),
    (dict(subject=W, blocked=W), ValueError, "blocked must be bool and broadcast to"),
    (dict(subject=W, blocked=[1]), TypeError, "blocked must be a tensor or None, got"),
    (
        dict(subject=W.to_sparse()),
        ValueError,
        "weights must be a dense tensor that holds numbers, got layout Sparse",
    ),
    (
        dict(subject=W.to("meta")),
        ValueError,
        "weights must be a dense tensor that holds numbers, got one on the meta device",
    ),
    (
        dict(subject={"a": W, "b": W}, reference={"b": W, "c": W}),
        ValueError,
        "reference must have the names of subject, got 'a', 'c' in one of them",
    ),
    (
        dict(subject={3: W, "3": W}),
        ValueError,
        "subject must have a name for each layer, got some names twice",
    ),
    (dict(subject=W, without="0 1 2"), ValueError, "without must leave a query and a"),
    (dict(subject=W, mask=1), TypeError, "mask must come with a module, got 1"),
]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"), ERRORS, ids=lambda x: str(x)[:40]
)
def test_errors(arguments, kind, message):
    with pytest.raises(kind, match="show: " + re.escape(message)):
        multihead.show(**arguments)


def test_numbers_may_be_of_other_kinds():
    number = np.int64(1)
    weights = random_weights(2, 3, 4, 4)
    shown = multihead.show(weights, item=number)
    assert torch.equal(shown.map(number), weights[1, 0])
    assert shown[np.int64(0)].map(1).equal(shown.map(1))
    with pytest.raises(TypeError, match="show: panel must be an int, got 'a'"):
        shown.map("a")
    small = weights.to(torch.float8_e4m3fn)
    assert torch.equal(multihead.show(small).map(1), small[0, 0].float())


def test_half_characters_are_shown_as_question_marks():
    shown = multihead.show(W[:1], tokens=["a\ud83d", "b", "c"], title="\udc00")
    assert "a?</text>" in shown.svg() and "<title>?</title>" in shown.svg()


def test_long_sequences_are_not_formed_to_leave_tokens_out():
    layer = torch.nn.MultiheadAttention(8, 1, batch_first=True)
    x = torch.randn(1, 2049, 8)
    with pytest.raises(
        ValueError, match="show: without must be empty for sequences of"
    ):
        multihead.show(layer, x, x, x, without=["0"], need_weights=False)


def test_operators_judge_what_they_get():
    shown = multihead.show(W)
    ops, q = torch.ops.multihead, torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match="show: facts must be a JSON object"):
        ops.picture_of_weights(W, None, "[]")
    for key in (q[..., :4], q[:, :3], q[0], q[:, :, :0]):
        with pytest.raises(
            ValueError, match="show: query and key must have the shapes"
        ):
            ops.picture_of_heads(q, key, facts="{}")
    with pytest.raises(ValueError, match="show: form must be svg or html, got gif"):
        ops.draw_pictures("", shown._layers, [], "gif")
    with pytest.raises(ValueError, match="show: layers must have at least one entry"):
        ops.draw_pictures("", [], [], "svg")


def test_inputs_go_with_a_module():
    with pytest.raises(TypeError, match="show: inputs must come with a module"):
        multihead.show(W, W)
    with pytest.raises(ValueError, match="show: panel must be from 0 to 2, got 7"):
        multihead.show(W).map(7)
