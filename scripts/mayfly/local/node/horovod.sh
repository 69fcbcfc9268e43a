#!/bin/sh
# Compile Horovod's wheel in /out; runs in a throw-away container of the base image.
# usage: horovod.sh FRAMEWORK   (/in has the scripts, the framework's requirements, and wheels)
set -eu
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends cmake g++ make python3-dev
python3 /in/install_packages.py /tmp/runtime /in/requirements.txt /in/wheels --offline
python3 /in/build_wheel.py /tmp/runtime/bin/python "$1" /out
rm -f /out/*.log
