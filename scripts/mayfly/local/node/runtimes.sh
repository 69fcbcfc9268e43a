#!/bin/sh
# Make an environment of each list of packages, all at a time, named by the list's SHA-256: role
# runtime of a job with the same list links it. The proof's imports leave their bytecode. One that
# cannot be made here, or not run (TensorFlow wants AVX), is left out: jobs without it need it not,
# and for the others the role says what is wrong.
# usage: runtimes.sh WHEELS   (the lists and their proofs are beside this script)
set -eu
here=$(dirname "$0")
for list in "$here"/*.txt; do
  home=$here/$(sha256sum "$list" | cut -c1-64)
  {
    python3 "$here/install_packages.py" "$home" "$list" "$1" --offline &&
      TF_CPP_MIN_LOG_LEVEL=3 "$home/bin/python" "${list%.txt}.proof.py" ||
      { rm -rf "$home" && echo "left out: ${list##*/}"; }
  } &
done
wait
rm "$here"/*.txt "$here"/*.py "$0"
