# Two images that run `maglev serve` on the model mounted at /model: docs/guides/deploy.md has the commands.
#   docker build --target cpu  -t maglev:cpu .
#   docker build --target cuda -t maglev:cuda .
FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/maglev
COPY constraints.txt ./
# Options for the installation of PyTorch alone, such as another index, where a CPU should not get CUDA's libraries.
ARG TORCH_OPTIONS=""
RUN pip install $TORCH_OPTIONS "$(grep -i '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY maglev ./maglev
RUN pip install -c constraints.txt '.[serve]' \
    && useradd --system --create-home --uid 10001 maglev \
    && install -d -o maglev -g maglev /sessions
EXPOSE 8000
VOLUME /sessions
ENTRYPOINT ["maglev"]
# Inside a container 0.0.0.0 is the container; `docker run -p 127.0.0.1:8000:8000` decides who reaches it.
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000", "--sessions", "/sessions"]

FROM base AS cpu
USER maglev

FROM base AS cuda
# Triton compiles a small launcher for its kernels with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER maglev
