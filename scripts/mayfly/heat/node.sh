#!/bin/bash
# Mayfly's launcher on one node of an OpenStack stack.
#
#   mayfly-node install   once, by cloud-init: makes and starts the unit mayfly-train
#   mayfly-node run       by that unit, at each boot: trains, reports, powers off
#   mayfly-node train     by `run`: the work itself; its output is the log
#   mayfly-node expire    by the timer mayfly-limit: ends what takes too long
#
# What to do is in job.json (the same on all nodes) and node.json (this node), never in this text,
# so no value that somebody typed is ever read as shell code.
set -eu -o pipefail
export LC_ALL=C.UTF-8 HOME=/root GIT_TERMINAL_PROMPT=0

STATE=${MAYFLY_STATE:-/var/lib/mayfly}
LOG=${MAYFLY_LOG:-/var/log/mayfly.log}
HOSTS=${MAYFLY_HOSTS:-/etc/hosts}
SELF=${MAYFLY_SELF:-/usr/local/sbin/mayfly-node}
CODE=$STATE/code
VENV=$STATE/venv
RESULTS=$STATE/results
WHEELS=/opt/mayfly/cache/wheels # an image may have some
MAX_RESTARTS=3
AGAIN_S=300 # how long a node waits for the others after it has lost them
KEEP_REASON=400 # characters of a failure's reason that Heat is told
LOOK_S=${MAYFLY_LOOK_S:-5} # between two looks whether another node has failed
# A prefix that sorts the main node first and the workers in order: torchrun ranks nodes by name.
MAIN_NAME=mayfly-main

# --- what is to be done -----------------------------------------------------------------------

declare -A JOB=() # all of job.json and node.json by key

