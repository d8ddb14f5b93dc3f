# SPDX-License-Identifier: MIT
"""Attention in files as people publish them: what a program sets before it starts, how
it trains, what lies beside it."""

from test_check_strays import named
from test_check_unusual import conditions

import multihead

IMPORTS = "import math\nimport torch\nfrom torch import nn\n"
TRANSLATOR = """
class Translator(nn.Module):
    def __init__(self, src_vocab_size, tgt_vocab_size, dim=64, heads=4):
        super().__init__()
        self.source = nn.Embedding(src_vocab_size, dim)
        self.target = nn.Embedding(tgt_vocab_size, dim)
        self.transformer = nn.Transformer(dim, heads, 1, 1, 64, batch_first=True)
        self.out = nn.Linear(dim, tgt_vocab_size)

    def forward(self, src, tgt):
        later = None
        src, tgt = self.source(src), self.target(tgt)
        return self.out(self.transformer(src, tgt, tgt_mask=later))
"""
HIDES = "later = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])"
TRAINING = """
def step(model, loss, src, tgt):
    said = model(src, tgt[:, :-1])
    return loss(said.flatten(0, 1), tgt[:, 1:].flatten())
"""


def translator(folder, hides, trains):
    text = IMPORTS + TRANSLATOR + (TRAINING if trains else "")
    path = folder / f"translator_{hides}_{trains}.py"
    path.write_text(text.replace("later = None", HIDES) if hides else text)
    return multihead.check(f"{path}:Translator")


def test_a_model_that_is_trained_to_say_what_it_sees(tmp_path):
    assert named(translator(tmp_path, False, True)) == ["later_tokens_seen"]
    assert named(translator(tmp_path, True, True)) == []
    assert "sees_later_keys" in conditions(translator(tmp_path, False, False))
    assert "sees_later_keys" not in conditions(translator(tmp_path, True, False))


SCRIPT = """
class Recalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_class * 4, 12 * n_class)
        self.out = nn.Linear(n_class * 4, n_class * 4)

    def forward(self, x):
        cut = self.qkv(x).unflatten(-1, (3, n_class, 4)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in cut)
        weights = (q @ k.mT / math.sqrt(4)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

if __name__ == "__main__":
    sentences = ["i like dog", "i love coffee"]
    words = " ".join(sentences).split()
    numbers = {word: place for place, word in enumerate(sorted(set(words)))}
    n_class = len(numbers)
    model = Recalls()
"""


def test_what_a_program_counts_before_it_starts(tmp_path):
    (tmp_path / "script.py").write_text(IMPORTS + SCRIPT)
    report = multihead.check(f"{tmp_path}/script.py:Recalls")
    assert "raises" not in named(report), str(report)
    unknown = SCRIPT.replace("len(numbers)", "load(numbers)")
    (tmp_path / "other.py").write_text(IMPORTS + unknown)
    report = multihead.check(f"{tmp_path}/other.py:Recalls")
    assert report.judgement == "not_judged", str(report)


SETTINGS = """
from dataclasses import dataclass

@dataclass
class Settings:
    n_embd: int = 64
    n_head: int = 4
    sliding_window_size: int | None = None

class CausalSelfAttention(nn.Module):
    def __init__(self, config: Settings):
        super().__init__()
        self.heads, self.window = config.n_head, config.sliding_window_size
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None):
        cut = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in cut)
        if self.window is not None:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
            mask = seen.tril().triu(1 - self.window)
        attend = nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(out.transpose(1, 2).flatten(2))
"""


def test_a_window_that_is_off_stays_off(tmp_path):
    (tmp_path / "settings.py").write_text(IMPORTS + SETTINGS)
    report = multihead.check(f"{tmp_path}/settings.py:CausalSelfAttention")
    assert conditions(report) == ["causal_unless_masked", "mask_keeps"], str(report)


def test_a_package_beside_a_file_of_its_name(tmp_path):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "scales.py").write_text("def scale(d):\n    return d**-0.5\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "utils.py").write_text("other = 1\n")
    (tmp_path / "layers" / "attend.py").write_text(
        "from utils.scales import scale\n\n\n"
        "def attend(q, k, v):\n"
        "    return (q @ k.mT * scale(q.shape[-1])).softmax(-1) @ v\n"
    )
    report = multihead.check(f"{tmp_path}/layers/attend.py:attend")
    assert report.judgement == "right", str(report)
