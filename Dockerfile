# The image of docker-compose.yml: CPU torch, the pinned packages of requirements.lock, no tools.
#   docker build -t localhost/swarm:cpu .
#   docker build -t localhost/swarm:gpu --build-arg TORCH_INDEX= --build-arg SLIM=no .
# Layers go from what changes seldom to what changes often: a change of the code repeats no download.
# A name with a digest (python:3.11-slim@sha256:...) fixes what is built upon.
ARG BASE=python:3.11-slim
FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_PYTHON=/venv/bin/python
RUN python -m venv --without-pip /venv && echo /app > /venv/lib/python3.11/site-packages/app.pth
ENV PATH=/venv/bin:$PATH
COPY requirements-build.lock requirements.lock requirements-torch.lock /src/
# Where torch comes from: builds for the CPU are not on PyPI. Empty: what pip finds by itself, on Linux the build for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The last command brings the CUDA packages that a build for it names; with a build for the CPU it has nothing to do.
RUN pip install --no-compile --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r /src/requirements-torch.lock \
 && pip install --no-compile --no-deps --require-hashes -r /src/requirements-build.lock \
 && pip install --no-compile --no-build-isolation --no-deps --require-hashes -r /src/requirements.lock \
 && pip install --no-compile -r /src/requirements-torch.lock
# Nothing above is compiled. binutils has `strip`, for this last step.
# What no node needs on a CPU: headers and tools of torch, CUDA kernels, tests, symbols for debuggers; 0.4 GB.
# Libraries in *.libs were altered by their wheels' makers and may not survive a second treatment.
ARG SLIM=yes
RUN cd /venv/lib/python3.11/site-packages && test "$SLIM" != yes || { \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends binutils && rm -rf /var/lib/apt/lists/* \
      && rm -rf torch/include torch/test torch/bin/*est* torch/bin/protoc* bitsandbytes/libbitsandbytes_cuda* \
      && find . -type d -name tests -prune -exec rm -rf {} + \
      && find . -name '*.so*' -type f -not -path '*.libs/*' -exec strip --strip-unneeded {} + ; }

FROM packages AS build
COPY pyproject.toml README.md LICENSE /src/
COPY node_configs /src/node_configs
COPY swarm /src/swarm
RUN pip install --no-build-isolation --no-deps --no-compile --target /app /src
# One round of a node without network: shows that the image works, and compiles the modules that a node needs, no others.
RUN PYTHONPYCACHEPREFIX=/pycache /app/bin/swarm run --node.dir /tmp/node --node.max_rounds 1 --network.backend off \
      --sharing.swarm_groups 0 --evaluation.tasks_per_source 1 \
 && rm -rf /tmp/node

FROM ${BASE}
RUN mkdir /data /swarm /hub && useradd --home-dir /data --uid 1000 swarm && chown swarm /data /swarm /hub
COPY --from=packages /venv /venv
COPY --from=build /pycache /pycache
COPY --from=build /app /app
COPY docker/start.py /usr/local/bin/start-swarm
ENV PATH=/app/bin:/venv/bin:$PATH PYTHONPYCACHEPREFIX=/pycache HOME=/data
USER swarm
WORKDIR /data
ENTRYPOINT ["start-swarm"]
CMD ["swarm", "--help"]
