# Two images from one file: `docker build --target cpu .` and `docker build --target gpu .`
# The server is the entry point: `docker run IMAGE MODEL --port 8000`.

FROM node:22-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /refit
COPY package.json package-lock.json ./
RUN npm ci --ignore-scripts
COPY . .
# `prepare` cannot run once the devDependencies are gone, so the build comes first.
RUN npm run build && npm prune --omit=dev --ignore-scripts

FROM node:22-slim AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends curl && rm -rf /var/lib/apt/lists/*
COPY --from=build /refit /refit
USER node
ENV REFIT_HOST=0.0.0.0
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD curl -fs http://127.0.0.1:30000/health || exit 1
ENTRYPOINT ["node", "/refit/bin/refit.js", "serve"]

# The CUDA library, with kernels for every supported GPU architecture.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build-cuda
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ make && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/local/bin/node /usr/local/bin/node
COPY --from=build /refit /refit
WORKDIR /refit
RUN REFIT_CUDA_ARCHS=release node scripts/build-native.js --cuda

# CUDA's runtime libraries under the same Node.js and the same build.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04 AS gpu
RUN apt-get update && apt-get install -y --no-install-recommends curl && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home refit
COPY --from=build /usr/local/bin/node /usr/local/bin/node
COPY --from=build-cuda /refit /refit
USER refit
ENV REFIT_HOST=0.0.0.0
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD curl -fs http://127.0.0.1:30000/health || exit 1
ENTRYPOINT ["node", "/refit/bin/refit.js", "serve"]
