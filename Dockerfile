# The command line and both daemons, for the CPU or, with --build-arg TORCH=cuda, for NVIDIA devices.
#
# To pin the base by digest: --build-arg PYTHON_TAG=3.13-slim-bookworm@sha256:...
ARG PYTHON_TAG=3.13-slim-bookworm

FROM python:${PYTHON_TAG} AS wheel
WORKDIR /src
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    pip install --no-cache-dir --root-user-action ignore -c /tmp/constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY ingest ingest
COPY replay replay
COPY learner learner
COPY serving serving
COPY anabranch anabranch
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /dist .

FROM python:${PYTHON_TAG}
ARG TORCH=cpu
# With TORCH=cuda: an index of wheels for an older driver, such as https://download.pytorch.org/whl/cu126; the wheels of
# PyPI are for CUDA 13, which needs driver 580.
ARG TORCH_INDEX=""
# Extras of pyproject.toml, separated by commas; without codecs, since it is the producers who choose a compression.
ARG EXTRAS=""
ENV PATH=/opt/anabranch/bin:$PATH \
    HOME=/tmp TMPDIR=/tmp \
    PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# From what seldom changes to what often does: a new release adds only the last of these layers.
RUN groupadd --gid 10001 anabranch \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin anabranch \
    && install -d -o 10001 -g 10001 -m 0750 /var/lib/anabranch /var/cache/anabranch \
    && install -d /pipeline \
    && python -m venv --without-pip /opt/anabranch
# For learner.compile: Triton compiles the launchers of its kernels where they run.
RUN if [ "$TORCH" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    torch="$(grep '^torch==' /tmp/constraints.txt)" \
    && case "$TORCH" in \
         cpu) set -- --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" ;; \
         cuda) set -- ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch${TORCH_INDEX:++${TORCH_INDEX##*/}}" ;; \
         *) echo "TORCH=$TORCH is not known: it is cpu or cuda" >&2; exit 2 ;; \
       esac \
    && pip --python /opt/anabranch install -c /tmp/constraints.txt "$@"
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    --mount=type=bind,source=pyproject.toml,target=/tmp/pyproject.toml \
    python -c 'import sys, tomllib; project = tomllib.load(open("/tmp/pyproject.toml", "rb"))["project"]; \
known = project["optional-dependencies"]; known["all"] = [each for name in known if name != "all" for each in known[name]]; \
extras = [extra for name in {"codecs", *sys.argv[1].split(",")} - {""} for extra in known[name]]; \
print(*project["dependencies"], *extras, sep="\n")' "$EXTRAS,$([ "$TORCH" != cuda ] || echo gpu)" > /tmp/requirements.txt \
    && pip --python /opt/anabranch install -c /tmp/constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/anabranch install --no-deps --no-index /dist/*.whl

ARG REVISION=""
LABEL org.opencontainers.image.title="Anabranch" \
      org.opencontainers.image.description="Keeps a PyTorch model learning from a Kafka stream while it serves it" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"

# The pipeline's folder is mounted here, read-only; all state is in the volume.
WORKDIR /pipeline
ENV ANABRANCH__STATE_DIR=/var/lib/anabranch
# For what learner.compile compiles: not /tmp, from which compose lets nothing be executed, nor the state, which is data
# that can run no code. compose.gpu.yaml mounts a volume there, for the learner alone.
ENV TORCHINDUCTOR_CACHE_DIR=/var/cache/anabranch/inductor \
    TRITON_CACHE_DIR=/var/cache/anabranch/triton
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
ENTRYPOINT ["anabranch"]
CMD ["--help"]
