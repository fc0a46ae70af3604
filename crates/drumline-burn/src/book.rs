//! Runs the Rust code of the book's pages that use burn.

#[doc = include_str!("../../../docs/start/rust.md")]
struct Start;

#[doc = include_str!("../../../docs/guides/uneven-inputs.md")]
struct UnevenInputs;

#[doc = include_str!("../../../docs/guides/checkpoints.md")]
struct Checkpoints;

#[cfg(feature = "data")]
#[doc = include_str!("../../../docs/guides/data.md")]
struct Data;

#[doc = include_str!("../../../docs/guides/mixed-precision.md")]
struct MixedPrecision;

#[doc = include_str!("../../../docs/guides/sharded-optimizer.md")]
struct ShardedOptimizer;

#[doc = include_str!("../../../docs/concepts/shards.md")]
struct Shards;

#[doc = include_str!("../../../docs/guides/when-a-rank-dies.md")]
struct Deaths;
