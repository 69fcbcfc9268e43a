"""CLOUD=local: a Docker Engine, a node image, an S3 server and an IM service on this machine."""
