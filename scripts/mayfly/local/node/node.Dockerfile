ARG BASE
FROM ${BASE}
COPY hadoop /opt/mayfly/cache/hadoop
COPY wheels /opt/mayfly/cache/wheels
COPY horovod /opt/mayfly/cache/horovod
