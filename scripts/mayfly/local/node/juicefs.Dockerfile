RUN ln -s /dev/null /etc/systemd/system/redis-server.service \
 && printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d \
 && apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server \
 && apt-get clean && rm /usr/sbin/policy-rc.d
LABEL mayfly.devices=/dev/fuse
