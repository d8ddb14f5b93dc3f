# SPDX-License-Identifier: MIT
# shellcheck shell=bash
#
# Part of ./run: the kernels under other compilers, and where memory and arithmetic are
# watched. They need no PyTorch, so another compiler or processor is cheap to try. The
# whole library crosses to ARM too, against PyTorch's wheel for it.

# newest_clang: the name of the newest clang++ on the PATH.
newest_clang() {
  { compgen -c clang++- || echo clang++; } | grep -x 'clang++\(-[0-9]*\)\?' |
    sort -Vu | tail -n 1
}

# compile TARGET FOLDER CMAKE-OPTIONS...: builds it in build/FOLDER; warnings are errors.
compile() {
  local folder=$root/build/$2
  step "configuring build/$2" "$cmake" -S "$root" -B "$folder" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release "-DCMAKE_MAKE_PROGRAM=$ninja" \
    "-DCMAKE_CXX_COMPILER_LAUNCHER=$ccache" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
    "${@:3}" || return
  "$ninja" -C "$folder" -j "$jobs" "$1" 2>&1 | show_progress
}

# kernels FOLDER CMAKE-OPTIONS...: the kernels and their tests.
kernels() {
  compile kernels_test "$1" -DMULTIHEAD_KERNELS_ONLY=ON "${@:2}"
}

# The kernels and their tests by clang.
compilers() {
  local clang
  find_tools
  clang=$(newest_clang)
  if echo '_Float16 x;' | "$clang" -x c++ -fsyntax-only - 2> /dev/null; then
    kernels clang "-DCMAKE_CXX_COMPILER=$clang" -DCMAKE_CXX_FLAGS_RELEASE=-O0 ||
      die "the kernels do not build with $clang"
    say "compilers: the kernels build"
  else
    lacks "clang++ 15 or newer"
  fi
}

# What of the kernels' tests takes two minutes under emulation; Isa/Machines has the bits
# of other processors.
short_tests='Isa.*:ChosenIsa.*:Vector*Special*:MXInt8*:*StoredRows*:Isa/*neon'
short_tests+='-Isa/Backward*:Isa/Bits*:*32Bits*'

# What CMake is told to build for a 64-bit ARM. Libraries of headers alone are this
# machine's, behind the headers of the other.
arm=aarch64-linux-gnu-g++
arm_options=("-DCMAKE_CXX_COMPILER=$arm" -DCMAKE_SYSTEM_NAME=Linux
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 "-DCMAKE_CXX_FLAGS=-idirafter /usr/include")

