ARG SOURCE
FROM ${SOURCE}
COPY . /tmp/mayfly
RUN sh /tmp/mayfly/setup.sh /tmp/mayfly && rm -r /tmp/mayfly
ENV container=docker
STOPSIGNAL SIGRTMIN+3
LABEL mayfly=1
CMD ["/usr/local/sbin/mayfly-init"]
