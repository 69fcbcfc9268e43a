#!/bin/sh
# Make the HDFS-only set of Hadoop in /out; runs in a throw-away container of the base image.
# usage: assemble.sh SCRIPT
set -eu
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends gcc libc6-dev
python3 "$1" /out/hadoop
