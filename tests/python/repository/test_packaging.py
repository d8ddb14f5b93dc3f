# SPDX-License-Identifier: MIT
"""The library as others get it: a wheel, and an installed CMake package.

Both are made from this checkout and used outside it, in folders whose names have
a space, without any variable that the build set.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch

from multihead import _built

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(_built.__file__).parents[2]


def run(*command, cwd=None, **variables) -> str:
    """What the command prints; it must succeed. Sees PATH and `variables` only."""
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, (
        f"{command} exits with {done.returncode}:\n{done.stdout}"
    )
    return done.stdout


def cached(name: str) -> str:
    """An entry of the cache of the build under test; "" when it has none."""
    cache = (BUILD / "CMakeCache.txt").read_text()
    found = re.search(rf"^{name}:\w+=(.*)$", cache, re.MULTILINE)
    return found.group(1) if found else ""


@pytest.fixture(scope="module")
def tools() -> dict[str, str]:
    """Variables with which a build finds the tools that built this one."""
    if not (BUILD / "CMakeCache.txt").exists():
        pytest.skip(f"multihead is imported from {BUILD}, which is no build folder")
    programs = [cached("CMAKE_COMMAND"), cached("CMAKE_MAKE_PROGRAM")]
    folders = [str(pathlib.Path(program).parent) for program in programs]
    # ccache tells languages of messages apart, and flags such as `strict`.
    kept = re.compile("HOME|CMAKE_PREFIX_PATH|CCACHE_.*|LANG|LC_.*")
    strict = "CMAKE_COMPILE_WARNING_AS_ERROR"
    return {
        **{name: value for name, value in os.environ.items() if kept.fullmatch(name)},
        "PATH": os.pathsep.join([*folders, os.environ["PATH"]]),
        "CMAKE_CXX_COMPILER_LAUNCHER": cached("CMAKE_CXX_COMPILER_LAUNCHER"),
        "CXX": cached("CMAKE_CXX_COMPILER"),
        "SKBUILD_CMAKE_DEFINE": f"{strict}={cached(strict) or 'OFF'}",
    }


def make_wheel(tools, tmp_path_factory, *settings) -> pathlib.Path:
    """A wheel of this checkout; what it compiles stays in build/ for next time."""
    folder = tmp_path_factory.mktemp("a wheel")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, *settings, ROOT, **tools)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tools, tmp_path_factory) -> pathlib.Path:
    return make_wheel(tools, tmp_path_factory)


@pytest.fixture(scope="module")
def wheel_with_command(tools, tmp_path_factory) -> pathlib.Path:
    command = "cmake.define.MULTIHEAD_BUILD_CLI=ON"
    return make_wheel(tools, tmp_path_factory, "-C", command)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> pathlib.Path:
    return make_environment(wheel, tmp_path_factory)


def make_environment(wheel, tmp_path_factory) -> pathlib.Path:
    """A new virtual environment: the wheel, and the torch that runs this test."""
    folder = tmp_path_factory.mktemp("an environment") / "venv"
    run(sys.executable, "-m", "venv", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    torch_site = pathlib.Path(torch.__file__).parents[1]
    (site / "torch.pth").write_text(f"{torch_site}\n")
    options = ["--no-index", "--no-deps", wheel]
    run(folder / "bin/python", "-m", "pip", "install", *options)
    return folder


@pytest.mark.parametrize("command", [False, True])
def test_wheel_holds_package_and_library_and_the_command_on_demand(command, request):
    wheel = request.getfixturevalue("wheel_with_command" if command else "wheel")
    name = f"multihead-{_built.VERSION}-py3-none-linux_"
    assert wheel.name.startswith(name)
    held = set(zipfile.ZipFile(wheel).namelist())
    libraries = (
        "libmultihead.so",
        "libmultihead_diagnosis.so",
        "libmultihead_pictures.so",
    )
    for path in ("__init__.py", "_built.py", *libraries):
        assert f"multihead/{path}" in held
    assert ("multihead/bin/multihead" in held) == command
    metadata = f"multihead-{_built.VERSION}.dist-info"
    tops = {path.split("/")[0] for path in held}
    beside = {"multihead_command.py", "multihead_pytest.py"}
    assert tops == {"multihead", metadata} | beside


def dependencies(metadata: str) -> list[str]:
    """What is required in any case, so not for an extra."""
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    return [line.replace(" ", "") for line in required if "extra" not in line]


def test_wheel_needs_the_torch_that_it_was_built_against(wheel):
    path = f"multihead-{_built.VERSION}.dist-info/METADATA"
    metadata = zipfile.ZipFile(wheel).read(path).decode()
    assert dependencies(metadata) == [f"torch=={_built.TORCH_VERSION}"]


def test_source_distribution_serves_every_supported_torch(tmp_path):
    build = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=ROOT, PATH=os.environ["PATH"])
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        (info,) = (n for n in archive.getnames() if n.endswith("/PKG-INFO"))
        metadata = archive.extractfile(info).read().decode()
        assert f"{made.name[:-7]}/cmake/torch_requirement.py" in archive.getnames()
    (needed,) = dependencies(metadata)
    assert re.fullmatch(r"torch>=[\d.]+", needed)
    assert "\nDynamic: Requires-Dist\n" in metadata


def test_a_wheel_without_a_torch_to_build_against_says_so(tmp_path):
    program = "import sys; sys.path[:0] = ['cmake']; import torch_requirement as t\n"
    program += "try: t.torch_version()\nexcept RuntimeError as error: print(error)"
    for variables in ({"TORCH_ROOT": str(tmp_path)}, {}):
        # Without site-packages this Python has no torch either.
        printed = run(sys.executable, "-S", "-c", program, cwd=ROOT, **variables)
        assert "install torch and use pip's --no-build-isolation" in printed


def test_wheel_imports_outside_the_repository(environment, tmp_path):
    program = """
