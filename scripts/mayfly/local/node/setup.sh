#!/bin/sh
# Make an IM node of a bare Debian: packages, the environment that IM expects, systemd, sshd. No
# configuration of the cluster and no roles: these come with each run, as on a cloud.
# usage: setup.sh DIRECTORY   (what image.py put beside this script; the lists of packages are there)
set -eu
here=$1
export DEBIAN_FRONTEND=noninteractive

# Documentation fills a quarter of a node; Java's package wants its manual's directory all the same.
mkdir -p /etc/dpkg/dpkg.cfg.d /usr/share/man/man1
printf 'path-exclude=/usr/share/%s/*\n' man doc locale info >/etc/dpkg/dpkg.cfg.d/mayfly
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d

if [ -s "$here/sources.list" ]; then
  rm -f /etc/apt/sources.list.d/debian.sources
  cp "$here/sources.list" /etc/apt/sources.list
fi
apt-get update -q
# shellcheck disable=SC2046 # one word for each package is meant
apt-get install -y -q --no-install-recommends $(grep -v '^#' "$here/packages.txt")

# Registries are reached as this machine reaches them.
cp "$here"/certificates/*.crt /usr/local/share/ca-certificates/ 2>/dev/null || true
update-ca-certificates >/dev/null
cp "$here/pip.conf" /etc/pip.conf

# IM installs Ansible by micromamba from conda's channels: one download for each cluster. The same
# environment is here already, and a stand-in for the program that would make it.
mamba=/var/tmp/.mamba
mkdir -p "$mamba/bin" "$mamba/envs"
python3 -m venv "$mamba/envs/ansible"
"$mamba/envs/ansible/bin/pip" install -q --no-cache-dir --no-compile -r "$here/requirements-ansible.txt"
# Ansible's bundle has 100 collections; what only their developers use is half of the image's files.
for packages in "$mamba"/envs/ansible/lib/python3*/site-packages; do
  rm -rf "$packages"/ansible_collections/*/*/tests "$packages"/ansible_collections/*/*/docs \
    "$packages"/ansible_collections/*/*/changelogs
  "$mamba/envs/ansible/bin/python" -m compileall -q -x ansible_collections "$packages" || true
done
install -m 755 "$here/micromamba" "$mamba/bin/micromamba"

# Nodes let in who has the key that IM's connector made for them, and have no passwords.
rm -f /etc/ssh/ssh_host_*
install -m 644 "$here/sshd.conf" /etc/ssh/sshd_config.d/mayfly.conf
# A container has no audit session: pam_loginuid cannot set one.
sed -i 's/^session\s\+required\s\+pam_loginuid.so/session optional pam_loginuid.so/' /etc/pam.d/sshd
install -m 755 "$here/mayfly-init" /usr/local/sbin/mayfly-init

# What belongs to real hardware only fails or waits in a container.
for unit in apt-daily.timer apt-daily-upgrade.timer console-getty.service dev-hugepages.mount \
  e2scrub_all.timer fstrim.timer getty.target sys-fs-fuse-connections.mount \
  systemd-logind.service systemd-modules-load.service systemd-networkd.service \
  systemd-remount-fs.service systemd-resolved.service systemd-udevd.service \
  systemd-udev-trigger.service; do
  ln -sf /dev/null "/etc/systemd/system/$unit"
done
# Each node gets an identity of its own when it starts (mayfly-init).
rm -f /etc/machine-id /var/lib/dbus/machine-id
ln -s /etc/machine-id /var/lib/dbus/machine-id
systemctl set-default multi-user.target >/dev/null
systemctl enable ssh >/dev/null

rm -rf /usr/sbin/policy-rc.d /usr/share/doc/* /usr/share/man/man[2-9] /usr/share/locale/* /root/.cache
apt-get clean
