# SPDX-License-Identifier: MIT
# shellcheck shell=bash
#
# Part of ./run: configures build/release and builds targets in it.

# Sets ccache, if there is one, and cmake and ninja: the system's where new
# enough, else .venv's. Of paths in the checkout ccache sees the part below it, so
# that it knows its files again in another checkout.
find_tools() {
  ccache=$(command -v ccache) || true
  export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
  export CCACHE_SLOPPINESS=pch_defines,time_macros  # or it caches no source
  cmake=$(command -v cmake) ninja=$(command -v ninja) &&
    "$cmake" --version | python3 -c '
import re, sys
sys.exit([int(n) for n in re.findall(r"\d+", sys.stdin.readline())[:2]] < [3, 25])' &&
    return
  install build
  cmake=$venv/bin/cmake ninja=$venv/bin/ninja
}

configure() {
  local key="$root $python $torch ${CI:-}" options=()
  [[ -f $build/.configured && $(< "$build/.configured") == "$key" ]] && return
  if [[ -n $ccache ]]; then options+=("-DCMAKE_CXX_COMPILER_LAUNCHER=$ccache"); fi
  if [[ ${CI:-} == true ]]; then options+=(-DCMAKE_COMPILE_WARNING_AS_ERROR=ON); fi
  step "configuring the build" "$cmake" --fresh -S "$root" -B "$build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release "-DCMAKE_MAKE_PROGRAM=$ninja" \
    "-DTORCH_ROOT=${torch#* }" "${options[@]}"
  echo "$key" > "$build/.configured"
}

# Shows what Ninja says: its progress on one line where there is a terminal, and
# nothing at all when there was nothing to do.
show_progress() {
  local line start=$SECONDS worked='' newline='' width=${COLUMNS:-80}
  while IFS= read -r line; do
    case $line in
      "ninja: Entering"* | "ninja: no work"* | *"Re-checking globbed"*) continue ;;
    esac
    worked=yes
    if [[ $line == \[* && -t 2 ]]; then
      printf '\r\e[K%s' "${line:0:width-1}" && newline=$'\n'
    else
      printf '%s\n' "$newline$line" && newline=''
    fi
  done >&2
  if [[ -n $worked ]]; then
    printf '%s' "$newline" >&2
    say "the build took $((SECONDS - start)) s"
  fi
}

# build TARGETS: sets up what that takes, one call at a time, and builds them.
build() {
  mkdir -p -- "$build"
  exec 9> "$root/build/.lock"
  flock -n 9 || { say "waiting for another ./run" && flock 9; }
  install_packages
  choose_python
  find_tools
  configure
  "$ninja" -C "$build" -j "$jobs" "$@" 2>&1 < /dev/null | show_progress ||
    die "the build failed"
  exec 9>&-
  export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH}
  export MULTIHEAD_BUILD_DIR=$build MULTIHEAD_PYTHON=$python
}