import multihead, torch
q = torch.randn(1, 2, 3, 4)
ours = multihead.scaled_dot_product_attention(q, q, q)
reference = torch.nn.functional.scaled_dot_product_attention(q, q, q)
torch.testing.assert_close(ours, reference)
print(multihead.__version__, multihead.__file__)
"""
    printed = run(
        environment / "bin/python", "-W", "error", "-c", program, cwd=tmp_path
    )
    version, path = printed.split(maxsplit=1)
    assert version == _built.VERSION
    assert environment in pathlib.Path(path).parents


def test_without_the_command_the_script_says_how_to_get_it(environment, tmp_path):
    with pytest.raises(AssertionError) as raised:
        run(environment / "bin/multihead", "info", cwd=tmp_path)
    said = str(raised.value)
    assert "exits with 1" in said
    assert "-C cmake.define.MULTIHEAD_BUILD_CLI=ON" in said
    (module,) = re.findall(r"python -m (\S+) FILE", said)
    example = ROOT / "examples/exercise.py"
    with pytest.raises(AssertionError, match="(?s)exits with 1:.*divided by"):
        run(environment / "bin/python", "-m", module, example, cwd=tmp_path)


def test_wheel_installs_the_command(wheel_with_command, tmp_path_factory, tmp_path):
    environment = make_environment(wheel_with_command, tmp_path_factory)
    printed = run(environment / "bin/multihead", "info", cwd=tmp_path)
    assert _built.TORCH_VERSION in printed
    with pytest.raises(AssertionError, match="exits with 2"):
        run(environment / "bin/multihead", "--nonsense", cwd=tmp_path)


def test_another_torch_is_refused_in_one_sentence():
    program = """
import torch
torch.__version__ = "2.12.1+cpu"
try:
    import multihead
except ImportError as error:
    print(error)