# The kernels for a 64-bit ARM and their tests, emulated. Of the portable kernels only
# what compares instruction sets with each other is run.
cross() {
  local filter='-Isa/*/portable:*/avx*:*/amx'
  if [[ ${1:-} == aarch64 && ${2:-} == --library ]]; then
    cross_library "${@:3}"
    return
  fi
  [[ ${1:-} == aarch64 && ${2:-} =~ ^(--short)?$ && $# -le 2 ]] ||
    die "the kernels cross to aarch64: ./run cross aarch64 [--short | --library]"
  [[ ${2:-} != --short ]] || filter=$short_tests
  find_tools
  has "$arm" g++-aarch64-linux-gnu googletest || { lacks "$arm" && return; }
  kernels aarch64 "${arm_options[@]}" || die "the kernels do not build with $arm"
  has qemu-aarch64 qemu-user || { lacks qemu-aarch64 && return; }
  emulated "$filter" || die "the emulated tests failed"
  say "cross: the kernels' tests pass on an emulated aarch64"
}

# emulated FILTER: the kernels' tests on every core, a share of them in each process: qemu
# keeps a table of all pages that were ever mapped, and tests that map gigabytes without
# touching them make one for all of them outgrow the machine.
emulated() {
  local shares=16
  seq 0 $((shares - 1)) | GTEST_TOTAL_SHARDS=$shares GTEST_BRIEF=1 GTEST_FILTER=$1 \
    xargs -P "$jobs" -I SHARE env GTEST_SHARD_INDEX=SHARE \
    qemu-aarch64 -L /usr/aarch64-linux-gnu \
    "$root/build/aarch64/tests/cpp/kernels/kernels_test"
}

# arm_torch FOLDER: unpacks PyTorch's wheel for a 64-bit ARM there, once. The one that pip
# finds by itself is the CUDA build, which does not load without two libraries of CUDA.
arm_torch() {
  local wanted=$root/requirements/torch.txt torch cuda pip
  cmp -s "$wanted" "$1/.installed" && return
  make_venv
  rm -rf -- "$1"
  pip=("$venv/bin/python" -m pip install --no-input --no-compile --target "$1"
    --only-binary=:all: "--platform=manylinux_2_"{17,25,27,28}_aarch64)
  torch=$(grep '^torch=' "$wanted")
  step "unpacking $torch for aarch64" "${pip[@]}" --no-deps "$torch" || return
  cuda=$(sed -n 's/^Requires-Dist: cuda-toolkit[^=]*\(==[0-9.]*\).*/\1/p' "$1"/torch-*/METADATA)
  [[ -z $cuda ]] || step "unpacking what it needs of CUDA" \
    "${pip[@]}" "cuda-toolkit[cudart,cupti]$cuda" || return
  cp -- "$wanted" "$1/.installed"
}

# arm_root FOLDER: the files that say which processor this is, of a Neoverse N1. QEMU would
# show PyTorch this machine's, at which it ends with a segmentation fault.
arm_root() {
  local registers=$1/sys/devices/system/cpu/cpu0/regs/identification
  mkdir -p -- "$1/proc" "$registers"
  ln -sfn /usr/aarch64-linux-gnu/lib "$1/lib"
  printf '%s\n' 'processor : 0' 'Features : fp asimd asimdhp asimddp' \
    'CPU implementer : 0x41' 'CPU part : 0xd0c' > "$1/proc/cpuinfo"
  echo 0x413fd0c1 > "$registers/midr_el1"
}

# cross_library ARGUMENTS...: library and command for a 64-bit ARM, and the command with
# these arguments, emulated.
cross_library() {
  local folder=aarch64-library site=$root/build/aarch64-torch
  (($# > 0)) || set -- verify
  install_packages
  find_tools
  has "$arm" g++-aarch64-linux-gnu || die "this needs $arm"
  has qemu-aarch64 qemu-user || die "this needs qemu-aarch64"
  arm_torch "$site" || die "there is no PyTorch for aarch64"
  compile multihead_cli "$folder" "${arm_options[@]}" "-DTORCH_ROOT=$site/torch" \
    -DMULTIHEAD_BUILD_TESTS=OFF || die "the library does not build with $arm"
  arm_root "$root/build/aarch64-root"
  qemu-aarch64 -cpu neoverse-n1 -L "$root/build/aarch64-root" \
    "$root/build/$folder/cli/multihead" "$@"
}

# finds TEXT COMMAND...: the command fails because it sees the bug that it has.
finds() {
  local report
  report=$("${@:2}" 2>&1) && die "nobody noticed the bug planted in: ${*:2}"
  [[ $report == *"$1"* ]] || die "no \"$1\" in what ${*:2} said:"$'\n'"$report"
}

# The tests of the kernels, which need no PyTorch, where memory and arithmetic
# are watched; each watcher first has to find a bug that was planted. Valgrind
# knows no AVX-512, takes ages over threads and gigabytes of address space.
sanitize() {
  local clang sanitized=$root/build/asan tests=tests/cpp/kernels
  clang=$(newest_clang)
  [[ -n $(type -P "$clang") ]] || die "this needs clang"
  "$clang" -fopenmp -include omp.h -E -x c++ /dev/null > /dev/null 2>&1 ||
    die "this needs clang's OpenMP: libomp-dev, of the version of $clang"
  command -v valgrind > /dev/null || die "this needs valgrind"
  build kernels_test planted_bug
  cd -- "$root"
  step "configuring the build with sanitizers" "$cmake" --preset asan \
    "-DCMAKE_CXX_COMPILER=$clang" "-DCMAKE_MAKE_PROGRAM=$ninja" \
    "-DCMAKE_CXX_COMPILER_LAUNCHER=$ccache" "-DTORCH_ROOT=${torch#* }"
  "$ninja" -C "$sanitized" -j "$jobs" kernels_test planted_bug 2>&1 | show_progress ||
    die "the build failed"
  finds heap-buffer-overflow "$sanitized/$tests/planted_bug" memory
  finds "signed integer overflow" "$sanitized/$tests/planted_bug" arithmetic
  MULTIHEAD_FUZZ_FIRST=450 "$sanitized/$tests/kernels_test" --gtest_brief=1 \
    --gtest_filter='-Vector*:*Layouts*'
  say "sanitizers: the planted bugs were found, no other"

  export MULTIHEAD_ISA=avx2
  local valgrind=(valgrind --quiet --error-exitcode=1)
  finds "Invalid read" "${valgrind[@]}" "$build/$tests/planted_bug" memory
  finds uninitialised "${valgrind[@]}" "$build/$tests/planted_bug" uninitialised
  MULTIHEAD_FUZZ_FIRST=480 "${valgrind[@]}" "$build/$tests/kernels_test" \
    --gtest_brief=1 --gtest_filter='Isa/*avx2:Dtype/*-*Bits.DoNot*:*Offsets*:*Layouts*'
  say "valgrind: the planted bugs were found, no other"
}
