# shellcheck shell=bash
# Finds a Python and keeps a virtual environment in sync with pyproject.toml. Sourced by the scripts beside it, which
# first set `root` (the repository) and `me` (their own name, for messages). Works with bash 3.2, the newest on macOS.

# Exits with 3 if the Python is too old or not among the given minor versions, and with 4 if it cannot create a virtual
# environment (Debian and Ubuntu package ensurepip separately). Otherwise prints the path of the interpreter itself:
# never a shim, whose result depends on the folder, and never the link of a virtual environment, which disappears when
# that environment is created again.
probe='
import sys
if sys.version_info < (3, 12) or sys.implementation.name != "cpython":
    sys.exit(3)
if sys.argv[1:] and str(sys.version_info[1]) not in sys.argv[1:]:
    sys.exit(3)
try:
    import ensurepip, venv
    ensurepip.version()
except Exception:
    sys.stdout.write("%s %d.%d" % ((sys.executable,) + sys.version_info[:2]))
    sys.exit(4)
print(getattr(sys, "_base_executable", "") or sys.executable)
'

lowest_minors='12 13' # the oldest supported numpy has no wheels for a newer Python

answer_help() { # ARGUMENT…; prints what the function `usage` says, and exits, if an argument asks for it
  local argument
  for argument in "$@"; do
    case "$argument" in
      -h | --help) usage && exit 0 ;;
    esac
  done
}

case "${PYTHON:-}" in
  '' | /*) ;;
  */*) PYTHON=$PWD/$PYTHON ;; # the scripts change to the root of the repository before they use it
esac

say() { printf '%s: %s\n' "$me" "$1" >&2; }

python_candidates() { # MINOR… in order of preference
  local minor folder python
  for minor in "$@"; do printf 'python3.%s\n' "$minor"; done
  printf 'python3\npython\n'
  for minor in "$@"; do
    for folder in "${PYENV_ROOT:-/nonexistent}" "${HOME:-/nonexistent}/.pyenv"; do
      for python in "$folder/versions/3.$minor".*/bin/python; do
        if [ -x "$python" ]; then printf '%s\n' "$python"; fi
      done
    done
  done
  if command -v uv >/dev/null 2>&1; then
    for minor in "$@"; do uv python find --system "3.$minor" 2>/dev/null || true; done
  fi
}

# Prints the first candidate that runs, is new enough and can create virtual environments. 3.12 is tried first, because
# the project is tested on it (.python-version). A name on the PATH is not sufficient: pyenv has shims for every version
# ever installed, which exit with 127 if that version is not selected.
find_python() { # [--lowest]
  local minors='12 13 14' only='' needed='≥ 3.12' candidates candidate answer status crippled=''
  if [ "${1:-}" = --lowest ]; then
    minors=$lowest_minors only=$lowest_minors needed='3.12 or 3.13'
  fi
  # shellcheck disable=SC2086 # minors are words
  candidates=${PYTHON:-$(python_candidates $minors)}
  while IFS= read -r candidate; do
    # shellcheck disable=SC2086
    answer=$("$candidate" -c "$probe" $only 2>/dev/null </dev/null) && status=0 || status=$?
    if [ "$status" = 0 ] && [ -n "$answer" ]; then
      printf '%s\n' "$answer"
      return 0
    fi
    if [ "$status" = 4 ] && [ -z "$crippled" ]; then crippled=$answer; fi
  done <<<"$candidates"
  if [ -n "$crippled" ]; then
    say "${crippled% *} has no ensurepip; on Debian or Ubuntu: apt install python${crippled##* }-venv"
  elif [ -n "${PYTHON:-}" ]; then
    say "PYTHON=$PYTHON is not a working CPython $needed; unset it or set another one"
  else
    say "no Python $needed found; install one (uv python install 3.12 or pyenv install 3.12), or set it: PYTHON=… $me"
  fi
  return 2
}

# Creates VENV and installs the project in it, or leaves it unchanged if pyproject.toml is unchanged. An environment
# broken by an interrupted install, an upgrade of Python or a move of the repository is created again.
ensure_venv() { # VENV EXTRA [CONSTRAINTS]
  local venv=$1 extra=$2 constraints=${3:-} python base wanted stamp
  python=$venv/bin/python
  stamp=$venv/.installed${extra:+-$extra}
  wanted=$root$'\n'$(cat "$root/pyproject.toml" ${constraints:+"$constraints"})
  if venv_is_sound "$venv" ${constraints:+--lowest}; then
    if is_installed "$venv" "$extra" "$wanted"; then return 0; fi
  else
    base=$(find_python ${constraints:+--lowest}) || return 2
    say "creating ${venv##*/} with $base"
    rm -rf "$venv"
    mkdir -p "$venv"
    : >"$venv/.installing"
    "$base" -m venv "$venv" || return 1
  fi
  install_project "$venv" "$extra" "$constraints" || return 1
  printf '%s\n' "$wanted" >"$stamp"
}

# The extra dev contains the extras kernels and parquet, each extra the core, and an installation of several extras each of them.
is_installed() { # VENV EXTRA WANTED
  local venv=$1 extra=$2 wanted=$3 stamp there each has_all
  for stamp in "$venv/.installed"*; do
    if ! stamp_says "$stamp" "$wanted"; then continue; fi
    there=,${stamp#"$venv/.installed"}, has_all=yes
    there=${there/,-/,}
    case "$there" in *,dev,*) there=$there,kernels,parquet, ;; esac
    for each in ${extra//,/ }; do
      case "$there" in *,"$each",*) ;; *) has_all='' ;; esac
    done
    if [ -n "$has_all" ]; then return 0; fi
  done
  return 1
}

stamp_says() { # STAMP WANTED
  [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]
}