read_job() {
  local pairs=() i
  mapfile -d '' -t pairs < <(python3 - "$STATE" <<'PY'
import json, pathlib, sys
for name in ("job.json", "node.json"):
    for key, value in json.loads(pathlib.Path(sys.argv[1], name).read_text()).items():
        print(key, "" if value is None else value, sep="\0", end="\0")
PY
  )
  [ "${#pairs[@]}" -gt 0 ] || fail "$STATE holds no job"
  for ((i = 0; i < ${#pairs[@]}; i += 2)); do JOB[${pairs[i]}]=${pairs[i + 1]}; done
}

words() { # the entrypoint's arguments, each ended by a NUL
  python3 - "${JOB[arguments]}" <<'PY'
import shlex, sys
print("".join(f"{word}\0" for word in shlex.split(sys.argv[1])), end="")
PY
}

step() { # say what begins; a failure's reason starts with it
  printf '%s' "$1" >"$STATE/step"
  printf '%s mayfly: %s\n' "$(date -u +%H:%M:%S)" "$1"
}

fail() { # end with a reason
  printf 'mayfly: %s\n' "$1"
  exit 1
}

retry() { # a command that needs the network, three times
  "$@" || { sleep 5; "$@"; } || { sleep 15; "$@"; }
}

# --- install ----------------------------------------------------------------------------------

install_unit() {
  mkdir -p "$RESULTS"
  date +%s >"$STATE/began"
  cat >/etc/systemd/system/mayfly-train.service <<UNIT
[Unit]
Description=Mayfly: distributed training on this node
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=$SELF run
KillMode=control-group
TimeoutStopSec=30

[Install]
WantedBy=multi-user.target
UNIT
  systemctl daemon-reload
  systemctl enable --quiet mayfly-train.service
  systemctl start --no-block mayfly-train.service
}

# --- run --------------------------------------------------------------------------------------

run() {
  [ ! -e "$STATE/finished" ] || { power_off; return; } # somebody started the machine again
  arm_limit
  status=1
  trap 'finish "$status"' EXIT
  trap 'trap - EXIT; exit 143' TERM # the machine reboots: the next boot goes on
  [ "${JOB[rank]}" != 0 ] || keep_board >/dev/null 2>&1 &
  watch_others >/dev/null 2>&1 &
  if setsid -w "$SELF" train 2>&1 | tee -a "$LOG"; then status=0; fi
}

arm_limit() { # after a reboot the time goes on
  local left
  left=$(($(cat "$STATE/began") + JOB[max_duration] - $(date +%s)))
  [ "$left" -gt 0 ] || left=1
  systemctl stop mayfly-limit.timer 2>/dev/null || true
  systemd-run --quiet --collect --unit=mayfly-limit --on-active="$left" "$SELF" expire
}

expire() {
  systemctl kill --kill-who=all --signal=SIGKILL mayfly-train.service 2>/dev/null || true
  sleep 1
  [ -e "$STATE/finished" ] || finish 1 "did not end within ${JOB[max_duration]} s, while $(cat "$STATE/step")"
}

finish() { # STATUS [REASON]: results, log, signal, power off; whatever fails, the rest is done
  local status=$1 reason=${2:-} word=SUCCESS
  trap - EXIT
  set +e
  [ "$status" = 0 ] || word=FAILURE
  [ -n "$reason" ] || reason=$(why "$status")
  if [ -n "${JOB[results]:-}" ] && ! upload "$word" "$reason" >>"$LOG" 2>&1; then
    [ "$word" = FAILURE ] || reason="trained, but the results were not uploaded: $(last_words)"
    word=FAILURE
  fi
  printf 'mayfly: %s: %s\n' "$word" "$reason" | tee -a "$LOG"
  touch "$STATE/finished"
  signal_heat "$word" "$reason"
  # After Heat, which names the first one: the node whose failure is the cause.
  [ "$status" = 0 ] || [ -e "$STATE/other" ] || tell_others "${JOB[name]}: $reason"
  jobs -p | xargs -r kill 2>/dev/null
  systemctl stop mayfly-limit.timer 2>/dev/null
  power_off
}

why() { # what the stack says of this node
  if [ "$1" = 0 ]; then
    echo "trained in $(($(date +%s) - $(cat "$STATE/began"))) s"
  elif [ -e "$STATE/other" ]; then
    echo "ended, since another node failed: $(cat "$STATE/other")"
  else
    echo "$(cat "$STATE/step" 2>/dev/null): $(last_words)"
  fi
}

last_words() { # the last error of Python that is not torchrun's own, or else the last line
  local line
  line=$(grep -aE '^(\[rank[0-9]+\]: *)?[A-Za-z_.]*(Error|Exception|Interrupt|Exit)\b' "$LOG" |
    grep -av 'torch.distributed.elastic' | tail -n 1)
  [ -n "$line" ] || line=$(grep -av '^[[:space:]=-]*$' "$LOG" | tail -n 1)
  printf '%s' "${line:0:$KEEP_REASON}"
}

signal_heat() { # STATUS REASON; the token goes neither to a command line nor to the log
  python3 - "$STATE/node.json" "$1" "$2" <<'PY' || printf 'mayfly: Heat was not told: %s\n' "$2" | tee -a "$LOG"
import json, pathlib, shlex, ssl, sys, time, urllib.request
node = json.loads(pathlib.Path(sys.argv[1]).read_text())
status, reason = sys.argv[2], f"{node['name']}: {sys.argv[3]}"
# Heat's attribute curl_cli is a command; its parts are used without curl.
curl = shlex.split(node["signal"])
headers = dict(h.split(": ", 1) for o, h in zip(curl, curl[1:]) if o == "-H")
context = ssl._create_unverified_context() if "--insecure" in curl else None
body = json.dumps({"status": status, "reason": reason, "data": reason, "id": node["name"]})
for wait in (1, 4, 10, 20, None):
    try:
        request = urllib.request.Request(curl[-1], body.encode(), headers, method="POST")
        urllib.request.urlopen(request, timeout=20, context=context).close()
        break
    except OSError as error:
        print(f"mayfly: Heat does not take the signal: {error}", file=sys.stderr)
        if wait is None:
            sys.exit(1)
        time.sleep(wait)
PY
}

# --- a node that fails for good ends the others: torchrun would let them wait for it ------------

board() { echo "http://${JOB[main_address]}:$((JOB[port] + 1))/"; }

keep_board() { # the main node keeps the first failure that a node tells, for all to read
  exec python3 - "${JOB[main_address]}" "$((JOB[port] + 1))" <<'PY'
import http.server, sys, time
said = b""
class Board(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(said)
    def do_POST(self):
        global said
        text = self.rfile.read(min(int(self.headers["Content-Length"]), 2000))
        said = said or text
        self.answer(b"")
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
while True:
    try:
        http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Board).serve_forever()
    except OSError: # the address is not there yet
        time.sleep(2)
PY
}

watch_others() { # ends this node's training when the board has something
  exec python3 - "$STATE" "$(board)" "$LOOK_S" <<'PY'
import http.client, os, pathlib, signal, sys, time, urllib.request
state, said = pathlib.Path(sys.argv[1]), b""
while not said:
    time.sleep(float(sys.argv[3]))
    try:
        said = urllib.request.urlopen(sys.argv[2], timeout=5).read()
    except (OSError, http.client.HTTPException):
        pass
(state / "other").write_bytes(said)
for number in (signal.SIGTERM, signal.SIGKILL): # torchrun takes its processes with it at the first
    os.killpg(int((state / "group").read_text()), number)
    time.sleep(20)
PY
}

tell_others() { # REASON; the main node stays until they have looked
  [ "${JOB[nodes]}" -gt 1 ] || return 0
  printf '%s' "$1" | python3 -c '
import sys, time, urllib.request
text, look = sys.stdin.buffer.read(), float(sys.argv[2])
for wait in (look, 2 * look, None): # the main node may not be up yet
    try:
        urllib.request.urlopen(sys.argv[1], text, timeout=5).close()
        break
    except OSError:
        if wait is None:
            sys.exit(1)
        time.sleep(wait)' "$(board)" "$LOOK_S" 2>/dev/null || return 0
  [ "${JOB[rank]}" != 0 ] || sleep $((3 * LOOK_S))
}

upload() { # STATUS REASON: the log, the outcome and what is in the results directory, to S3
  local tools=$STATE/tools
  if [ ! -e "$tools/.complete" ]; then
    python3 -m venv "$tools"
    local pip=("$tools/bin/pip" install -q --disable-pip-version-check 'boto3>=1.35,<2')
    "${pip[@]}" --no-index --find-links="$WHEELS" 2>/dev/null || retry "${pip[@]}" || return 1
    touch "$tools/.complete"
  fi
  "$tools/bin/python" - "$STATE" "$LOG" "$1" "$2" <<'PY'
import json, pathlib, sys, boto3
state, log = pathlib.Path(sys.argv[1]), sys.argv[2]
job, node = (json.loads((state / name).read_text()) for name in ("job.json", "node.json"))
bucket, _, prefix = job["results"].removeprefix("s3://").partition("/")
prefix += f"{job['stack']}/{node['name']}/"
client = boto3.client(
    "s3",
    aws_access_key_id=node["s3_access_key_id"],
    aws_secret_access_key=node["s3_secret_access_key"],
    endpoint_url=job["s3_endpoint"] or None,
    region_name=job["s3_region"],
)
outcome = {"node": node["name"], "status": sys.argv[3], "reason": sys.argv[4]}
results = state / "results"
for path in sorted(path for path in results.rglob("*") if path.is_file()):
    client.upload_file(str(path), bucket, f"{prefix}results/{path.relative_to(results)}")
client.upload_file(log, bucket, f"{prefix}mayfly.log")
client.put_object(Bucket=bucket, Key=f"{prefix}outcome.json", Body=json.dumps(outcome).encode())
PY
}

power_off() {
  [ "${JOB[keep]}" = True ] || systemctl --no-block poweroff
}

# --- train ------------------------------------------------------------------------------------

train() {
  echo $$ >"$STATE/group"
  install_packages
  get_code
  cd "$CODE/${JOB[directory]}"
  make_environment
  check_accelerator
  join_network
  wait_for_main
  launch
}

install_packages() {
  if command -v git >/dev/null && python3 -c 'import ensurepip, venv' 2>/dev/null; then return; fi
  step "installing git and python3-venv"
  if command -v apt-get >/dev/null; then
    retry apt-get update -q
    # A fresh machine may be at its own upgrades.
    DEBIAN_FRONTEND=noninteractive retry apt-get -o DPkg::Lock::Timeout=300 install -y -q \
      --no-install-recommends git python3-venv
  elif command -v dnf >/dev/null; then
    retry dnf install -y -q git python3
  else
    fail "this image has neither git and venv nor apt-get or dnf to install them"
  fi
}

get_code() {
  local repository ref directory entrypoint
  repository=${JOB[repository]} ref=${JOB[ref]}
  directory=${JOB[directory]} entrypoint=${JOB[entrypoint]}
  if [ ! -d "$CODE" ]; then
    step "cloning $repository"
    retry clone "$repository"
    if [ -n "$ref" ]; then
      step "checking out '$ref' of $repository"
      git -C "$CODE.partial" checkout -q "$ref" --
    fi
    mv "$CODE.partial" "$CODE"
  fi
  step "looking into $repository"
  [ -f "$CODE/$directory/requirements.txt" ] || fail "there is no requirements.txt in '$directory'"
  [ -f "$CODE/$directory/$entrypoint" ] || fail "there is no entrypoint '$entrypoint' in '$directory'"
}

clone() {
  rm -rf "$CODE.partial"
  git clone -q -- "$1" "$CODE.partial"
}

make_environment() {
  [ ! -e "$VENV/.complete" ] || return 0
  step "installing requirements.txt"
  [ ! -d "$WHEELS" ] || export PIP_FIND_LINKS=$WHEELS
  python3 -m venv "$VENV"
  retry "$VENV/bin/pip" install -q --disable-pip-version-check --no-cache-dir --no-compile -r requirements.txt
  touch "$VENV/.complete"
}

check_accelerator() {
  local wanted
  wanted=${JOB[processes]}
  case ${JOB[accelerator]} in
    cpu) export CUDA_VISIBLE_DEVICES="" ;;
    gpu)
      step "looking for GPUs"
      [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -ge "$wanted" ] ||
        fail "this node has fewer than $wanted GPUs that nvidia-smi shows"
      ;;
  esac
}

join_network() { # the variables of the rendezvous; the interface is the one on the way to the main node
  local main interface
  main=${JOB[main_address]}
  step "looking for the way to the main node $main"
  if [ "${JOB[rank]}" = 0 ]; then
    interface=$(ip -o -4 addr show | awk -v address="$main" '{split($4, a, "/")} a[1] == address {print $2}')
  else
    interface=$(ip -o -4 route get "$main" | sed -n 's/.* dev \([^ ]*\) .*/\1/p')
  fi
  [ -n "$interface" ] || fail "no interface has the address $main"
  [ "$interface" != lo ] || fail "the way to $main is the loopback interface"
  grep -q " $MAIN_NAME\$" "$HOSTS" || printf '%s %s\n' "$main" "$MAIN_NAME" >>"$HOSTS"
  MASTER_ADDR=$main MASTER_PORT=${JOB[port]} NODE_RANK=${JOB[rank]}
  NNODES=${JOB[nodes]} NPROC_PER_NODE=${JOB[processes]}
  export MASTER_ADDR MASTER_PORT NODE_RANK NNODES NPROC_PER_NODE
  export WORLD_SIZE=$((NNODES * NPROC_PER_NODE))
  export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface TP_SOCKET_IFNAME=$interface
  export MAYFLY_RESULTS=$RESULTS
}

wait_for_main() { # workers wait; the main node goes on, and tells Heat once its own port is open
  local limit
  limit=${JOB[start_timeout]}
  if [ "$NODE_RANK" = 0 ]; then
    if [ "${JOB[waits_for]}" = started ]; then
      # Not into the pipe of the log, which would then stay open as long as this waits.
      (until_open "$MASTER_ADDR" "$MASTER_PORT" "$limit" && signal_heat SUCCESS "training started") >/dev/null 2>&1 &
    fi
    return
  fi
  step "waiting for the main node $MASTER_ADDR:$MASTER_PORT"
  until_open "$MASTER_ADDR" "$MASTER_PORT" "$limit" || fail "it did not answer within $limit s"
  [ "${JOB[waits_for]}" != started ] || signal_heat SUCCESS "training started"
}

until_open() { # ADDRESS PORT SECONDS
  python3 - "$@" <<'PY'
import socket, sys, time
address, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + seconds
while True:
    try:
        socket.create_connection((address, port), timeout=3).close()
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit(1)
        time.sleep(1)
PY
}

launch() {
  local entrypoint command=() arguments=() is_host=false
  entrypoint=${JOB[entrypoint]}
  words >"$STATE/arguments"
  mapfile -d '' -t arguments <"$STATE/arguments"
  if [ "${JOB[launcher]}" = plain ]; then
    command=("$VENV/bin/python" -u "$entrypoint")
  else
    [ -x "$VENV/bin/torchrun" ] || fail "requirements.txt installs no torch: there is no torchrun"
    [ "$NODE_RANK" != 0 ] || is_host=true
    # In a store that starts share, ranks find the addresses of the start before.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    command=("$VENV/bin/torchrun"
      --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" --max-restarts="$MAX_RESTARTS"
      --rdzv-backend=c10d --rdzv-id="${JOB[stack]}" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
      --rdzv-conf="is_host=$is_host,join_timeout=${JOB[start_timeout]}"
      --local-addr="$(rendezvous_name)" "$entrypoint")
  fi
  local attempt
  for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
    step "running $entrypoint on node $NODE_RANK of $NNODES"
    if PYTHONUNBUFFERED=1 "${command[@]}" "${arguments[@]}"; then return 0; fi
    sleep 2 # until the log has the last lines
    lost_rendezvous || return 1
    # The other nodes' torchrun has lost it too; they meet again where the main node listens anew.
    JOB[start_timeout]=$((JOB[start_timeout] < AGAIN_S ? JOB[start_timeout] : AGAIN_S))
    wait_for_main
  done
  return 1
}

lost_rendezvous() { # whether torchrun itself gave up, as it does when a node comes back too soon
  tail -n 60 "$LOG" | grep -aE '^torch\.distributed\.[A-Za-z_.]*(Error|Exception)' | tail -n 1 |
    grep -qE '(DistStoreError|DistNetworkError|DistBackendError|RendezvousConnectionError|RendezvousTimeoutError)'
}

rendezvous_name() {
  if [ "$NODE_RANK" = 0 ]; then echo "$MAIN_NAME"; else printf 'mayfly-worker-%04d' "$NODE_RANK"; fi
}

# ----------------------------------------------------------------------------------------------

case ${1:-} in
  install) install_unit ;;
  run) read_job; run ;;
  train) read_job; train ;;
  expire) read_job; expire ;;
  *) echo "usage: mayfly-node install | run | train | expire" >&2; exit 2 ;;
esac