"""
    variables = {"PYTHONPATH": str(BUILD / "python")}
    printed = run(sys.executable, "-W", "ignore", "-c", program, **variables)
    assert printed.startswith(
        f"multihead was built against PyTorch {_built.TORCH_VERSION}, "
        "but PyTorch 2.12.1+cpu is installed."
    )


@pytest.mark.parametrize("local", ["", "+cpu", "+cu132", "a0+git1234567"])
def test_how_torch_was_built_does_not_matter(local):
    _built.check_torch(_built.TORCH_VERSION + local)
    with pytest.raises(ImportError, match="was built against PyTorch"):
        _built.check_torch(_built.TORCH_VERSION + "1" + local)


def test_the_source_folder_alone_says_that_it_is_not_built():
    program = "import multihead"
    with pytest.raises(AssertionError, match="ImportError: multihead is not built"):
        run(sys.executable, "-c", program, PYTHONPATH=str(ROOT / "python"))


@pytest.fixture(scope="module")
def prefix(tools, tmp_path_factory) -> pathlib.Path:
    """Where this build is installed for C++ users."""
    folder = tmp_path_factory.mktemp("a prefix")
    run("cmake", "--install", BUILD, "--prefix", folder, **tools)
    return folder


def configure(tools, prefix, build, *options) -> str:
    """Configures the consumer in tests/consumer against an installed multihead."""
    source = ROOT / "tests/consumer"
    places = ["-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"]
    return run("cmake", "-G", "Ninja", *places, *options, **tools)


@pytest.mark.parametrize("command", ["ON", "OFF"])
def test_configuring_warns_of_nothing(tools, tmp_path, command):
    options = [f"-DMULTIHEAD_BUILD_CLI={command}", "-DMULTIHEAD_BUILD_TESTS=OFF"]
    options += [f"-DTORCH_ROOT={cached('TORCH_ROOT')}", "-S", ROOT, "-B", tmp_path]
    printed = run("cmake", "-G", "Ninja", *options, **tools)
    assert "Warning" not in printed
    steps = run("cmake", "--build", tmp_path, "--target", "help", **tools)
    assert ("multihead_cli" in steps) == (command == "ON")


def test_a_python_package_brings_the_headers_of_json(tools, tmp_path):
    """Where no package of the system does: found by the Python that CMake finds."""
    header = tmp_path / "nlohmann_json/include/nlohmann/json.hpp"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "nlohmann_json/__init__.py").touch()
    installed = cached("nlohmann_json_DIR")
    options = ["-DMULTIHEAD_BUILD_CLI=OFF", "-DMULTIHEAD_BUILD_TESTS=OFF"]
    options += [f"-DTORCH_ROOT={cached('TORCH_ROOT')}", "-S", ROOT]
    options += ["-B", tmp_path / "build", f"-DCMAKE_IGNORE_PATH={installed}"]
    variables = {k: v for k, v in tools.items() if k != "CMAKE_PREFIX_PATH"}
    variables["PYTHONPATH"] = str(tmp_path)
    run("cmake", "-G", "Ninja", *options, **variables)
    commands = (tmp_path / "build/compile_commands.json").read_text()
    assert f"-isystem {tmp_path}/nlohmann_json/include" in commands


def test_the_readme_says_how_to_find_an_installed_library(tools, prefix, tmp_path):
    """Its command for a consumer's build, where $HOME/.local is the prefix."""
    (command,) = re.findall(
        r"^cmake -S app .*$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    shutil.copytree(ROOT / "tests/consumer", tmp_path / "app")
    (tmp_path / ".local").symlink_to(prefix)
    variables = {n: v for n, v in tools.items() if n != "CMAKE_PREFIX_PATH"}
    variables |= {"HOME": str(tmp_path), "CMAKE_GENERATOR": "Ninja"}
    run("sh", "-c", command, cwd=tmp_path, **variables)


def test_consumer_builds_and_runs(tools, prefix, tmp_path):
    configure(tools, prefix, tmp_path / "a build")
    run("cmake", "--build", tmp_path / "a build", **tools)
    printed = run(tmp_path / "a build/consumer", tmp_path / "layer.safetensors")
    expected = f"multihead {_built.VERSION} on LibTorch {_built.TORCH_VERSION}"
    assert printed.startswith(expected)


def test_installed_command_runs(prefix):
    assert _built.TORCH_VERSION in run(prefix / "bin/multihead", "info")


def test_consumer_with_another_torch_is_told(tools, prefix, tmp_path):
    other = tmp_path / "torch"
    header = other / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), (2, 12, 1))
    header.write_text("".join(f"#define TORCH_VERSION_{n} {v}\n" for n, v in numbers))
    (other / "lib").mkdir()
    for library in ("torch_cpu", "c10"):
        (other / f"lib/lib{library}.so").touch()
    sentence = (
        rf"built against PyTorch\s+{_built.TORCH_VERSION},\s+but\s+\S+\s+is\s+2.12.1"
    )
    with pytest.raises(AssertionError, match=sentence):
        configure(tools, prefix, tmp_path / "build", f"-DTORCH_ROOT={other}")