venv_is_sound() { # VENV [--lowest]
  local stamp made_for allowed=''
  if [ "${2:-}" = --lowest ]; then allowed=$lowest_minors; fi
  if [ -e "$1/.installing" ]; then return 1; fi
  for stamp in "$1/.installed"*; do
    if [ -f "$stamp" ]; then
      IFS= read -r made_for <"$stamp"
      if [ "$made_for" != "$root" ]; then return 1; fi
    fi
  done
  # shellcheck disable=SC2086
  "$1/bin/python" -c "$probe" $allowed >/dev/null 2>&1 </dev/null
}

install_project() { # VENV EXTRA CONSTRAINTS
  local venv=$1 extra=$2 constraints=$3 log=$1/install.log status=0
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then # uv makes environments without pip
    "$venv/bin/python" -m ensurepip >"$log" 2>&1 || { cat "$log" >&2 && return 1; }
  fi
  say "installing loopfeed${extra:+[$extra]} into ${venv##*/}: about 900 MB, up to several minutes the first time (${venv##*/}/install.log)"
  : >"$venv/.installing"
  # Only wheels: without a compiler, building a dependency would fail minutes later with a less clear message.
  "$venv/bin/python" -m pip install --disable-pip-version-check --only-binary=:all: \
    ${constraints:+--constraint "$constraints"} --editable "$root${extra:+[$extra]}" >"$log" 2>&1 </dev/null || status=$?
  if [ "$status" = 0 ]; then
    rm -f "$venv/.installing"
  else
    cat "$log" >&2
    case "$(cat "$log")" in
      *'Installing collected packages'*) ;; # stopped while installing packages: the mark stays
      *) rm -f "$venv/.installing" ;;
    esac
    say "pip could not install the project (exit code $status, output above); run the same command again to continue"
  fi
  return "$status"
}

# Lets all that is started keep the bytecode of what it imports, without which each process compiles all modules again.
# Whoever wants none beside the sources has it in the environment.
keep_bytecode() { # VENV
  if [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then return 0; fi
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$1/bytecode}"
}

# All that the tests marked `integration` need besides the environment's packages.
ensure_downloads() { # VENV
  ensure_card_compiler "$1"
  ensure_slurm "$1"
  ensure_chromium "$1"
}

# Installs XLA's compiler for NVIDIA cards, which itself needs no card, outside the environment's packages: as one of
# them it would make jax look for a card at every start. Without it the tests that compile for a card are skipped.
ensure_card_compiler() { # VENV
  local python=$1/bin/python folder=$1/card-compiler log=$1/card-compiler.log version
  version=$("$python" -c 'import jaxlib, sys; print(jaxlib.__version__ if sys.platform == "linux" else "")') || version=''
  if [ -z "$version" ] || [ -e "$folder/.installed-$version" ]; then return 0; fi
  say "downloading XLA's compiler for NVIDIA cards, 145 MB"
  rm -rf "$folder"
  if "$python" -m pip install --disable-pip-version-check --timeout 15 --retries 1 --only-binary=:all: --no-deps \
    --target "$folder" "jax-cuda13-pjrt==$version" "jax-cuda13-plugin==$version" >"$log" 2>&1 </dev/null; then
    : >"$folder/.installed-$version"
  else
    say "pip could not download it, so the tests that compile for a card are skipped; see $log"
  fi
}

# Unpacks Debian's Slurm, which needs no rights, for the test that runs a job under it; without it that test is skipped.
ensure_slurm() { # VENV
  local folder=$1/slurm log=$1/slurm.log package
  if [ -e "$folder/.unpacked" ] || command -v slurmctld >/dev/null 2>&1 || [ -x /usr/sbin/slurmctld ]; then return 0; fi
  if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg >/dev/null 2>&1; then return 0; fi
  say "downloading Slurm, 3 MB"
  rm -rf "$folder"
  mkdir -p "$folder/packages"
  if (
    cd "$folder/packages"
    timeout 60 apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 libmunge2 || exit 1
    for package in *.deb; do dpkg -x "$package" "$folder" || exit 1; done
  ) >"$log" 2>&1 </dev/null; then
    : >"$folder/.unpacked"
  else
    say "apt-get could not download it, so the test that runs a job under Slurm is skipped; see $log"
    rm -rf "$folder"
  fi
}

# Unpacks Debian's Chromium and those of its libraries that this machine lacks, which needs no rights, for the tests that
# open pages in a browser; without it those tests are skipped.
ensure_chromium() { # VENV
  local folder=$1/chromium log=$1/chromium.log name packages package
  if [ -e "$folder/.unpacked" ]; then return 0; fi
  for name in chromium chromium-browser google-chrome-stable google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then return 0; fi
  done
  if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg >/dev/null 2>&1; then return 0; fi
  say "downloading Chromium, up to 210 MB"
  rm -rf "$folder"
  mkdir -p "$folder/packages"
  if (
    cd "$folder/packages"
    packages=$(apt-get --simulate --no-install-recommends install chromium | sed -n 's/^Inst \([^ ]*\) .*/\1/p')
    [ -n "$packages" ] || exit 1
    # shellcheck disable=SC2086 # packages are words
    timeout 600 apt-get download $packages || exit 1
    for package in *.deb; do dpkg -x "$package" "$folder" || exit 1; done
    rm -- *.deb
    printf '<?xml version="1.0"?>\n<fontconfig><dir>/usr/share/fonts</dir><dir>%s/usr/share/fonts</dir></fontconfig>\n' \
      "$folder" >"$folder/fonts.conf"
  ) >"$log" 2>&1 </dev/null; then
    : >"$folder/.unpacked"
  else
    say "apt-get could not download it, so the tests in a browser are skipped; see $log"
    rm -rf "$folder"
  fi
}
