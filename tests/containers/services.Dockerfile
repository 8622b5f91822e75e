# Prometheus and a registry from Debian's own packages, for machines that reach no registry.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
RUN apt-get -o Acquire::Retries=5 update \
    && apt-get -o Acquire::Retries=5 install -y --no-install-recommends docker-registry prometheus \
    && rm -rf /var/lib/apt/lists/*
USER 65534
ENTRYPOINT ["prometheus"]
