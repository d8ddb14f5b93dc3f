# SPDX-License-Identifier: MIT
"""PyTorch's own tests of attention, with multihead under PyTorch's names.

    ./run python tests/pytorch_own/run.py PYTORCH/test

Every test runs on the CPU with multihead's functions and module in the place of
PyTorch's, under `auto` and under `exact`, and then `installed`: unchanged, but under
multihead.install(). Those that do not pass run as they are. What passes then is a
difference, and must be one of expected.toml, whose entries name the row of
docs/parity.md that documents them. Exit status 1: there is a difference that is not in
the list, or an entry whose tests all pass.

Results are kept in build/pytorch_own, so that a run that was stopped goes on where it
was; they are dropped when the tests, PyTorch or multihead have changed.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings its predecessor
    import tomli as tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("nn/test_multihead_attention.py", "test_transformers.py")
THEIRS = "none"
BACKENDS = ("auto", "exact", "installed")


@dataclasses.dataclass(frozen=True)
class Expected:
    """An entry of expected.toml."""

    tests: str  # a regular expression, searched in the id
    backends: list[str]
    error: str  # a regular expression, searched in the error
    row: str  # text of docs/parity.md
    reason: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that passes with PyTorch's names and not with ours."""

    test: str
    outcome: str
    text: str

    def matches(self, entry: Expected) -> bool:
        """Whether this is what the entry speaks of."""
        return bool(re.search(entry.tests, self.test)) and bool(
            re.search(entry.error, self.text)
        )

    def __str__(self) -> str:
        # The type, and the first line that says something.
        first = re.sub(r":\s+", ": ", self.text, count=1).split("\n")[0]
        return f"{self.test}: {self.outcome}: {first[:200]}"


def expectations(path: pathlib.Path) -> tuple[list[Expected], str]:
    """The list, and which tests have PyTorch's formula as their reference."""
    data = tomllib.loads(path.read_text())
    return [Expected(**entry) for entry in data["difference"]], data["reference"]


def identity(options, backend: str) -> str:
    """What results depend on: the tests, the rebinding, PyTorch, multihead."""
    sources = [*options.files, HERE / "rebound.py"]
    if backend != THEIRS:
        package = pathlib.Path(importlib.util.find_spec("multihead").origin).parent
        sources += sorted(p for p in package.rglob("*") if p.suffix in (".py", ".so"))
    contents = [hashlib.sha256(p.read_bytes()).hexdigest() for p in sources]
    torch = importlib.metadata.version("torch")
    return " ".join([torch, options.reference, *contents])


def read(path: pathlib.Path) -> tuple[dict[str, dict], str | None]:
    """Results by test, and the test that began last and has none."""
    results, running = {}, None
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        running = entry.get("began")
        if "test" in entry:
            # What setUp or tearDown say comes beside the test's own result.
            before = results.get(entry["test"])
            if before is None or before["outcome"] == "passed":
                results[entry["test"]] = entry
    return results, running


def run(options, backend: str, select: list[str] | None) -> dict[str, dict]:
    """Results of the selected tests, by id; those that are there already stay."""
    if select == []:
        return {}
    folder = options.results / backend
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    head = json.dumps({"identity": identity(options, backend)})
    if not path.exists() or path.read_text().split("\n")[0] != head:
        path.write_text(head + "\n")
    if select is not None and read(path)[0].keys() >= set(select):
        return {test: read(path)[0][test] for test in select}
    (folder / "select.json").unlink(missing_ok=True)
    if select is not None:
        (folder / "select.json").write_text(json.dumps(select))
    ended = True
    while ended:
        (folder / "done.json").write_text(json.dumps(list(read(path)[0])))
        status = _pytest(options, backend, folder)
        results, ended = read(path)
        if ended:
            crash = {"test": ended, "outcome": "ended the process"}
            with path.open("a") as lines:
                print(json.dumps(crash | {"text": "", "calls": 0}), file=lines)
        elif status not in (0, 1, 5):  # passed, failed, nothing left to run
            raise SystemExit(f"pytest ended with {status}, see {folder / 'log'}")
    collected = json.loads((folder / "collected.json").read_text())
    return {test: results[test] for test in collected}


def _pytest(options, backend: str, folder: pathlib.Path) -> int:
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
        "PYTORCH_TEST_WITH_SLOW": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "rebound", "-c", os.devnull]
    command += ["--noconftest", "-p", "no:cacheprovider", "-q", "--no-header"]
    command += ["--tb=short", "-W", "ignore", "--rootdir", str(options.folder)]
    command += ["--own-backend", backend, "--own-folder", str(folder)]
    command += ["--own-every", str(options.every)]
    command += ["--own-reference", options.reference]
    command += ["-k", options.keyword] if options.keyword else []
    command += [str(file) for file in options.files]
    with (folder / "log").open("w") as log:
        return subprocess.call(command, env=environment, stdout=log, stderr=log)


def failed(results: dict[str, dict]) -> list[str]:
    """The tests that do not pass, those that are skipped among them."""
    return [test for test, result in results.items() if result["outcome"] != "passed"]


def compare(ours: dict[str, dict], theirs: dict[str, dict]) -> list[Difference]:
    """What passes with PyTorch's names only; theirs has all that fails with ours."""
    return [
        Difference(test, ours[test]["outcome"], ours[test]["text"])
        for test in failed(ours)
        if theirs[test]["outcome"] == "passed"
    ]


def report(backend, ours, theirs, entries) -> bool:
    """Prints what differs; whether all of it is expected, and all that is, differs."""
    passed = sorted(set(ours) - set(failed(ours)))
    reached = sum(ours[test]["calls"] > 0 for test in passed)
    differences = compare(ours, theirs)
    neither = len(ours) - len(passed) - len(differences)
    print(f"{backend}: {len(passed)} tests pass, {reached} of them by multihead;")
    print(f"  {neither} fail or are skipped with PyTorch's names too,")
    print(f"  {len(differences)} pass with PyTorch's names only")
    known, stale = set(), []
    for entry in (entry for entry in entries if backend in entry.backends):
        found = [d for d in differences if d.matches(entry)]
        known.update(found)
        if found:
            print(f"  expected ({entry.row}): {entry.reason}")
            for difference in found:
                print(f"    {difference.test}")
        elif any(re.search(entry.tests, test) for test in passed):
            stale.append(entry)
        else:
            print(f"  not met, no such test passes at all: {entry.tests}")
    unknown = [d for d in differences if d not in known]
    for difference in unknown:
        print(f"  NOT EXPECTED: {difference}")
    for entry in stale:
        print(f"  LISTED, BUT DOES NOT OCCUR: {entry.tests} ({entry.error})")
    return not unknown and not stale


def arguments() -> argparse.Namespace:
    def path(text: str) -> pathlib.Path:
        return pathlib.Path(text).resolve()

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=path,
        help=f"PyTorch's folder test, with {' and '.join(FILES)}",
    )
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="every N-th case of each parametrised family only",
    )
    parser.add_argument("-k", dest="keyword", help="as pytest has it")
    parser.add_argument("--results", type=path, default=ROOT / "build/pytorch_own")
    parser.add_argument("--expected", type=path, default=HERE / "expected.toml")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.files = [
        path for path in (options.folder / f for f in FILES) if path.exists()
    ]
    if not options.files:
        raise SystemExit(f"{options.folder} has none of {', '.join(FILES)}")
    entries, options.reference = expectations(options.expected)
    good = []
    for backend in options.backend or BACKENDS:
        ours = run(options, backend, None)
        theirs = run(options, THEIRS, failed(ours))
        good.append(report(backend, ours, theirs, entries))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
