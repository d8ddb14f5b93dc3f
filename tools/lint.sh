# SPDX-License-Identifier: MIT
# shellcheck shell=bash
#
# Part of ./run: what is said of the sources without running them, and the pages made
# from their comments. The rules are in .clang-format, .clang-tidy and pyproject.toml.

# sources [FOLDERS]: their C++ files, each ended by a NUL.
sources() {
  find "${@:-.}" \( -path ./build -o -path ./.venv \) -prune -o -name '*.h' -print0 \
    -o -name '*.cpp' -print0
}

format() {
  local clang=(-i) ruff=(--quiet) status=0
  if [[ ${1:-} == --check ]]; then clang=(--dry-run -Werror) ruff=(--diff); fi
  install lint
  cd -- "$root"
  sources | xargs -0 "$venv/bin/clang-format" "${clang[@]}" || status=1
  "$venv/bin/ruff" format "${ruff[@]}" . || status=1
  return "$status"
}

# tidy: clang-tidy on the files that standard input names, each ended by a NUL. What
# needs no PyTorch is read as one of the kernels' targets, the rest as build/release
# compiles it: half a minute for each file.
tidy() {
  local file alone=() other=() flags=(-x c++ -std=c++20 -I. -DMULTIHEAD_TARGET=portable)
  if [[ $(uname -m) == x86_64 ]]; then
    flags=("${flags[@]:0:4}" -DMULTIHEAD_X86 -DMULTIHEAD_TARGET=avx512 -march=x86-64-v4)
  fi
  while IFS= read -rd '' file; do
    case $file in
      *reference/tensors.*) other+=("$file") ;;
      *multihead/kernels/* | *reference/* | *cpp/kernels/*) alone+=("$file") ;;
      *) other+=("$file") ;;
    esac
  done
  local options=(--quiet --extra-arg=-Wno-unknown-warning-option) status=0
  if ((${#alone[@]})); then
    printf '%s\0' "${alone[@]}" | xargs -0 -P "$jobs" -I {} \
      "$venv/bin/clang-tidy" "${options[@]}" {} -- "${flags[@]}" || status=1
  fi 2> /dev/null
  if ((${#other[@]})); then
    choose_python && find_tools && configure
    printf '%s\0' "${other[@]}" | xargs -0 -P "$jobs" -n 1 \
      "$venv/bin/clang-tidy" "${options[@]}" -p "$build" || status=1
  fi 2> /dev/null
  return "$status"
}

lint() {
  local failed=()
  install lint || { lacks "$(paste -sd ' ' "$root/requirements/lint.txt")" && return; }
  cd -- "$root"
  if (($# > 0)); then
    printf '%s\0' "$@" | tidy
    return
  fi
  format --check || failed+=(layout)
  "$venv/bin/ruff" check . || failed+=(ruff)
  choose_python
  "$venv/bin/mypy" --python-executable "$python" || failed+=(mypy)
  {
    sources multihead/kernels | grep -z '\.cpp$'
    sources reference
  } | tidy || failed+=(clang-tidy)
  ((${#failed[@]} == 0)) || die "lint: ${failed[*]}: see above, or ./run format"
  say "lint: nothing to say"
}

# The site: the Markdown and the notebooks as pages, and the reference of C++ and Python.
# A warning is an error, and so is a link that leads nowhere.
docs() {
  local pages=$root/build/docs version
  install docs || { lacks "$(paste -sd ' ' "$root/requirements/docs.txt")" && return; }
  has doxygen doxygen || { lacks doxygen && return; }
  cd -- "$root"
  version=$(sed -n 's/^project(multihead VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
  rm -rf -- "$pages"
  mkdir -p -- "$pages"
  PROJECT_NUMBER=$version "$venv/bin/sphinx-build" --quiet --fail-on-warning --keep-going \
    -c docs/site -d build/docs-read . "$pages"
  PROJECT_NUMBER=$version OUTPUT_DIRECTORY=$pages doxygen docs/Doxyfile
  "$venv/bin/pydoctor" --quiet --project-version "$version" --html-output "$pages/python"
  "$venv/bin/python" docs/site/check_links.py "$pages" || die "docs: see above"
  say "the site: $pages/index.html"
}
