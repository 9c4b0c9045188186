# The images of Engram: `operator`, `runtime` (NVIDIA GPUs) and `runtime-cpu`. docs/install.md says how to build them.
#
#   buildah build --target operator --tag engram-operator .          # or docker, or podman
#
# BASE is any image with Python 3.11 or newer, `venv` and glibc. With a folder `wheelhouse/` in the context nothing is
# fetched: it holds the wheels of every dependency, of pip and of hatchling. Dependencies are layers of their own: a
# change of our sources builds one small layer.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/engram
COPY pyproject.toml constraints.txt ./
# The name is a pattern, so that the folder may be missing; constraints.txt is there so that something is copied.
COPY constraints.txt wheelhous[e] /wheelhouse/
# An index of your own, as build arguments: they are in no image that is kept.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/src/constraints.txt
RUN if ls /wheelhouse/*.whl >/dev/null 2>&1; then \
        printf '[global]\nno-index = true\nfind-links = /wheelhouse\n' >/etc/pip.conf; \
    fi
# What pyproject.toml asks for, with one extra.
RUN for extra in operator runtime; do python3 -c "import sys, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies'][sys.argv[1]], sep='\n')" $extra >/opt/$extra.txt \
        || exit 1; \
    done
# pip works from its own environment on the other one: it is in no image.
ENV INSTALL="/opt/build/bin/pip --python /opt/engram/bin/python"

FROM build AS operator-packages
RUN $INSTALL install --quiet --requirement /opt/operator.txt

FROM build AS runtime-packages
RUN $INSTALL install --quiet --requirement /opt/runtime.txt

FROM build AS runtime-cpu-packages
# PyPI's torch for x86-64 brings the CUDA libraries. An index with CPU builds (of the same version) makes a small image.
ARG TORCH_INDEX_URL
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
        $INSTALL install --quiet --index-url "$TORCH_INDEX_URL" torch; \
    fi \
    && $INSTALL install --quiet --requirement /opt/runtime.txt \
    && $INSTALL uninstall --quiet --yes triton

# Our own packages, in a folder that the images copy over the environment.
FROM build AS own
RUN /opt/build/bin/pip install --quiet 'hatchling>=1.25'
COPY README.md LICENSE ./
COPY crds crds
COPY kernels kernels
COPY runtime runtime
COPY operator operator
COPY provider provider
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist . \
    && $INSTALL install --quiet --no-deps --prefix /opt/own /dist/*.whl

FROM ${BASE} AS common
# Libraries ask for a user's name and home; the home is the one place that can be written where the root is read-only.
RUN echo 'engram:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd && echo 'engram:x:10001:' >>/etc/group
ENV PATH=/opt/engram/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.vendor="Engram" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="https://engram.dev/docs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Both commands handle SIGTERM themselves and start no process that they do not wait for: PID 1 needs no helper.
STOPSIGNAL SIGTERM
WORKDIR /
USER 10001:10001

FROM common AS operator
LABEL org.opencontainers.image.title="engram-operator" \
      org.opencontainers.image.description="The Kubernetes operator of Engram"
COPY --from=operator-packages /opt/engram /opt/engram
COPY --from=own /opt/own /opt/engram
ENTRYPOINT ["engram-operator"]

FROM common AS runtime-cpu
LABEL org.opencontainers.image.title="engram-runtime-cpu" \
      org.opencontainers.image.description="The inference engine of Engram, for CPUs"
COPY --from=runtime-cpu-packages /opt/engram /opt/engram
COPY --from=own /opt/own /opt/engram
ENTRYPOINT ["engram"]

FROM common AS runtime
LABEL org.opencontainers.image.title="engram-runtime" \
      org.opencontainers.image.description="The inference engine of Engram, for NVIDIA GPUs"
# Triton compiles a launcher for each kernel when it first runs: a C compiler and Python's headers at run time.
USER 0:0
RUN headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
    && apt-get update --quiet \
    && apt-get install --quiet --yes --no-install-recommends gcc libc6-dev $([ -f "$headers" ] || echo python3-dev) \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=runtime-packages /opt/engram /opt/engram
COPY --from=own /opt/own /opt/engram
ENTRYPOINT ["engram"]
