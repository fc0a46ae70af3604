# The program of `make train`, for containers that each run one rank: see compose.yaml.
FROM rust:1.95-slim-bookworm AS build
WORKDIR /drumline
COPY . .
RUN cargo build --release --locked --no-default-features -p drumline-cli -p fashion-mnist

FROM debian:bookworm-slim
WORKDIR /drumline
COPY examples/fashion-mnist/fetch-data.sh .
COPY examples/fashion-mnist/data data
# The images, or the handwritten digits where they cannot be had.
RUN XDG_CACHE_HOME=/drumline/cache sh fetch-data.sh > where && ln -s "$(cat where)" images
COPY --from=build /drumline/target/release/drumline /drumline/target/release/fashion-mnist /usr/local/bin/
ENTRYPOINT ["fashion-mnist", "--data", "/drumline/images"]
