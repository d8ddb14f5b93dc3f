# SPDX-License-Identifier: MIT
"""The C++ reader and writer against Python's package `safetensors`, both ways.

Every test passes a file through tests/cpp/safetensors/safetensors_copy, which reads it with the C++
reader and writes it again with the C++ writer. MULTIHEAD_BUILD_DIR in the environment is
the folder of the CMake build that has it.
"""

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.fixture(scope="module")
def copy():
    """Function of a path: that of what C++ read there and wrote again.

    Raises ValueError with C++'s message where it refuses the file.
    """
    build = os.environ.get("MULTIHEAD_BUILD_DIR")
    if not build:
        pytest.fail("MULTIHEAD_BUILD_DIR must name the folder of the CMake build")
    program = Path(build) / "tests" / "cpp" / "safetensors_copy"
    if not program.exists():
        pytest.fail(f"{program} does not exist: build the target safetensors_copy")
    pipe = subprocess.PIPE
    with subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True) as process:

        def run(source: Path) -> Path:
            target = source.with_suffix(".copy")
            process.stdin.write(f"{source}\n{target}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, f"safetensors_copy ended with status {process.wait(10)}"
            if answer != "\n":
                assert not target.exists()
                raise ValueError(answer.strip())
            return target

        yield run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("safetensors")


def bits(tensor: torch.Tensor) -> tuple:
    """Dtype, shape and bytes: equal for NaN too, and for dtypes without ==."""
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, bytes(flat.view(torch.uint8).numpy())


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert bits(actual[name]) == bits(tensor), name


def tensor_of(data: bytes, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw & 1
    return raw.view(dtype).reshape(shape)


def write_raw(path: Path, header: str | bytes, data: bytes = b"") -> Path:
    header = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_byte_for_byte(copy, tmp_path, dtype):
    content = {
        "matrix": tensor_of(bytes(range(3 * 4 * dtype.itemsize)), dtype, (3, 4)),
        "scalar": tensor_of(bytes(range(dtype.itemsize)), dtype, ()),
        "empty": tensor_of(b"", dtype, (2, 0)),
    }
    source = tmp_path / "file.safetensors"
    save_file(content, source)
    target = copy(source)
    assert target.read_bytes() == source.read_bytes()
    assert_same(load_file(target), content)


def test_all_dtypes_in_one_file_byte_for_byte(copy, tmp_path):
    content = {
        f"tensor.{i}": tensor_of(bytes(dtype.itemsize), dtype, (1,))
        for i, dtype in enumerate(DTYPES)
    }
    source = tmp_path / "file.safetensors"
    save_file(content, source)
    assert copy(source).read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "metadata",
    [{"format": "pt"}, {"größe\n\x01\x7f": '"注意力"\\ 🤗'}],
    ids=["pt", "text"],
)
def test_metadata_byte_for_byte(copy, tmp_path, metadata):
    source = tmp_path / "file.safetensors"
    save_file({"w": torch.ones(1)}, source, metadata)
    target = copy(source)
    assert target.read_bytes() == source.read_bytes()
    with safe_open(target, "pt") as file:
        assert file.metadata() == metadata


def test_several_metadata_keys_are_sorted(copy, tmp_path):
    """Python's writer puts them in random order, so only ours can be repeated."""
    metadata = {key: key.upper() for key in "fbadce"}
    copies = []
    for i in range(3):
        source = tmp_path / f"{i}.safetensors"
        save_file({}, source, metadata)
        copies.append(copy(source).read_bytes())
    header = json.loads(copies[0][8:])
    assert list(header["__metadata__"].items()) == sorted(metadata.items())
    assert copies[0] == copies[1] == copies[2]


def test_state_dict_loads_into_the_module_again(copy, tmp_path):
    module = torch.nn.MultiheadAttention(8, 2, kdim=5, vdim=6, add_bias_kv=True)
    source = tmp_path / "module.safetensors"
    save_file(module.state_dict(), source)
    other = torch.nn.MultiheadAttention(8, 2, kdim=5, vdim=6, add_bias_kv=True)
    other.load_state_dict(load_file(copy(source)))
    assert_same(other.state_dict(), module.state_dict())


names = st.text(st.characters(codec="utf-8")).filter(lambda n: n != "__metadata__")


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = torch.Size(shape).numel() * dtype.itemsize
    return tensor_of(draw(st.binary(min_size=size, max_size=size)), dtype, shape)


contents = st.dictionaries(names, tensors(), max_size=6)
fast = settings(max_examples=60, deadline=None)


@fast
@given(content=contents, metadata=st.dictionaries(names, st.text(), max_size=1))
def test_random_content_byte_for_byte(copy, folder, content, metadata):
    source = folder / "random.safetensors"
    save_file(content, source, metadata or None)
    target = copy(source)
    assert target.read_bytes() == source.read_bytes()
    assert_same(load_file(target), content)


@fast
@given(data=st.data(), content=contents.filter(bool))
def test_what_we_accept_the_reference_accepts(copy, folder, data, content):
    """One byte of a file's header changed: refused, or read as Python reads it."""
    source = folder / "mutant.safetensors"
    source.with_suffix(".copy").unlink(missing_ok=True)
    save_file(content, source)
    file = bytearray(source.read_bytes())
    (length,) = struct.unpack_from("<Q", file)
    position = data.draw(st.integers(0, 8 + length - 1))
    file[position] = data.draw(st.sampled_from(b' "019,:[]{}\x00\xff'))
    source.write_bytes(file)

    try:
        target = copy(source)
    except ValueError:
        return
    assert_same(load_file(target), load_file(source))


def entry(dtype: str, shape: list, end: int, **more) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end], **more}


ONE_BYTE = json.dumps(entry("U8", [1], 1))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (" {}", b"", "must start with '{'"),
        ('{"__metadata__":null}', b"", "must be an object, got null"),
        (f'{{"w":{ONE_BYTE},"w":{ONE_BYTE}}}', b"\1", "must not repeat a key"),
        (json.dumps({"w": entry("U8", [1], 1, device="cpu")}), b"\1", '"device"'),
        (json.dumps({"w": entry("U8", [1] * 65, 1)}), b"\1", "at most 64 integers"),
        (json.dumps({"w": entry("BOOL", [1], 1)}), b"\2", "BOOL must be 0 or 1"),
    ],
    ids=["space", "null-metadata", "twice", "unknown-field", "65-sizes", "bool-2"],
)
def test_stricter_than_the_reference(copy, tmp_path, header, data, message):
    """The reference reads these, we do not: the whole list of known differences."""
    source = write_raw(tmp_path / "file.safetensors", header, data)
    load_file(source)
    with pytest.raises(ValueError, match=re.escape(message)):
        copy(source)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{", b""),
        ('{"w":1}', b""),
        (json.dumps({"w": entry("F32", [2], 4)}), bytes(4)),
        (json.dumps({"w": entry("F32", [1], 4)}), bytes(5)),
        (json.dumps({"w": entry("F32", [1.0], 4)}), bytes(4)),
        (json.dumps({"w": entry("F32", [-1], 4)}), bytes(4)),
        (json.dumps({"w": entry("F32", [2**62, 4], 0)}), b""),
        (json.dumps({"a": entry("U8", [1], 1), "b": entry("U8", [1], 1)}), b"\1"),
    ],
)
def test_both_refuse(copy, tmp_path, header, data):
    source = write_raw(tmp_path / "file.safetensors", header, data)
    with pytest.raises(SafetensorError):
        load_file(source)
    with pytest.raises(ValueError, match="read_safetensors: "):
        copy(source)
