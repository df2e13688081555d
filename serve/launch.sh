#!/usr/bin/env bash
# launch.sh serve: serve $ARTIFACT on 127.0.0.1:$PORT as $SERVED_NAME through vLLM's OpenAI server, as LowBArena starts it. Shipped as it is.
#   needed:     ARTIFACT (a directory, or a Hub id), TOKENIZER, PORT, SERVED_NAME, MAX_MODEL_LEN, GPU_MEMORY_UTILIZATION, KV_CACHE_DTYPE
#   understood: GENERATION_CONFIG, LANGUAGE_MODEL_ONLY=1 (the arena's wish; without it every modality stays on), GEMQ_PROFILE (else what
#               the file `profile` beside this one says, else throughput), GEMQ_EXTRA_ARGS (more of vLLM's arguments, split at spaces),
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
    *) refuse 2 "GEMQ_PROFILE is '$1'; valid are single-stream, throughput, memory" ;;
  esac
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
  profile=$(profile_arguments "${GEMQ_PROFILE:-$profile}")
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
  # shellcheck disable=SC2206
  command+=(${GEMQ_EXTRA_ARGS:-})
  printf 'launch.sh:%s\n' "$(printf ' %q' "${command[@]}")" >&2
  exec "${command[@]}"
}

case "${1:-}" in
  serve) serve "${2:-}" ;;
  *) refuse 2 "usage: launch.sh serve [--no-verify]" ;;
esac
