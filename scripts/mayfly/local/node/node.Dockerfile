ARG BASE
FROM ${BASE}
COPY hadoop /opt/mayfly/cache/hadoop
COPY wheels /opt/mayfly/cache/wheels
COPY horovod /opt/mayfly/cache/horovod
COPY runtimes /opt/mayfly/cache/runtimes
RUN sh /opt/mayfly/cache/runtimes/runtimes.sh /opt/mayfly/cache/wheels
